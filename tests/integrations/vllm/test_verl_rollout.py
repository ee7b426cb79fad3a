"""Entropies through verl's real rollout side on a CPU: replica, server in a Ray actor, clients, agent loops, TransferQueue."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.e2e

TOLERANCE = 2e-5  # nat


@pytest.fixture(scope="module")
def answer(policy_dir, other_policy_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    request_file, answer_file = folder / "request.json", folder / "answer.json"
    request_file.write_text(json.dumps({"model": str(policy_dir), "other_weights": str(other_policy_dir)}))
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("drive_verl.py")), str(request_file), str(answer_file)],
        env={
            **os.environ,
            "VERL_PLATFORM": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "2",
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    return json.loads(answer_file.read_text())


@pytest.fixture(scope="module")
def masked(policy_dir):
    """The ids that verl masks in vLLM: those the tokenizer does not have."""
    from transformers import AutoTokenizer

    return range(len(AutoTokenizer.from_pretrained(policy_dir)), 512)


def test_the_columns_in_transfer_queue_are_exact(answer, truth, policy_dir, masked):
    rows = answer["transfer_queue"]
    assert len(rows) == 4  # two prompts, one through the single-turn loop and one through the tool loop; rollout.n=2
    for row in rows:
        assert len(row["rollout_entropies"]) == len(row["responses"]) == len(row["response_mask"]) == 64
        log_probs, entropies, _ = truth(policy_dir, row["prompts"], row["responses"], 0.8, masked)
        assert (torch.tensor(row["rollout_entropies"]) - entropies).abs().max() < TOLERANCE
        assert (torch.tensor(row["rollout_log_probs"]) - log_probs).abs().max() < TOLERANCE
        assert set(row["rollout_versions"]) == {-1}  # no weights were sent yet
        assert "rollout_entropies" not in row["extra_fields"]


def test_validation_with_top_p_has_no_entropies_of_the_policy(answer):
    for row in answer["validation"]:
        assert all(math.isnan(entropy) for entropy in row["rollout_entropies"])
        assert set(row["rollout_versions"]) == {1}


def test_an_interrupted_response_keeps_the_entropies_of_the_policy_that_sampled_each_token(
    answer, truth, policy_dir, other_policy_dir, masked
):
    policies = {1: policy_dir, 2: other_policy_dir}
    for row in answer["interrupted"]:
        versions = torch.tensor(row["versions"])
        assert len(row["tokens"]) == len(row["entropies"]) == len(versions) == 480
        assert versions.tolist() == sorted(versions.tolist())
        assert set(row["versions"]) == {1, 2}  # interrupted in the middle
        for version, policy in policies.items():
            _, entropies, _ = truth(policy, row["prompt"], row["tokens"], 0.8, masked)
            here = versions == version
            assert (torch.tensor(row["entropies"]) - entropies)[here].abs().max() < TOLERANCE


def test_a_server_of_verls_own_beside_ours_is_left_alone(answer):
    assert len(answer["stock"]["ranks"]) == 8
    assert all(1 <= rank <= 512 for rank in answer["stock"]["ranks"])


def test_a_killed_worker_is_an_error_and_not_a_hang(answer):
    assert "EngineDeadError" in answer["killed"]["error"]


def test_an_unpatched_worker_is_found_when_its_server_starts(answer):
    assert "its worker runs without gtpo_verl's patch" in answer["unpatched"]["error"]
