"""One training in its run directory: the lock, what is recorded about it, and how Ctrl-C stops it."""

import datetime as dt
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from gtpo_verl.files import write_text
from gtpo_verl.runs.directory import CONFIG_FILE, DIFF_FILE, STOP_FILE, flatten, read_record, write_record
from gtpo_verl.runs.lock import training_lock
from gtpo_verl.runs.provenance import checksums, code_state, hardware, run_versions


@contextmanager
def training_session(run_dir: Path, *, config: str, command: str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Hold the run directory for the training in the block, and keep ``run.json`` up to date.

    The status is ``running``, then ``complete``, ``interrupted`` (Ctrl-C, or the file ``STOP``) or ``failed``. The
    first Ctrl-C asks the trainer to stop after its step, by ``STOP``; the second raises KeyboardInterrupt.

    The record is that of the last attempt, with the start and the end of all of them in ``attempts``.

    Args:
        run_dir: made if it does not exist.
        config: the resolved configuration as YAML, written to ``config.yaml``.
        command: the command line that repeats the training.
        overrides: as they were typed.

    Raises:
        UserError: another training writes to the directory.
    """
    with training_lock(run_dir):
        stop = run_dir / STOP_FILE
        stop.unlink(missing_ok=True)
        write_text(run_dir / CONFIG_FILE, config)
        record = _Record(run_dir, yaml.safe_load(config), command, overrides)
        previous = signal.signal(signal.SIGINT, _Stopper(stop))
        try:
            yield
        except KeyboardInterrupt:
            record.close("interrupted", "Ctrl-C, twice")
            raise
        except Exception as error:
            record.close("failed", _reason(error))
            raise
        finally:
            signal.signal(signal.SIGINT, previous)
        if stop.exists():
            record.close("interrupted", "stopped after a step, on request")
        else:
            record.close("complete", "all steps were trained")
        stop.unlink(missing_ok=True)
        _link_model(run_dir)


class _Record:
    """``run.json`` of a training, written as it starts and as it ends."""

    def __init__(self, run_dir: Path, config: dict[str, Any], command: str, overrides: Sequence[str]) -> None:
        self.run_dir = run_dir
        self.config = dict(flatten(config))
        earlier = read_record(run_dir) or {}
        started = _now()
        code, changes = code_state()
        if changes:
            write_text(run_dir / DIFF_FILE, changes)
        else:
            (run_dir / DIFF_FILE).unlink(missing_ok=True)
        self.attempt: dict[str, Any] = {"started": started, "ended": None, "status": "running", "exit_reason": None}
        self.attempt["commit"] = code["commit"]
        self.facts: dict[str, Any] = {
            "name": run_dir.name,
            "created": earlier.get("created", started),
            "command": command,
            "overrides": list(overrides),
            "seed": self.config.get("seed"),
            "code": code,
            "versions": run_versions(),
            "hardware": hardware(),
            "checksums": checksums(self.config),
            "attempts": [*earlier.get("attempts", []), self.attempt],
        }
        self._write("running")

    def close(self, status: str, reason: str) -> None:
        """Record the end of the attempt."""
        self.attempt |= {"ended": _now(), "status": status, "exit_reason": reason}
        if None in self.facts["checksums"].values():  # a model of the hub, which the workers have downloaded since
            self.facts["checksums"] = checksums(self.config)
        self._write(status)

    def _write(self, status: str) -> None:
        write_record(self.run_dir, self.facts | {"status": status})


def _now() -> str:
    return dt.datetime.now().astimezone().isoformat(timespec="seconds")


def _reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class _Stopper:
    """The handler of Ctrl-C."""

    def __init__(self, stop: Path) -> None:
        self.stop = stop

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.stop.exists():
            raise KeyboardInterrupt
        self.stop.touch()
        print("\nStopping after this step, with a checkpoint. Ctrl-C again stops at once.", file=sys.stderr, flush=True)


def _link_model(run_dir: Path) -> None:
    """Link ``model`` to the weights of the last checkpoint in Hugging Face format, where the run saves them."""
    saved = sorted(
        run_dir.glob("checkpoints/global_step_*/actor/huggingface"),
        key=lambda path: int(path.parts[-3].rsplit("_", 1)[-1]),
    )
    if not saved or not any(saved[-1].glob("*.safetensors")):
        return
    link = run_dir / "model"
    link.unlink(missing_ok=True)
    link.symlink_to(saved[-1].relative_to(run_dir))
    print(f"Trained model: {link}", flush=True)
