"""The rules of the game, once for the verifier and for the demonstrations: what a step is, and which steps are legal.

A problem is a set of numbers and a target, ``2,3,8,9:18``. A play counts down from the target: each step adds or
subtracts a number of the set that was not used before, ``18-3=15;15-9=6;6+2=8;8-8=0``, and the play that reaches 0 has
solved the problem. A total is never negative, and nothing follows a 0. The module imports nothing beyond the standard
library.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

STEP = re.compile(r"(0|[1-9][0-9]?)([+-])([1-9])=(0|[1-9][0-9]?)", re.ASCII)
PROBLEM = re.compile(r"([1-9](?:,[1-9])*):([1-9][0-9]?)", re.ASCII)


class Problem(NamedTuple):
    """numbers: distinct, 1 to 9, in ascending order. target: where the play starts."""

    numbers: tuple[int, ...]
    target: int

    def __str__(self) -> str:
        return f"{','.join(map(str, self.numbers))}:{self.target}"


class Step(NamedTuple):
    """``total`` before, and the signed ``number`` that is added to it."""

    total: int
    number: int

    @property
    def result(self) -> int:
        return self.total + self.number

    def __str__(self) -> str:
        return f"{self.total}{self.number:+d}={self.result}"


def read_problem(text: str) -> Problem:
    """The problem that `str` of it has written. Raises ValueError for any other text."""
    found = PROBLEM.fullmatch(text)
    if found is None:
        raise ValueError(f"not a countdown problem: {text!r}; one is written 2,3,8,9:18")
    return Problem(tuple(map(int, found[1].split(","))), int(found[2]))


def legal_steps(total: int, unused: tuple[int, ...]) -> Iterator[Step]:
    """Every step that the rules allow from a total with these numbers left."""
    if total == 0:
        return
    for number in unused:
        yield Step(total, number)
        if number <= total:
            yield Step(total, -number)


def without(unused: tuple[int, ...], step: Step) -> tuple[int, ...]:
    """The numbers that are left after a step."""
    return tuple(number for number in unused if number != abs(step.number))


@cache
def solvable(total: int, unused: tuple[int, ...]) -> bool:
    """Whether 0 can be reached."""
    return total == 0 or any(solvable(step.result, without(unused, step)) for step in legal_steps(total, unused))


def final_total(problem: Problem, play: str) -> int | None:
    """The total that a written play ends at; None where a step breaks a rule, or the text is no play at all.

    An illegal play is one with a step that is not written as above, does not start from the total before, has a wrong
    result, uses a number that the problem lacks or that is used up, goes below 0 or follows a 0.
    """
    total, unused = problem.target, problem.numbers
    for text in play.split(";"):
        found = STEP.fullmatch(text)
        if found is None:
            return None
        step = Step(int(found[1]), int(found[2] + found[3]))
        if step not in legal_steps(total, unused) or step.result != int(found[4]):
            return None
        total, unused = step.result, without(unused, step)
    return total
