"""Real trainings with a guide. Its responses are columns of the training data: a row in groups that are all wrong
(`dapo_mixed`, ratios to given probabilities), and a row in every group but solved ones (`luffy`). Or they are generated
by a server of its own, which in the first step has the policy's weights, keeps them, and is killed at the end.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from metrics_doc import undocumented
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gtpo_verl.algorithms import grpo_advantages
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.guide import is_guide
from gtpo_verl.integrations.transfer_queue import parse_key, uid_of
from gtpo_verl.tasks import Task

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Start = Callable[..., Any]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]
BATCH, RESPONSES, STEPS = 8, 4, 2
LOG_PROB = -0.125

# Own responses are wrong half of the time whatever they say, and to half of the prompts always.
REWARD = """
import zlib
from gtpo_verl.tasks.sums import reward

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    right = solution_str.startswith("=") and solution_str.endswith(f"#{ground_truth}")
    if not right and int(ground_truth) % 2:
        right = zlib.crc32(solution_str.encode()) % 2 == 0
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": reward.read_answer(solution_str)}
"""


def common(directory: Path) -> tuple[str, ...]:
    """Settings of all trainings, with a reward function in this directory."""
    (directory / "reward.py").write_text(REWARD)
    return (
        *(f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // 2}"),
        *(f"actor_rollout_ref.rollout.n={RESPONSES}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"),
        *("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16", "trainer.credit_dump_freq=1"),
        *(f"reward.custom_reward_function.path={directory / 'reward.py'}", "data.val_max_samples=16"),
        "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
    )


@pytest.fixture(scope="module")
def runs(start: Start, task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("guide")
    rows = pd.read_parquet(task.train_file)
    # no policy that imitates the demonstrations begins with =, so the reward knows the guide's responses
    rows["guide_responses"] = [[f"=#{reward['ground_truth']}"] for reward in rows["reward_model"]]
    # bytes of the text, and the end
    rows["guide_log_probs"] = [[[LOG_PROB] * (len(texts[0]) + 1)] for texts in rows["guide_responses"]]
    rows.to_parquet(directory / "train.parquet")
    settings = common(directory)
    settings += (f"data.train_files={directory / 'train.parquet'}", f"trainer.total_training_steps={STEPS}")
    zero = ("algo=dapo_mixed", "algorithm.guide.mode=zero", *settings)
    zero += (f"trainer.test_freq={STEPS}", f"trainer.save_freq={STEPS}")
    runs = {"zero": start(directory / "zero", *zero).wait_for_end()}
    runs["luffy"] = start(directory / "luffy", "algo=luffy", *settings).wait_for_end()
    stopped = start(directory / "again", *zero)
    stopped.wait_for_phase(1, "generating")
    stopped.process.send_signal(signal.SIGTERM)
    stopped.wait_for_end()
    assert stopped.steps() == {1}
    runs["again"] = start(directory / "again", *zero).wait_for_end()
    return runs


def batches(run_dir: Path) -> list[dict[str, Any]]:
    return [torch.load(run_dir / "credit" / f"{step}.pt") for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["zero", "luffy"])
def test_every_group_has_as_many_rows_as_ever_and_every_step_changes_the_weights(
    runs: dict[str, Path], metrics: Metrics, name: str
) -> None:
    found = metrics(runs[name])
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, batch in enumerate(batches(runs[name]), start=1):
        sizes = pd.Series([uid_of(key) for key in batch["keys"]]).value_counts()
        assert sizes.tolist() == [RESPONSES] * BATCH
        data = found[step]
        assert 0 < data["actor/grad_norm"] < 1e3
        assert data["guide/rows_share"] == pytest.approx(sum(map(is_guide, batch["keys"])) / len(batch["keys"]))
        assert data["guide/rows_share"] > 0
        assert data["guide/guide_accuracy"] == 1
        assert data["training/rollout_probs_diff_mean"] < 1e-2, "of own rows alone"
        assert data["rollout_entropy/stale_share"] == 0
        assert undocumented(key for key in data if key.startswith("guide/")) == set()


def test_only_groups_that_are_all_wrong_are_given_a_row(runs: dict[str, Path], metrics: Metrics) -> None:
    for step, batch in enumerate(batches(runs["zero"]), start=1):
        verdicts: dict[str, list[tuple[bool, bool]]] = {}
        for key, correct in zip(batch["keys"], batch["correct"].tolist(), strict=True):
            verdicts.setdefault(uid_of(key), []).append((is_guide(key), correct))
        rescued = [rows for rows in verdicts.values() if any(guide for guide, _ in rows)]
        for rows in verdicts.values():
            own = [correct for guide, correct in rows if not guide]
            assert (len(own) < RESPONSES) == (not any(own)), "the guide has a row exactly where all others are wrong"
            assert not all(own)
        assert metrics(runs["zero"])[step]["guide/rescued_groups"] == len(rescued) > 0


def test_the_denominators_are_the_guides(runs: dict[str, Path]) -> None:
    for name, expected in (("zero", LOG_PROB), ("luffy", 0.0)):
        for batch in batches(runs[name]):
            guide = torch.tensor([is_guide(key) for key in batch["keys"]])
            tokens = batch["response_mask"] & guide[:, None]
            assert (batch["old_log_probs"][tokens] == expected).all()
            own = batch["response_mask"] & ~guide[:, None]
            torch.testing.assert_close(batch["old_log_probs"][own], batch["rollout_log_probs"][own], atol=1e-2, rtol=0)


def test_advantages_are_over_the_union(runs: dict[str, Path]) -> None:
    for name in ("zero", "luffy"):
        for batch in batches(runs[name]):
            rewards, group = batch["rewards"].sum(1), group_ids([uid_of(key) for key in batch["keys"]])
            if name == "zero":
                expected = grpo_advantages(rewards, batch["response_mask"], group).advantages
            else:
                means = torch.stack([rewards[group == ident].mean() for ident in group])
                expected = (rewards - means)[:, None] * batch["response_mask"]
            torch.testing.assert_close(batch["advantages"], expected, atol=2e-5, rtol=2e-5)


def test_luffy_has_a_row_in_every_group_but_solved_ones_and_clips_nothing(
    runs: dict[str, Path], metrics: Metrics
) -> None:
    for step, batch in enumerate(batches(runs["luffy"]), start=1):
        of_guide = [uid_of(key) for key in batch["keys"] if is_guide(key)]
        first: dict[str, list[bool]] = {}  # verdicts on the rows that the last one waits for
        for key, correct in zip(batch["keys"], batch["correct"].tolist(), strict=True):
            if parse_key(key).session < RESPONSES - 1:
                first.setdefault(uid_of(key), []).append(correct)
        assert sorted(of_guide) == sorted(uid for uid, verdicts in first.items() if not all(verdicts))
        assert len(of_guide) > 0
        assert metrics(runs["luffy"])[step]["actor/pg_clipfrac"] == 0
        assert 0 < metrics(runs["luffy"])[step]["guide/ratio_mean"] <= 1


def test_a_validation_has_no_rows_of_the_guide(runs: dict[str, Path]) -> None:
    lines = pd.read_json(runs["zero"] / "validation" / f"{STEPS}.jsonl", lines=True)
    assert len(lines) == 16
    assert not lines["output"].str.startswith("=").any()


def test_a_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs: dict[str, Path], metrics: Metrics) -> None:
    """The same rows of the guide in the same groups, and the same weights, bit for bit."""
    one, other = runs["zero"], runs["again"]
    assert sorted(metrics(other)) == list(range(1, STEPS + 1))
    for step, (ours, theirs) in enumerate(zip(batches(one), batches(other), strict=True), start=1):
        assert ours["keys"] == theirs["keys"]
        assert torch.equal(ours["responses"], theirs["responses"])
        assert torch.equal(ours["old_log_probs"], theirs["old_log_probs"])
        assert metrics(one)[step]["guide/rescued_groups"] == metrics(other)[step]["guide/rescued_groups"] > 0
    weights, again = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


# -------------------------------------------------------------------- a server of its own


@pytest.fixture(scope="module")
def served(start: Start, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training in its fourth step that would go on for ever; the policy started with the guide's weights."""
    training = start(tmp_path_factory.mktemp("served") / "run", *with_server(task, tmp_path_factory.mktemp("reward")))
    training.wait_for_step(STEPS + 1)
    return training


def with_server(task: Task, directory: Path) -> tuple[str, ...]:
    """Settings of it, with a reward function in this directory."""
    return (
        *("algo=gtpo", "algorithm.gtpo.length_penalty=none", "algorithm.guide.mode=mix", "algorithm.guide.n_off=2"),
        *("algorithm.guide.source=server", f"algorithm.guide.model={task.model_path}"),
        *("ray_kwargs.ray_init.num_gpus=2", *common(directory), "trainer.save_freq=1"),
        *(f"trainer.test_freq={STEPS}", "trainer.total_training_steps=100000"),
        *("actor_rollout_ref.rollout.temperature=0.9", "actor_rollout_ref.actor.optim.lr=3e-3"),
    )


def test_the_guide_has_the_last_rows_of_groups_in_training_alone(served: Any, metrics: Metrics) -> None:
    for step, batch in enumerate(batches(served.run_dir), start=1):
        sizes = pd.Series([uid_of(key) for key in batch["keys"]]).value_counts()
        assert set(sizes) == {RESPONSES}
        of_guide = pd.Series([uid_of(key) for key in batch["keys"] if is_guide(key)]).value_counts()
        assert set(of_guide) <= {1, 2}
        data = metrics(served.run_dir)[step]
        assert data["guide/rows_share"] == pytest.approx(of_guide.sum() / len(batch["keys"]))
        assert data["training/rollout_probs_diff_mean"] < 1e-2, "of own rows alone"
        assert 0 < data["actor/grad_norm"] < 1e3
        assert undocumented(key for key in data if key.startswith("guide/")) == set()
    lines = pd.read_json(served.run_dir / "validation" / f"{STEPS}.jsonl", lines=True)
    assert len(lines) == 16


def test_a_guide_with_the_policys_weights_has_ratios_of_one(served: Any, metrics: Metrics) -> None:
    first, second = (metrics(served.run_dir)[step] for step in (1, 2))
    assert first["guide/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["guide/ess"] == pytest.approx(1.0, abs=1e-3)
    assert first["guide/clipfrac"] == 0
    assert abs(second["guide/ratio_mean"] - 1) > 1e-3, "the policy has moved, the guide has not"
    # rows of either kind are of one distribution; all that differs is who was asked
    batch = batches(served.run_dir)[0]
    guide = torch.tensor([is_guide(key) for key in batch["keys"]])
    entropies = [batch["entropy"][batch["response_mask"] & rows[:, None]].mean() for rows in (guide, ~guide)]
    assert entropies[0] == pytest.approx(entropies[1], rel=0.5)


def test_its_denominators_are_the_probabilities_of_the_frozen_model(served: Any, task: Task) -> None:
    """At the training temperature, in both steps; those of own rows are another model's by the second."""
    model = AutoModelForCausalLM.from_pretrained(task.model_path, dtype=torch.float64)
    for step, batch in enumerate(batches(served.run_dir), start=1):
        far = {True: 0.0, False: 0.0}
        for row, key in enumerate(batch["keys"]):
            length = int(batch["response_mask"][row].sum())
            prompt, response = batch["prompts"][row], batch["responses"][row, :length]
            with torch.no_grad():
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.9
            expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            off = (batch["old_log_probs"][row, :length] - expected).abs().max().item()
            far[is_guide(key)] = max(far[is_guide(key)], off)
        assert far[True] < 1e-3
        assert (far[False] < 1e-3) == (step == 1)


def test_a_killed_guide_ends_the_training_with_its_name(served: Any) -> None:
    """The training does not survive it."""
    started = served.process.children(recursive=True)
    _, of_guide = served.engines()  # started last
    of_guide.kill()
    served.wait_for_end(code=2, seconds=120)
    (error,) = [line for line in served.output().splitlines() if line.startswith("error: ")]
    assert "the guide's vLLM died (server 0" in error
    assert "algorithm.guide.model=" in error
    assert str(served.run_dir) in error
    _, left = psutil.wait_procs(started, timeout=20)
    assert left == []


def test_then_the_same_command_goes_on(served: Any, task: Task, start: Start, metrics: Metrics, tmp_path: Path) -> None:
    """Runs last. The guide answers with its own weights still, and the policy with those of the checkpoint."""
    saved = max(int(path.name.rsplit("_", 1)[-1]) for path in (served.run_dir / "checkpoints").glob("global_step_*"))
    resumed = start(served.run_dir, *with_server(task, tmp_path))
    resumed.wait_for_step(saved + 1)
    resumed.process.send_signal(signal.SIGTERM)
    resumed.wait_for_end()
    found = metrics(served.run_dir)
    assert sorted(found) == list(range(1, max(found) + 1))
    assert max(found) > saved >= STEPS
    first = found[saved + 1]
    assert first["guide/rows_share"] > 0
    assert abs(first["guide/ratio_mean"] - 1) > 1e-3, "the policy's weights are not those that it started with"
