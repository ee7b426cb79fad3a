"""Entropies through verl's real rollout side on a CPU: replica, server in a Ray actor, clients, agent loops,
TransferQueue.
"""

from typing import Any

import pytest
import torch

# tests/e2e/test_real_model.py measures the same columns in a training
pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

TOLERANCE = 2e-5  # nat


@pytest.fixture(scope="module")
def drive(policy_dir, other_policy_dir, ask):
    """Run drive_verl.py in a process of its own."""

    def drive(interrupted: int, max_tokens: int, only: bool, env: dict[str, str] | None = None) -> dict[str, Any]:
        request = {
            "model": str(policy_dir),
            "other_weights": str(other_policy_dir),
            "interrupted": interrupted,
            "max_tokens": max_tokens,
            "only": only,
        }
        return ask(
            "drive_verl.py", request, {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "2", **(env or {})}, timeout=800
        )

    return drive


@pytest.fixture(scope="module")
def answer(drive):
    answer = drive(interrupted=6, max_tokens=480, only=False)
    assert answer["runners"] == ["V1"]
    return answer


@pytest.fixture(scope="module")
def masked(policy_dir):
    """The ids that verl masks in vLLM: those the tokenizer does not have."""
    from transformers import AutoTokenizer

    return range(len(AutoTokenizer.from_pretrained(policy_dir)), 512)


def test_the_columns_in_transfer_queue_are_exact(answer, truth, policy_dir, masked, record_property):
    rows = answer["transfer_queue"]
    errors: list[float] = []
    assert len(rows) == 6  # a prompt each through the single-turn loop, the tool loop and one of two turns; rollout.n=2
    for row in rows:
        assert len(row["rollout_entropies"]) == len(row["responses"]) == len(row["response_mask"]) == 64
        true = truth(policy_dir, row["prompts"], row["responses"], 0.8, masked)
        sampled = torch.tensor(row["response_mask"]).bool()
        errors.append((torch.tensor(row["rollout_entropies"]) - true.entropies)[sampled].abs().max().item())
        assert errors[-1] < TOLERANCE
        assert (torch.tensor(row["rollout_log_probs"]) - true.log_probs)[sampled].abs().max() < TOLERANCE
        assert torch.tensor(row["rollout_entropies"])[~sampled].eq(0).all()
        assert set(row["rollout_versions"]) == {-1}  # no weights were sent yet
        assert "rollout_entropies" not in row["extra_fields"]
    record_property("largest_error_nat", max(errors))
    masks = ["".join(map(str, row["response_mask"])) for row in rows]
    # the last two have a second turn ...
    assert [len(mask.split("0")[0]) for mask in masks] == [64] * 4 + [40] * 2
    assert all(mask.endswith("1") for mask in masks)  # ... that the limit cuts


def test_validation_with_top_p_has_no_entropies_of_the_policy(answer):
    for row in answer["validation"]:
        sampled = torch.tensor(row["response_mask"]).bool()
        assert torch.tensor(row["rollout_entropies"])[sampled].isnan().all()
        assert torch.tensor(row["rollout_versions"])[sampled].eq(1).all()


@pytest.fixture(scope="module")
def check_interrupted(truth, policy_dir, other_policy_dir, masked):
    """Every token of an interrupted response against the policy of the version that the token carries; returns the
    largest error.
    """

    def check(rows: list[dict[str, Any]], length: int) -> float:
        policies = {1: policy_dir, 2: other_policy_dir}
        largest = 0.0
        for row in rows:
            versions = torch.tensor(row["versions"])
            assert len(row["tokens"]) == len(row["entropies"]) == len(versions) == length
            assert versions.tolist() == sorted(versions.tolist())
            assert set(row["versions"]) == {1, 2}  # interrupted in the middle
            for version, policy in policies.items():
                entropies = truth(policy, row["prompt"], row["tokens"], 0.8, masked).entropies
                here = versions == version
                error = (torch.tensor(row["entropies"]) - entropies)[here].abs().max().item()
                assert error < TOLERANCE
                largest = max(largest, error)
        return largest

    return check


def test_an_interrupted_response_keeps_the_entropies_of_the_policy_that_sampled_each_token(
    answer, check_interrupted, record_property
):
    record_property("largest_error_nat", check_interrupted(answer["interrupted"], length=480))


@pytest.mark.exhaustive
def test_so_it_does_under_model_runner_v2(drive, check_interrupted, v2_on_cpu, record_property):
    answer = drive(interrupted=3, max_tokens=48, only=True, env=v2_on_cpu)
    assert answer["runners"] == ["V2"]
    record_property("largest_error_nat", check_interrupted(answer["interrupted"], length=48))


def test_weights_come_by_a_socket_of_this_run(answer):
    sender = answer["sockets"]["sender"]
    assert answer["sockets"]["receivers"] == [sender]
    assert not sender.endswith("zmq-01000000-replica-0-rank-0.sock")  # any other run's with a Ray of its own


def test_a_server_of_verls_own_beside_ours_is_left_alone(answer):
    assert len(answer["stock"]["ranks"]) == 8
    assert all(1 <= rank <= 512 for rank in answer["stock"]["ranks"])


def test_a_killed_worker_is_an_error_and_not_a_hang(answer, record_property):
    record_property("seconds", answer["killed"].get("seconds"))  # at most 60, see drive_verl.py
    assert "EngineDeadError" in answer["killed"]["error"]
    assert answer["killed"]["alive"] == []
    assert answer["killed"]["dead"] == ["server 0: its engine's process has ended"], "of verl's own actor"


def test_an_unpatched_worker_is_found_when_its_server_starts(answer):
    assert "its worker runs without gtpo_verl's patch" in answer["unpatched"]["error"]
