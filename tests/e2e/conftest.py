"""The embedded task, prepared once for all end-to-end tests, and a function that trains on it with the real command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gtpo_verl.quickstart.task import Task, prepare_task

Train = Callable[..., Path]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return prepare_task(tmp_path_factory.getbasetemp() / "task", progress=False)


@pytest.fixture(scope="session")
def train(task: Task) -> Train:
    """Train with ``python -m gtpo_verl.train`` in a process of its own; returns the run directory."""

    def run(run_dir: Path, *overrides: str, timeout: float = 600) -> Path:
        command = [
            *(sys.executable, "-m", "gtpo_verl.train", "setting=quickstart", "hardware=cpu"),
            f"actor_rollout_ref.model.path={task.model_path}",
            f"data.train_files={task.train_file}",
            f"data.val_files={task.val_file}",
            f"trainer.run_dir={run_dir}",
            *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
            *overrides,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=run_dir.parent)
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
        return run_dir

    return run


@pytest.fixture(scope="session")
def quickstart(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quickstart of two steps an arm with few validation samples: its run directory, and what it printed."""
    output = tmp_path_factory.mktemp("outputs")
    (output / "task").symlink_to(task.model_path.parent)
    command = [
        *(sys.executable, "-m", "gtpo_verl.cli", "quickstart", "--output", str(output), "--steps", "2"),
        *("data.val_max_samples=32", "trainer.credit_dump_freq=1"),
        # greedy: an evaluation must give the same responses again
        *("actor_rollout_ref.rollout.val_kwargs.temperature=0", "actor_rollout_ref.rollout.val_kwargs.n=2"),
        # the identity with verl's grpo holds without the length punishment
        *("algorithm.grpo_s.beta2=0", "algorithm.gtpo.length_penalty=none", "algorithm.grpo_s.length_penalty=none"),
        "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    logs = "\n".join(log.read_text()[-3000:] for log in output.glob("quickstart-*/*/train.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return next(output.glob("quickstart-*")), done.stdout


@pytest.fixture(scope="session")
def two_ranks(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, set[str]]]:
    """Three steps of GTPO on two ranks and two replicas: the run directory, what was printed, and who read which key.

    Two keys are there that nobody reads. The recorder in ``recorder/`` writes down the readers, in every process of the run.
    """
    base = tmp_path_factory.mktemp("two_ranks")
    notes = base / "notes"
    notes.mkdir()
    run_dir = base / "run"
    recorder = Path(__file__).with_name("recorder")
    command = [
        *(sys.executable, "-m", "gtpo_verl.train", "algo=gtpo", "setting=quickstart", "hardware=cpu"),
        "trainer.n_gpus_per_node=2",
        f"actor_rollout_ref.model.path={task.model_path}",
        f"data.train_files={task.train_file}",
        f"data.val_files={task.val_file}",
        f"trainer.run_dir={run_dir}",
        *("trainer.total_training_steps=3", "trainer.credit_dump_freq=1", "data.val_max_samples=16"),
        *("+trainer.nobody_reads_this=1", "+actor_rollout_ref.model.override_config.nobody=1"),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(recorder), os.environ.get("PYTHONPATH")])),
        "GTPO_VERL_RECORD": str(notes),
        "RAY_DEDUP_LOGS": "0",  # otherwise Ray prints a line that several processes write only once
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=base, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    readers: dict[str, set[str]] = {}
    for file in notes.iterdir():
        for line in file.read_text().splitlines():
            key, _, reader = line.partition("\t")
            if reader.startswith("transfer_queue."):  # TransferQueue makes a configuration of its own of the section
                key = f"transfer_queue.{key}"
            readers.setdefault(key, set()).add(reader)
    return run_dir, done.stdout + done.stderr, readers


@pytest.fixture(scope="session")
def metrics() -> Callable[[Path], dict[int, dict[str, Any]]]:
    """Read ``metrics.jsonl`` of a run directory: {step: {name: number}}."""

    def read(run_dir: Path) -> dict[int, dict[str, Any]]:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["data"] for line in lines}

    return read
