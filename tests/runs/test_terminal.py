"""What a run shows, and what goes to its log; with real file descriptors, in a process of its own."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.progress import Progress
from waiting import wait_until

from gtpo_verl.runs import terminal
from gtpo_verl.runs.directory import read_record

RUN = """
import json, os, pathlib, subprocess, sys
from gtpo_verl.runs import terminal
from gtpo_verl.runs.directory import record_metrics
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
    record_metrics(directory, 1, {"training/accuracy": 0.5, "credit/entropy_all": 1.25, "timing_s/step": 3.21})
    record_metrics(directory, 2, {"val-core/x/acc/mean@2": 0.75})
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


PROGRESS = """
import pathlib, sys, time
from gtpo_verl.runs import terminal
terminal.MINUTE = 0.05
with terminal.progress_over(pathlib.Path("log"), pathlib.Path("kept")) as progress:
    bars = [progress.add_task(name, total=total) for name, total in (("starting", None), ("prompts", 2), ("points", 8))]
    progress.update(bars[1], completed=2)
    print("noise")
    for done in (1, 3):
        progress.update(bars[2], completed=done)
        time.sleep(3)
"""


@pytest.mark.slow
def test_progress_in_a_file_is_a_line_now_and_then_for_what_is_not_finished(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRESS], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line for line in done.stdout.splitlines() if "━" not in line]
    assert lines[0] == "All that Ray and vLLM print is in log"
    assert {"points 1/8", "points 3/8, about 0 min left"} <= set(lines)
    assert not [line for line in lines[1:] if not line.startswith("points")], lines
    assert (tmp_path / "log").read_text() == "noise\n"


def test_the_time_that_is_left_is_by_the_mean_speed_and_hidden_work_is_not_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    progress, begun = Progress(get_time=lambda: now), {}
    hidden, shown = progress.add_task("prompts", total=64, completed=47), progress.add_task("points", total=8000)
    progress.update(hidden, visible=False)
    for minute, done in enumerate((2000, 2000, 2500, 2500, 8000)):  # from what an earlier command left
        now = 60.0 * minute
        progress.update(shown, completed=done)
        terminal._say_counts(progress, begun)
    expected = ["points 2000/8000", "points 2000/8000", "points 2500/8000, about 22 min left"]
    assert capsys.readouterr().out.splitlines() == [*expected, "points 2500/8000, about 33 min left"]


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


TRAINING = """
import pathlib, sys, time
from gtpo_verl.errors import main_guard
from gtpo_verl.runs import terminal
from gtpo_verl.runs.directory import record_metrics
from gtpo_verl.runs.session import training_session
directory = pathlib.Path(sys.argv[1])

def train():
    terminal.outlive_terminal()
    print("starting", flush=True)
    with training_session(directory, config="trainer: {total_training_steps: 1000}", command="gtpo-verl train"):
        log = directory / "train.log"
        with terminal.printing_to(log), terminal.following(directory, 1000, verbose="verbose" in sys.argv):
            for step in range(1, 1000):
                record_metrics(directory, step, {"timing_s/step": 0.05})
                terminal.say("said")
                print("noise", flush=True)
                time.sleep(0.05)
                if (directory / "STOP").exists():
                    (directory / "saved").write_text(str(step))
                    return 0

sys.exit(main_guard(train))
"""


def has_steps(directory: Path, count: int) -> bool:
    file = directory / "metrics.jsonl"
    return file.exists() and file.read_text().count("\n") >= count


def own_terminal() -> None:
    """Standard input is the terminal of the session; SIGHUP is not ignored, as what `nohup` starts would inherit."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("words", [(), ("verbose",)])
def test_a_training_whose_terminal_is_closed_saves_and_ends_as_asked(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The kernel sends SIGHUP, and every later write to the terminal is an EIO."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path), *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(slave)
    wait_until(lambda: has_steps(tmp_path, 3))
    os.close(master)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "saved").exists()
    record = read_record(tmp_path)
    assert record is not None
    assert (record["status"], record["reason"]) == ("interrupted", "SIGHUP: its terminal was closed")
    assert "Traceback" not in (tmp_path / "train.log").read_text()


def test_a_training_whose_reader_has_gone_goes_on(tmp_path: Path) -> None:
    """As under `| head`: no signal, and every later write is an EPIPE."""
    command = [sys.executable, "-c", TRAINING, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    wait_until(lambda: has_steps(tmp_path, 3))
    process.stdout.close()
    wait_until(lambda: has_steps(tmp_path, 13))
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    record = read_record(tmp_path)
    assert record is not None
    assert record["status"] == "interrupted"
