"""The embedded task, prepared once for all end-to-end tests, and trainings on it with the real command."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from three_files import NAME, add_method

from gtpo_verl.files import read_json
from gtpo_verl.runs.directory import METRICS_FILE, PHASE_FILE
from gtpo_verl.runs.reader import read_metrics
from gtpo_verl.runs.terminal import LOG_FILE
from gtpo_verl.tasks import Task
from gtpo_verl.tasks import task as embedded_task
from gtpo_verl.tasks.prepare import prepare_task

Start = Callable[..., "Training"]


@pytest.fixture(scope="session")
def task(default_task_dir: Path) -> Task:
    return prepare_task(embedded_task("sums"), default_task_dir)


class Training:
    """``python -m gtpo_verl.train`` in a process of its own, with its children."""

    def __init__(self, run_dir: Path, *overrides: str, environment: dict[str, str] | None = None) -> None:
        self.run_dir = run_dir
        self.terminal = run_dir.with_suffix(".terminal")
        command = [sys.executable, "-m", "gtpo_verl.train", *overrides, f"trainer.run_dir={run_dir}"]
        with self.terminal.open("ab") as terminal:
            self.process = psutil.Popen(
                command,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                cwd=run_dir.parent,
                start_new_session=True,
                env=os.environ | (environment or {}),
            )

    def wait_for_step(self, step: int, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while step not in self.steps():
            self._check(deadline)

    def wait_for_phase(self, step: int, phase: str, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not (found := read_json(self.run_dir / PHASE_FILE)) or (found["step"], found["phase"]) != (step, phase):
            self._check(deadline)

    def wait_for_log(self, text: str, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log():
            self._check(deadline)

    def wait_for_end(self, code: int = 0, seconds: float = 600) -> Path:
        assert self.process.wait(timeout=seconds) == code, self.said()
        return self.run_dir

    def _check(self, deadline: float) -> None:
        assert self.process.poll() is None, self.said()
        assert time.monotonic() < deadline, self.said()
        time.sleep(0.2)

    def said(self) -> str:
        """What shows why it failed."""
        return self.log()[-5000:] + self.output()

    def steps(self) -> set[int]:
        file = self.run_dir / METRICS_FILE
        return set(read_metrics(file)[0]) if file.exists() else set()

    def engines(self) -> list[psutil.Process]:
        """vLLM's, oldest first; other processes of the training may end while they are listed."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "VLLM::EngineCor" in " ".join(process.cmdline() or [process.name()]):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def output(self) -> str:
        """What it showed on its terminal."""
        return self.terminal.read_text()

    def log(self) -> str:
        """All that it printed."""
        file = self.run_dir / LOG_FILE
        return file.read_text() if file.exists() else ""

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def start(task: Task) -> Iterator[Start]:
    """Start a training on the embedded task without validation and checkpoints; it is ended with the module if it has
    not by itself.

    ``bare`` leaves all of that to the overrides. Those that do not depend on each other are best started together:
    starting is most of their time, and leaves a core idle.
    """
    started: list[Training] = []

    common = (
        *("setting=quickstart", "hardware=cpu", f"actor_rollout_ref.model.path={task.model_path}"),
        *(f"data.train_files={task.train_file}", f"data.val_files={task.val_file}"),
        *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
    )

    def begin(
        run_dir: Path, *overrides: str, bare: bool = False, environment: dict[str, str] | None = None
    ) -> Training:
        started.append(Training(run_dir, *(() if bare else common), *overrides, environment=environment))
        return started[-1]

    yield begin
    for training in started:
        training.close()


# One quickstart whose steps train different algorithms, each as its preset has it or with one term left out:
# overrides of a step.
STEPS = (
    ("algo=gtpo",),  # first: its batch was sampled from the model that the run started with
    ("algo=dapo",),
    ("algo=grpo_s",),
    ("algo=gtpo", "algorithm.gtpo.alpha2=0", "algorithm.gtpo.length_penalty=none"),
    ("algo=grpo_s", "algorithm.grpo_s.beta2=0", "algorithm.grpo_s.length_penalty=none"),
    (f"algo={NAME}",),  # added to the package in three files, test_new_method.py
)


@dataclass(frozen=True)
class Quickstart:
    """A finished quickstart of one arm, and what it left."""

    directory: Path  # quickstart-TIME
    printed: str
    readers: dict[str, set[str]]  # of each configuration key, the modules that used it, in all processes

    @property
    def arm(self) -> Path:
        return self.directory / "gtpo"

    @property
    def last_step(self) -> int:
        return len(STEPS)

    @property
    def log(self) -> str:
        return (self.arm / "train.log").read_text()


@pytest.fixture(scope="session")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH with the package and a method that it does not have."""
    return add_method(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def quickstart(task: Task, extended: Path, tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """The quickstart on two ranks and two replicas, with one arm that takes another algorithm every step (`STEPS`).

    Two keys are there that nobody reads. ``recorder/`` writes down the readers and changes the algorithm, by a
    ``sitecustomize`` that every process of the run loads.
    """
    output = tmp_path_factory.mktemp("outputs")
    (output / "task-sums").symlink_to(task.model_path.parent)
    notes = tmp_path_factory.mktemp("notes")
    recorder = Path(__file__).with_name("recorder")
    command = [
        *(sys.executable, "-m", "gtpo_verl.cli", "quickstart", "--output", str(output)),
        *("--arms", "gtpo", "--steps", str(len(STEPS))),
        *("trainer.n_gpus_per_node=2", "trainer.credit_dump_freq=1", "data.val_max_samples=32"),
        # sampled, and an evaluation gives the same responses again; cool enough that no byte makes invalid text
        *("actor_rollout_ref.rollout.val_kwargs.temperature=0.7", "actor_rollout_ref.rollout.val_kwargs.n=2"),
        *("+trainer.nobody_reads_this=1", "+actor_rollout_ref.model.override_config.nobody=1"),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(recorder), str(extended), os.environ.get("PYTHONPATH")])),
        "GTPO_VERL_RECORD": str(notes),
        "GTPO_VERL_TEST_ALGORITHMS": json.dumps(STEPS),
        "RAY_DEDUP_LOGS": "0",  # otherwise Ray prints a line that several processes write only once
    }
    # `-m` looks in the current directory first: not in the checkout, whose package lacks the method
    done = subprocess.run(command, env=environment, cwd=output, capture_output=True, text=True, timeout=1200)
    logs = "\n".join(log.read_text()[-5000:] for log in output.glob("quickstart-*/*/train.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    (directory,) = output.glob("quickstart-*")
    return Quickstart(directory, done.stdout, noted(notes))


def noted(notes: Path) -> dict[str, set[str]]:
    """What the recorder wrote down: {key: modules}."""
    readers: dict[str, set[str]] = {}
    for file in notes.iterdir():
        for line in file.read_text().splitlines():
            key, _, reader = line.partition("\t")
            if reader.startswith("transfer_queue."):  # TransferQueue makes a configuration of its own of the section
                key = f"transfer_queue.{key}"
            readers.setdefault(key, set()).add(reader)
    return readers


@pytest.fixture(scope="session")
def metrics() -> Callable[[Path], dict[int, dict[str, Any]]]:
    """Read ``metrics.jsonl`` of a run directory as a report does: {step: {name: number}}."""

    def read(run_dir: Path) -> dict[int, dict[str, Any]]:
        return read_metrics(run_dir / METRICS_FILE)[0]

    return read
