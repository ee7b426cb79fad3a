"""Families of random cases for tests/fuzz.py, each a function of a random generator and a directory for files.

A case returns `PASSED` or `REFUSED`, and raises for what must not happen. What it does follows from its generator
alone, so that every case can be repeated by its number.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

PASSED, REFUSED = "passed", "refused"
Case = Callable[[Random, Path], str]


class BrokenRuleError(Exception):
    """A rule that does not hold; the message says which."""


def check(holds: object, rule: str) -> None:
    """Raise `BrokenRuleError` unless a rule holds."""
    if not holds:
        raise BrokenRuleError(rule)


def refused(error: Exception) -> str:
    """`REFUSED` for an error whose message is one line of text, else `BrokenRuleError`."""
    text = str(error)
    check(text.strip(), f"{type(error).__name__} without a message")
    check("\n" not in text, f"{type(error).__name__} with more than one line: {text[:200]!r}")
    return REFUSED


def attempt(case: Case, rng: Random, directory: Path) -> tuple[str, str]:
    """Run a case; returns its outcome, or `broken`, and the end of the stack trace."""
    try:
        return case(rng, directory), ""
    except Exception:
        return "broken", traceback.format_exc(limit=-6)
