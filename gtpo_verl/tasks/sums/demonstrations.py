"""The embedded problems: sums of three or four digits, their split into three parts, and noisy demonstrations.

A prompt is ``3+9+2+7`` and a newline. A demonstration writes the running total out, ``3+9=12;12+2=14;14+7=21;#21``, and
what follows the last ``#`` is the answer. A step is off by one with a fixed probability and the rest continues from the
wrong total, so a model that imitates the demonstrations well is right about half of the time, and only the verifier
tells it which half: mixed groups from the first step, and room to learn.

Problems with the same operands in another order have the same answer and resemble each other. Such a multiset of
operands (660 of them) is therefore never split over two parts, and it is the cluster over which intervals are
bootstrapped.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

Problem = tuple[int, ...]

PROBLEMS: tuple[Problem, ...] = tuple(terms for count in (3, 4) for terms in product(range(1, 10), repeat=count))
"""All 7,290 problems: 729 sums of three digits and 6,561 of four."""

MAX_PROMPT_LENGTH = 8
"""Tokens (bytes) of the longest prompt, four digits with three signs and the newline."""

MAX_RESPONSE_LENGTH = 32
"""Limit on the tokens of a response; the longest demonstration has 26 and an end of sequence."""


@dataclass(frozen=True)
class Partition:
    """The problems in three parts, of which no two have a multiset of operands in common."""

    validation: tuple[Problem, ...]
    train: tuple[Problem, ...]
    warm_start: tuple[Problem, ...]


def partition(seed: int, train_prompts: int, val_prompts: int) -> Partition:
    """Assign whole multisets of operands in seeded order, to validation, then to training, the rest to the warm start.

    A multiset that would exceed the size asked for is passed over, so a part has at most that size and is short of it
    only where no small multiset is left. Raises ValueError where a part would be empty.
    """
    multisets: dict[str, list[Problem]] = {}
    for problem in PROBLEMS:
        multisets.setdefault(cluster(problem), []).append(problem)
    rest = sorted(multisets, key=lambda name: _hash(seed, name))
    parts = []
    for size in (val_prompts, train_prompts, len(PROBLEMS)):
        names = _fill(rest, multisets, size)
        rest = [name for name in rest if name not in names]
        problems = [problem for name in names for problem in multisets[name]]
        parts.append(tuple(sorted(problems, key=lambda problem: _hash(seed, prompt(problem)))))
    if not all(parts):
        raise ValueError(
            f"train_prompts={train_prompts} and val_prompts={val_prompts} must be positive and leave some of the "
            f"{len(PROBLEMS)} problems to the warm start; choose other sizes"
        )
    return Partition(*parts)


def cluster(problem: Problem) -> str:
    """Return the multiset of the problem's operands, in ascending order: ``2+3+7+9`` for (3, 9, 2, 7)."""
    return "+".join(map(str, sorted(problem)))


def _fill(names: Sequence[str], multisets: Mapping[str, Sequence[Problem]], size: int) -> dict[str, None]:
    """The first multisets that fit into ``size`` problems together, in their order."""
    chosen: dict[str, None] = {}
    for name in names:
        if len(multisets[name]) <= size:
            size -= len(multisets[name])
            chosen[name] = None
    return chosen


def _hash(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()


def prompt(problem: Problem) -> str:
    """Return the problem as the model reads it, newline included."""
    return "+".join(map(str, problem)) + "\n"


def answer(problem: Problem) -> str:
    """Return the sum in decimal digits, which is the ground truth of the verifier."""
    return str(sum(problem))


def demonstration(problem: Problem, error_rate: float, rng: random.Random) -> str:
    """Write out the steps and the answer, each step's total off by one with probability ``error_rate``.

    Errors are never corrected: each step starts from the total of the one before, and the answer is the last total.
    """
    total, *rest = problem
    steps = ""
    for term in rest:
        result = total + term
        if rng.random() < error_rate:
            result += rng.choice((-1, 1))
        steps += f"{total}+{term}={result};"
        total = result
    return f"{steps}#{total}"


def demonstration_stream(problems: Sequence[Problem], error_rate: float, seed: int) -> Iterator[tuple[Problem, str]]:
    """Yield pairs of a problem, drawn uniformly from ``problems``, and a fresh demonstration of it, without end."""
    rng = random.Random(seed)
    while True:
        problem = rng.choice(problems)
        yield problem, demonstration(problem, error_rate, rng)
