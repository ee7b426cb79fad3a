"""What a rule finds in a configuration, and how everything that a list of rules finds is said at once.

A rule is a function `rule(config)` that yields a :class:`Problem` for each thing it finds. It may also raise the
`UserError` of a value that a dataclass of ours refuses, which is then its problem.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gtpo_verl.errors import ProblemsError, UserError

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or worth knowing: one line, `key=value: what is wrong: what to do`. An `error` stops a
    run or makes it meaningless, a `warning` costs memory, time or accuracy, a `note` is information.
    """

    message: str
    severity: str = "error"


Rule = Callable[..., Iterable[Problem]]


def warning(message: str) -> Problem:
    """A problem that costs memory, time or accuracy."""
    return Problem(message, "warning")


def note(message: str) -> Problem:
    """A remark."""
    return Problem(message, "note")


def evaluate(rules: Iterable[Rule], *subject: Any) -> list[Problem]:
    """Everything that these rules find in a configuration, each problem once, in their order."""
    found: dict[Problem, None] = {}
    for rule in rules:
        try:
            for problem in rule(*subject):
                found[problem] = None
        except UserError as error:
            found[Problem(str(error))] = None
    return list(found)


def errors_of(problems: Iterable[Problem]) -> list[str]:
    """The messages of those that stop a run."""
    return [problem.message for problem in problems if problem.severity == "error"]


def refuse(problems: Iterable[Problem]) -> None:
    """Print warnings and notes, and raise all errors together. Raises UserError: there are errors."""
    found = list(problems)
    for problem in found:
        if problem.severity != "error":
            print(f"{problem.severity}: {problem.message}", flush=True)
    errors = errors_of(found)
    if len(errors) == 1:
        raise UserError(errors[0])
    if errors:
        raise ProblemsError(*errors)
