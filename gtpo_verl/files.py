"""Files that a crash leaves readable: atomic writes, and JSON lines of which the last may be torn.

Only the standard library is needed.
"""

import argparse
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError, first_line


def local_path(text: str) -> Path:
    """A path from a command line, for argparse, which reports an address of remote storage by the option's name."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is remote storage, and results are written as files")
    return Path(os.path.expanduser(text))  # bash leaves the ~ of `--output=~/x` alone


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``file``, then rename it: readers see the old content or the new.

    The directory is made if need be. What ``write`` raises is passed on, and ``file`` is as it was: a full disk with
    the file's name. Raises UserError: something else than a file is there, such as a device.
    """
    if file.exists() and not (file.is_file() or file.is_symlink()):
        raise UserError(f"{file} is no file that could be replaced: choose another.")
    file.parent.mkdir(parents=True, exist_ok=True)
    # unique: on a shared file system two hosts may have the same process id
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with _naming(file):
            write(temporary)
            temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """In the block a file is written: an error that names none, such as that of a full disk, gets its name."""
    try:
        yield
    except OSError as error:
        if error.errno:
            error.filename = error.filename or str(file)
        raise


def obstacle(directory: Path) -> str | None:
    """What keeps files from being written to a directory that need not be there yet, in words; None: nothing does."""
    place = next(place for place in (directory, *directory.parents) if place.exists())
    if not place.is_dir():
        return f"{place} is a file, not a directory"
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return f"nothing can be written in {place} ({error.strerror})"
    return None


def check_writable(directory: Path) -> None:
    """Raise UserError where nothing can be written to the directory of `--output`."""
    if blocked := obstacle(directory.resolve()):
        raise UserError(f"--output {directory}: {blocked}.")


def write_bytes(file: Path, content: bytes) -> None:
    """Write bytes, atomically."""
    write_atomically(file, lambda path: path.write_bytes(content))


def write_text(file: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    write_bytes(file, text.encode())


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_json(file: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_text(file, json.dumps(value, indent=2) + "\n")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """In the block a file of ours is read and taken apart: whatever is wrong with its content is one line. Raises
    UserError: names the file; the error behind it is its cause.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error):.120}"
        raise UserError(f"{file} is damaged ({what}): repair it, or remove it.") from error


def read_json(file: Path) -> Any:
    """Read a JSON file; None where there is none. Raises ValueError: it is not JSON."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:  # not asked before: another process may remove it in between
        return None
    return json.loads(text)


def append_json_line(file: Path, value: Any) -> None:
    """Append a value as one line of JSON, behind a last line that a crash may have torn."""
    line = json.dumps(value).encode() + b"\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    with _naming(file), file.open("ab+") as lines:
        if lines.seek(0, 2):
            lines.seek(-1, 2)
            line = line if lines.read(1) == b"\n" else b"\n" + line
        lines.write(line)


def read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line, from 1, and its value: None for a line that is not JSON, such as a torn one.

    Blank lines are skipped. Bytes that are not UTF-8 are replaced by U+FFFD.
    """
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parsed(line)


def move_json_lines(file: Path, to: Path, chosen: Callable[[Any], bool]) -> list[Any]:
    """Move lines of a file to the end of another one, and return their values. Killed in between, a line is in both.

    chosen: whether to move the line with this value, None for one that is not JSON.
    """
    kept, moved, values = [], [], []
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        value = _parsed(line.decode("utf-8", "replace"))
        if chosen(value):
            moved.append(line + b"\n")
            values.append(value)
        else:
            kept.append(line + b"\n")
    if moved:
        with _naming(to), to.open("ab") as end:
            end.writelines(moved)
        write_bytes(file, b"".join(kept))
    return values


def read_lines_from(file: Path, offset: int) -> tuple[list[str], int]:
    """The complete lines behind ``offset`` (bytes) of a file that is still being written, or not there yet; and the
    offset to go on from. A file that has become shorter is read from its end on.
    """
    if not file.is_file():
        return [], offset
    with file.open("rb") as content:
        offset = min(offset, content.seek(0, 2))
        content.seek(offset)
        text = content.read()
    end = text.rfind(b"\n") + 1
    return text[:end].decode("utf-8", "replace").split("\n")[:-1], offset + end


def read_json_lines_from(file: Path, offset: int) -> tuple[list[Any], int]:
    """The values of `read_lines_from`, without those of lines that are not JSON; and the offset to go on from."""
    lines, offset = read_lines_from(file, offset)
    values = [_parsed(line) for line in lines if line.strip()]
    return [value for value in values if value is not None], offset


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
