"""``gtpo-verl audit`` on the embedded task: real Ray, vLLM and verifier, stopped in between, and analysed again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gtpo_verl.tasks import task
from gtpo_verl.tasks.prepare import prepare_task

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

SIZES = [
    *("--prompts", "20", "--samples", "8", "--responses", "40", "--steps", "4", "--continuations", "8"),
    *("--methods", "gtpo,fork20,kl_cov", "--branches", "2"),
]


def test_an_audit_is_stopped_goes_on_and_is_analysed_again(default_task_dir: Path, tmp_path: Path) -> None:
    prepared = prepare_task(task("sums"), default_task_dir)
    output = tmp_path / "audit"
    command = [
        *(sys.executable, "-m", "gtpo_verl.cli", "audit", str(prepared.model_path), "setting=quickstart"),
        *("hardware=cpu", f"data.val_files={prepared.val_file}", "--output", str(output), *SIZES),
    ]
    dry = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=300)
    assert dry.returncode == 0, dry.stderr
    assert "2,880 continuations" in dry.stdout
    assert not output.exists()

    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rollouts = output / "rollouts.parquet"
    while first.poll() is None and not (rollouts.is_file() and pq.read_metadata(rollouts).num_rows):
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGINT)
    printed, _ = first.communicate(timeout=300)
    assert first.returncode in (0, 130), printed
    before = pq.read_table(rollouts).to_pylist()
    assert before

    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    log = (output / "audit.log").read_text()[-5000:]
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert pq.read_table(rollouts).to_pylist()[: len(before)] == before
    values = pq.read_table(output / "values.parquet").to_pylist()
    assert {row["trials"] for row in values} == {4, 16}
    branches = pq.read_table(output / "branches.parquet").to_pylist()
    chosen = {(row["row"], row["sample"]) for row in branches}
    assert len(chosen) == 40
    lengths = {(row["row"], row["sample"]): len(row["tokens"]) for row in pq.read_table(rollouts).to_pylist()}
    assert len(branches) == 2 * sum(min(4, lengths[each]) for each in chosen)
    assert all(row["tokens"] for row in branches)
    assert {row["ended"] for row in branches} == {True, False}
    behind = {(row["row"], row["sample"], row["place"], row["half"]) for row in values if row["stage"] == 3}
    assert behind == {(row["row"], row["sample"], row["place"], row["number"]) for row in branches if not row["ended"]}
    assert all(0 <= row["successes"] <= row["trials"] for row in values)
    record = json.loads((output / "audit.json").read_text())
    measured = record["measurement"]
    assert measured["continuations"] == sum(row["trials"] for row in values)
    # the halves are independent: they agree about as well as binomial counts of four allow
    reliability = record["reliability"]["all"]
    (half, *interval), (binomial, *_) = reliability["half"], reliability["half_binomial"]
    assert 0 < half < 1
    assert abs(half - binomial) < 0.4
    assert interval == [None, None]  # too few prompts have an audited response
    assert set(record["methods"]) == {"dapo", "gtpo", "fork20", "position", "state", "random", "oracle"}
    assert record["methods"]["dapo"]["figures"]["all"]["alignment"][0] == 0
    assert (output / "audit.html").stat().st_size > 10_000
    # entropies are vLLM's, log-probs of the tokens that were sampled
    assert all(min(row["entropies"]) >= 0 and max(row["log_probs"]) <= 1e-6 for row in before)

    again = subprocess.run(
        [sys.executable, "-m", "gtpo_verl.cli", "audit", "--reanalyse", str(output), "--methods", "eapo"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert again.returncode == 0, again.stderr
    assert "eapo" in json.loads((output / "audit.json").read_text())["methods"]


def test_gradients_of_a_model(default_task_dir: Path, tmp_path: Path) -> None:
    prepared = prepare_task(task("countdown"), default_task_dir.parent / "task-countdown")
    output = tmp_path / "gradients"
    command = [
        *(sys.executable, "-m", "gtpo_verl.cli", "audit", str(prepared.model_path), "setting=quickstart"),
        *("task=countdown", "hardware=cpu", f"data.val_files={prepared.val_file}", "--output", str(output)),
        *("--gradients", "24", "--prompts", "48", "--methods", "gtpo,dapo_blame,kl_cov"),
    ]
    without = [*command, "reward.custom_reward_function.path=null", "--check"]
    assert "verl has no verifier for the first prompt" in subprocess.run(without, capture_output=True, text=True).stderr
    dry = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=300)
    assert "24 groups with contrast and 24 more in the true gradient, 8 responses each" in dry.stdout, dry.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr + (output / "audit.log").read_text()[-5000:]
    record = json.loads((output / "audit.json").read_text())
    facts, found = record["measurement"], record["gradients"]
    assert (facts["groups"], facts["others"], facts["step"]) == (24, 24, 24)
    assert facts["log_prob_difference"] < 1e-3  # vLLM's log-probs are those of the model whose gradients are taken
    assert set(found["methods"]) == {"dapo", "gtpo", "dapo_blame"}
    assert found["methods"]["dapo"]["sgd"]["cosine"][0] > 0.5
    assert "How much signal and how much noise" in (output / "audit.html").read_text()
    assert not (output / "values.parquet").exists()
    again = [sys.executable, "-m", "gtpo_verl.cli", "audit", "--reanalyse", str(output)]
    assert subprocess.run(again, capture_output=True, timeout=300).returncode == 0
    assert json.loads((output / "audit.json").read_text())["gradients"] == found
