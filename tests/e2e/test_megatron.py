"""verl's trainer with its Megatron engine on a CPU: two tensor-parallel ranks, two vLLM servers, real Ray. It is
stopped, resumed, exported and evaluated.

docs/inside/megatron.md says what of Megatron is real here.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_harness import ACTOR, LAYOUTS, environment
from transformers import AutoModelForCausalLM

from gtpo_verl.runs.checkpoints import TRACKER
from gtpo_verl.runs.directory import PHASE_FILE

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Training = Any  # tests/e2e/conftest.py
Start = Callable[..., Training]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]

STEPS = 4
OVERRIDES = (
    *("algo=gtpo", "backend=megatron", f"trainer.total_training_steps={STEPS}", "algorithm.entropy.source=both"),
    *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=32"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "algorithm.filter_groups.enable=false",
    # two ranks, of which each has a share of every layer; sequences packed as on GPUs, where hardware=cpu pads for FSDP
    *("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.use_remove_padding=true"),
    *(f"{ACTOR}.megatron.{key}={value}" for key, value in LAYOUTS["tp2"].settings().items()),
    *(f"~{ACTOR}.fsdp_config", "~actor_rollout_ref.ref.fsdp_config"),  # hardware=cpu's, for FSDP
    # the last step validates, as `eval` will again
    *(f"trainer.test_freq={STEPS}", f"trainer.save_freq={STEPS}", "data.val_max_samples=32"),
    *("actor_rollout_ref.rollout.val_kwargs.temperature=0.7", "actor_rollout_ref.rollout.val_kwargs.n=2"),
)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def stopped(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that was stopped by the file STOP in its second step, and its last step."""
    training = start(tmp_path_factory.mktemp("megatron") / "run", *OVERRIDES, environment=environment())
    training.wait_for_step(1, seconds=1200)
    (training.run_dir / "STOP").touch()
    run_dir = training.wait_for_end(seconds=1200)
    return run_dir, max(training.steps())


@pytest.fixture(scope="module")
def resumed(start: Start, stopped: tuple[Path, int]) -> Path:
    run_dir, _ = stopped
    return start(run_dir, *OVERRIDES, environment=environment()).wait_for_end(seconds=1200)


def test_a_stop_saves_before_weights_are_sent_to_the_engines(stopped: tuple[Path, int]) -> None:
    """Sending them wakes the engines, and under Megatron on a GPU both do not fit."""
    run_dir, last = stopped
    assert last < STEPS
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["status"], record["reason"]) == ("interrupted", "the file STOP")
    saved = (run_dir / "checkpoints" / TRACKER).stat().st_mtime
    phase = json.loads((run_dir / PHASE_FILE).read_text())
    assert (phase["step"], phase["phase"]) == (last, "sending weights to the engines")
    assert saved <= phase["since"]


def test_the_weights_of_a_checkpoint_are_linked(stopped: tuple[Path, int]) -> None:
    run_dir, last = stopped
    weights = run_dir / "checkpoints" / f"global_step_{last}" / "actor" / "model" / "huggingface"
    assert (run_dir / "model").resolve() == weights.resolve()
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())


def test_it_goes_on_where_it_was_stopped(stopped: tuple[Path, int], resumed: Path, metrics: Metrics) -> None:
    """vLLM has the actor's weights in every step, the first after the resume included: its entropies are the same."""
    _, last = stopped
    assert [line["step"] for line in lines(resumed / "metrics.jsonl")] == list(range(1, STEPS + 1))
    logged = metrics(resumed)
    for step in range(1, STEPS + 1):
        assert 0 < logged[step]["rollout_entropy/abs_diff_max"] < 1e-4, step
        assert logged[step]["actor/grad_norm"] > 1e-3
    assert json.loads((resumed / "run.json").read_text())["status"] == "complete"
    assert f"global_step_{last}" in (resumed / "train.log").read_text()


def test_export_says_where_the_weights_are(resumed: Path) -> None:
    command = [sys.executable, "-m", "gtpo_verl.cli", "export", str(resumed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"global_step_{STEPS}/actor/model/huggingface" in done.stderr


def test_eval_of_the_exported_weights_is_the_trainings_own_validation(resumed: Path) -> None:
    """Response by response, without Megatron: what was converted into files is what was sent to vLLM."""
    command = [sys.executable, "-m", "gtpo_verl.cli", "eval", str(resumed), "trainer.n_gpus_per_node=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    problems = lines(resumed / "evaluation" / f"global_step_{STEPS}" / "problems.jsonl")
    answered = [
        (problem["ground_truth"], response["response"], response["acc"])
        for problem in problems
        for response in problem["responses"]
    ]
    validated = [
        (sample["gts"], sample["output"], sample["acc"]) for sample in lines(resumed / "validation" / f"{STEPS}.jsonl")
    ]
    assert sorted(answered) == sorted(validated)
    assert len({response for _, response, _ in answered}) > 1
