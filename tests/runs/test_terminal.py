"""What a run shows, and what goes to its log; with real file descriptors, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_verl.runs import terminal

RUN = """
import json, os, pathlib, subprocess, sys
from gtpo_verl.runs import terminal
from gtpo_verl.runs.directory import MetricsRecorder
directory = pathlib.Path(sys.argv[1])
log = directory / "train.log"
print("before")
with terminal.printing_to(log), terminal.following(directory, 2, verbose="verbose" in sys.argv):
    print("noise")
    print("noise on stderr", file=sys.stderr)
    subprocess.run(["echo", "noise of a child"])
    for pid in (1, 2):
        print(f"(RewardWorker pid={pid}) gtpo_verl WARNING: the verifier is slow", flush=True)
    print("WARNING: of another package")
    MetricsRecorder(directory).write(1, {"training/accuracy": 0.5, "credit/entropy_all": 1.25, "timing_s/step": 3.21})
    MetricsRecorder(directory).write(2, {"val-core/x/acc/mean@2": 0.75})
    terminal.say("said")
print("after", file=sys.stderr)
"""


def run(directory: Path, *words: str) -> tuple[list[str], str]:
    """The lines on the terminal, and the log."""
    command = [sys.executable, "-c", RUN, str(directory), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines(), (directory / "train.log").read_text()


NOISE = (
    "noise\n",
    "noise on stderr\n",
    "noise of a child\n",
    "pid=2) gtpo_verl WARNING",
    "WARNING: of another package",
)


def test_the_terminal_shows_steps_and_warnings_once_and_the_log_everything(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "data": {}}) + "\n")  # of an earlier attempt
    shown, log = run(tmp_path)
    assert sorted(shown) == sorted(
        [
            "before",
            "said",
            "warning: the verifier is slow",
            "step 1/2: accuracy 0.50, entropy 1.25, 3.2 s",
            "step 2/2: validation 0.750",
            "after",
        ]
    )
    assert all(line in log for line in NOISE)
    assert "before" not in log
    assert "after" not in log


def test_verbose_shows_everything(tmp_path: Path) -> None:
    shown, log = run(tmp_path, "verbose")
    assert set(log.splitlines()) <= set(shown)
    assert all(line in log for line in NOISE)
    assert not any(line.startswith("step") for line in shown)


def test_nothing_is_followed_where_the_terminal_is_the_log(tmp_path: Path) -> None:
    """As for a training that another command starts, with its log for stdout."""
    with (tmp_path / "train.log").open("w") as log:
        command = [sys.executable, "-c", RUN, str(tmp_path)]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=60)
    text = (tmp_path / "train.log").read_text()
    assert all(text.count(line) == 1 for line in (*NOISE, "before\n", "after\n"))
    assert "step 1" not in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_terminal_is_back_after_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: type[BaseException]
) -> None:
    def fail() -> None:
        with terminal.printing_to(tmp_path / "log"):
            os.write(2, b"inside")
            raise error

    with pytest.raises(error):
        fail()
    os.write(2, b"outside")
    assert capfd.readouterr().err == "outside"
    assert (tmp_path / "log").read_text() == "inside"
