"""Two FSDP ranks and two rollout replicas on the two cores: they train, and one rank would have trained the same."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.e2e

STEPS = 3
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(two_ranks: tuple[Path, str, dict[str, set[str]]]) -> tuple[Path, str]:
    """The run directory of three real steps, and what the run printed."""
    return two_ranks[:2]


def test_three_steps_on_two_ranks_and_two_replicas(trained: tuple[Path, str], metrics: Metrics) -> None:
    run_dir, printed = trained
    for actor in ("WorkerDict", "EntropyVLLMHttpServer"):
        assert len(set(re.findall(rf"\({actor} pid=(\d+)\)", printed))) == 2, actor
    steps = metrics(run_dir)
    assert sorted(steps) == list(range(STEPS + 1))  # 0 is the validation before training
    for step in range(1, STEPS + 1):
        data = steps[step]
        assert 0 < data["actor/grad_norm"] < 100
        # the weights reach both replicas: the entropies of either's tokens are those of the trained actor, at every step
        assert 0 < data["rollout_entropy/abs_diff_max"] < 1e-4
        assert data["credit/advantage_spread"] > 1e-3


@pytest.fixture(scope="module")
def replayed(trained: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The first step's batch on one rank and on two, by verl's workers without Ray: results by number of ranks."""
    run_dir, _ = trained
    out = tmp_path_factory.mktemp("replayed") / "results.pt"
    driver = Path(__file__).with_name("replay_batch.py")
    done = subprocess.run([sys.executable, driver, run_dir, "1", out], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return torch.load(out)


@pytest.mark.parametrize("column", ["entropy", "old_log_probs", "advantages"])
def test_one_rank_computes_what_two_did(
    trained: tuple[Path, str], replayed: dict[int, dict[str, Any]], column: str
) -> None:
    """Rank by rank in the replay, and against what the run itself recorded before its update."""
    run_dir, _ = trained
    recorded = torch.load(run_dir / "credit" / "1.pt")
    expected = recorded[column] * recorded["response_mask"]
    assert expected.abs().max() > 0.1
    for ranks in (1, 2):
        torch.testing.assert_close(replayed[ranks][column].to(expected.dtype), expected, atol=1e-5, rtol=0)


def test_losses_and_gradients_of_one_rank_are_those_of_two(replayed: dict[int, dict[str, Any]]) -> None:
    """Two updates: in the first all ratios are 1, in the second some are clipped."""
    one, two = (replayed[ranks]["metrics"] for ranks in (1, 2))
    assert one["actor/pg_clipfrac"][0] == 0 < one["actor/pg_clipfrac"][1]
    assert one["grad_norm"][0] > 1e-3
    for name in ("loss", "actor/pg_loss", "grad_norm"):
        assert one[name] == pytest.approx(two[name], abs=1e-5), name


def test_the_run_itself_had_this_loss(
    trained: tuple[Path, str], replayed: dict[int, dict[str, Any]], metrics: Metrics
) -> None:
    data = metrics(trained[0])[1]
    assert replayed[1]["metrics"]["actor/pg_loss"][0] == pytest.approx(data["actor/pg_loss"], abs=1e-5)
    assert replayed[1]["metrics"]["grad_norm"][0] == pytest.approx(data["actor/grad_norm"], abs=1e-5)
