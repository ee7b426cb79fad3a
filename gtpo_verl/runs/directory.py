"""What a run keeps on disk: ``metrics.jsonl``, ``groups.jsonl``, ``run.json``, and the file by which a running job is asked to stop."""

import contextlib
import fcntl
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError

METRICS_FILE = "metrics.jsonl"
GROUPS_FILE = "groups.jsonl"
RECORD_FILE = "run.json"
STOP_FILE = "STOP"
LOCK_FILE = "LOCK"
STOPPING = 600  # seconds a training that was asked to stop, and finishes its step, is waited for


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other trainings out of a run directory; one that is stopping there already is waited for.

    Raises:
        UserError: another training writes to it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("a") as file:
        deadline, waiting = time.monotonic() + STOPPING, False
        while not _lock(file.fileno()):
            if not (run_dir / STOP_FILE).exists() or time.monotonic() > deadline:
                raise UserError(
                    f"another training writes to {run_dir}: stop it with Ctrl-C, or with `touch {run_dir / STOP_FILE}` from elsewhere, "
                    "or give this one a trainer.run_dir of its own."
                )
            if not waiting:
                print(f"Waiting for the training that is stopping in {run_dir}.", file=sys.stderr, flush=True)
            waiting = True
            time.sleep(0.5)
        yield


def _lock(descriptor: int) -> bool:
    """Whether the file is locked now, until it is closed; also where the file system cannot lock at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class MetricsRecorder:
    """Appends ``{"step": int, "data": {name: number}}`` to ``metrics.jsonl``; a step written again after a resume comes later and wins."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        _end_torn_line(self.path)
        _end_torn_line(run_dir / GROUPS_FILE)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one step; values that are not finite are left out and named under ``not_finite``."""
        numbers, not_finite = {}, []
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue  # tables and nested counts go to verl's own loggers
            if math.isfinite(number):
                numbers[name] = number
            else:
                not_finite.append(name)
        line: dict[str, Any] = {"step": int(step), "data": numbers}
        if not_finite:
            line["not_finite"] = sorted(not_finite)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def record_groups(run_dir: Path, step: int, groups: dict[str, int]) -> None:
    """Append the groups that a step trained on to ``groups.jsonl``.

    Args:
        run_dir: the run's directory.
        step: the step; one written again after a resume comes later and wins.
        groups: {uid of the group: step in which its responses were generated}.
    """
    with (run_dir / GROUPS_FILE).open("a") as file:
        file.write(json.dumps({"step": int(step), "groups": groups}) + "\n")


def _end_torn_line(path: Path) -> None:
    """A crash may have torn the last line of ``path``: end it, so that the next one is not glued to it."""
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


def read_metrics_from(run_dir: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Read the whole lines of ``metrics.jsonl`` behind ``offset`` (bytes); returns them and where to go on. Torn lines are skipped."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read()
    end = text.rfind(b"\n") + 1
    lines = []
    for line in text[:end].splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines, offset + end


def write_record(run_dir: Path, facts: dict[str, Any]) -> None:
    """Write ``run.json``, whole or not at all."""
    temporary = run_dir / f".{RECORD_FILE}.tmp"
    temporary.write_text(json.dumps(facts, indent=2) + "\n")
    temporary.replace(run_dir / RECORD_FILE)


def read_record(run_dir: Path) -> dict[str, Any] | None:
    """Read ``run.json``; None where there is none."""
    path = run_dir / RECORD_FILE
    return json.loads(path.read_text()) if path.is_file() else None
