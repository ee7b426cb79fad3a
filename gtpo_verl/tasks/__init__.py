"""Embedded tasks, one package each: small verifiable problems, a tiny model and its warm start, made on the spot."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError, did_you_mean

# the module of each task; its TASK is an EmbeddedTask
_MODULES = {"sums": "gtpo_verl.tasks.sums.task"}


@dataclass(frozen=True)
class Task:
    """Paths of a prepared task, and its manifest."""

    model_path: Path
    train_file: Path
    val_file: Path
    manifest: dict[str, Any]

    @property
    def baseline(self) -> float:
        """Accuracy of the warm-started model on the validation prompts, sampled at temperature 1."""
        return float(self.manifest["baseline"]["accuracy"])


@dataclass(frozen=True, kw_only=True)
class EmbeddedTask:
    """One embedded task.

    description: one line, for the console.
    data_source: that of its rows.
    reward: ``reward.custom_reward_function.path``, a module with ``compute_score`` and the control ``random_verdict``.
    prepare: makes the task in a directory, or returns the one that is there.
    locate: where `prepare` puts it in a directory, with an empty manifest.
    """

    name: str
    description: str
    data_source: str
    reward: str
    prepare: Callable[[Path], Task]
    locate: Callable[[Path], Task]


def task(name: str) -> EmbeddedTask:
    """The embedded task of this name.

    Raises:
        UserError: there is none.
    """
    if name not in _MODULES:
        raise UserError(f"no embedded task {name!r}{did_you_mean(name, _MODULES) or '.'} Known: {', '.join(_MODULES)}.")
    found = importlib.import_module(_MODULES[name]).TASK
    assert isinstance(found, EmbeddedTask)
    return found


def task_of(reward: str | None) -> EmbeddedTask | None:
    """The embedded task with this reward module; None where it is no embedded task's."""
    return next((found for found in map(task, _MODULES) if found.reward == reward), None)
