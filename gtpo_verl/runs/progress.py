"""How far a training is: its step, its last accuracy, and the time that the rest takes."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from gtpo_verl.files import reading
from gtpo_verl.runs.directory import CONFIG_FILE, METRICS_FILE, read_config
from gtpo_verl.runs.reader import logged_accuracies, read_metrics

RECENT = 10  # steps whose median time is that of a step to come


@dataclass(frozen=True)
class Progress:
    """Where a training is.

    step: the last one logged. steps: their number, None before the first attempt has begun.
    accuracy: of the last validation, by data source. seconds_left: None before the first step.
    metrics: of the last step that was logged; 0 is the validation before the first one.
    """

    step: int = 0
    steps: int | None = None
    accuracy: Mapping[str, float] | None = None
    seconds_left: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def progress_of(run_dir: Path) -> Progress:
    """Read the progress of the training in ``run_dir``; a file that has not changed is not read again."""
    metrics = _read_metrics(*_version(run_dir / METRICS_FILE))
    steps = _read_steps(*_version(run_dir / CONFIG_FILE))
    step = max(metrics, default=0)
    keys = {key for data in metrics.values() for key in data}
    accuracy = {
        source: next(data[key] for _, data in sorted(metrics.items(), reverse=True) if key in data)
        for source, key in logged_accuracies(keys).items()
    }
    times = [data["timing_s/step"] for _, data in sorted(metrics.items()) if "timing_s/step" in data]
    left = statistics.median(times[-RECENT:]) * max(0, steps - step) if times and steps is not None else None
    return Progress(step, steps, accuracy, left, metrics.get(step, {}))


def last_step(run_dir: Path) -> int:
    """The last step that the training in ``run_dir`` has logged, 0 before the first."""
    return progress_of(run_dir).step


def _version(file: Path) -> tuple[Path, int, int]:
    """A file and what changes when it is written; zeros where there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return file, 0, 0
    return file, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=256)
def _read_metrics(file: Path, changed: int, size: int) -> Mapping[int, Mapping[str, float]]:
    return read_metrics(file)[0] if size else {}


@lru_cache(maxsize=256)
def _read_steps(file: Path, changed: int, size: int) -> int | None:
    if not size:
        return None
    with reading(file):
        steps = read_config(file).get("trainer", {}).get("total_training_steps")
        return None if steps is None else int(steps)
