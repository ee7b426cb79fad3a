"""Jobs on a real Ray cluster on which another version of the plugin is installed; none of them trains.

One job is followed from submission to end: what it was given is compared with what a function of the user's received.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model_files import write_model
from ray_head import Head, ray_head

import gtpo_verl
from gtpo_verl.cli import main
from gtpo_verl.errors import UserError
from gtpo_verl.experiments.handover import HandOver
from gtpo_verl.experiments.jobs import Jobs
from gtpo_verl.experiments.package import carried_files

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]  # and in a process of its own, see the Makefile

HOSTILE = 'it\'s "$HOME" `id` $(id) \\ %s\nsecond line; ü漢 && a|b'
SECRET = f"secret-{HOSTILE}"
REWARD = """
import json, os
from own.rule import verdict

def compute_score(data_source, solution_str, ground_truth, extra_info=None, text=None, note=None):
    with open(note, "w") as file:
        json.dump({"text": text, "secret": os.environ["MY_KEY"], "directory": os.getcwd()}, file)
    return verdict(solution_str, ground_truth)
"""
RULE = "verdict = lambda response, truth: {'score': 1.0, 'acc': response == truth}\n"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """With another version of the plugin on every process's path, whose import fails."""
    other = tmp_path_factory.mktemp("other")
    (other / "gtpo_verl").mkdir()
    (other / "gtpo_verl" / "__init__.py").write_text("raise ImportError('the other version')\n")
    metadata = other / "gtpo_verl-0.0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gtpo-verl\nVersion: 0.0.1\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\ngtpo_verl = gtpo_verl.old\n")
    with ray_head({"PYTHONPATH": str(other)}, "--num-gpus=1") as found:
        yield found


@pytest.fixture
def jobs(head: Head, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # the token is sent where it is asked for
    monkeypatch.setenv("RAY_AUTH_TOKEN", head.token)
    return Jobs(head.address)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    shared = tmp_path_factory.mktemp("shared")
    write_model(shared)
    row = {
        "prompt": [{"role": "user", "content": "1+1"}],
        "data_source": "s",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0},
    }
    pq.write_table(pa.Table.from_pylist([row] * 24), shared / "data.parquet")
    return [
        *("setting=quickstart", "hardware=cpu", f"actor_rollout_ref.model.path={shared}"),
        *(f"data.train_files={shared / 'data.parquet'}", f"data.val_files={shared / 'data.parquet'}"),
        f"trainer.run_dir={shared / 'run'}",
    ]


def test_a_job_gets_what_it_was_given_and_no_list_or_log_shows_its_secrets(
    head: Head, jobs: Jobs, overrides: list[str], tmp_path: Path
) -> None:
    own = tmp_path / "user"
    (own / "own").mkdir(parents=True)
    (own / "own" / "mine.py").write_text(REWARD)
    (own / "own" / "rule.py").write_text(RULE)
    (own / ".env").write_text("not carried")
    note = tmp_path / "note.json"
    quoted = '"{}"'.format(HOSTILE.replace('"', '\\"'))  # Hydra's
    words = [
        *overrides,
        "reward.custom_reward_function.path=own/mine.py",
        f"+reward.custom_reward_function.reward_kwargs.note={note}",
        f"+reward.custom_reward_function.reward_kwargs.text={quoted}",
    ]
    run_dir = words[5].removeprefix("trainer.run_dir=")
    task = HandOver(action="check", run_dir=run_dir, overrides=tuple(words), environment={"MY_KEY": SECRET})
    assert jobs.status("given-1") is None
    assert jobs.submit(task, "given-1", own, carried_files(own))
    assert not jobs.submit(task, "given-1", own, carried_files(own))

    log = "".join(jobs.follow("given-1"))
    assert jobs.status("given-1") == "SUCCEEDED", log
    assert f"Plugin gtpo_verl {gtpo_verl.__version__} (" in log
    assert ") on 1 node: Python 3." in log
    assert "This run is valid: 1 rank on CPUs." in log
    received = json.loads(note.read_text())
    assert received["text"] == HOSTILE
    assert received["secret"] == SECRET
    assert received["directory"] != str(own)

    (found,) = [job for job in jobs.list() if job.id == "given-1"]
    assert (found.run_dir, found.status) == (run_dir, "SUCCEEDED")
    assert found.start is not None
    assert found.end is not None
    assert found.start < found.end
    everything = repr(jobs._client.list_jobs())
    assert "given-1" in everything
    assert "secret" not in everything
    logs = [file for file in head.temporary.rglob("logs/**/*") if file.is_file()]
    assert any("given-1" in file.read_text(errors="replace") for file in logs)
    assert [str(file) for file in logs if "secret-it" in file.read_text(errors="replace")] == []
    (handover,) = head.temporary.rglob("handover.json")
    assert handover.stat().st_mode & 0o777 == 0o600


def test_a_refused_run_is_one_line_and_a_stopped_one_leaves_nothing(
    jobs: Jobs,
    head: Head,
    overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = overrides[-1].removeprefix("trainer.run_dir=")
    assert jobs.submit(HandOver(action="train", run_dir=run_dir, overrides=tuple(overrides)), "stopped", tmp_path, [])
    command = ["submit", "--address", head.address]
    wrong = [word for word in overrides if not word.startswith("data.val")] + ["data.val_files=/only/there.parquet"]
    assert main([*command, "--id", "wrong", "--", *wrong]) == 2
    assert capsys.readouterr().err == "error: job wrong failed: data.val_files=/only/there.parquet: no such file.\n"
    assert main(["status", "wrong", "--address", head.address]) == 1
    assert "no such file" in capsys.readouterr().out

    assert main(["stop", "stopped", "--address", head.address, "--grace", "1"]) == 0
    assert jobs.status("stopped") in ("STOPPED", "FAILED")
    assert {job.id for job in jobs.list()} >= {"wrong", "stopped"}
    assert not [job.id for job in jobs.list() if "-stop-" in job.id]
    assert main([*command, "--id", "wrong", "--", *overrides]) == 2
    assert "a job wrong exists" in capsys.readouterr().err


def test_without_the_token_it_is_one_line(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(UserError, match="asks for Ray's authentication token, and this machine has none or another"):
        Jobs(head.address)
