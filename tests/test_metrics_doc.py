"""docs/reference/metrics.md has a row for every metric that this project logs."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from metrics_doc import documented, undocumented
from omegaconf import OmegaConf

from gtpo_verl.algorithms import Batch
from gtpo_verl.algorithms.losses import aspo_loss, sequence_loss, token_loss
from gtpo_verl.algorithms.registry import algorithms
from gtpo_verl.evaluation.summary import Sample, logged, summarize
from gtpo_verl.integrations.losses import _named
from gtpo_verl.integrations.sampling import BudgetedReplayBuffer
from gtpo_verl.integrations.step.credit import verifier_metrics
from gtpo_verl.integrations.step.generation import Generation, GroupVerdict
from gtpo_verl.integrations.step.old_log_probs import OldLogProbs, agreement
from gtpo_verl.verifiers import FAILURES

PACKAGE = Path(__file__).parents[1] / "gtpo_verl"
OURS = re.compile(r"(actor|credit|response_length|rollout_entropy|training|val|verifier)(/[a-z_@]+)+")


def test_metrics_of_every_method() -> None:
    """Two mixed groups, so that no mean is left out."""
    mask = torch.ones(8, 5, dtype=torch.bool)
    entropy = torch.rand(8, 5, generator=torch.Generator().manual_seed(0)) + 0.1
    correct = torch.tensor([True, False, True, False] * 2)
    group = torch.arange(8) // 4
    batch = Batch(mask, group, correct, entropy=entropy, rewards=correct.float(), old_log_probs=-entropy)
    assert len(algorithms()) > 20
    for name, method in algorithms().items():
        names = {f"credit/{metric}" for metric in method.advantages(batch).metrics}
        assert undocumented(names) == set(), name


def test_metrics_of_the_losses() -> None:
    log_prob, mask = torch.zeros(2, 3), torch.ones(2, 3)
    _, of_tokens = token_loss(log_prob, log_prob, torch.ones(2, 3), mask, clip_ratio_c=10.0)
    _, of_sequences = sequence_loss(log_prob, log_prob, torch.ones(2), mask)
    _, of_aspo = aspo_loss(log_prob, log_prob, torch.ones(2, 3), mask)
    assert undocumented([*_named(of_tokens), *_named(of_sequences), *_named(of_aspo)]) == set()


def test_metrics_of_the_rollouts_entropies() -> None:
    rollout, mask = torch.rand(6), torch.ones(6, dtype=torch.bool)
    current = torch.tensor([True] * 3 + [False] * 3)
    names = [
        *agreement(rollout, rollout + 0.1 * torch.rand(6), mask, current),
        *OldLogProbs(OmegaConf.create()).ran(1.0, 10),
    ]
    assert len(names) == 7
    assert undocumented(names) == set()


def test_metrics_of_dynamic_sampling() -> None:
    verdicts = {"a": GroupVerdict("mixed"), "b": GroupVerdict("mixed")}
    sizes: dict[str, Any] = {"carried_in": 0, "missing": 2, "last_step": (1, 1), "window": 2, "budget": None}
    step = Generation(number=2, prompts=["a", "b"], verdicts=verdicts, **sizes)
    step.note_time()
    buffer: Any = SimpleNamespace(_max_age=1, prompt_global_steps={"train": {"a": 1, "b": 2}})
    found = step.metrics() | BudgetedReplayBuffer._metrics(buffer, step, ["a", "b"], [])
    names = {f"training/filter_groups/{name}" for name in found}
    assert len(names) == 13
    assert "training/filter_groups/yield" in names
    assert undocumented(names) == set()


def test_metrics_of_the_verifiers() -> None:
    names = verifier_metrics([{"verifier_failure": reason} for reason in ("", *FAILURES)])
    assert undocumented(names) == set()


def test_metrics_of_a_task_with_rules() -> None:
    assert verifier_metrics([{"acc": 1.0}]) == {}
    share = verifier_metrics([{"legal": 1.0}, {"legal": 0.0}, {"legal": 1.0}, {"legal": 1.0}])
    assert share == {"training/legal_share": 0.75}
    assert undocumented(share) == set()


def test_metrics_of_a_validation() -> None:
    samples = [
        Sample(f"problem {i}", "a/source", correct=j <= i, answer=str(j <= i), length=5 + i)
        for i in range(4)
        for j in range(4)
    ]
    names = logged(summarize(samples))
    assert {"val/a/source/mean@4", "val/a/source/maj@2/ci_low"} <= set(names)
    assert undocumented(names) == set()


def literals(path: Path) -> set[str]:
    """The strings of a module that look like a metric of ours."""
    nodes = ast.walk(ast.parse(path.read_text()))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in strings if OURS.fullmatch(text)}


def test_names_written_out_in_the_code() -> None:
    """What the trainer and the replay buffer set one by one, and what reports and plans read."""
    found = {name for path in PACKAGE.rglob("*.py") for name in literals(path)}
    assert {"training/accuracy", "response_length/truncated_share", "credit/entropy_all"} <= found
    assert undocumented(found) == set()


def test_a_metric_without_a_row_is_found() -> None:
    assert undocumented(["credit/new", "training/filter_groups/new", "val/x/mean@n", "new"]) == {
        "credit/new",
        "training/filter_groups/new",
        "val/x/mean@n",
        "new",
    }
    assert undocumented(["timing_s/gen", "val-core/x/acc/mean@8", "rollout_corr/kl", "actor/lr"]) == set()


def test_a_name_has_one_row() -> None:
    names = documented()
    assert [name for name in set(names) if names.count(name) > 1] == []
