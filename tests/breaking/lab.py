"""The training that is broken, its uninterrupted reference, and copies of it to go on from."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from breaking.checks import lines_of
from breaking.training import Attempt, Ended, turn
from gtpo_verl.files import write_text
from gtpo_verl.runs.checkpoints import TRACKER
from gtpo_verl.runs.directory import GROUPS_FILE, METRICS_FILE
from gtpo_verl.tasks import Task

SHORT = (
    *("algo=gtpo", "setting=quickstart", "hardware=cpu", "seed=0", "algorithm.entropy.source=actor"),
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    ),
    *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=1"),
    *("algorithm.filter_groups.enable=false", "++ray_kwargs.ray_init.address=local"),
)
CHECK_LIMIT = 120.0  # seconds for a command that starts no Ray


class Lab:
    """Where trainings are broken.

    Args:
        directory: of all runs.
        task: that they train.
        steps: of a training.
        limit: seconds after which an attempt is killed.
        lock: file whose lock each attempt holds; None for none.
    """

    def __init__(self, directory: Path, task: Task, steps: int, limit: float, lock: Path | None) -> None:
        self.directory = directory
        self.task = task
        self.steps = steps
        self.limit = limit
        self.lock = lock
        self.reference = directory / "reference"
        # how long states last, and when a kind of process is first there; seconds
        self.lasting: dict[str, float] = {}
        self.seen: dict[str, float] = {}

    def overrides(self, *more: str) -> list[str]:
        """Of the training; the run directory is added when it starts."""
        files = (
            f"actor_rollout_ref.model.path={self.task.model_path}",
            *(f"data.train_files={self.task.train_file}", f"data.val_files={self.task.val_file}"),
        )
        return [*SHORT, *files, f"trainer.total_training_steps={self.steps}", *more]

    @contextlib.contextmanager
    def training(self, run_dir: Path, *more: str, user: int | None = None, terminal: bool = False) -> Iterator[Attempt]:
        """An attempt to train in a directory, alone on the machine where there is a lock."""
        with turn(self.lock):
            attempt = Attempt(run_dir, self.overrides(*more), user=user, terminal=terminal)
            try:
                yield attempt
            finally:
                attempt.kill()

    def checked(self, run_dir: Path, *more: str, user: int | None = None) -> tuple[Ended, str]:
        """The same command with ``--check``, which starts no Ray; how it ended, and what it said."""
        attempt = Attempt(run_dir, [*self.overrides(*more), "--check"], user=user)
        ended = attempt.end(CHECK_LIMIT)
        return ended, attempt.said()

    def copy(self, name: str, steps: Sequence[int]) -> Path:
        """A run directory as if the reference had been killed after the last of these steps, with checkpoints of all of
        them.
        """
        run_dir = self.directory / name
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        for step in steps:
            folder = f"checkpoints/global_step_{step}"
            shutil.copytree(self.reference / folder, run_dir / folder)
        write_text(run_dir / "checkpoints" / TRACKER, str(steps[-1]))
        for file in (METRICS_FILE, GROUPS_FILE):
            kept = [line for line in lines_of(self.reference / file) if line["step"] <= steps[-1]]
            write_text(run_dir / file, "".join(json.dumps(line) + "\n" for line in kept))
        return run_dir
