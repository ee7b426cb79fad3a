"""Where a training is: one model of its state, read from the files of its run directory.

`run.json` says how an attempt ended, `LOCK.json` which process is at work, `phase.json` what that does, `STOP` that it
was asked to stop, `metrics.jsonl` how far it is, and `config.yaml` how many steps it has in all.
"""

import datetime as dt
import re
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError, last_error
from gtpo_verl.files import read_json, reading
from gtpo_verl.runs.checkpoints import checkpoints, tracked_step
from gtpo_verl.runs.directory import (
    CONFIG_FILE,
    METRICS_FILE,
    PHASE_FILE,
    RECORD_FILE,
    STOP_FILE,
    now,
    read_config,
    read_record,
)
from gtpo_verl.runs.lock import live_owner
from gtpo_verl.runs.reader import logged_accuracies, read_metrics
from gtpo_verl.runs.terminal import LOG_FILE, describe, warnings_in

RECENT = 10  # steps whose median time is that of a step to come
SHOWN = ("perf/throughput", "perf/max_memory_allocated_gb", "actor/grad_norm", "response_length/mean")
KEPT_WARNINGS = 5
_LINES = 20_000  # of the end of the log that are looked at
# What a log says that explains an end; the last of the first kind that is found is taken.
_CAUSES = (
    (re.compile(r"No space left on device"), "the disk is full"),
    (re.compile(r"CUDA out of memory"), "a GPU's memory ran out"),
    # not "OOM": whatever dies, Ray says that it might have been the system's OOM killer
    (re.compile(r"OutOfMemoryError|[Oo]ut of memory|memory pressure \(OOM\)"), "the machine's memory ran out"),
    (re.compile(r"\w*(?:Error|Exception): .*"), ""),  # as it is
)


@dataclass(frozen=True)
class RunState:
    """The state of a training."""

    status: str = ""  # running or stopping while a process works on it, else complete, interrupted or failed; "" is new
    reason: str = ""  # what a running one does, or why the last attempt ended
    killed: bool = False  # whether that ended without a word
    seconds: float = 0.0  # that the last attempt has run
    step: int = 0  # the last one logged; 0 is the validation before the first
    steps: int | None = None  # None before the first attempt
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last step
    accuracy: Mapping[str, float] = field(default_factory=dict)  # of the last validation, by data source
    step_seconds: float | None = None  # None before a step

    @property
    def is_alive(self) -> bool:
        return self.status in ("running", "stopping")

    @property
    def is_complete(self) -> bool:
        return self.status == "complete"

    @property
    def seconds_left(self) -> float | None:
        """The time of the steps to come; None before a step."""
        if self.step_seconds is None or self.steps is None:
            return None
        return self.step_seconds * max(0, self.steps - self.step)


def state_of(run_dir: Path) -> RunState:
    """Read the state of a training; files that have not changed are not read again. UserError: a file is damaged."""
    progress = _read_progress(*_version(run_dir / METRICS_FILE))
    return RunState(**_attempt(run_dir), **progress, steps=_read_steps(*_version(run_dir / CONFIG_FILE)))


def duration(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _attempt(run_dir: Path) -> dict[str, Any]:
    """What the record says of a `RunState`."""
    owner = live_owner(run_dir)  # before the record: one that ends writes its record, then gives up the lock
    record = read_record(run_dir)
    with reading(run_dir / RECORD_FILE):
        attempt = (record.get("attempts") or [{}])[-1]
        started, ended = (dt.datetime.fromisoformat(attempt.get(name) or now()) for name in ("started", "ended"))
        seconds = (ended - started).total_seconds() if "started" in attempt else 0.0
    if owner is not None:
        status = "stopping" if (run_dir / STOP_FILE).exists() else "running"
        return {"status": status, "reason": _phase(run_dir), "seconds": seconds}
    status = str(record.get("status") or "")
    if status == "running":
        reason = f"its process was killed, or its machine is gone{_phase(run_dir, killed=True)}"
        return {"status": "interrupted", "reason": reason, "killed": True, "seconds": seconds}
    return {"status": status, "reason": str(record.get("reason") or "no reason was recorded"), "seconds": seconds}


def _phase(run_dir: Path, *, killed: bool = False) -> str:
    """What the trainer does just now, or did when it was killed."""
    with reading(run_dir / PHASE_FILE):
        phase = read_json(run_dir / PHASE_FILE)
        if not phase:
            return " while it started" if killed else "starting"
        if killed:
            return f" in step {phase['step']}, {phase['phase']}"
        step = f"step {phase['step']}: " if phase["step"] else ""
        return f"{step}{phase['phase']} for {duration(max(0.0, time.time() - phase['since']))}"


def _version(file: Path) -> tuple[Path, int, int]:
    """A file and what changes when it is written; zeros where there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return file, 0, 0
    return file, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4096)
def _read_progress(file: Path, changed: int, size: int) -> Mapping[str, Any]:
    """What the metrics say of a `RunState`."""
    if not size:
        return {}
    metrics, _ = read_metrics(file)
    newest = sorted(metrics.items(), reverse=True)
    logged = logged_accuracies({key for data in metrics.values() for key in data})
    times = [data["timing_s/step"] for _, data in newest if "timing_s/step" in data]
    step, last = newest[0] if newest else (0, {})
    return {
        "step": step,
        "metrics": last,
        "accuracy": {source: next(data[key] for _, data in newest if key in data) for source, key in logged.items()},
        "step_seconds": statistics.median(times[:RECENT]) if times else None,
    }


@lru_cache(maxsize=4096)
def _read_steps(file: Path, changed: int, size: int) -> int | None:
    if not size:
        return None
    with reading(file):
        steps = read_config(file).get("trainer", {}).get("total_training_steps")
        return None if steps is None else int(steps)


@dataclass(frozen=True)
class Status:
    """What is said of a training: its status, why it ended or what it does, {label: text}, the log's last warnings."""

    state: str
    why: str
    lines: Mapping[str, str]
    warnings: tuple[str, ...]


def status_of(run_dir: Path) -> Status:
    """Read the status of a training. UserError: the directory holds no training."""
    record = read_record(run_dir) if run_dir.is_dir() else {}
    if "attempts" not in record:
        raise UserError(_no_training(run_dir))
    state = state_of(run_dir)
    with reading(run_dir / RECORD_FILE):
        begins = record["attempts"][-1].get("log_from", 0) if record["attempts"] else 0
        log: list[str] = []
        if (run_dir / LOG_FILE).is_file():
            with (run_dir / LOG_FILE).open("rb") as content:
                content.seek(max(0, begins))
                log = [line.decode("utf-8", "replace").rstrip() for line in deque(content, maxlen=_LINES)]
    causes = ((text, list(filter(None, map(pattern.search, log)))) for pattern, text in _CAUSES)
    why = state.reason
    if state.killed and (cause := last_error(log) or next((text or one[-1][0] for text, one in causes if one), "")):
        why += f"; the log says: {cause}"
    return Status(state.status, why, dict(_lines(run_dir, state)), tuple(warnings_in(log)[-KEPT_WARNINGS:]))


def _no_training(directory: Path) -> str:
    """What a directory without the record of a training is instead."""
    if not directory.is_dir():
        return f"{directory}: no such directory; name that of a training, its trainer.run_dir."
    runs = sorted(file.parent.name for file in directory.glob(f"*/{RECORD_FILE}"))
    if runs:
        return f"{directory} holds several trainings: name one of {', '.join(runs)} in it."
    if (directory / LOG_FILE).exists():
        return f"the training in {directory} has not begun yet; {directory / LOG_FILE} is its log."
    return f"{directory} is not the directory of a training: it has no {RECORD_FILE} of one."


def _lines(run_dir: Path, state: RunState) -> Iterator[tuple[str, str]]:
    yield "step", f"{state.step} of {state.steps or '?'}"
    if state.step_seconds is not None:
        yield "time of a step", f"{duration(state.step_seconds)} (median of the last {RECENT})"
    if state.seconds_left and state.status == "running":
        yield "time left", duration(state.seconds_left)
    if state.metrics:
        yield f"metrics of step {state.step}", describe(state.step, state.metrics)
        yield "", ", ".join(f"{key} {state.metrics[key]:.4g}" for key in SHOWN if key in state.metrics)
    directory = run_dir / "checkpoints"
    saved = [", ".join(folder.name for folder in checkpoints(directory).values()) or "none"]
    try:
        if (latest := tracked_step(directory)) is not None:
            saved.append(f"a restart goes on from global_step_{latest}")
    except ValueError as error:
        saved.append(str(error))
    yield "checkpoints", "; ".join(saved)
