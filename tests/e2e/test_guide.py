"""Two real trainings with a guide whose responses are columns of the training data: a row in groups that are all wrong
(`dapo_mixed`, ratios to given probabilities), and a row in every group (`luffy`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from metrics_doc import undocumented

from gtpo_verl.algorithms import grpo_advantages
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.guide import is_guide
from gtpo_verl.integrations.transfer_queue import group_names
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


@pytest.fixture(scope="module")
def runs(start: Start, task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("guide")
    (directory / "reward.py").write_text(REWARD)
    rows = pd.read_parquet(task.train_file)
    # no policy that imitates the demonstrations begins with =, so the reward knows the guide's responses
    rows["guide_responses"] = [[f"=#{reward['ground_truth']}"] for reward in rows["reward_model"]]
    # bytes of the text, and the end
    rows["guide_log_probs"] = [[[LOG_PROB] * (len(texts[0]) + 1)] for texts in rows["guide_responses"]]
    rows.to_parquet(directory / "train.parquet")
    common = (
        *(f"data.train_files={directory / 'train.parquet'}", f"trainer.total_training_steps={STEPS}"),
        *(f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // 2}"),
        *(f"actor_rollout_ref.rollout.n={RESPONSES}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"),
        *("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32", "trainer.credit_dump_freq=1"),
        *(f"reward.custom_reward_function.path={directory / 'reward.py'}", "data.val_max_samples=16"),
        "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
    )
    zero = start(
        directory / "zero",
        *("algo=dapo_mixed", "algorithm.guide.mode=zero", *common),
        *(f"trainer.test_freq={STEPS}", f"trainer.save_freq={STEPS}"),
    )
    runs = {"zero": zero.wait_for_end()}
    runs["luffy"] = start(directory / "luffy", "algo=luffy", *common).wait_for_end()
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
        sizes = pd.Series(group_names(batch["keys"])).value_counts()
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
            verdicts.setdefault(str(group_names([key])[0]), []).append((is_guide(key), correct))
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
            rewards, group = batch["rewards"].sum(1), group_ids(group_names(batch["keys"]))
            if name == "zero":
                expected = grpo_advantages(rewards, batch["response_mask"], group).advantages
            else:
                means = torch.stack([rewards[group == ident].mean() for ident in group])
                expected = (rewards - means)[:, None] * batch["response_mask"]
            torch.testing.assert_close(batch["advantages"], expected, atol=2e-5, rtol=2e-5)


def test_luffy_has_a_row_in_every_group_and_clips_nothing(runs: dict[str, Path], metrics: Metrics) -> None:
    for step, batch in enumerate(batches(runs["luffy"]), start=1):
        of_guide = [str(group_names([key])[0]) for key in batch["keys"] if is_guide(key)]
        assert len(of_guide) == len(set(of_guide)) == BATCH
        assert metrics(runs["luffy"])[step]["actor/pg_clipfrac"] == 0
        assert 0 < metrics(runs["luffy"])[step]["guide/ratio_mean"] <= 1


def test_a_validation_has_no_rows_of_the_guide(runs: dict[str, Path]) -> None:
    lines = pd.read_json(runs["zero"] / "validation" / f"{STEPS}.jsonl", lines=True)
    assert len(lines) == 16
    assert not lines["output"].str.startswith("=").any()
