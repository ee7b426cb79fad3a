"""What a run shows on its terminal, and the file that gets all it prints.

Ray, verl and vLLM print thousands of lines, from every process of every node. All of them go to the log of the run; the
terminal gets a line per step, each warning of this package once, and what the command itself says.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from gtpo_verl.files import read_json_lines_from, read_lines_from
from gtpo_verl.runs.directory import METRICS_FILE

if TYPE_CHECKING:
    from rich.progress import Progress

LOG_FILE = "train.log"
LOG_FORMAT = "gtpo_verl %(levelname)s: %(message)s"  # of this package's loggers in a run's processes
STOPPED = "Stopped after step"  # the last line of a training that was stopped begins so
POLL = 0.5  # seconds between looks at log and metrics
MINUTE = 60.0  # seconds between two lines of progress where stdout is no terminal

_WARNING = re.compile(r"gtpo_verl (WARNING|ERROR): (?P<text>.*)")
# EIO of a closed terminal, EPIPE, ENOSPC; and what a signal handler gets that prints in the middle of a print
_UNPRINTABLE = (OSError, RuntimeError)
_redirected: tuple[TextIO, TextIO] | None = None


class _Lasting:
    """A stream that raises nothing: what its terminal, a pipe or a full disk does not take is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(*_UNPRINTABLE):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(*_UNPRINTABLE):
            self._stream.flush()

    def close(self) -> None:
        with suppress(*_UNPRINTABLE):
            self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_terminal() -> None:
    """Let nothing that this process prints end it, now that it begins a training: its terminal may be closed."""
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, _Lasting) else cast(TextIO, _Lasting(stream))


def out() -> TextIO:
    """The terminal's stdout, also while this process prints to a log."""
    return _redirected[0] if _redirected else sys.stdout


def err() -> TextIO:
    """The terminal's stderr, also while this process prints to a log."""
    return _redirected[1] if _redirected else sys.stderr


def say(line: str) -> None:
    """Print a line to the terminal."""
    print(line, file=out(), flush=True)


@contextmanager
def printing_to(log: Path) -> Iterator[None]:
    """Send stdout and stderr of this process, and of those that it starts, to the end of a file, except what is printed
    to :func:`out` and :func:`err`. Nothing changes where stdout is that file already.
    """
    global _redirected
    with log.open("ab") as file:
        if os.path.samestat(os.fstat(1), os.fstat(file.fileno())):
            yield
            return
        sys.stdout.flush()
        sys.stderr.flush()
        terminal = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    stdout, stderr = (_lasting(os.fdopen(number, "w")) for number in terminal)
    with closing(stdout), closing(stderr):
        _redirected = stdout, stderr
        try:
            yield
        finally:
            _redirected = None
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(terminal[0], 1)
            os.dup2(terminal[1], 2)


@contextmanager
def progress_over(log: Path, kept: Path) -> "Iterator[Progress]":
    """A progress display on the terminal, while all that the block prints goes to the end of a file; on Ctrl-C it says
    where the results so far are ``kept``, with which the same command goes on. In a file or a pipe, as a job has it,
    progress is a line every minute.
    """
    from rich import progress as bars
    from rich.console import Console

    counts = (bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=30), bars.MofNCompleteColumn())
    times = (bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
    print(f"All that Ray and vLLM print is in {log}", flush=True)
    with (
        printing_to(log),
        bars.Progress(
            *counts,
            *times,
            console=Console(file=out()),
            redirect_stdout=False,
            redirect_stderr=False,
            speed_estimate_period=600,  # seconds: results come some hundred at a time
        ) as progress,
    ):
        begun: dict[int, tuple[float, float]] = {}
        lines = _meanwhile(lambda: _say_counts(progress, begun), MINUTE)
        try:
            with nullcontext() if progress.console.is_terminal else lines:
                yield progress
        except KeyboardInterrupt:
            progress.console.print(f"\nWhat is finished is in {kept}; repeat the command for the rest.")
            raise


def _say_counts(progress: "Progress", begun: dict[int, tuple[float, float]]) -> None:
    """A line for each task that is not finished. begun: when the first was said and how much was done, by task; from
    then on the mean speed counts, since results come some hundred at a time.
    """
    for task in progress.tasks:
        if task.visible and not task.finished and task.total:
            now, completed = progress.get_time(), task.completed
            since, before = begun.setdefault(task.id, (now, completed))
            seconds = (now - since) * (task.total - completed) / (completed - before) if completed > before else None
            left = "" if seconds is None else f", about {seconds / 60:.0f} min left"
            say(f"{task.description} {completed:.0f}/{task.total:.0f}{left}")


@contextmanager
def _meanwhile(work: Callable[[], None], seconds: float) -> Iterator[None]:
    """Do something every so many seconds of the block, in a thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name="terminal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def following(run_dir: Path, steps: int | None, *, verbose: bool) -> Iterator[None]:
    """Show on the terminal what a training of so many steps does in the block; ``verbose``: its whole log instead."""
    if _redirected is None:  # the terminal is the log
        yield
        return
    files = [run_dir / LOG_FILE, run_dir / METRICS_FILE]
    log, metrics = (file.stat().st_size if file.exists() else 0 for file in files)  # shown from here on
    shown: set[str] = set()

    def show() -> None:
        nonlocal log, metrics
        lines, log = read_lines_from(run_dir / LOG_FILE, log)
        if verbose:
            for line in lines:
                say(line)
            return
        for text in warnings_in(lines):
            if text not in shown:
                shown.add(text)
                say(f"warning: {text}")
        written, metrics = read_json_lines_from(run_dir / METRICS_FILE, metrics)
        for step in written:
            say(f"step {step['step']}/{steps or '?'}: {describe(step['step'], step['data'])}")

    try:
        with _meanwhile(show, POLL):
            yield
    finally:
        show()


def warnings_in(lines: Iterable[str]) -> list[str]:
    """The different warnings of this package in lines of a log, in their order."""
    return list(dict.fromkeys(match["text"] for match in map(_WARNING.search, lines) if match))


def describe(step: int, data: Mapping[str, float]) -> str:
    """One line on the metrics of a step."""
    validations = (name for name in data if name.startswith("val-core/") and "/acc/mean@" in name)
    shown = {
        "training/accuracy": "accuracy {:.2f}",
        next(validations, ""): "validation {:.3f}",
        "credit/entropy_all": "entropy {:.2f}",
        "timing_s/step": "{:.1f} s",
    }
    return ", ".join(text.format(data[name]) for name, text in shown.items() if name in data) or f"step {step}"
