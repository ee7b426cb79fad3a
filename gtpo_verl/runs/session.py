"""One training in its run directory: the lock, what is recorded about it, and how Ctrl-C stops it."""

import datetime as dt
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gtpo_verl.files import write_text
from gtpo_verl.runs.directory import CONFIG_FILE, STOP_FILE, write_record
from gtpo_verl.runs.lock import training_lock
from gtpo_verl.runs.provenance import hardware, run_versions


@contextmanager
def training_session(run_dir: Path, *, config: str, command: str) -> Iterator[None]:
    """Hold the run directory for the training in the block, and keep ``run.json`` up to date.

    The status is ``running``, then ``complete``, ``interrupted`` (Ctrl-C, or the file ``STOP``) or ``failed``. The
    first Ctrl-C asks the trainer to stop after its step, by ``STOP``; the second raises KeyboardInterrupt.

    Args:
        run_dir: made if it does not exist.
        config: the resolved configuration, written to ``config.yaml``.
        command: the command line that repeats the training.

    Raises:
        UserError: another training writes to the directory.
    """
    with training_lock(run_dir):
        stop = run_dir / STOP_FILE
        stop.unlink(missing_ok=True)
        write_text(run_dir / CONFIG_FILE, config)
        facts = {
            "name": run_dir.name,
            "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command,
            "versions": run_versions(),
            "hardware": hardware(),
        }
        write_record(run_dir, facts | {"status": "running"})
        previous = signal.signal(signal.SIGINT, _Stopper(stop))
        try:
            yield
        except KeyboardInterrupt:
            write_record(run_dir, facts | {"status": "interrupted"})
            raise
        except Exception:
            write_record(run_dir, facts | {"status": "failed"})
            raise
        finally:
            signal.signal(signal.SIGINT, previous)
        write_record(run_dir, facts | {"status": "interrupted" if stop.exists() else "complete"})
        stop.unlink(missing_ok=True)
        _link_model(run_dir)


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
