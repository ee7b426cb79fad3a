"""Atomic writes leave the old file or the new one; JSON lines survive a torn line."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gtpo_verl import files
from gtpo_verl.errors import UserError


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file.txt"
    files.write_text(file, "é1")
    files.write_bytes(file, b"2")
    assert file.read_bytes() == b"2"
    assert [path.name for path in file.parent.iterdir()] == ["file.txt"]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    files.write_text(file, "old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(file, fail)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    """Not `/dev/null`, which root could."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is no file that could be replaced"):
        files.write_text(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("place", ["/proc/x", "/proc", "{file}/x"])
def test_where_nothing_can_be_written_is_named_with_its_option(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    place = place.format(file=tmp_path / "file")
    with pytest.raises(UserError, match=rf"^--output {place}: (nothing can be written in /proc|.*file is a file)"):
        files.check_writable(Path(place))


def test_json_is_read_back(tmp_path: Path) -> None:
    assert files.read_json(tmp_path / "a.json") is None
    files.write_json(tmp_path / "a.json", {"name": "π", "values": [1, None]})
    assert files.read_json(tmp_path / "a.json") == {"name": "π", "values": [1, None]}


@pytest.mark.parametrize("torn", [b'{"step": 2, "da', '{"text": "π'.encode()[:-1], b"[" * 100_000])
def test_a_torn_line_takes_no_other_with_it(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "lines.jsonl"
    files.append_json_line(file, {"step": 1, "text": "π"})
    file.write_bytes(file.read_bytes() + b"\n" + torn)
    files.append_json_line(file, {"step": 2})
    assert list(files.read_json_lines(file)) == [(1, {"step": 1, "text": "π"}), (3, None), (4, {"step": 2})]
    lines, offset = files.read_json_lines_from(file, 0)
    assert [line["step"] for line in lines] == [1, 2]
    assert offset == file.stat().st_size


def test_reading_resumes_behind_the_last_complete_line(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    assert files.read_json_lines_from(file, 0) == ([], 0)
    files.append_json_line(file, 1)
    first, offset = files.read_json_lines_from(file, 0)
    with file.open("a") as lines:
        lines.write('{"step": ')
    assert files.read_json_lines_from(file, offset) == ([], offset)
    with file.open("a") as lines:
        lines.write("2}\n")
    second, _ = files.read_json_lines_from(file, offset)
    assert first + second == [1, {"step": 2}]


def test_lines_are_moved_and_a_reader_of_the_file_goes_on_behind_what_is_left(tmp_path: Path) -> None:
    file, to = tmp_path / "lines.jsonl", tmp_path / "moved.jsonl"
    assert files.move_json_lines(file, to, lambda value: True) == []
    for value in (1, 2, 3):
        files.append_json_line(file, value)
    _, offset = files.read_json_lines_from(file, 0)
    before = file.read_bytes()
    assert files.move_json_lines(file, to, lambda value: value is None) == []
    assert (file.read_bytes(), to.exists()) == (before, False)
    file.write_bytes(before + b'{"to\n4')  # the last line lacks its end alone
    assert files.move_json_lines(file, to, lambda value: value in (2, 3, 4)) == [2, 3, 4]
    assert files.read_json_lines_from(file, offset) == ([], file.stat().st_size)
    files.append_json_line(file, 2)
    assert list(files.read_json_lines(file)) == [(1, 1), (2, None), (3, 2)]
    assert files.move_json_lines(file, to, lambda value: value != 1) == [None, 2]
    assert to.read_text() == '2\n3\n4\n{"to\n2\n'


def test_the_first_line_of_an_empty_file_is_not_blank(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    files.append_json_line(tmp_path / "empty", 1)
    assert (tmp_path / "empty").read_bytes() == b"1\n"


def test_an_option_that_names_a_place_for_results_takes_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=files.local_path)
    assert parser.parse_args(["--output", "runs/a"]).output == Path("runs/a")
    assert parser.parse_args(["--output=~/a"]).output == Path.home() / "a"
    with pytest.raises(SystemExit):
        parser.parse_args(["--output", "s3://bucket/a"])
    assert "argument --output: s3://bucket/a is remote storage" in capsys.readouterr().err


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text('{"name": [1,\n 2')
    with pytest.raises(UserError) as caught, files.reading(file):
        files.read_json(file)
    assert str(caught.value).startswith(f"{file} is damaged (JSONDecodeError: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="KeyError: 'steps'"), files.reading(file):
        {}["steps"]
    with pytest.raises(FileNotFoundError), files.reading(file):  # of the machine, not of the file's content
        (tmp_path / "absent").read_text()


@pytest.mark.parametrize("write", [files.write_json, files.append_json_line])
def test_a_full_disk_is_reported_with_the_file(write: Any, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from gtpo_verl import files; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
        "from gtpo_verl.errors import main_guard; "
        f"sys.exit(main_guard(lambda: files.{write.__name__}(Path('run.json'), 'x' * 1000)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: run.json: File too large\n")
