"""The scheduler of a sweep, with child processes that stand for trainings, and whatever the moment it is killed."""

import errno
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from drive_sweep import FAKE, drive, fake_sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gtpo_verl.errors import UserError
from gtpo_verl.experiments import run as command
from gtpo_verl.experiments import scheduler as module
from gtpo_verl.experiments.launchers import LocalLauncher
from gtpo_verl.experiments.scheduler import Scheduler, read_attempts, unfinished
from gtpo_verl.experiments.status import RunStatus, progress_line, seconds_left, statuses, summary, table
from gtpo_verl.files import write_json
from gtpo_verl.runs.directory import record_metrics, write_record
from gtpo_verl.runs.lock import sweep_lock
from gtpo_verl.runs.state import RunState, state_of
from gtpo_verl.runs.sweep import write

DRIVE = [sys.executable, str(Path(__file__).parents[1] / "support" / "drive_sweep.py")]
ONE = {"seed": ("0",)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.02)


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def starts_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["from"] for line in (run_dir / "starts.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_run_is_trained_once_and_a_second_sweep_trains_nothing(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path)
    lines: list[str] = []
    assert drive(sweep, lines) == []
    assert {line.split(": ")[1] for line in lines} == {"started", "finished"}
    assert lines[0].startswith("algo=dapo,seed=0")
    for name in sweep.runs:
        assert (steps_of(sweep.run_dir(name)), starts_of(sweep.run_dir(name))) == ([1, 2, 3], [0])
    lines.clear()
    assert drive(sweep, lines) == lines == []
    assert summary(statuses(tmp_path)) == "4 runs: 4 finished"
    assert {run.training.accuracy["sums"] for run in statuses(tmp_path)} == {1.0}
    assert table(statuses(tmp_path)).row_count == 4


@pytest.mark.slow
def test_a_failed_run_goes_on_from_its_last_step_and_is_given_up_where_it_gets_no_further(tmp_path: Path) -> None:
    lines: list[str] = []
    once = fake_sweep(tmp_path / "once", "+fake.fail_at=2", "+fake.failures=2", axes=ONE)
    assert drive(once, lines) == []
    assert starts_of(once.run_dir("seed=0")) == [0, 1, 1]  # the first attempt got further, and is not counted
    assert "attempt 1 ended at step 1: step 2 went wrong. It is tried again." in lines[1]
    lines.clear()
    always = fake_sweep(tmp_path / "always", "+fake.fail_at=1", axes=ONE)
    assert drive(always, lines) == ["seed=0"]
    assert starts_of(always.run_dir("seed=0")) == [0, 0]
    assert "That was the last attempt" in lines[-1]
    assert [run.state for run in statuses(tmp_path / "always")] == ["failed"]
    assert (command.status(tmp_path / "once"), command.status(tmp_path / "always")) == (0, 1)


@pytest.mark.slow
def test_ctrl_c_stops_every_run_after_its_step_and_the_next_sweep_goes_on(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, "+fake.steps=400", "+fake.seconds=0.1")
    lines: list[str] = []
    seen = threading.Event()

    def interrupt() -> None:
        running = [run for run in statuses(tmp_path) if run.training.step]
        if len(running) == 2 and not seen.is_set():
            seen.set()
            os.kill(os.getpid(), signal.SIGINT)

    assert len(drive(sweep, lines, show=interrupt)) == 4
    assert sum("Stopping: 2 runs" in line for line in lines) == 1
    stopped = [run for run in statuses(tmp_path) if run.state == "stopped"]
    assert len(stopped) == 2
    attempts = read_attempts(tmp_path)
    assert all(0 < run.training.step < 400 and attempts[run.name].failures == 0 for run in stopped)
    shorter = fake_sweep(tmp_path, "+fake.steps=5", "+fake.seconds=0.01")
    assert drive(shorter, lines) == []
    for run in stopped:
        assert starts_of(tmp_path / run.name) == [0, run.training.step]


@pytest.mark.slow
def test_without_a_terminal_a_line_says_how_far_the_runs_are(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, "+fake.seconds=0.3")
    console = Console(file=io.StringIO(), width=200)
    with command._shown(tmp_path, 1, console, line_every=0) as show:
        assert drive(sweep, [], places=1, show=show) == []
    printed = console.file.getvalue()
    assert re.search(r"4 runs: .*1 running.*; algo=\w+,seed=\d [12]/3: 0\.3 s; about ", printed)
    assert printed.endswith("4 runs: 4 finished\n")


def test_a_run_that_failed_once_and_is_stopped_with_the_sweep_is_stopped(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, axes=ONE)

    def announce(line: str) -> None:
        if line.endswith("started, attempt 2"):
            scheduler.stops = 1

    launcher = LocalLauncher([{}], program=[sys.executable, "-c", "raise SystemExit(1)"])
    scheduler = Scheduler(sweep, launcher, announce=announce)
    write(sweep)
    assert scheduler.run() == ["seed=0"]
    assert scheduler.stops == 1
    assert [run.state for run in statuses(tmp_path)] == ["stopped"]


@pytest.mark.slow
def test_a_sweep_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert drive(fake_sweep(tmp_path, axes=ONE), [], show=lambda: os.kill(os.getpid(), signal.SIGHUP)) == []
    finally:
        signal.signal(signal.SIGHUP, before)


def runs(*known: tuple[str, RunState]) -> list[RunStatus]:
    return [RunStatus(str(number), state, training) for number, (state, training) in enumerate(known)]


def test_runs_to_come_take_as_long_as_the_slowest_of_the_others() -> None:
    new = RunState()
    starting = RunState(status="running", steps=10, seconds=50)
    running = RunState(status="running", step=5, steps=10, step_seconds=4, seconds=80)  # 20 s left
    slow = RunState(status="running", step=2, steps=10, step_seconds=9, seconds=80)  # 72 s left
    finished = RunState(status="complete", step=10, steps=10, step_seconds=4, seconds=90)
    assert seconds_left(runs(("running", starting), ("waiting", new)), 1) is None
    assert seconds_left(runs(("running", running)), 1) == 20
    assert seconds_left(runs(("running", running), ("waiting", new), ("waiting", new)), 1) == 20 + 2 * 100
    assert seconds_left(runs(("finished", finished), ("running", starting), ("failed", new)), 1) == 90
    two = runs(("running", running), ("running", slow), *[("waiting", new)] * 3)
    assert seconds_left(two, 2) == 72 + 2 * 152
    assert progress_line(runs(("running", starting)), 1) == "1 runs: 1 running; 0 0/10: step 0"
    assert "; about 2 min left" in progress_line(runs(("finished", finished), ("waiting", new)), 1)


@pytest.mark.slow
def test_two_signals_at_the_same_moment_stop_at_once(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, "+fake.steps=2", "+fake.seconds=60", axes=ONE)
    lines: list[str] = []
    asked: list[bool] = []

    def interrupt() -> None:
        if [run.state for run in statuses(tmp_path)] == ["running"] and not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    assert drive(sweep, lines, places=1, show=interrupt) == ["seed=0"]
    assert time.monotonic() - began < 50  # a step takes longer
    assert "Stopping at once, without a checkpoint." in lines


@pytest.mark.slow
def test_a_closed_terminal_signals_twice_and_the_runs_save(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, "+fake.steps=400", "+fake.seconds=0.1", axes=ONE)
    lines: list[str] = []
    closed: list[bool] = []

    def close() -> None:
        if any(run.training.step for run in statuses(tmp_path)) and not closed:
            closed.append(True)
            for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGHUP):
                os.kill(os.getpid(), signum)

    assert drive(sweep, lines, show=close) == ["seed=0"]
    assert "Stopping at once, without a checkpoint." not in lines
    assert [run.state for run in statuses(tmp_path)] == ["stopped"]


def test_a_stop_that_was_asked_for_before_the_first_run_is_followed(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, axes=ONE)
    with command.locked(tmp_path):
        (tmp_path / "STOP").touch()  # while models and data are checked
        write(sweep)
        assert Scheduler(sweep, LocalLauncher([{}], program=FAKE), announce=print).run() == ["seed=0"]
    assert read_attempts(tmp_path) == {}
    (tmp_path / "STOP").touch()
    with command.locked(tmp_path):
        assert not (tmp_path / "STOP").exists(), "one of an earlier sweep"


@pytest.mark.slow
def test_a_shared_disk_that_is_away_for_a_moment_stops_nothing(tmp_path: Path) -> None:
    away = [OSError(errno.ESTALE, "stale file handle")]

    class Flaky(Scheduler):
        def _check_space(self) -> None:
            if away and any(run.training.step for run in statuses(tmp_path)):
                raise away.pop()

    sweep, lines = fake_sweep(tmp_path, "+fake.seconds=0.3", axes=ONE), list[str]()
    write(sweep)
    assert Flaky(sweep, LocalLauncher([{}], program=FAKE), announce=lines.append).run() == []
    assert [line for line in lines if "stale file handle Waiting" in line]
    assert starts_of(sweep.run_dir("seed=0")) == [0]


@pytest.mark.slow
def test_a_disk_without_space_stops_the_sweep(tmp_path: Path) -> None:
    sweep = fake_sweep(tmp_path, "+fake.steps=2000", "+fake.seconds=0.05")

    class Filling(Scheduler):
        def _check_space(self) -> None:
            self.least_space = 2**62 if any(run.training.step for run in statuses(tmp_path)) else 0
            super()._check_space()

    launcher = LocalLauncher([{}], program=FAKE)
    write(sweep)
    with pytest.raises(OSError, match="little space left"):
        Filling(sweep, launcher, announce=lambda line: None).run()
    attempts = read_attempts(tmp_path)
    [run] = [run for run in statuses(tmp_path) if run.name in attempts and attempts[run.name].number]
    assert not launcher.is_running(tmp_path / run.name, 1)
    assert 0 < run.training.step < 2000
    assert attempts[run.name].failures == 0


def test_two_sweeps_in_one_directory_are_refused(tmp_path: Path) -> None:
    with (
        sweep_lock(tmp_path),
        pytest.raises(UserError, match="another process trains the runs in") as caught,
        sweep_lock(tmp_path),
    ):
        pass
    assert f"`touch {tmp_path / 'STOP'}`" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("places", [pytest.param("1", marks=pytest.mark.exhaustive), "2"])
@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.exhaustive), pytest.param(3, marks=pytest.mark.exhaustive)]
)
def test_no_step_is_trained_twice_whenever_the_sweep_is_killed(tmp_path: Path, seed: int, places: str) -> None:
    moments = random.Random(seed)
    overrides = ("+fake.steps=6", "+fake.seconds=0.2")
    sweep = fake_sweep(tmp_path, *overrides)
    for _ in range(3):
        process = subprocess.Popen([*DRIVE, str(tmp_path), places, *overrides])
        time.sleep(moments.uniform(0.5, 5))
        process.kill()
        process.wait()
    subprocess.run([*DRIVE, str(tmp_path), places, *overrides], check=True, timeout=120)
    assert unfinished(sweep) == []
    for name in sweep.runs:
        run_dir = sweep.run_dir(name)
        assert steps_of(run_dir) == [1, 2, 3, 4, 5, 6]
        assert all(start < 6 for start in starts_of(run_dir))
        assert read_attempts(tmp_path)[name].failures == 0


# -------------------------------------------------------------------- a cluster that outlives its scheduler


class KilledError(BaseException):
    """The scheduler's process is gone: none of its code runs any more."""


class Cluster:
    """A launcher as Ray's: it remembers every id, and its jobs go on when the scheduler is killed.

    outcomes: of each attempt in the order of their starts, the steps that it logs before it ends; at 3 it is finished.
    kills: the numbers of the effects, counted over all schedulers, before which the scheduler is killed.
    """

    cluster: str | None = "http://cluster"

    def __init__(self, outcomes: Sequence[int], kills: Sequence[int]) -> None:
        self.capacity = 2
        self.outcomes = itertools.chain(outcomes, itertools.repeat(3))
        self.kills = set(kills)
        self.effects = self.looks = 0
        self.jobs: dict[tuple[Path, int], int] = {}  # for how many more looks it runs
        self.most = 0

    def write(self, file: Path, value: object) -> None:
        self.effect()
        write_json(file, value)
        self.effect()

    def effect(self) -> None:
        self.effects += 1
        if self.effects in self.kills:
            raise KilledError

    def start(self, run_dir: Path, attempt: int, overrides: Sequence[str]) -> bool:
        self.effect()
        if (run_dir, attempt) in self.jobs:
            return False
        assert not state_of(run_dir).is_complete, "a finished run was started again"
        assert not any(looks for (place, _), looks in self.jobs.items() if place == run_dir), "two jobs of one run"
        self.jobs[run_dir, attempt] = 1 + len(self.jobs) % 3
        self.most = max(self.most, sum(looks > 0 for looks in self.jobs.values()))
        self.effect()
        return True

    def is_running(self, run_dir: Path, attempt: int) -> bool:
        """Every look is also the time in which the job does its work."""
        self.looks += 1
        assert self.looks < 10_000, "the scheduler does not come to an end"
        looks = self.jobs.get((run_dir, attempt), 0)
        if looks == 1:
            step = next(self.outcomes)
            for number in range(1, step + 1):
                record_metrics(run_dir, number, {"x": 1.0})
            write_record(run_dir, {"status": "complete" if step == 3 else "failed"})
        if looks:
            self.jobs[run_dir, attempt] = looks - 1
        return looks > 0

    def stop(self, run_dir: Path, attempt: int, *, at_once: bool) -> None:
        self.jobs[run_dir, attempt] = 0

    def reason(self, run_dir: Path, attempt: int) -> str:
        self.effect()
        return "it ended."

    def close(self) -> None:
        pass


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    outcomes=st.lists(st.integers(0, 3), max_size=8),
    kills=st.lists(st.integers(1, 60), max_size=6, unique=True),
)
def test_no_run_is_started_twice_whatever_the_moment_of_the_kill(
    outcomes: list[int], kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("sweep")
    sweep = fake_sweep(directory, retries=1)
    write(sweep)
    cluster = Cluster(outcomes, kills)
    for _ in range(30):
        scheduler = Scheduler(sweep, cluster, announce=lambda line: cluster.effect())
        scheduler._stop_runs = lambda: None  # type: ignore[method-assign]  # killed, it stops nothing
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "POLL", 0)
            patch.setattr(module, "write_json", cluster.write)
            try:
                left = scheduler.run()
            except KilledError:
                continue
        if not left:
            break
    assert unfinished(sweep) == []
    assert cluster.most <= cluster.capacity
    assert not any(cluster.jobs.values())
