"""Locks on directories: a living owner keeps others out, a dead one does not, on this host and on others."""

import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock
from waiting import wait_until

from gtpo_verl.errors import UserError
from gtpo_verl.files import write_json
from gtpo_verl.runs import lock as module
from gtpo_verl.runs.lock import DirectoryLock, LockedError, Owner, live_owner, preparing, results_lock, training_lock


def write_owner(file: Path, *, host: str = "node7", age: float) -> None:
    """What a process on another host has left beside its lock."""
    owner = {"host": host, "pid": 4242, "heartbeat": time.time() - age, "token": "theirs"}
    write_json(file.with_name(f"{file.name}.json"), owner)


HOLD = """
import pathlib, signal, sys
from gtpo_verl.runs.lock import training_lock
with training_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_a_second_training_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    here = rf"process {os.getpid()} on {socket.gethostname()}"
    refused = pytest.raises(
        UserError, match=rf"another training writes to .*run: {here}\..*another trainer\.run_dir\.$"
    )
    with training_lock(tmp_path / "run"), refused, training_lock(tmp_path / "run"):
        pass
    with training_lock(tmp_path / "run"):  # the first has ended
        pass
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["LOCK"]


def test_two_processes_do_not_sample_into_the_same_results(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match=rf"another process samples into {tmp_path}: process {os.getpid()} on ")
    with results_lock(tmp_path / "LOCK"), refused, results_lock(tmp_path / "LOCK"):
        pass


def test_a_training_that_was_killed_frees_its_directory_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {process.pid} on "), training_lock(tmp_path):
            pass
        process.kill()
    assert json.loads((tmp_path / "LOCK.json").read_text())["pid"] == process.pid
    with training_lock(tmp_path):
        pass


@pytest.mark.parametrize(("age", "abandoned"), [(0.0, False), (module.LEASE + 60, True)])
def test_a_directory_is_abandoned_when_its_owner_elsewhere_has_no_heartbeat(
    tmp_path: Path, age: float, abandoned: bool
) -> None:
    write_owner(tmp_path / "LOCK", age=age)
    assert (live_owner(tmp_path) is None) is abandoned


def test_a_directory_is_abandoned_when_its_owner_here_was_killed(tmp_path: Path) -> None:
    with training_lock(tmp_path):
        assert live_owner(tmp_path)
    assert live_owner(tmp_path) is None
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    write_json(tmp_path / "LOCK.json", asdict(Owner(socket.gethostname(), killed.pid, time.time(), "theirs")))
    assert live_owner(tmp_path) is None


def test_a_training_that_is_stopping_has_a_grace_period(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = contextlib.ExitStack()
    first.enter_context(training_lock(tmp_path))
    (tmp_path / "STOP").touch()
    monkeypatch.setattr(module.time, "sleep", lambda _: first.close())
    with training_lock(tmp_path):
        assert capsys.readouterr().err.startswith(f"Waiting for process {os.getpid()} on ")


def test_the_grace_period_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.0)
    (tmp_path / "STOP").touch()
    with training_lock(tmp_path), pytest.raises(UserError, match="another training"), training_lock(tmp_path):
        pass


def test_a_living_owner_on_another_host_counts_where_flock_does_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_owner(tmp_path / "LOCK", age=10)
    monkeypatch.setattr(module.time, "sleep", lambda _: write_owner(tmp_path / "LOCK", age=0))  # its next heartbeat
    with pytest.raises(UserError, match=r"another training writes to .*process 4242 on node7"), training_lock(tmp_path):
        pass
    said = r"Waiting to see whether process 4242 on node7.* lives: .* 1\d s ago, and after 300 s it is taken for dead"
    assert re.match(said, capsys.readouterr().err)
    assert json.loads((tmp_path / "LOCK.json").read_text())["token"] == "theirs"


@pytest.mark.parametrize("locked", [True, False], ids=["its lock is left", "its lock is gone"])
def test_a_dead_owner_on_another_host_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], locked: bool
) -> None:
    monkeypatch.setattr(module, "SETTLE", 0.0)
    write_owner(tmp_path / "LOCK", age=module.LEASE + 20)
    left = FileLock(tmp_path / "LOCK")  # as a file server keeps it for a host that is gone
    if locked:
        left.acquire()
    with training_lock(tmp_path):
        said = rf"Taking over {tmp_path / 'LOCK'} from process 4242 on node7: no heartbeat for 3[2-9]\d s\.\n"
        assert re.fullmatch(said, capsys.readouterr().err)
        with (
            pytest.raises(UserError, match=f"process {os.getpid()} on {socket.gethostname()}"),
            training_lock(tmp_path),
        ):
            pass


def test_an_owner_whose_host_is_gone_is_waited_for_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_owner(tmp_path / "LOCK", age=module.LEASE - 60)
    monkeypatch.setattr(module.time, "sleep", lambda _: age(module.LEASE + 5))

    def age(seconds: float) -> None:
        """Time passes: the owner, who has said nothing since, is so old."""
        file = tmp_path / "LOCK.json"
        owner = json.loads(file.read_text())
        if owner["token"] == "theirs":
            write_json(file, owner | {"heartbeat": time.time() - seconds})

    with training_lock(tmp_path):
        assert re.search(r"Waiting to see .*\nTaking over .* no heartbeat for 30\d s", capsys.readouterr().err)


def test_of_two_hosts_that_take_over_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_owner(tmp_path / "LOCK", age=module.LEASE + 20)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: write_owner(tmp_path / "LOCK", host="node8", age=0))
    with pytest.raises(LockedError, match="process 4242 on node8"):
        DirectoryLock(tmp_path / "LOCK").acquire()
    assert json.loads((tmp_path / "LOCK.json").read_text())["host"] == "node8"


def test_the_heartbeat_goes_on_until_the_lock_is_released_or_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT", 0.01)
    lock = DirectoryLock(tmp_path / "LOCK")
    lock.acquire()
    first = lock.owner()
    assert first is not None
    while (owner := lock.owner()) is None or owner.heartbeat == first.heartbeat:
        time.sleep(0.01)
    while lock._heart.is_alive():  # a heartbeat that has just begun replaces the new owner once
        write_owner(tmp_path / "LOCK", age=0)
        time.sleep(0.05)
    assert "was taken over by process 4242 on node7" in capsys.readouterr().err
    lock.release()
    assert json.loads((tmp_path / "LOCK.json").read_text())["token"] == "theirs"


def test_a_record_that_is_damaged_for_a_moment_does_not_end_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT", 0.01)
    lock, record = DirectoryLock(tmp_path / "LOCK"), tmp_path / "LOCK.json"
    lock.acquire()
    whole = record.read_text()

    def seen() -> bool:
        record.write_text("{")  # again where a heartbeat that had begun replaced it
        return "no heartbeat for" in capsys.readouterr().err

    wait_until(seen)
    record.write_text(whole)
    wait_until(lambda: json.loads(record.read_text())["heartbeat"] > json.loads(whole)["heartbeat"])
    lock.release()
    assert not record.exists()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_the_file_system_has_no_locks_the_record_protects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def none(*_: object) -> None:
        raise OSError(error, "no locks")

    monkeypatch.setattr("fcntl.flock", none)
    monkeypatch.setattr(module, "SETTLE", 0.0)
    with (
        training_lock(tmp_path),
        pytest.raises(UserError, match=f"another training writes to .*process {os.getpid()} on"),
        training_lock(tmp_path),
    ):
        pass
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    write_json(tmp_path / "LOCK.json", asdict(Owner(socket.gethostname(), killed.pid, time.time(), "theirs")))
    with training_lock(tmp_path):
        assert json.loads((tmp_path / "LOCK.json").read_text())["pid"] == os.getpid()


def test_an_owner_in_a_container_of_this_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    for age, alive in ((10.0, True), (module.LEASE + 60, False)):
        owner = Owner(socket.gethostname(), killed.pid, time.time() - age, "theirs", "pid:[1]")
        write_json(tmp_path / "LOCK.json", asdict(owner))
        assert (live_owner(tmp_path) is not None) is alive
    with training_lock(tmp_path):  # flock reaches a container of this host
        pass


def test_one_process_prepares_a_directory_and_the_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, lines = contextlib.ExitStack(), list[str]()
    first.enter_context(preparing(tmp_path / "task", lines.append))
    monkeypatch.setattr(module.time, "sleep", lambda _: first.close())
    with preparing(tmp_path / "task", lines.append):
        assert lines == [
            f"process {os.getpid()} on {socket.gethostname()} is preparing {tmp_path / 'task'}; waiting for it"
        ]
    assert [file.name for file in tmp_path.iterdir()] == [".task.lock"]
