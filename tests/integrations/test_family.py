"""Every registered method in verl's advantage step and actor update, in one process (family_run.py): advantages and
losses against the loops of tests/support/family_loops.py.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import family_loops as loops
import pytest
import torch

from gtpo_verl.algorithms import algorithm, algorithms

pytestmark = pytest.mark.slow

# At random, or ranked within a micro-batch; verl's own. Their advantages are DAPO's, and kl_cov's first loss too.
RANKED = ("kl_cov", "clip_cov")
SETTINGS = {"stare_c2": {"m": 0.9}, "psr": {"correct": 1.0, "wrong": 0.0}, "nsr": {"correct": 0.0, "wrong": 1.0}}
LOOPS = {
    **dict.fromkeys(("dapo", "grpo", *RANKED, "gspo", "ce_gppo", "aspo", "dcpo_clip"), loops.dapo),
    "stare_c2": loops.stare_o1,
    "psr": loops.w_reinforce,
    "nsr": loops.w_reinforce,
    "dapo_mixed": loops.dapo,  # without a guide
    "luffy": loops.dr_grpo,
}
OTHERS = ("gtpo", "grpo_s", "random20", "gtpo_shuffled")  # the golden run has the first two


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("family") / "results.pt"
    script = Path(__file__).with_name("family_run.py")
    done = subprocess.run([sys.executable, script, out], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return torch.load(out)


def rows_of(batch: dict[str, Any], found: dict[str, torch.Tensor]) -> loops.Rows:
    groups = [int(key.rsplit("_", 2)[0]) for key in batch["keys"]]
    columns = (found["entropy"].double().tolist(), found["old_log_probs"].double().tolist())
    scores, penalty = batch["rewards"].sum(1).double().tolist(), found["penalty"].double().tolist()
    return loops.Rows(batch["response_mask"].tolist(), groups, batch["correct"].tolist(), *columns, scores, penalty)


def test_every_method_was_run(results: dict[str, Any]) -> None:
    assert results["methods"].keys() == algorithms().keys()
    mask, correct = results["batch"]["response_mask"], results["batch"]["correct"]
    assert not correct[-6:].any()
    assert correct[:-6].any()
    assert mask.any(1).all()


@pytest.mark.parametrize("name", [name for name in algorithms() if name not in OTHERS])
def test_advantages_are_those_of_the_loops(results: dict[str, Any], name: str) -> None:
    found = results["methods"][name]
    expected = torch.zeros_like(found["advantages"])
    loop = LOOPS.get(name) or getattr(loops, name)
    for token, value in loop(rows_of(results["batch"], found), **SETTINGS.get(name, {})).items():
        expected[token] = value
    torch.testing.assert_close(found["advantages"], expected, atol=2e-5, rtol=2e-5)
    assert found["advantages"].abs().max() > 0


def test_random_tokens_are_a_fifth(results: dict[str, Any]) -> None:
    kept = results["methods"]["random20"]["advantages"] != 0
    credited = results["methods"]["dapo"]["advantages"] != 0
    assert 0.1 < kept.sum() / credited.sum() < 0.3


def token_loss(name: str, a: float, w: float, pi: float, clip: list[float]) -> float:
    if name == "ce_gppo":
        return -loops.ce_gppo(a, w, pi, *clip, 0.75, 1.0)[0]
    if name in ("aspo", "dcpo_clip"):
        return -getattr(loops, name)(a, w, pi, *clip)[0]
    return -loops.clipped(a, w, *clip)[0]


def expected_loss(name: str, results: dict[str, Any], new: torch.Tensor) -> float:
    """The loss of the whole batch, from the log-probs that the update started with."""
    found, mask = results["methods"][name], results["batch"]["response_mask"]
    rows = []
    for i in range(len(mask)):
        places = mask[i].nonzero().squeeze(1).tolist()
        logs = [(new[i, t] - found["old_log_probs"][i, t]).item() for t in places]
        if name in ("gspo", "grpo_s"):
            w = math.exp(sum(logs) / len(logs)) if name == "gspo" else sum(map(math.exp, logs)) / len(logs)
            clip = found["clip"][:2] if name == "gspo" else (0.2, 0.28)
            rows.append([-loops.clipped(found["advantages"][i, 0].item(), w, *clip)[0]] * len(places))
            continue
        rows.append(
            [
                token_loss(
                    name,
                    found["advantages"][i, t].item(),
                    math.exp(log),
                    found["old_log_probs"][i, t].exp().item(),
                    found["clip"],
                )
                for t, log in zip(places, logs, strict=True)
            ]
        )
    if algorithm(name).aggregation == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if algorithm(name).aggregation == "seq-mean-token-sum-norm":
        return sum(map(sum, rows)) / len(rows) / results["limit"]
    return sum(sum(row) / len(row) for row in rows) / len(rows)


@pytest.mark.parametrize("name", [name for name in algorithms() if name != "clip_cov"])
def test_the_first_loss_is_that_of_ratios_of_one(results: dict[str, Any], name: str) -> None:
    found = results["methods"][name]
    loss = expected_loss(name, results, found["old_log_probs"])
    assert found["updates"][0]["actor/pg_loss"] == pytest.approx(loss, abs=2e-5)
    assert found["updates"][0].get("actor/pg_clipfrac", 0) == 0


FIRST_OF_LOSS = {entry.loss: name for name, entry in reversed(algorithms().items())}.values()


@pytest.mark.parametrize("name", [name for name in FIRST_OF_LOSS if name not in RANKED])
def test_the_second_loss_is_that_of_the_updated_policy(results: dict[str, Any], name: str) -> None:
    found = results["methods"][name]
    loss = expected_loss(name, results, found["log_probs"])
    first, second = (update["actor/pg_loss"] for update in found["updates"])
    assert second == pytest.approx(loss, abs=5e-5)
    assert second < first, "the update did not lower the loss"


@pytest.mark.parametrize("name", [name for name, entry in algorithms().items() if entry.loss == "mixed"])
def test_the_actor_divides_the_guides_rows_by_their_own_denominators(results: dict[str, Any], name: str) -> None:
    """In micro-batches of six rows, of which two are the guide's; `luffy` shapes them, `dapo_mixed` clips them."""
    method, mask = results["methods"][name], results["batch"]["response_mask"]
    found, total = method["guided"], 0.0
    for i, t in mask.nonzero().tolist():
        a = method["advantages"][i, t].item()
        w = math.exp((found["log_probs"][i, t] - found["denominators"][i, t]).item())
        if name == "luffy" and found["guide"][i, t]:
            total -= a * w / (w + 0.1)
        else:
            total -= loops.clipped(a, w, *method["clip"])[0]
    divisor = len(mask) * results["limit"] if name == "luffy" else mask.sum().item()
    assert found["update"]["actor/pg_loss"] == pytest.approx(total / divisor, abs=2e-5)
    assert 0 < found["update"]["grad_norm"] < 1e3
    assert found["update"]["actor/pg_clipfrac"] == 0, "of own rows, whose ratios are 1"


@pytest.mark.parametrize("name", list(algorithms()))
def test_every_method_moves_the_weights(results: dict[str, Any], name: str) -> None:
    found = results["methods"][name]
    assert 0 < found["updates"][0]["grad_norm"] < 1e3  # after it gspo, with its narrow range, clips every response
    if found["log_probs"] is not None:
        assert (found["log_probs"] - found["old_log_probs"]).abs().max() > 1e-4
