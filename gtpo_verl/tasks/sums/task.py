"""The sums as an embedded task: sums of three or four digits, and noisy demonstrations.

A prompt is ``3+9+2+7`` and a newline. A demonstration writes the running total out, ``3+9=12;12+2=14;14+7=21;#21``, and
what follows the last ``#`` is the answer. A step is off by one with a fixed probability and the rest continues from the
wrong total, so a model that imitates the demonstrations well is right about half of the time, and only the verifier
tells it which half. Problems with the same multiset of operands have the same answer: a cluster.
"""

import random
from itertools import product

from gtpo_verl.tasks import EmbeddedTask, WarmStart
from gtpo_verl.tasks.sums.reward import compute_score

Problem = tuple[int, ...]

PROBLEMS: tuple[Problem, ...] = tuple(terms for count in (3, 4) for terms in product(range(1, 10), repeat=count))
"""All 7,290 problems: 729 sums of three digits and 6,561 of four."""

MAX_PROMPT_LENGTH = 8
"""Tokens (bytes) of the longest prompt, four digits with three signs and the newline."""

MAX_RESPONSE_LENGTH = 32
"""Limit on the tokens of a response; the longest demonstration has 26 and an end of sequence."""


def cluster(problem: Problem) -> str:
    """Return the multiset of the problem's operands, in ascending order: ``2+3+7+9`` for (3, 9, 2, 7)."""
    return "+".join(map(str, sorted(problem)))


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


TASK = EmbeddedTask(
    name="sums",
    description="sums with written-out steps, and a tiny Qwen2 warm-started on noisy demonstrations",
    kind="sums of three or four digits",
    cluster_name="multiset of operands",
    problems=PROBLEMS,
    train_prompts=3584,
    val_prompts=1024,
    prompt=prompt,
    ground_truth=answer,
    cluster=cluster,
    demonstration=demonstration,
    compute_score=compute_score,
    max_response_length=MAX_RESPONSE_LENGTH,
    # so many steps that the loss reaches the floor of the demonstrations' noise: the baseline is the same on every
    # machine, and training does not forget more than it learns
    warm_start=WarmStart(steps=800, batch_size=64),
    baseline_range=(0.3, 0.6),
)
