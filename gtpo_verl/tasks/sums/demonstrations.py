"""The embedded problems: sums of three or four digits, their partition into three disjoint parts, and noisy demonstrations.

A prompt is ``3+9+2+7`` and a newline. A demonstration writes the running total out, ``3+9=12;12+2=14;14+7=21;#21``, and
what follows the last ``#`` is the answer. A step is off by one with a fixed probability and the rest continues from the
wrong total, so a model that imitates the demonstrations well is right about half of the time and knows what better means
only from the verifier: mixed groups from the first step, and room to learn.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

Problem = tuple[int, ...]

PROBLEMS: tuple[Problem, ...] = tuple(terms for count in (3, 4) for terms in product(range(1, 10), repeat=count))
"""All 7,290 problems: 729 sums of three digits and 6,561 of four."""

MAX_PROMPT_LENGTH = 8
"""Tokens (bytes) of the longest prompt, four digits with three signs and the newline."""

MAX_RESPONSE_LENGTH = 32
"""Tokens that a response may take: the longest demonstration has 26 and an end, so that only a rambling one is cut."""


@dataclass(frozen=True)
class Partition:
    """The problems in three pairwise disjoint parts."""

    validation: tuple[Problem, ...]
    train: tuple[Problem, ...]
    warm_start: tuple[Problem, ...]


def partition(seed: int, train_prompts: int, val_prompts: int) -> Partition:
    """Order all problems by a seeded hash and cut the order: validation first, training next, warm start the rest.

    Raises ValueError where a part would be empty; no problem is in two parts, whatever the sizes.
    """
    available = len(PROBLEMS)
    if train_prompts < 1 or val_prompts < 1 or train_prompts + val_prompts >= available:
        raise ValueError(
            f"train_prompts={train_prompts} and val_prompts={val_prompts} must be positive and leave some of the "
            f"{available} problems to the warm start; choose a smaller sum"
        )
    order = sorted(PROBLEMS, key=lambda problem: hashlib.sha256(f"{seed}:{prompt(problem)}".encode()).digest())
    cut = val_prompts + train_prompts
    return Partition(tuple(order[:val_prompts]), tuple(order[val_prompts:cut]), tuple(order[cut:]))


def prompt(problem: Problem) -> str:
    """Return the problem as the model reads it, newline included."""
    return "+".join(map(str, problem)) + "\n"


def answer(problem: Problem) -> str:
    """Return the sum in decimal digits, which is the ground truth of the verifier."""
    return str(sum(problem))


def demonstration(problem: Problem, error_rate: float, rng: random.Random) -> str:
    """Write the steps and the answer out, each step's total off by one with probability ``error_rate``.

    Errors are carried on, never corrected: the steps stay consistent with each other and the answer with the last of them.
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
