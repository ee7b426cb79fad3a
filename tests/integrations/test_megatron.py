"""The losses and metrics under verl's Megatron engine are those under its FSDP engine, whatever the split.

drive_engines.py says what is verl's and Megatron's own in this comparison, and docs/megatron.md where it ends.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gtpo_verl.commands.setup import MEGATRON_DIRECTORY

pytestmark = pytest.mark.slow

ALGORITHMS = ("dapo", "gtpo", "grpo_s")
SPLITS = ("dp1", "dp2", "tp2", "cp2", "dp2 cp2")
MICRO_BATCHES = (1, 2, 4)
LENGTHS = (8, 6, 9, 8, 9, 5, 8, 4)  # tokens of prompt and response together, row by row
RESPONSES = (5, 1, 7, 4, 6, 3, 2, 1)  # of the response alone
CLOSE = 1e-6  # float32, relative to the largest value

Results = dict[tuple[str, str, int | str], Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    megatron = Path(sys.prefix) / MEGATRON_DIRECTORY
    assert (megatron / "megatron" / "core").is_dir(), (
        f"no megatron-core in {megatron}: run `gtpo-verl setup --cpu --dev`"
    )
    out = tmp_path_factory.mktemp("engines") / "results.pt"
    driver = Path(__file__).with_name("drive_engines.py")
    path = os.pathsep.join(filter(None, [str(megatron), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", driver, out],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return torch.load(out)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= CLOSE * expected.abs().max())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("split", [*SPLITS, "cp2 per token", "dp2 cp2 per token"])
def test_losses_are_those_of_fsdp_on_one_rank(results: Results, algorithm: str, split: str) -> None:
    expected = results["fsdp dp1", algorithm, 4]["loss"]
    assert abs(expected) > 0.01
    for micro_batch in MICRO_BATCHES:
        assert results[f"megatron {split}", algorithm, micro_batch]["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("split", SPLITS)
def test_gradients_are_those_of_fsdp_on_one_rank(results: Results, algorithm: str, split: str) -> None:
    for name, expected in results["fsdp dp1", algorithm, 4]["gradients"].items():
        for micro_batch in MICRO_BATCHES:
            assert same(results[f"megatron {split}", algorithm, micro_batch]["gradients"][name], expected), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp_gives_the_same_on_one_rank_and_two(results: Results, algorithm: str, ranks: int) -> None:
    expected = results["fsdp dp1", algorithm, 4]
    for micro_batch in MICRO_BATCHES:
        actual = results[f"fsdp dp{ranks}", algorithm, micro_batch]
        assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert all(same(actual["gradients"][name], value) for name, value in expected["gradients"].items())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("split", [*SPLITS, "cp2 per token", "dp2 cp2 per token"])
def test_metrics_are_those_of_fsdp_with_the_same_micro_batches(results: Results, algorithm: str, split: str) -> None:
    """Means over micro-batches depend on how rows are grouped, so the data-parallel split is the same on both sides."""
    for micro_batch in MICRO_BATCHES:
        fsdp = results["fsdp dp2" if "dp2" in split else "fsdp dp1", algorithm, micro_batch]["metrics"]
        assert fsdp["actor/pg_clipfrac"] > 0
        assert {"actor/pg_loss", "actor/entropy_loss", "actor/ppo_kl"} < fsdp.keys()
        assert results[f"megatron {split}", algorithm, micro_batch]["metrics"] == pytest.approx(fsdp, abs=1e-6)


@pytest.mark.parametrize("split", [*SPLITS, "cp2 per token", "dp2 cp2 per token"])
def test_entropies_and_log_probs_before_the_update_are_those_of_fsdp(results: Results, split: str) -> None:
    actual = results[f"megatron {split}", "gtpo", "entropies"]
    expected = results["fsdp dp1", "gtpo", "entropies"]
    assert expected[0].min() > 0.1
    assert actual.shape[1] == sum(RESPONSES[: len(LENGTHS) // (2 if "dp2" in split else 1)])
    assert same(actual, expected[:, : actual.shape[1]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("split", "data_parallel"), [("cp2 per token", 1), ("dp2 cp2 per token", 2)])
def test_the_per_token_regime_scales_all_gradients_by_what_verl_rounds_off(
    results: Results, algorithm: str, split: str, data_parallel: int
) -> None:
    """Megatron-Bridge switches this regime on with context parallelism. verl hands Megatron floor(tokens / cp) of each
    micro-batch.

    So gradients are larger by tokens / (cp · Σ floor(tokens / cp)): 6 percent on this tiny batch with one row in a
    micro-batch, about one in a hundred thousand on micro-batches of the papers' size.
    """
    for micro_batch in MICRO_BATCHES:
        share = len(LENGTHS) // data_parallel
        rows = min(micro_batch, share)
        counted = sum(2 * (sum(LENGTHS[start : start + rows]) // 2) for start in range(0, len(LENGTHS), rows))
        factor = sum(LENGTHS) / counted
        assert math.isclose(factor, 57 / {1: 54, 2: 56, 4: 56}[micro_batch])
        for name, expected in results["fsdp dp1", algorithm, 4]["gradients"].items():
            assert same(results[f"megatron {split}", algorithm, micro_batch]["gradients"][name], factor * expected), (
                name
            )
