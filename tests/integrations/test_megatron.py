"""A small Qwen2 under verl's Megatron engine is the one under its FSDP engine, whatever the split: weights converted,
losses, metrics, gradients, three updates, and what a checkpoint gives back.

drive_engines.py says what is verl's and Megatron's own in this comparison, and docs/inside/megatron.md where it ends.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_harness import LAYOUTS, Layout, environment

pytestmark = pytest.mark.slow

ALGORITHMS = ("dapo", "gtpo", "grpo_s")
MICRO_BATCHES = (1, 2, 4)
LENGTHS = (8, 6, 9, 8, 9, 5, 8, 4)  # tokens of prompt and response together, row by row
RESPONSES = (5, 1, 7, 4, 6, 3, 2, 1)  # of the response alone
CLOSE = 2e-5  # float32, relative to the largest value of a tensor
MOVED = 6e-4  # how far three updates move the weights that they move most: three learning rates

IN_EVERY_RUN = ("fsdp dp1", "tp2")
MEGATRON = [
    name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.exhaustive)
    for name, layout in LAYOUTS.items()
    if layout.backend == "megatron"
]

Results = dict[tuple[str, int | str], Any]
Get = Callable[[str], Results]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Results of a layout by its name; the first that is not of every run has the others computed."""
    out = tmp_path_factory.mktemp("engines")
    loaded: dict[str, Results] = {}

    def get(name: str) -> Results:
        if name not in loaded:
            if not (out / f"{name}.pt").exists():
                here = name in IN_EVERY_RUN
                drive("drive_engines", out, *(other for other in LAYOUTS if (other in IN_EVERY_RUN) == here))
            loaded[name] = torch.load(out / f"{name}.pt")
        return loaded[name]

    return get


def drive(module: str, *arguments: object) -> None:
    """Call ``main`` of a module beside this one, in a process with Megatron.

    As an imported module: the process that Megatron's checkpoints start imports the main one again.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {module}; {module}.main(*sys.argv[1:])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def reference(results: Get, layout: Layout) -> Results:
    """FSDP on one rank, with the same model."""
    return results("fsdp dp1 tied" if layout.tied else "fsdp dp1")


def same(actual: torch.Tensor, expected: torch.Tensor, close: float = CLOSE) -> bool:
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= close * expected.abs().max())


def gradient_scale(layout: Layout, micro_batch: int) -> float:
    """How much larger gradients are in the per-token regime.

    verl hands Megatron floor(tokens / cp) of each micro-batch, whose sum divides the gradients: they are larger by
    tokens / (cp · Σ floor(tokens / cp)). It is 6 percent on this tiny batch with one row in a micro-batch, about one in
    a hundred thousand on micro-batches of the papers' size.
    """
    if not layout.per_token:
        return 1.0
    rows = min(micro_batch, len(LENGTHS) // layout.data_parallel)
    counted = sum(2 * (sum(LENGTHS[start : start + rows]) // 2) for start in range(0, len(LENGTHS), rows))
    assert math.isclose(sum(LENGTHS) / counted, 57 / {1: 54, 2: 56, 4: 56}[micro_batch])
    return sum(LENGTHS) / counted


@pytest.mark.parametrize("name", MEGATRON)
def test_weights_are_converted_and_back_without_a_difference(results: Get, name: str) -> None:
    found, expected = results(name)["dapo", "weights"], reference(results, LAYOUTS[name])["dapo", "weights"]
    other_name = {"lm_head.weight"} if LAYOUTS[name].tied else set()  # FSDP's module has the embedding twice
    assert found.keys() == expected.keys() - other_name
    assert all(torch.equal(weight, expected[key]) for key, weight in found.items())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", MEGATRON)
def test_losses_and_gradients_are_those_of_fsdp_on_one_rank(results: Get, algorithm: str, name: str) -> None:
    layout = LAYOUTS[name]
    expected = reference(results, layout)[algorithm, 4]
    assert abs(expected["loss"]) > 0.01
    for micro_batch in MICRO_BATCHES:
        found = results(name)[algorithm, micro_batch]
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found["gradients"].keys() == expected["gradients"].keys()
        scale = gradient_scale(layout, micro_batch)
        for key, gradient in expected["gradients"].items():
            assert gradient.abs().max() > 1e-4, key
            assert same(found["gradients"][key], scale * gradient), key


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", MEGATRON)
def test_metrics_are_those_of_fsdp_with_the_same_micro_batches(results: Get, algorithm: str, name: str) -> None:
    """Means over micro-batches depend on how rows are grouped, which the micro-batches of all ranks decide."""
    layout = LAYOUTS[name]
    fsdp = results("fsdp dp2") if layout.data_parallel > 1 else reference(results, layout)
    for micro_batch in MICRO_BATCHES:
        expected = fsdp[algorithm, micro_batch]["metrics"]
        assert expected["actor/pg_clipfrac"] > 0
        assert {"actor/pg_loss", "actor/entropy_loss", "actor/ppo_kl"} < expected.keys()
        assert results(name)[algorithm, micro_batch]["metrics"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", MEGATRON)
def test_entropies_and_log_probs_before_the_update_are_those_of_fsdp(results: Get, name: str) -> None:
    """Of the rows of one data-parallel rank."""
    layout = LAYOUTS[name]
    found, expected = results(name)["gtpo", "policy"], reference(results, layout)["gtpo", "policy"]
    assert expected[0].min() > 0.1
    assert found.shape[1] == sum(RESPONSES[: len(LENGTHS) // layout.data_parallel])
    assert same(found, expected[:, : found.shape[1]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", MEGATRON)
def test_three_updates_are_those_of_fsdp(results: Get, algorithm: str, name: str) -> None:
    """Norms of all gradients, by which they are clipped; policies; weights, which differ by less than a thirtieth of
    what the updates changed.
    """
    layout = LAYOUTS[name]
    fsdp = reference(results, layout)
    scale = gradient_scale(layout, 2)
    found, expected = results(name)[algorithm, "updated"], fsdp[algorithm, "updated"]
    losses = [update["loss"] for update in expected["updates"]]
    assert min(abs(one - other) for one, other in pairwise(losses)) > 0.01
    for one, other in zip(found["updates"], expected["updates"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-6)
        assert one["norm"] == pytest.approx(scale * other["norm"], rel=1e-5)
    assert same(found["policy"], expected["policy"][:, : found["policy"].shape[1]])
    before, after = fsdp[algorithm, "weights"], expected["weights"]
    assert max((after[key] - before[key]).abs().max() for key in after) == pytest.approx(MOVED, rel=0.05)
    for key, weight in found["weights"].items():
        assert (weight - after[key]).abs().max() < MOVED / 30, key


@pytest.mark.parametrize("name", MEGATRON)
def test_a_new_engine_goes_on_from_a_checkpoint_as_the_one_that_saved_it(results: Get, name: str) -> None:
    """Bit by bit: weights as loaded, losses and norms of two more updates, weights after them."""
    found = results(name)["gtpo", "checkpoint"]
    assert all(torch.equal(found["loaded"][key], weight) for key, weight in found["saved"].items())
    one, other = found["went on"], found["resumed"]
    assert one["updates"] == other["updates"]
    assert torch.equal(one["policy"], other["policy"])
    assert any(not torch.equal(weight, found["saved"][key]) for key, weight in one["weights"].items())
    assert all(torch.equal(weight, other["weights"][key]) for key, weight in one["weights"].items())


@pytest.mark.parametrize("name", MEGATRON)
def test_a_checkpoint_has_the_model_in_hugging_faces_format(results: Get, name: str) -> None:
    found = results(name)["gtpo", "checkpoint"]
    assert found["exported"].keys() >= found["saved"].keys()
    assert all(torch.equal(found["exported"][key], weight) for key, weight in found["saved"].items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fsdp_gives_the_same_on_one_rank_and_two(results: Get, algorithm: str) -> None:
    expected = results("fsdp dp1")[algorithm, 4]
    for name in ("fsdp dp1", "fsdp dp2"):
        for micro_batch in MICRO_BATCHES:
            found = results(name)[algorithm, micro_batch]
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
            assert all(same(found["gradients"][key], value) for key, value in expected["gradients"].items())


# -------------------------------------------------------------------- faults of others, which the harness passes


@pytest.mark.exhaustive
def test_gloo_still_misreads_parts_that_are_not_contiguous() -> None:
    """When this fails, megatron_on_cpu/gloo.py has nothing left to do."""
    script = Path(__file__).parents[1] / "support" / "megatron_cpu" / "megatron_on_cpu" / "gloo.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == [
        "rank 0 received [[0.0, 1.0], [2.0, 3.0]], expected [[0.0, 1.0], [4.0, 5.0]]",
        "rank 1 received [[2.0, 3.0], [4.0, 5.0]], expected [[2.0, 3.0], [6.0, 7.0]]",
    ]


@pytest.mark.exhaustive
def test_megatron_cannot_resume_with_the_adam_it_falls_back_to(tmp_path: Path) -> None:
    """When this fails, a run without Transformer Engine's Adam may be resumed."""
    drive("drive_fallback_adam", tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["saved"] == [1.0]
    assert found["new_engine"] == "DistributedOptimizer.state_dict"  # an assertion, for a new optimizer has no state
    # in an engine that has trained: one counter for all parameters, which each of them advances
    assert found["counters"] == 1
    assert found["after_an_update"] == [1.0 + found["parameters"]]
