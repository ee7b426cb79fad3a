"""Where a training is: one model of its state, read from the files of its run directory.

`run.json` says how an attempt ended, `LOCK.json` which process is at work, `phase.json` what that does, `STOP` that it
was asked to stop, `metrics.jsonl` how far it is, and `config.yaml` how many steps it has in all.
"""

import datetime as dt
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from gtpo_verl.files import read_json, reading
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

RECENT = 10  # steps whose median time is that of a step to come


@dataclass(frozen=True)
class RunState:
    """The state of a training.

    status: ``running`` or ``stopping`` while a process works on it, else ``complete``, ``interrupted`` or ``failed``;
    empty before its first attempt. reason: what a running one does, or why the last attempt ended. killed: whether that
    ended without a word. seconds: how long the last attempt has run.
    step: the last one logged; 0 is the validation before the first. steps: their number, None before the first attempt.
    metrics: of the last step. accuracy: of the last validation, by data source. step_seconds: None before a step.
    """

    status: str = ""
    reason: str = ""
    killed: bool = False
    seconds: float = 0.0
    step: int = 0
    steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float | None = None

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
    """Read the state of the training in a run directory; files that have not changed are not read again.

    Raises:
        UserError: a file is damaged.
    """
    progress = _read_progress(*_version(run_dir / METRICS_FILE))
    return RunState(**_attempt(run_dir), **progress, steps=_read_steps(*_version(run_dir / CONFIG_FILE)))


def in_words(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _attempt(run_dir: Path) -> dict[str, Any]:
    """Of the last attempt: status, reason, whether it was killed, and how long it has run."""
    record = read_record(run_dir)
    with reading(run_dir / RECORD_FILE):
        attempt = (record.get("attempts") or [{}])[-1]
        started, ended = (dt.datetime.fromisoformat(attempt.get(name) or now()) for name in ("started", "ended"))
        seconds = (ended - started).total_seconds() if "started" in attempt else 0.0
    if live_owner(run_dir) is not None:
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
        return f"{step}{phase['phase']} for {in_words(max(0.0, time.time() - phase['since']))}"


def _version(file: Path) -> tuple[Path, int, int]:
    """A file and what changes when it is written; zeros where there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return file, 0, 0
    return file, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=256)
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


@lru_cache(maxsize=256)
def _read_steps(file: Path, changed: int, size: int) -> int | None:
    if not size:
        return None
    with reading(file):
        steps = read_config(file).get("trainer", {}).get("total_training_steps")
        return None if steps is None else int(steps)
