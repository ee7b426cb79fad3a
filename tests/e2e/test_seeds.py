"""Two trainings of one seed are the same training, though their responses end in another order;
docs/inside/reproducibility.md has what was measured.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Start = Callable[..., Any]  # tests/e2e/conftest.py
Metrics = Callable[[Path], dict[int, dict[str, Any]]]
STEPS = range(1, 4)
COMPUTED = ("response_mask", "responses", "old_log_probs", "entropy", "rewards", "correct", "advantages")


@pytest.fixture(scope="module")
def trained(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three trainings with dynamic sampling: one, its repetition with random delays in the verifier, another seed."""
    directory = tmp_path_factory.mktemp("seeds")
    delayed = f"reward.custom_reward_function.path={Path(__file__).with_name('delayed_reward.py')}"

    def train(name: str, *overrides: str) -> Path:
        training = start(
            directory / name,
            *("algo=gtpo", "algorithm.entropy.source=actor", "trainer.credit_dump_freq=1"),
            *(f"trainer.total_training_steps={len(STEPS)}", *overrides),
        )
        return Path(training.wait_for_end())

    return {"first": train("first"), "again": train("again", delayed), "other": train("other", "seed=1")}


def batch(run_dir: Path, step: int) -> dict[str, Any]:
    """What the update of a step depended on, its rows in their order."""
    return dict(torch.load(run_dir / "credit" / f"{step}.pt"))


@pytest.mark.parametrize("step", STEPS)
def test_one_seed_gives_the_same_rows_and_numbers_bit_for_bit(trained: dict[str, Path], step: int) -> None:
    first, again = batch(trained["first"], step), batch(trained["again"], step)
    assert first["keys"] == again["keys"]
    for one, other in zip(first["prompts"], again["prompts"], strict=True):
        assert torch.equal(one, other)
    assert [name for name in COMPUTED if not torch.equal(first[name], again[name])] == []
    mask = first["response_mask"]
    torch.testing.assert_close(
        first["rollout_log_probs"][mask], again["rollout_log_probs"][mask], atol=1e-5, rtol=0
    )  # vLLM batches what has arrived, and a sum of another shape is rounded elsewhere


@pytest.mark.parametrize("step", STEPS)
def test_one_seed_makes_the_same_updates(trained: dict[str, Path], metrics: Metrics, step: int) -> None:
    first, again = (metrics(trained[name])[step] for name in ("first", "again"))
    names = [name for name in first if name.startswith(("actor/", "credit/", "critic/", "training/filter_groups/"))]
    timed = ("perf/", "_s", "entropy_diff")
    compared = [name for name in names if not any(part in name for part in timed)]
    assert {"actor/pg_loss", "actor/grad_norm", "training/filter_groups/generated_groups"} <= set(compared)
    assert {name: first[name] for name in compared} == {name: again[name] for name in compared}


def test_the_responses_of_a_group_have_streams_of_their_own(trained: dict[str, Path]) -> None:
    first = batch(trained["first"], 1)
    distinct = {tuple(row.tolist()) for row in first["responses"]}
    assert len(distinct) > len(first["keys"]) / 2


def test_another_seed_is_another_training(trained: dict[str, Path]) -> None:
    first, other = batch(trained["first"], 1), batch(trained["other"], 1)
    same = [torch.equal(one, two) for one, two in zip(first["prompts"], other["prompts"], strict=True)]
    assert sum(same) < len(same) / 4


def test_the_same_groups_are_trained_on(trained: dict[str, Path]) -> None:
    lines = [(trained[name] / "groups.jsonl").read_text().splitlines() for name in ("first", "again")]
    assert [json.loads(line)["groups"] for line in lines[0]] == [json.loads(line)["groups"] for line in lines[1]]
