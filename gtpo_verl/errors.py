"""The one exception that a command shows to its user as a single line, the place where it is shown, and help in
phrasing it.
"""

import difflib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any

_PREFIX = "error: "  # of the line in which a command says why it failed


class UserError(Exception):
    """Something the user can put right; the message says what is wrong and what to do, in one line."""


class ProblemsError(UserError):
    """Several such things at once; the arguments are their messages, and each is shown as a line of its own."""

    def __str__(self) -> str:
        listed = " ".join(f"({number}) {message}" for number, message in enumerate(self.args, start=1))
        return f"{len(self.args)} settings do not fit: {listed}"


class StepGivenUpError(UserError):
    """The run was asked to stop, and its step does not end."""


def main_guard(command: Callable[[], int]) -> int:
    """Run a command; a :class:`UserError` becomes one line on stderr (several a line each) and exit code 2, and so does
    an OSError, which is about the machine. Ctrl-C is exit code 130. ``GTPO_VERL_TRACEBACK=1`` shows the stack trace.
    """
    try:
        return command()
    except UserError as error:
        if os.environ.get("GTPO_VERL_TRACEBACK") == "1":
            raise
        for message in error.args if isinstance(error, ProblemsError) else (str(error),):
            _say(message)
        return 2
    except OSError as error:
        if os.environ.get("GTPO_VERL_TRACEBACK") == "1":
            raise
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror or first_line(error)}")
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130


def _say(message: str) -> None:
    """One line on stderr; line breaks and colours, as in a file's name or contents, are escaped."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in message)
    print(f"{_PREFIX}{shown}", file=sys.stderr, flush=True)


def last_error(lines: Iterable[str]) -> str | None:
    """What the last ``error:`` line of a log says, which a command prints when it fails; None where there is none."""
    errors = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    return errors[-1] if errors else None


def reason_in(lines: Iterable[str]) -> str | None:
    """Why a command ended, as the end of its log says: `last_error`, else its last line, which may be a library's that
    ended the process; None of an empty log.
    """
    filled = [line.strip() for line in lines if line.strip()]
    return last_error(filled) or (
        f"it ended without an error of its own; its last line is: {filled[-1]}" if filled else None
    )


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean NAME?`` for the known name closest to ``word``, in whatever case, or an empty string."""
    names = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {names[close[0]]}?" if close else ""


def choose_from(word: str, known: Collection[str]) -> str:
    """What follows "no such name": the name closest to ``word``, where one is close, and all that are known."""
    return f"{did_you_mean(word, known) or '.'} Choose one of: {', '.join(known)}."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def raised_in(file: str | None, error: BaseException) -> str:
    """What an error in a user's file is, with the file and, where they are known, the line."""
    what = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    if file is None:
        return what
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(file)]
    return f"{what} ({file}:{lines[-1]})" if lines else f"{what} ({file})"


def within(seconds: float, task: Callable[[], Any]) -> Any:
    """Run ``task``, and raise TimeoutError when it takes longer; a task that hangs is left behind in a daemon
    thread.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = task()
        except BaseException as error:  # SystemExit too: the caller decides what it means
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
