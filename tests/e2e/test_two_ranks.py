"""The first step of the quickstart on two FSDP ranks: one rank would have trained the same. That both trained:
test_quickstart.py.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Quickstart = Any  # tests/e2e/conftest.py
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def replayed(quickstart: Quickstart, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The first step's batch on one rank and on two, by verl's workers without Ray: results by number of ranks."""
    out = tmp_path_factory.mktemp("replayed") / "results.pt"
    driver = Path(__file__).with_name("replay_batch.py")
    done = subprocess.run(
        [sys.executable, driver, quickstart.arm, "1", out], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return torch.load(out)


@pytest.mark.parametrize("column", ["entropy", "old_log_probs", "advantages"])
def test_one_rank_computes_what_two_did(
    quickstart: Quickstart, replayed: dict[int, dict[str, Any]], column: str
) -> None:
    """Rank by rank in the replay, and against what the run itself recorded before its update."""
    recorded = torch.load(quickstart.arm / "credit" / "1.pt")
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
    quickstart: Quickstart, replayed: dict[int, dict[str, Any]], metrics: Metrics
) -> None:
    data = metrics(quickstart.arm)[1]
    assert replayed[1]["metrics"]["actor/pg_loss"][0] == pytest.approx(data["actor/pg_loss"], abs=1e-5)
    assert replayed[1]["metrics"]["grad_norm"][0] == pytest.approx(data["actor/grad_norm"], abs=1e-5)
