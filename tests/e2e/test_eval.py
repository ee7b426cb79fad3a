"""``gtpo-verl eval`` of a quickstart's trained model gives what the training's own validation gave."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gtpo_verl.cli import main
from gtpo_verl.runs.directory import CONFIG_FILE

pytestmark = pytest.mark.e2e

Metrics = Callable[[Path], dict[int, dict[str, Any]]]
PROMPTS = 32
SOURCE = "gtpo_verl/sums"


@pytest.fixture
def last_step(quickstart: Any) -> int:
    return quickstart.last_step


@pytest.fixture
def run_dir(quickstart: Any) -> Path:
    """An arm that validated before and after its steps, two samples a prompt."""
    return quickstart.arm


def evaluate(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command; with one replica, whatever the run had."""
    command = [sys.executable, "-m", "gtpo_verl.cli", "eval", *map(str, arguments), "trainer.n_gpus_per_node=1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@dataclass(frozen=True)
class Evaluation:
    output: Path
    printed: str


@pytest.fixture(scope="module")
def evaluation(quickstart: Any) -> Evaluation:
    """That of the trained model."""
    done = evaluate(quickstart.arm)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return Evaluation(quickstart.arm / "evaluation" / f"global_step_{quickstart.last_step}", done.stdout)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_validation_logs_the_figures_that_papers_print(run_dir: Path, last_step: int, metrics: Metrics) -> None:
    for step in (0, last_step):
        logged = metrics(run_dir)[step]
        samples = lines(run_dir / "validation" / f"{step}.jsonl")
        mean = sum(sample["acc"] for sample in samples) / len(samples)
        assert logged[f"val/{SOURCE}/mean@2"] == pytest.approx(mean, abs=1e-9)
        assert logged[f"val/{SOURCE}/mean@2"] == pytest.approx(logged[f"val-core/{SOURCE}/acc/mean@2"], abs=1e-9)
        assert logged[f"val/{SOURCE}/problems"] == PROMPTS
        assert logged[f"val/{SOURCE}/failed_samples"] == 0
        assert logged[f"val/{SOURCE}/pass@1"] == pytest.approx(mean)
        solved = {sample["input"] for sample in samples if sample["acc"]}
        assert logged[f"val/{SOURCE}/pass@2"] == pytest.approx(len(solved) / PROMPTS)
        # every byte of a response is a token, and one more ends it, unless it was truncated
        tokens = [len(sample["output"]) + 1 for sample in samples]
        assert logged[f"val/{SOURCE}/response_length"] == pytest.approx(sum(min(n, 32) for n in tokens) / len(tokens))
        assert logged[f"val/{SOURCE}/truncated_share"] == pytest.approx(sum(n >= 32 for n in tokens) / len(tokens))


@pytest.mark.exhaustive
def test_eval_of_a_trained_model_is_its_own_validation(
    evaluation: Evaluation, run_dir: Path, last_step: int, metrics: Metrics
) -> None:
    """Response by response: the seed is the same, so are the random numbers that each is sampled with."""
    problems = lines(evaluation.output / "problems.jsonl")
    assert sorted(problem["row"] for problem in problems) == list(range(PROMPTS))

    validated = [
        (sample["gts"], sample["output"], sample["acc"])
        for sample in lines(run_dir / "validation" / f"{last_step}.jsonl")
    ]
    answered = [
        (problem["ground_truth"], response["response"], response["acc"])
        for problem in problems
        for response in problem["responses"]
    ]
    assert sorted(answered) == sorted(validated)
    pairs = [[response["response"] for response in problem["responses"]] for problem in problems]
    assert any(one != other for one, other in pairs), "the two samples of a prompt share their stream"
    (summary,) = json.loads((evaluation.output / "summary.json").read_text())["sources"]
    logged = metrics(run_dir)[last_step]
    for name, figure in (
        ("mean@2", summary["mean"]),
        ("pass@2", summary["pass_at"]["2"]),
        ("maj@2", summary["majority_at"]["2"]),
        ("response_length", summary["response_length"]),
        ("truncated_share", summary["truncated_share"]),
    ):
        assert figure["value"] == pytest.approx(logged[f"val/{SOURCE}/{name}"], abs=1e-9), name
    assert "mean@2" in evaluation.printed
    assert (evaluation.output / "pass_at_k.png").stat().st_size > 5000


def test_export_makes_of_the_shards_of_two_ranks_what_the_run_saved(
    run_dir: Path, last_step: int, tmp_path: Path
) -> None:
    """To the bit: an update of a small learning rate is less than the rounding of bfloat16."""
    saved = run_dir / "checkpoints" / f"global_step_{last_step}"
    copy = tmp_path / "checkpoints" / saved.name
    shutil.copytree(saved, copy)
    shutil.copy(run_dir / CONFIG_FILE, tmp_path)
    weights = copy / "actor" / "huggingface" / "model.safetensors"
    expected = load_file(weights)
    weights.unlink()
    assert main(["export", str(copy)]) == 0
    exported = load_file(weights)
    assert exported.keys() == expected.keys()
    assert all(tensor.dtype == torch.float32 for tensor in exported.values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())
    assert json.loads((copy / "actor" / "huggingface" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.exhaustive
def test_a_finished_evaluation_is_not_done_again(evaluation: Evaluation, run_dir: Path) -> None:
    """What a crash leaves of the file, and what goes on from it, is tested in tests/evaluation/test_records.py."""
    output = evaluation.output
    before, summary = (output / "problems.jsonl").read_bytes(), (output / "summary.json").read_text()
    (output / "summary.json").unlink()
    again = evaluate(run_dir)
    assert again.returncode == 0, (again.stdout + again.stderr)[-5000:]
    assert f"{PROMPTS} rows, {PROMPTS} of them finished before" in again.stdout
    assert (output / "problems.jsonl").read_bytes() == before
    assert json.loads((output / "summary.json").read_text())["sources"] == json.loads(summary)["sources"]


@pytest.mark.exhaustive
def test_another_setting_is_refused_by_name(evaluation: Evaluation, run_dir: Path) -> None:
    before = (evaluation.output / "problems.jsonl").read_bytes()
    refused = evaluate(run_dir, "actor_rollout_ref.rollout.val_kwargs.n=4")
    assert refused.returncode == 2
    assert "rollout.val_kwargs.n was 2, is 4" in refused.stderr
    assert (evaluation.output / "problems.jsonl").read_bytes() == before
