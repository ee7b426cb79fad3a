"""Where a training is, and why one that ended did; from its files alone."""

import re
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json, reading
from gtpo_verl.runs.checkpoints import checkpoints, tracked_step
from gtpo_verl.runs.directory import METRICS_FILE, PHASE_FILE, RECORD_FILE, STOP_FILE
from gtpo_verl.runs.lock import LOCK_FILE, live_owner
from gtpo_verl.runs.pace import in_words
from gtpo_verl.runs.progress import RECENT, progress_of
from gtpo_verl.runs.reader import read_metrics
from gtpo_verl.runs.terminal import LOG_FILE, describe

SHOWN = ("perf/throughput", "perf/max_memory_allocated_gb", "actor/grad_norm", "response_length/mean")
KEPT_WARNINGS = 5
_LINES = 20_000  # of the end of the log that are looked at
_WARNING = re.compile(r"gtpo_verl (?:WARNING|ERROR): (?P<text>.*)")
# What a log says that explains an end; the last of the first kind that is found is taken.
_CAUSES = (
    (re.compile(r"^error: (?P<text>.*)"), "{text}"),
    (re.compile(r"(?P<text>No space left on device)"), "the disk is full"),
    (re.compile(r"(?P<text>CUDA out of memory)"), "a GPU's memory ran out"),
    # not "OOM": whatever dies, Ray says that it might have been the system's OOM killer
    (
        re.compile(r"(?P<text>OutOfMemoryError|[Oo]ut of memory|memory pressure \(OOM\))"),
        "the machine's memory ran out",
    ),
    (re.compile(r"(?P<text>\w*(?:Error|Exception): .*)"), "{text}"),
)


@dataclass(frozen=True)
class Status:
    """What ``gtpo-verl status`` says of a run.

    state: ``running``, ``stopping``, ``complete``, ``interrupted`` or ``failed``. why: of an end, or what a running
    one does. lines: the rest, {label: text}. warnings: the last ones of the log, oldest first.
    """

    state: str
    why: str
    lines: Mapping[str, str]
    warnings: tuple[str, ...]


def status_of(run_dir: Path) -> Status:
    """Read the status of a training.

    Raises:
        UserError: the directory holds no training.
    """
    record = _read(run_dir / RECORD_FILE)
    if "attempts" not in record:
        raise UserError(_no_training(run_dir))
    alive = live_owner(run_dir / LOCK_FILE) is not None
    with reading(run_dir / RECORD_FILE):
        begins = record["attempts"][-1].get("log_from", 0) if record["attempts"] else 0
        log = _end_of(run_dir / LOG_FILE, max(0, begins))
    if alive:
        state = "stopping" if (run_dir / STOP_FILE).exists() else "running"
        why = _phase(run_dir)
    else:
        state, why = _end(run_dir, record, log)
    texts = (match["text"] for match in map(_WARNING.search, log) if match)
    warnings = tuple(dict.fromkeys(texts))[-KEPT_WARNINGS:]
    return Status(state, why, dict(_lines(run_dir, state)), warnings)


def _no_training(directory: Path) -> str:
    """What a directory without the record of a training is instead."""
    runs = sorted(file.parent.name for file in directory.glob(f"*/{RECORD_FILE}"))
    if runs:
        return f"{directory} holds several trainings: name one of {', '.join(runs)} in it."
    if (directory / LOG_FILE).exists():
        return f"the training in {directory} has not begun yet; {directory / LOG_FILE} is its log."
    return f"{directory} is not the directory of a training: it has no {RECORD_FILE} of one."


def _read(file: Path) -> dict[str, Any]:
    with reading(file):
        value = read_json(file)
    return value if isinstance(value, dict) else {}


def _phase(run_dir: Path) -> str:
    phase = _read(run_dir / PHASE_FILE)
    if not phase:
        return "starting"
    with reading(run_dir / PHASE_FILE):
        step = f"step {phase['step']}: " if phase["step"] else ""
        return f"{step}{phase['phase']} for {in_words(max(0.0, time.time() - phase['since']))}"


def _end(run_dir: Path, record: Mapping[str, Any], log: list[str]) -> tuple[str, str]:
    """State and reason of a training that no process works on."""
    state = str(record.get("status"))
    if state != "running":
        return state, str(record.get("reason") or "no reason was recorded")
    doing = _read(run_dir / PHASE_FILE)
    with reading(run_dir / PHASE_FILE):
        at = f" in step {doing['step']}, {doing['phase']}" if doing else " while it started"
    cause = _cause(log)
    said = f"; the log says: {cause}" if cause else ""
    return "interrupted", f"its process was killed, or its machine is gone{at}{said}"


def _cause(log: list[str]) -> str:
    for pattern, text in _CAUSES:
        found = [match for match in map(pattern.search, log) if match]
        if found:
            return text.format(text=found[-1]["text"])
    return ""


def _end_of(file: Path, begins: int) -> list[str]:
    """The last lines of the log of an attempt, which begins behind so many bytes."""
    if not file.is_file():
        return []
    with file.open("rb") as content:
        content.seek(begins)
        return [line.decode("utf-8", "replace").rstrip() for line in deque(content, maxlen=_LINES)]


def _lines(run_dir: Path, state: str) -> Iterator[tuple[str, str]]:
    progress = progress_of(run_dir)
    metrics = read_metrics(run_dir / METRICS_FILE)[0] if (run_dir / METRICS_FILE).is_file() else {}
    yield "step", f"{progress.step} of {progress.steps or '?'}"
    times = [data["timing_s/step"] for _, data in sorted(metrics.items()) if "timing_s/step" in data]
    if times:
        yield "time of a step", f"{in_words(statistics.median(times[-RECENT:]))} (median of the last {RECENT})"
    if progress.seconds_left and state == "running":
        yield "time left", in_words(progress.seconds_left)
    if metrics:
        last = max(metrics)
        yield f"metrics of step {last}", describe(last, dict(metrics[last]))
        yield "", ", ".join(f"{key} {metrics[last][key]:.4g}" for key in SHOWN if key in metrics[last])
    yield "checkpoints", _saved(run_dir / "checkpoints")


def _saved(directory: Path) -> str:
    names = ", ".join(folder.name for folder in checkpoints(directory).values())
    try:
        latest = tracked_step(directory)
    except ValueError as error:
        return f"{names}; {error}"
    return f"{names or 'none'}" + (f"; a restart goes on from global_step_{latest}" if latest is not None else "")
