"""``gtpo-verl submit``: variables, and what it says where nothing can be submitted."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gtpo_verl.cli import main
from gtpo_verl.commands.submit import exports, follow, variables
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import jobs
from gtpo_verl.experiments.jobs import JobInfo, Jobs

ROOT = Path(__file__).parents[2]
WORDS = ["trainer.run_dir=/shared/run", "data.train_files=/a.parquet", "data.val_files=/b.parquet"]


def test_a_script_gives_its_exports_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", 'it\'s "$x"\nü')
    monkeypatch.setenv("OTHER", "not exported by the script")
    script = tmp_path / "environment.sh"
    script.write_text('export A="$KEY"\nB=1\nexport KEY\nexport C="${OTHER:+set}"\necho printed\n')
    assert exports(script) == {"A": 'it\'s "$x"\nü', "KEY": 'it\'s "$x"\nü', "C": "set"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("export name=5 status=6\nreturn 0\n", {"name": "5", "status": "6"}),
        ("export X=$'\\xff'\n", {"X": "\udcff"}),
        ("export X=1\nexit 0\n", "it ends the shell, and its exports with it"),
        ("export X=1\nset -e\nfalse\nexport Y=2\n", "it ends with 1"),
    ],
)
def test_no_export_is_lost_without_a_word(tmp_path: Path, text: str, expected: dict[str, str] | str) -> None:
    script = tmp_path / "environment.sh"
    script.write_text(text)
    if isinstance(expected, dict):
        assert exports(script) == expected
        return
    with pytest.raises(UserError, match=expected):
        exports(script)


def test_a_script_that_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "scripts" / "environment.sh"
    assert exports(script).items() >= {"PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "token"}.items()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UserError, match="expandable_segments:True, with which vLLM cannot sleep: unset it"):
        exports(script)


def test_variables_are_taken_from_here_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert variables(["HF_TOKEN", "NCCL_DEBUG=INFO", "X=a=b", "EMPTY="], None) == {
        "HF_TOKEN": "secret",
        "NCCL_DEBUG": "INFO",
        "X": "a=b",
        "EMPTY": "",
    }
    with pytest.raises(UserError, match="--env NOT_SET: it is not set here"):
        variables(["NOT_SET"], None)
    with pytest.raises(UserError, match="--env =x: it has no name"):
        variables(["=x"], None)
    with pytest.raises(UserError, match="LD_PRELOAD: set it on the nodes"):
        variables(["LD_PRELOAD=/x.so"], None)


def test_what_acts_before_a_process_starts_is_left_to_the_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site's script may load modules or activate an environment; `ray_node.sh` sources it before Ray starts."""
    script = tmp_path / "environment.sh"
    script.write_text("export PATH=/site/bin:$PATH LD_LIBRARY_PATH=/site/lib NCCL_DEBUG=INFO\n")
    assert variables([], script) == {"NCCL_DEBUG": "INFO"}
    assert capsys.readouterr().out.startswith(f"note: LD_LIBRARY_PATH, PATH of {script}: the nodes' own is used")


class SilentCluster:
    """Ray's client of a cluster that does not answer for so many requests."""

    def __init__(self, silent: int) -> None:
        self.silent = silent

    def tail_job_logs(self, name: str) -> Any:
        raise RuntimeError("connection lost")

    def get_job_info(self, name: str) -> Any:
        self.silent -= 1
        if self.silent >= 0:
            raise ConnectionError("refused")
        raise RuntimeError("Job a does not exist")


def test_a_job_is_followed_across_a_cluster_that_does_not_answer_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "POLL", 0.0)
    followed = Jobs.__new__(Jobs)
    followed.address, followed._client = "http://head:8265", SilentCluster(3)
    assert list(followed.follow("a")) == []
    assert capsys.readouterr().err.count("Waiting for it.") == 1
    monkeypatch.setattr(jobs, "PATIENCE", -1.0)
    followed._client = SilentCluster(3)
    with pytest.raises(UserError, match="no Ray cluster answers"):
        list(followed.follow("a"))


@pytest.mark.parametrize("words", [["--list"], ["--logs", "a"]])
def test_a_dead_address_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")  # --address wins
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["submit", "--address", address, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: no Ray cluster answers at {address} ")


@pytest.mark.slow
def test_a_server_that_is_silent_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CONNECT_TIMEOUT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        assert main(["submit", "--address", f"127.0.0.1:{server.getsockname()[1]}", "--list"]) == 2
    assert time.monotonic() - started < 60  # not the minutes of a socket
    (line,) = capsys.readouterr().err.splitlines()
    assert "no answer within 1 s" in line


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "ftp://x"])
def test_an_address_is_a_url_of_a_dashboard(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--address", address, "--list"]) == 2
    assert "it must be the URL of a Ray dashboard" in capsys.readouterr().err


def test_an_id_fits_into_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--id", "a b?ü", "--", *WORDS]) == 2
    assert capsys.readouterr().err == "error: --id a b?ü: use letters, digits and _.- only, for instance a-b.\n"


def test_looking_takes_no_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--list", "algo=gtpo"]) == 2
    assert "take no overrides" in capsys.readouterr().err


def test_the_reason_of_a_failure_is_its_last_error() -> None:
    def reason(message: str) -> str:
        return JobInfo(id="a", status="FAILED", run_dir="/a", start=None, end=None, message=message).reason

    assert reason("failed with exit code 2:\nerror: first\nerror: second \nbye\n") == "second"
    assert reason("Traceback\nValueError: x").endswith("its last line is: ValueError: x")
    assert reason("") == "Ray gives no reason."


class EndedJob:
    """The jobs of a cluster that has one, with this log and this end."""

    address = "http://head:8265"

    def __init__(self, status: str, *log: str) -> None:
        self.log = log
        self.job = JobInfo(id="a", status=status, run_dir="/a", start=None, end=None)

    def known(self, name: str) -> JobInfo:
        return self.job

    def follow(self, name: str) -> Iterator[str]:
        yield from self.log


@pytest.mark.parametrize(
    ("job", "code", "last"),
    [
        (EndedJob("STOPPED", "step 1/30: x\nst", "ep 2/30: y\n"), 1, "Job a was stopped after step 2 of 30. To resume"),
        (EndedJob("STOPPED"), 1, "Job a was stopped. To resume"),
        (
            EndedJob("SUCCEEDED", "step 2/30: x\nStopped after step 3 of 30 (the file STOP).\n"),
            0,
            "after step 3 of 30.",
        ),
        (EndedJob("SUCCEEDED", "step 30/30: x\n"), 0, ""),
    ],
)
def test_a_job_that_was_stopped_says_where_and_how_to_go_on(
    job: Any, code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(job, "a") == code
    said = capsys.readouterr().out
    assert said.endswith(f"Job a: {job.job.status}\n")
    assert last in said
    assert ("submit the same line again" in said) == bool(last)


THIN = """
import sys
blocked = ("torch", "verl", "vllm", "transformers", "vl_convert", "math_verify", "jinja2")
sys.modules.update(dict.fromkeys(blocked))  # importing one fails, and it counts as missing
from gtpo_verl.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_machine_with_ray_alone_checks_and_submits(tmp_path: Path) -> None:
    """As far as the cluster, which does not answer."""
    row = {"prompt": [{"role": "user", "content": "1"}], "data_source": "s", "reward_model": {"ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "here.parquet")
    words = [*WORDS[:2], "data.val_files=here.parquet", "setting=paper_gtpo_7b", "algo=gtpo"]
    for algo, message in (("gtpo", "no Ray cluster answers"), ("gtpx", "algo=gtpx: no such algo; did you mean gtpo?")):
        command = [sys.executable, "-c", THIN, "submit", "--address", "127.0.0.1:9", "--", *words, f"algo={algo}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {message}")
