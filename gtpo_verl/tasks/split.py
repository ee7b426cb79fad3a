"""The problems of a task in three parts, and the stream of demonstrations that the warm start reads."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_verl.tasks import EmbeddedTask


@dataclass(frozen=True)
class Partition:
    """The problems of each part. Validation has no cluster in common with another part."""

    validation: tuple[Any, ...]
    train: tuple[Any, ...]
    warm_start: tuple[Any, ...]


def partition(task: EmbeddedTask, seed: int) -> Partition:
    """Assign whole clusters in seeded order, to validation, then to training, the rest to the warm start, which has the
    training part too where the task says so.

    A cluster that would exceed the size asked for is passed over, so a part has at most that size and is short of it
    only where no small cluster is left. Raises ValueError where a part would be empty.
    """
    clusters: dict[str, list[Any]] = {}
    for problem in task.problems:
        clusters.setdefault(task.cluster(problem), []).append(problem)
    rest = sorted(clusters, key=lambda name: _hash(seed, name))
    parts = []
    for size in (task.val_prompts, task.train_prompts, len(task.problems)):
        problems: list[Any] = []
        left = []
        for name in rest:
            fits = len(problems) + len(clusters[name]) <= size
            problems += clusters[name] if fits else []
            left += [] if fits else [name]
        rest = left
        parts.append(tuple(sorted(problems, key=lambda problem: _hash(seed, task.prompt(problem)))))
    validation, train, warm_start = parts
    if task.warm_start_on_training:
        warm_start += train
    if not (validation and train and warm_start):
        raise ValueError(
            f"train_prompts={task.train_prompts} and val_prompts={task.val_prompts} must be positive and leave some "
            f"of the {len(task.problems)} problems to the warm start; choose other sizes"
        )
    return Partition(validation, train, warm_start)


def demonstration_stream(
    task: EmbeddedTask, problems: Sequence[Any], error_rate: float, seed: int
) -> Iterator[tuple[Any, str]]:
    """Yield pairs of a problem, drawn uniformly from ``problems``, and a fresh demonstration of it, without end."""
    rng = random.Random(seed)
    while True:
        problem = rng.choice(problems)
        yield problem, task.demonstration(problem, error_rate, rng)


def _hash(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()
