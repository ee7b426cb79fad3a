"""Whatever a verifier does, the caller gets a verdict, the next sample is judged, and nothing stays behind."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from gtpo_verl.errors import UserError
from gtpo_verl.verifiers.pool import VerifierPool, tail

MakePool = Callable[..., VerifierPool]

WRONG = {"score": -1.0, "acc": 0.0, "pred": ""}
GOOD = "pred = 'good'"
RIGHT = {"score": 1.0, "acc": 1.0, "pred": "good", "verifier_failure": ""}


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("statement", "failure"),
    [
        ("while True: pass", "timeout"),
        ("time.sleep(1e6)", "timeout"),
        ("9**9**9**9", "timeout"),  # one bytecode, which no signal handler of Python's could interrupt
        ("ctypes.string_at(0)", "crash"),
        ("os._exit(0)", "crash"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "crash"),
        ("raise SystemExit", "crash"),
        ("pred = b'x' * 2**30", "memory"),
        ("pred = []\nwhile True: pred.append(b'x' * 2**22)", "memory"),
        ("raise ValueError('no')", "error"),
        ("def f(): f()\nf()", "error"),
        ("pred = 1 / 0", "error"),
    ],
)
def test_what_a_verifier_does_costs_one_sample(make_pool: MakePool, statement: str, failure: str) -> None:
    pool = make_pool(workers=1, timeout=2.0 if failure == "timeout" else 30.0, memory_mb=64)
    assert pool.judge(GOOD, "") == RIGHT
    assert pool.judge(statement, "") == WRONG | {"verifier_failure": failure}
    assert pool.judge(GOOD, "") == RIGHT
    assert pool.counts == {"samples": 3, failure: 1}


@pytest.mark.slow
def test_a_sample_with_an_endless_neighbour_is_not_affected(make_pool: MakePool) -> None:
    pool = make_pool(workers=2, timeout=8.0)
    hanging = pool.submit("while True: pass", "")
    assert [pool.judge(GOOD, "") for _ in range(20)] == [RIGHT] * 20
    assert hanging.result()["verifier_failure"] == "timeout"


@pytest.mark.slow
def test_the_time_of_a_sample_does_not_include_those_before_it(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, timeout=8.0)
    waiting = [pool.submit("time.sleep(1.1); " + GOOD, "") for _ in range(8)]
    assert [future.result() for future in waiting] == [RIGHT] * 8


def test_a_sample_that_leaves_much_memory_behind_gets_its_process_replaced(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, memory_mb=100)
    keep = "import builtins; builtins.kept = [*getattr(builtins, 'kept', []), b'x' * 2**26]"
    pids = [pool.judge(keep, "")["pred"] for _ in range(4)]
    assert pool.counts == {"samples": 4}
    assert len(set(pids)) >= 2


@pytest.mark.slow
def test_when_all_processes_die_at_once_the_samples_are_judged_by_new_ones(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    child = int(pool.judge("", "")["pred"])
    server = psutil.Process(child).parent()
    assert server is not None
    slow = pool.submit("time.sleep(1); " + GOOD, "")
    time.sleep(0.3)
    server.kill()
    assert slow.result() == RIGHT
    assert pool.judge(GOOD, "") == RIGHT
    wait_until(lambda: gone(child))


def test_a_child_that_dies_while_it_has_nothing_to_do_costs_no_sample(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    child = int(pool.judge("", "")["pred"])
    assert pool._server is not None
    os.kill(child, signal.SIGKILL)
    wait_until(pool._server.channels[0].poll)  # the server says so
    assert pool.judge(GOOD, "") == RIGHT


@pytest.mark.slow
def test_stopped_processes_are_taken_for_stuck(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtpo_verl.verifiers.pool.GRACE", 0.5)
    pool = make_pool(workers=1, timeout=6.0)
    child = int(pool.judge("", "")["pred"])
    assert pool.judge("os.kill(os.getpid(), signal.SIGSTOP)", "")["verifier_failure"] == "timeout"
    wait_until(lambda: gone(child))
    assert pool.judge(GOOD, "") == RIGHT


def test_a_prediction_can_be_written_to_a_file(make_pool: MakePool) -> None:
    pred = make_pool().judge("pred = 'a\\ud800\\0\\n' + 'b' * 10**6", "")["pred"]
    assert pred.startswith("a?\0\nbbb")
    assert len(pred) == 512
    assert json.loads(json.dumps(pred, ensure_ascii=False).encode("utf-8")) == pred


def test_failures_are_logged_with_their_count_and_do_not_fill_the_disk(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            pool.judge("raise ValueError('why')", "")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4  # the 1st, 2nd, 4th and 8th
    assert lines[-1] == (
        "verifier obedient: error, ValueError: why; the sample counts as wrong (8 of 8 samples so far)"
    )


def test_closing_leaves_no_process(make_pool: MakePool) -> None:
    pool = make_pool(workers=2, timeout=600)
    child = int(pool.judge("", "")["pred"])
    server = psutil.Process(child).parent()
    assert server is not None
    wait_until(lambda: len(server.children()) == 2)
    family = [server, *server.children()]
    pool.submit("while True: pass", "")
    time.sleep(0.2)
    pool.close()
    wait_until(lambda: all(gone(process.pid) for process in family))


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["time.sleep(0)", "while True: pass"])
def test_a_caller_that_is_killed_leaves_no_process(make_pool: MakePool, tmp_path: Path, busy: str) -> None:
    """As a reward worker of Ray is killed: no handler of the caller runs."""
    caller = tmp_path / "caller.py"
    caller.write_text(
        "import sys, time\n"
        "from gtpo_verl.verifiers.pool import VerifierPool\n"
        "pool = VerifierPool('obedient', workers=2, timeout=8.0)\n"
        "print(pool.judge('', '')['pred'], flush=True)\n"
        "pool.submit(sys.argv[1], '')\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(caller), busy], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    server = psutil.Process(child).parent()
    assert server is not None
    wait_until(lambda: len(server.children()) == 2)
    family = [server, *server.children()]
    time.sleep(0.3)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: all(gone(member.pid) for member in family))


def test_a_rule_that_cannot_be_imported_is_an_error_and_not_a_verdict(make_pool: MakePool) -> None:
    with pytest.raises(UserError, match="does not start: ModuleNotFoundError: No module named 'absent_rule'"):
        make_pool("absent_rule").judge("", "")


def test_a_rule_that_fails_on_import_is_an_error_with_its_exit_code(make_pool: MakePool, tmp_path: Path) -> None:
    (tmp_path / "broken_rule.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(UserError, match="did not start: exit code 1 "):
        make_pool("broken_rule").judge("", "")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": math.inf}, "=inf"),
        ({"memory_mb": 1}, "memory_mb=1"),
    ],
)
def test_an_impossible_limit_is_refused(make_pool: MakePool, setting: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_pool(**setting)


def test_the_end_of_a_long_response_begins_with_a_line() -> None:
    assert tail("short", 10) == "short"
    assert tail("first\nsecond $x$", 12) == "second $x$"
    assert tail("x" * 100 + "\nthe end", 10) == "the end"
    assert tail("x" * 100, 10) == "x" * 10
    assert tail("y\n" + "x" * 9, 10) == "x" * 9
    assert tail("a" * 10 + "bbbbbbb\nbb", 10) == "bbbbbbb\nbb", "a line break in the second half would cost the answer"


def test_ten_megabytes_are_not_sent(make_pool: MakePool) -> None:
    pool = make_pool(max_chars=100)
    assert pool.judge("raise ValueError\n" + "#" * 10**7 + "\n" + GOOD, "") == RIGHT
