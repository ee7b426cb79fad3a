"""The main job, whole: three arms on real verl, Ray and vLLM, two steps each, and its report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from gtpo_verl.tasks.sums.task import Task

pytestmark = pytest.mark.e2e

ARMS = ("dapo", "gtpo", "grpo_s")
STEPS = 2
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


def test_every_arm_trained_to_its_end(quickstart: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = quickstart
    record = json.loads((directory / "run.json").read_text())
    assert record["status"] == "complete"
    assert record["complete"] == list(ARMS)
    for arm in ARMS:
        steps = metrics(directory / arm)
        assert sorted(steps) == [0, 1, 2]
        assert json.loads((directory / arm / "run.json").read_text())["status"] == "complete"
        assert any(key.startswith("val-core/") and "/acc/mean@" in key for key in steps[STEPS])


def test_a_killed_quickstart_stops_its_arm_and_goes_on_with_it(quickstart: tuple[Path, str], metrics: Metrics) -> None:
    """No step is trained twice, and never two trainings in one directory."""
    directory, printed = quickstart
    assert f"Resuming: {directory}" in printed
    assert len(list(directory.parent.glob("quickstart-*"))) == 1
    log = (directory / "dapo" / "train.log").read_text()
    assert log.count("Stopping after this step, with a checkpoint") == 1
    lines = [json.loads(line) for line in (directory / "dapo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/pg_loss" in line["data"]] == [1, 2]


def test_entropies_of_the_rollouts_are_those_of_the_actor(quickstart: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = quickstart
    for arm in ARMS:
        for step in range(1, STEPS + 1):
            data = metrics(directory / arm)[step]
            # above 0: two programs computed them; a comparison of one with itself would show exactly 0
            assert 0 < data["rollout_entropy/abs_diff_mean"] <= data["rollout_entropy/abs_diff_max"] < 1e-4
            assert data["credit/entropy_all"] > 0.01


def test_entropies_of_the_first_step_are_those_of_the_model_in_float64(
    quickstart: tuple[Path, str], task: Task, record_property: Callable[[str, object], None]
) -> None:
    batch = torch.load(quickstart[0] / "gtpo" / "credit" / "1.pt")
    model = Qwen2ForCausalLM.from_pretrained(task.model_path, dtype=torch.float32, attn_implementation="eager").double()
    truth, errors = [], {"rollout_entropies": [], "entropy": []}
    for row, prompt in enumerate(batch["prompts"]):
        mask = batch["response_mask"][row]
        tokens = torch.cat([prompt, batch["responses"][row][mask]])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
        truth.append(torch.special.entr(logits.softmax(-1)).sum(-1))
        for column, found in errors.items():
            found.append((batch[column][row][mask].double() - truth[-1]).abs())
    low = torch.cat(truth) < 0.01  # half of the tokens: there a wrong answer's weight, 1/H, is largest
    assert low.float().mean() > 0.2
    rollout, actor = (torch.cat(found) for found in errors.values())
    assert rollout.max() < 2e-5
    relative = {name: (error / torch.cat(truth))[low] for name, error in (("rollout", rollout), ("actor", actor))}
    record_property("largest_error_nat", f"rollout {rollout.max():.1e}, actor {actor.max():.1e}")
    record_property(
        "relative_error", {name: f"{error.mean():.1e} to {error.max():.1e}" for name, error in relative.items()}
    )
    assert relative["rollout"].mean() < 1e-3
    assert (
        relative["rollout"].mean() < relative["actor"].mean()
    )  # verl takes the difference of two numbers as large as the logits


def test_credit_differs_inside_a_response_for_gtpo_alone(quickstart: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = quickstart
    spread = {arm: [metrics(directory / arm)[step]["credit/advantage_spread"] for step in (1, 2)] for arm in ARMS}
    assert max(spread["dapo"]) == pytest.approx(0, abs=1e-6)
    assert max(spread["grpo_s"]) == pytest.approx(0, abs=1e-6)
    assert min(spread["gtpo"]) > 1e-3


def test_every_step_logs_what_a_reader_needs(quickstart: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = quickstart
    names = (
        *("shaped_correct_mean", "shaped_correct_std", "shaped_wrong_mean", "shaped_wrong_std"),
        *("sign_flip_correct", "sign_flip_wrong", "entropy_correct", "entropy_wrong"),
        *("tail_alive_correct", "tail_alive_wrong", "degenerate_share"),
    )
    for arm in ARMS:
        for step in range(1, STEPS + 1):
            data = metrics(directory / arm)[step]
            assert [name for name in names if f"credit/{name}" not in data] == []
            if arm != "grpo_s":  # the ratio of a sequence stays too close to 1
                assert data["actor/pg_clipfrac"] > 0
            assert 0 < data["training/filter_groups/yield"] <= 1


def test_grpo_s_without_entropy_is_verls_grpo_on_the_trained_batch(quickstart: tuple[Path, str]) -> None:
    """β2 = 0, no overlong punishment: the advantages the actor was trained on are those of verl's own estimator."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    directory, _ = quickstart
    for step in range(1, STEPS + 1):
        batch = torch.load(directory / "grpo_s" / "credit" / f"{step}.pt")
        index = np.array([key.rsplit("_", 2)[0] for key in batch["keys"]], dtype=object)
        verdicts = torch.zeros_like(batch["rewards"])
        verdicts[:, 0] = batch["correct"].float()
        expected, _ = compute_grpo_outcome_advantage(verdicts, batch["response_mask"], index)
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(batch["advantages"], expected, atol=2e-6, rtol=0)


def test_the_report_and_the_models_are_there(quickstart: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    directory, printed = quickstart
    assert str(directory / "report.html") in printed
    page = (directory / "report.html").read_text()
    assert all(name in page for name in ("DAPO", "GTPO", "GRPO-S"))
    assert list((directory / "figures").glob("*.png"))
    for arm in ARMS:
        assert AutoModelForCausalLM.from_pretrained(directory / arm / "model").num_parameters() > 600_000


def test_a_second_call_has_nothing_left_to_train(quickstart: tuple[Path, str], task: Task) -> None:
    """A finished quickstart is not touched again: the next one is a new run, beside it."""
    from gtpo_verl.commands.quickstart import _run_directory

    directory, _ = quickstart
    request = json.loads((directory / "run.json").read_text())["request"]
    fresh, resumed = _run_directory(directory.parent, request, fresh=False)
    assert not resumed
    assert fresh != directory
    fresh.rmdir()


def test_no_training_is_left_running(quickstart: tuple[Path, str]) -> None:
    import psutil

    directory, _ = quickstart
    mine = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(directory) in " ".join(process.info["cmdline"] or [])
    ]
    assert mine == []
