"""Countdown as an embedded task, where few tokens decide: reach 0 from a target with three or four numbers.

A prompt is ``2,3,8,9:18`` and a newline, a demonstration one play of it (see `rules`). Most steps of a demonstration
are on a way to 0; with a fixed probability a step is any legal one instead, and the play goes on from there. So a
model that imitates the demonstrations well knows the rules and loses its way, and its entropy says where a play forks:
at the sign and the number, not at a total or a separator.
"""

import random
from itertools import combinations

from gtpo_verl.tasks import EmbeddedTask, WarmStart
from gtpo_verl.tasks.countdown.reward import compute_score
from gtpo_verl.tasks.countdown.rules import Problem, legal_steps, solvable, without

TARGETS = range(10, 26)  # above the highest number, so that a play has two steps at least

PROBLEMS: tuple[Problem, ...] = tuple(
    Problem(numbers, target)
    for count in (3, 4)
    for numbers in combinations(range(1, 10), count)
    for target in TARGETS
    if solvable(target, numbers)
)
"""All 1,372 problems with a solution: 258 with three numbers and 1,114 with four."""


MAX_PROMPT_LENGTH = 11
"""Tokens (bytes) of the longest prompt, four numbers, a target of two digits and the newline."""

MAX_RESPONSE_LENGTH = 40
"""Limit on the tokens of a response; the longest play has 31 and an end of sequence."""


def prompt(problem: Problem) -> str:
    """Return the problem as the model reads it, newline included."""
    return f"{problem}\n"


def demonstration(problem: Problem, error_rate: float, rng: random.Random) -> str:
    """Play until 0 or until no number is left.

    With probability ``error_rate`` a step is drawn from all legal ones, else from those from which 0 can be reached,
    where there are any.
    """
    total, unused = problem.target, problem.numbers
    play = []
    while total and unused:
        steps = list(legal_steps(total, unused))
        good = [step for step in steps if solvable(step.result, without(unused, step))]
        step = rng.choice(good if good and rng.random() >= error_rate else steps)
        play.append(str(step))
        total, unused = step.result, without(unused, step)
    return ";".join(play)


TASK = EmbeddedTask(
    name="countdown",
    description="count down to 0 with given numbers, and a tiny Qwen2 warm-started on unsure but legal play",
    kind="countdown problems",
    cluster_name="problem",
    problems=PROBLEMS,
    train_prompts=1000,
    val_prompts=372,
    warm_start_on_training=True,  # there are few problems, and verdicts are what the demonstrations lack
    prompt=prompt,
    ground_truth=str,
    cluster=str,
    demonstration=demonstration,
    compute_score=compute_score,
    max_response_length=MAX_RESPONSE_LENGTH,
    warm_start=WarmStart(steps=1500, batch_size=32),
    baseline_range=(0.2, 0.6),
)
