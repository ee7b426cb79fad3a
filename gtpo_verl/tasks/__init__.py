"""Embedded tasks, one package each: small verifiable problems, a tiny model and its warm start, made on the spot.

A package of this one describes a task by an `EmbeddedTask`; the model, the split of the problems, the preparation and
the control verdict are the same for all.
"""

import importlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError, choose_from

TASKS = ("sums", "countdown")  # each a package, whose module `task` has the EmbeddedTask as TASK


@dataclass(frozen=True)
class Task:
    """A prepared task: its directory, and its manifest, empty where the paths alone are wanted."""

    directory: Path
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def model_path(self) -> Path:
        return self.directory / "model"

    @property
    def train_file(self) -> Path:
        return self.directory / "train.parquet"

    @property
    def val_file(self) -> Path:
        return self.directory / "val.parquet"

    @property
    def baseline(self) -> float:
        """Accuracy of the warm-started model on the validation prompts, sampled at temperature 1."""
        return float(self.manifest["baseline"]["accuracy"])


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """How the model learns to imitate demonstrations: AdamW with a linear warm-up and a cosine decay to 0.

    error_rate: probability that a step of a demonstration is drawn without regard to the answer.
    """

    steps: int
    batch_size: int
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    error_rate: float = 0.25


@dataclass(frozen=True, kw_only=True)
class EmbeddedTask:
    """One embedded task. A problem is any hashable value that its functions understand.

    description, kind: one line, and what the problems are, for the console.
    cluster_name: what the problems of a `cluster` have in common; no cluster is in two parts of the task.
    problems: all of them, at most `train_prompts` for training and `val_prompts` for validation.
    warm_start_on_training: whether the warm start shows the training problems too, or only what is left.
    prompt, ground_truth, cluster: of a problem, as text.
    demonstration: one of a problem, with `WarmStart.error_rate` and a random generator.
    compute_score: the verifier, as verl calls it.
    max_response_length: tokens.
    baseline_range: accuracies of the warm-started model between which training has something to learn from.
    """

    name: str
    description: str
    kind: str
    cluster_name: str
    problems: Sequence[Any]
    train_prompts: int
    val_prompts: int
    warm_start_on_training: bool = False
    prompt: Callable[[Any], str]
    ground_truth: Callable[[Any], str]
    cluster: Callable[[Any], str]
    demonstration: Callable[[Any, float, random.Random], str]
    compute_score: Callable[[str, str, str], Mapping[str, Any]]
    max_response_length: int
    warm_start: WarmStart
    baseline_range: tuple[float, float]

    @property
    def data_source(self) -> str:
        """That of its rows."""
        return f"gtpo_verl/{self.name}"

    @property
    def reward(self) -> str:
        """`reward.custom_reward_function.path`: a module with `compute_score` and the control `random_verdict`."""
        return f"pkg://gtpo_verl.tasks.{self.name}.reward"

    def directory(self, parent: Path) -> Path:
        """Where the runs in a directory keep the prepared task."""
        return parent / f"task-{self.name}"


def set_thread_waiting() -> None:
    """Let the threads of a warm start spin for microseconds when they wait for each other, and then sleep: kernels of
    a tiny model are that short. To be called before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def task(name: str) -> EmbeddedTask:
    """The embedded task of this name. Raises UserError: there is none."""
    if name not in TASKS:
        raise UserError(f"no embedded task {name!r}{choose_from(name, TASKS)}")
    found: EmbeddedTask = importlib.import_module(f"{__name__}.{name}.task").TASK
    return found


def task_of(reward: str | None) -> EmbeddedTask | None:
    """The embedded task with this reward module; None where it is no embedded task's."""
    return next((found for found in map(task, TASKS) if found.reward == reward), None)
