"""What a run records of its code and of the files that it reads."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.runs import provenance
from gtpo_verl.runs.directory import read_record
from gtpo_verl.runs.provenance import checksums, code_state, keep_code_state
from gtpo_verl.runs.session import training_session


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "gtpo_verl").mkdir(parents=True)
    (root / "gtpo_verl" / "a.py").write_text("x = 1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def test_code_is_a_commit_and_what_was_changed_in_it(checkout: Path):
    clean, changes = code_state(checkout)
    assert (len(clean["commit"]), clean["diff"], changes) == (40, None, "")
    (checkout / "notes.txt").write_text("not code\n")
    assert code_state(checkout) == (clean, "")
    (checkout / "gtpo_verl" / "a.py").write_text("x = 2\n")
    edited, changes = code_state(checkout)
    assert edited == {"commit": clean["commit"], "diff": sha256(changes)}
    assert "+x = 2" in changes
    (checkout / "gtpo_verl" / "new.py").write_text("y = 3\n")
    added, changes = code_state(checkout)
    assert "+y = 3" in changes
    assert added["diff"] != edited["diff"]
    (checkout.parent / "code.diff").write_text(changes)
    git(checkout, "checkout", "-q", "--", ".")
    (checkout / "gtpo_verl" / "new.py").unlink()
    git(checkout, "apply", "../code.diff")
    assert code_state(checkout) == (added, changes)


def test_an_installed_package_has_no_commit_even_below_somebody_elses_checkout(checkout: Path):
    inside = checkout / "lib"
    inside.mkdir()
    assert code_state(inside) == ({"commit": None, "diff": None}, "")


def test_a_copy_of_the_package_says_of_which_commit_it_is(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the node of a cluster, where there is no checkout."""
    (checkout / "gtpo_verl" / "a.py").write_text("x = 2\n")
    there = code_state(checkout)
    monkeypatch.setattr(provenance, "code_state", lambda: there)
    (tmp_path / "job" / "gtpo_verl").mkdir(parents=True)
    keep_code_state(tmp_path / "job" / "gtpo_verl")
    assert code_state(tmp_path / "job") == there
    assert "+x = 2" in there[1]
    monkeypatch.setattr(provenance, "code_state", lambda: ({"commit": None, "diff": None}, ""))  # of a wheel
    keep_code_state(tmp_path)
    assert not (tmp_path / "code.json").exists()


def test_checksums_are_of_contents(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "a.parquet").write_text("a")
    (tmp_path / "b.parquet").write_text("b")
    config = {
        "data.train_files": [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")],
        "data.val_files": str(tmp_path / "b.parquet"),
        "actor_rollout_ref.model.path": str(model),
        "reward.custom_reward_function.path": "pkg://gtpo_verl.tasks.sums.reward",
    }
    found = checksums(config)
    assert found["data.val_files"] == sha256("b")
    assert found["data.train_files"] == sha256(f"{sha256('a')}\n{sha256('b')}")
    assert found["actor_rollout_ref.model.path"] == sha256(f"config.json {sha256('{}')}")
    assert len(found["reward.custom_reward_function.path"]) == 64
    (model / "config.json").write_text("{ }")
    (model / "weights").mkdir()
    assert checksums(config)["actor_rollout_ref.model.path"] != found["actor_rollout_ref.model.path"]


def test_the_hubs_cache_knows_its_checksums_and_what_is_not_there_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    blob = tmp_path / ("a" * 64)
    blob.write_text("weights")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blob)
    key = "actor_rollout_ref.model.path"
    assert checksums({key: str(snapshot)}) == {key: sha256(f"model.safetensors {'a' * 64}")}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert checksums({key: "owner/model", "data.val_files": None}) == {key: None}
    verifier = "reward.custom_reward_function.path"
    assert checksums({verifier: "pkg://no_such_package.reward"}) == {verifier: None}
    (tmp_path / "models--owner--model" / "refs").mkdir(parents=True)
    (tmp_path / "models--owner--model" / "refs" / "main").write_text("c0ffee")
    assert checksums({key: "owner/model"}) == {key: "hub:c0ffee"}


def test_a_training_records_everything_and_each_of_its_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = {"commit": "c0ffee", "diff": "digest"}
    monkeypatch.setattr("gtpo_verl.runs.session.code_state", lambda: (code, "+changed\n"))
    data = tmp_path / "train.parquet"
    data.write_text("rows")
    run_dir = tmp_path / "run"
    config = f"seed: 3\ndata: {{train_files: {data}}}\n"
    overrides = ["algo=gtpo", "seed=3"]

    def train(fail: bool) -> None:
        with training_session(run_dir, config=config, command="gtpo-verl train algo=gtpo seed=3", overrides=overrides):
            running = read_record(run_dir)
            assert (running["status"], running["attempts"][-1]["ended"]) == ("running", None)
            if fail:
                raise UserError("vLLM died\nbecause")

    with pytest.raises(UserError):
        train(fail=True)
    train(fail=False)
    record = read_record(run_dir)
    assert (record["status"], record["seed"], record["overrides"]) == ("complete", 3, overrides)
    assert record["checksums"] == {"data.train_files": sha256("rows")}
    assert record["versions"]["gtpo_verl"]
    assert record["hardware"]
    first, second = record["attempts"]
    assert (first["status"], first["exit_reason"]) == ("failed", "vLLM died")
    assert (second["status"], second["exit_reason"]) == ("complete", "all steps were trained")
    assert record["created"] == first["started"] <= first["ended"] <= second["started"] <= second["ended"]
    assert record["code"] == {"commit": "c0ffee", "diff": "digest"}
    assert (run_dir / "code.diff").read_text() == "+changed\n"
