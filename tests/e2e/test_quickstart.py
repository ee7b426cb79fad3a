"""The main job on real verl, Ray and vLLM: a quickstart on two ranks and two replicas, every step another algorithm,
and its report.

One training, because starting one takes more than a minute; the fixture is in conftest.py. With three arms, killed and
resumed, it is run by test_three_arms.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import reference_loops as loops
import torch
from metrics_doc import undocumented

from gtpo_verl.experiments.scheduler import unfinished
from gtpo_verl.runs.provenance import FILE_KEYS
from gtpo_verl.runs.sweep import load
from gtpo_verl.tasks import Task

pytestmark = pytest.mark.e2e

GTPO, DAPO, GRPO_S, GTPO_WITHOUT_ENTROPY, GRPO_S_WITHOUT_ENTROPY, NEW_METHOD = STEPS = range(1, 7)
Quickstart = Any  # tests/e2e/conftest.py
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


def credit(quickstart: Quickstart, step: int) -> dict[str, Any]:
    """The batch of a step as it was trained on."""
    return torch.load(quickstart.arm / "credit" / f"{step}.pt")


def test_it_trained_to_its_end(quickstart: Quickstart, metrics: Metrics) -> None:
    sweep = load(quickstart.directory)
    assert (list(sweep.runs), unfinished(sweep)) == (["gtpo"], [])
    own = json.loads((quickstart.arm / "run.json").read_text())
    assert (own["status"], [attempt["status"] for attempt in own["attempts"]]) == ("complete", ["complete"])
    assert "algo=gtpo" in own["overrides"]
    assert set(own["checksums"]) == set(FILE_KEYS)
    assert all(len(digest) == 64 for digest in own["checksums"].values())
    steps = metrics(quickstart.arm)
    assert sorted(steps) == [0, *STEPS]  # 0 is the validation before training
    for step in (0, STEPS[-1]):
        assert any(key.startswith("val-core/") and "/acc/mean@" in key for key in steps[step])


def test_samples_for_the_report_have_the_advantages_that_were_trained_on(quickstart: Quickstart) -> None:
    last = STEPS[-1]
    (line,) = (json.loads(line) for line in (quickstart.arm / "credit_samples.jsonl").read_text().splitlines())
    pairs = len(line["samples"]) // 2
    assert (line["step"], [sample["correct"] for sample in line["samples"]]) == (last, [True, False] * pairs)
    assert 1 <= pairs <= 4
    batch = credit(quickstart, last)
    trained_on = [
        (bool(correct), advantages[mask].tolist())
        for correct, advantages, mask in zip(batch["correct"], batch["advantages"], batch["response_mask"], strict=True)
    ]
    for sample in line["samples"]:
        expected = (sample["correct"], pytest.approx(sample["advantages"], abs=1e-4))
        assert any(row == expected for row in trained_on)
        assert len(sample["tokens"]) == len(sample["advantages"]) == sample["length"]
    page = (quickstart.directory / "report.html").read_text()
    assert "Where the credit went" in page


def test_two_ranks_and_two_replicas_did_the_work(quickstart: Quickstart) -> None:
    for actor in ("WorkerDict", "EntropyVLLMHttpServer"):
        assert len(set(re.findall(rf"\({actor} pid=(\d+)\)", quickstart.log))) == 2, actor


def test_groups_were_generated_scored_and_written_together(quickstart: Quickstart) -> None:
    assert "(SeededAgentLoopWorker pid=" in quickstart.log
    assert "(AgentLoopWorkerTQ pid=" not in quickstart.log


def test_entropies_of_the_rollouts_are_those_of_the_actor(quickstart: Quickstart, metrics: Metrics) -> None:
    """At every step, of either replica: after an update both have the actor's weights."""
    for step in STEPS:
        data = metrics(quickstart.arm)[step]
        # above 0: two programs computed them; a comparison of one with itself would show exactly 0
        assert 0 < data["rollout_entropy/abs_diff_mean"] <= data["rollout_entropy/abs_diff_max"] < 1e-4
        assert data["credit/entropy_all"] > 0.01
        assert 0 < data["actor/grad_norm"] < 100


def test_entropies_of_the_first_step_are_those_of_the_model_in_float64(
    quickstart: Quickstart, task: Task, record_property: Callable[[str, object], None]
) -> None:
    from transformers import Qwen2ForCausalLM

    batch = credit(quickstart, GTPO)
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
    assert rollout.mean() < 1e-6
    assert rollout.max() < 5e-5  # a token whose logits float32 itself moves that far: 2.3e-5 in a plain forward pass
    relative = {name: (error / torch.cat(truth))[low] for name, error in (("rollout", rollout), ("actor", actor))}
    record_property("largest_error_nat", f"rollout {rollout.max():.1e}, actor {actor.max():.1e}")
    record_property(
        "relative_error", {name: f"{error.mean():.1e} to {error.max():.1e}" for name, error in relative.items()}
    )
    assert relative["rollout"].mean() < 1e-3
    assert (
        relative["rollout"].mean() < relative["actor"].mean()
    )  # verl takes the difference of two numbers as large as the logits


def test_credit_differs_inside_a_response_for_gtpo_alone(quickstart: Quickstart, metrics: Metrics) -> None:
    spread = {step: metrics(quickstart.arm)[step]["credit/advantage_spread"] for step in STEPS}
    assert spread.pop(GTPO) > 1e-3
    assert max(spread.values()) == pytest.approx(0, abs=1e-6)


# name, weight of the entropy term, whether long responses are punished
REFERENCE = {
    GTPO: ("gtpo", 0.1, True),
    GRPO_S: ("grpo_s", 0.1, True),
    GTPO_WITHOUT_ENTROPY: ("gtpo", 0.0, False),
    GRPO_S_WITHOUT_ENTROPY: ("grpo_s", 0.0, False),
}


@pytest.mark.parametrize("step", REFERENCE)
def test_a_step_was_trained_on_the_advantages_of_the_papers_equations(quickstart: Quickstart, step: int) -> None:
    """By the loops of tests/support/reference_loops.py, from the entropies and verdicts that the step recorded."""
    from gtpo_verl.config import compose_config

    name, weight, punished = REFERENCE[step]
    batch = credit(quickstart, step)
    floor = compose_config([f"algo={name}", "setting=quickstart"]).algorithm[name].entropy_floor
    options = loops.Options(scale2=weight, entropy_floor=floor)
    _, group = np.unique(groups(batch), return_inverse=True)
    penalty = loops.soft_overlong_penalty(batch["response_mask"].sum(-1).tolist(), 32, 4) if punished else None
    expected = getattr(loops, f"{name}_advantages")(
        *(batch["entropy"].double(), batch["correct"], batch["response_mask"], torch.from_numpy(group)),
        *(options, penalty, loops.FLOAT32_EPS),
    )
    wanted = torch.tensor(expected.advantages, dtype=torch.float64)
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(batch["advantages"].double(), wanted, atol=1e-6, rtol=0)


def groups(batch: dict[str, Any]) -> np.ndarray:
    return np.array([key.rsplit("_", 2)[0] for key in batch["keys"]], dtype=object)


@pytest.mark.parametrize(("step", "column"), [(DAPO, "rewards"), (GRPO_S_WITHOUT_ENTROPY, "correct")])
def test_without_entropy_it_is_verls_grpo(quickstart: Quickstart, step: int, column: str) -> None:
    """DAPO on the rewards, overlong punishment included; GRPO-S with β2 = 0 and no punishment on the verdicts."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    batch = credit(quickstart, step)
    rewards = torch.zeros_like(batch["rewards"])
    rewards[:, 0] = batch[column].float().reshape(len(rewards), -1).sum(-1)
    expected, _ = compute_grpo_outcome_advantage(rewards, batch["response_mask"], groups(batch))
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(batch["advantages"], expected, atol=2e-6, rtol=0)


def test_every_step_logs_what_a_reader_needs(quickstart: Quickstart, metrics: Metrics) -> None:
    shaped = ("shaped_correct_mean", "shaped_correct_std", "shaped_wrong_mean", "shaped_wrong_std", "floor_share")
    names = (
        *("sign_flip_correct", "sign_flip_wrong", "entropy_correct", "entropy_wrong"),
        *("tail_alive_correct", "tail_alive_wrong", "degenerate_share"),
    )
    for step in STEPS:
        data = metrics(quickstart.arm)[step]
        assert [name for name in names if f"credit/{name}" not in data] == []
        missing = [name for name in shaped if f"credit/{name}" not in data]
        assert missing == ([*shaped] if step in (DAPO, NEW_METHOD) else [])
        assert undocumented(set(data)) == set()
        assert 0 < data["training/filter_groups/yield"] <= 1


def test_the_report_and_the_model_are_there(quickstart: Quickstart) -> None:
    from transformers import AutoModelForCausalLM

    assert str(quickstart.directory / "report.html") in quickstart.printed
    assert "GTPO" in (quickstart.directory / "report.html").read_text()
    assert list((quickstart.directory / "figures").glob("*.png"))
    assert AutoModelForCausalLM.from_pretrained(quickstart.arm / "model").num_parameters() > 600_000


def test_a_second_call_has_nothing_left_to_train(quickstart: Quickstart) -> None:
    """A finished quickstart is not touched again: the next one is a new run, beside it."""
    from gtpo_verl.commands.quickstart import _sweep

    finished = load(quickstart.directory)
    fresh, resumed = _sweep(quickstart.directory.parent, ["gtpo"], finished.common, fresh=False)
    assert not resumed
    assert fresh.directory != quickstart.directory
    fresh.directory.rmdir()


def test_no_training_is_left_running(quickstart: Quickstart) -> None:
    running = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in running if str(quickstart.directory) in line] == []
