"""What ``gtpo-verl status`` says of a training: its state, and what its log says of an end without a word."""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gtpo_verl.errors import UserError, last_error
from gtpo_verl.files import reading
from gtpo_verl.runs.checkpoints import checkpoints, tracked_step
from gtpo_verl.runs.directory import RECORD_FILE, read_record
from gtpo_verl.runs.state import RECENT, RunState, in_words, state_of
from gtpo_verl.runs.terminal import LOG_FILE, describe, warnings_in

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
class Status:
    """What is said of a run.

    state: its status. why: of an end, or what a running one does. lines: the rest, {label: text}. warnings: the last
    ones of the log, oldest first.
    """

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
        log = _end_of(run_dir / LOG_FILE, max(0, begins))
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


def _end_of(file: Path, begins: int) -> list[str]:
    """The last lines of the log of an attempt, which begins behind so many bytes."""
    if not file.is_file():
        return []
    with file.open("rb") as content:
        content.seek(begins)
        return [line.decode("utf-8", "replace").rstrip() for line in deque(content, maxlen=_LINES)]


def _lines(run_dir: Path, state: RunState) -> Iterator[tuple[str, str]]:
    yield "step", f"{state.step} of {state.steps or '?'}"
    if state.step_seconds is not None:
        yield "time of a step", f"{in_words(state.step_seconds)} (median of the last {RECENT})"
    if state.seconds_left and state.status == "running":
        yield "time left", in_words(state.seconds_left)
    if state.metrics:
        yield f"metrics of step {state.step}", describe(state.step, state.metrics)
        yield "", ", ".join(f"{key} {state.metrics[key]:.4g}" for key in SHOWN if key in state.metrics)
    yield "checkpoints", _saved(run_dir / "checkpoints")


def _saved(directory: Path) -> str:
    names = ", ".join(folder.name for folder in checkpoints(directory).values()) or "none"
    try:
        latest = tracked_step(directory)
    except ValueError as error:
        return f"{names}; {error}"
    return names if latest is None else f"{names}; a restart goes on from global_step_{latest}"
