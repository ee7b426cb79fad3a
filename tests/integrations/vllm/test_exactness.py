"""Entropies out of real vLLM engines against transformers' teacher-forced logits in float64, on the same tokens.

What is left is the float32 noise of the forward pass: an entropy is off by as much as the token's log-prob is.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5  # nat; the product's promise. Measured: 2e-6 to 4e-6


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, 512) for _ in range(draw.randrange(3, longest + 1))] for _ in range(count)]


def batch(count: int, longest: int, params: Sequence[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """``count`` prompts, their sampling parameters taken in turn."""
    chosen = [{"max_tokens": max_tokens, **params[i % len(params)]} for i in range(count)]
    return {"prompts": prompts(count, longest), "params": chosen}


@pytest.fixture
def check(
    policy_dir: Path, truth: Callable[..., Any], record_property: Callable[[str, object], None]
) -> Callable[..., None]:
    """Compare every response of an engine with the truth; the largest error is kept in pytest's XML report
    (--junitxml).
    """

    def check(answer: dict[str, Any], batches: list[dict[str, Any]]) -> None:
        params = [each for batch in batches for each in batch["params"]]
        spread, errors, surprises, variances = [], [], [], []
        for response, wanted in zip(answer["responses"], params, strict=True):
            assert len(response["tokens"]) == wanted["max_tokens"]
            allowed = wanted.get("allowed_token_ids", range(512))
            masked = sorted(set(range(512)) - set(allowed))
            temperature = wanted["temperature"] or 1.0  # a greedy row reports the policy at T = 1
            true = truth(policy_dir, response["prompt"], response["tokens"], temperature, masked)
            error = (torch.tensor(response["entropies"]) - true.entropies).abs().max().item()
            assert error < TOLERANCE, f"{wanted}: {error:.1e} nat"
            errors.append(error)
            assert (torch.tensor(response["log_probs"]) - true.log_probs).abs().max() < TOLERANCE
            assert response["ranks"] == true.ranks.tolist()
            assert max(response.get("prompt_ranks", [0])) <= 512  # plain ranks: prompt tokens carry no entropy
            spread.append(true.entropies)
            if wanted["temperature"] > 0:
                surprises.append(-true.log_probs - true.entropies)
                variances.append(true.variances)
        record_property("largest_error_nat", f"{max(errors):.1e}")
        record_property("tokens", sum(map(len, spread)))
        spread = torch.cat(spread)
        assert spread.max() - spread.min() > 2.0  # the test policy is neither uniform nor certain
        # the tokens come from the distributions whose entropies they carry: -log p is H on average
        assert torch.cat(surprises).sum().abs() < 5 * torch.cat(variances).sum().sqrt()

    return check


MIXED = [
    {"temperature": 0.6},
    {"temperature": 1.0, "prompt_logprobs": 0},
    {"temperature": 0.0},
    {"temperature": 1.0, "allowed_token_ids": list(range(2, 400))},
]


def test_v1(run_engine, check):
    batches = [batch(16, 40, MIXED, max_tokens=48)]
    answer = run_engine(batches)
    assert answer["runners"] == ["V1"]
    check(answer, batches)


@pytest.mark.exhaustive
def test_v1_chunked_prefill_and_preemption(run_engine, check):
    batches = [batch(8, 60, MIXED, max_tokens=60)]
    answer = run_engine(batches, max_num_batched_tokens=16, max_num_seqs=8, block_size=32, num_gpu_blocks_override=10)
    assert answer["runners"] == ["V1"]
    assert answer["metrics"]["vllm:num_preemptions"] > 0
    check(answer, batches)


def cached(count: int, longest: int, max_tokens: int) -> list[dict[str, Any]]:
    """The same long prompts twice, so that the second time finds them in the cache; prompt log-probs would not look
    there.
    """
    params = [each for each in MIXED if "prompt_logprobs" not in each]
    return [
        {
            "prompts": [prompt * (1 + longest // len(prompt)) for prompt in prompts(count, longest)],
            "params": [{"max_tokens": max_tokens, **params[i % len(params)]} for i in range(count)],
        }
    ] * 2


@pytest.mark.exhaustive
def test_v1_prefix_caching(run_engine, check):
    batches = cached(6, 70, max_tokens=24)
    answer = run_engine(batches, block_size=32)
    assert answer["runners"] == ["V1"]
    assert answer["metrics"]["vllm:prefix_cache_hits"] >= 6 * 64
    check(answer, batches)


@pytest.mark.exhaustive
def test_v2_prefix_caching_and_tensor_parallel(run_engine, check, v2_on_cpu):
    batches = cached(3, 70, max_tokens=6)
    answer = run_engine(batches, env=v2_on_cpu, block_size=32, tensor_parallel_size=2)
    assert answer["runners"] == ["V2", "V2"]
    assert answer["metrics"]["vllm:prefix_cache_hits"] >= 3 * 64
    check(answer, batches)


@pytest.mark.exhaustive
def test_v1_tensor_parallel(run_engine, check):
    batches = [batch(8, 40, MIXED, max_tokens=32)]
    answer = run_engine(batches, tensor_parallel_size=2)
    assert answer["runners"] == ["V1", "V1"]
    check(answer, batches)


@pytest.mark.exhaustive
def test_v2(run_engine, check, v2_on_cpu):
    batches = [batch(8, 20, MIXED, max_tokens=12)]
    answer = run_engine(batches, env=v2_on_cpu)
    assert answer["runners"] == ["V2"]
    check(answer, batches)


@pytest.mark.exhaustive
def test_v2_chunked_prefill_and_preemption(run_engine, check, v2_on_cpu):
    batches = [batch(6, 40, MIXED, max_tokens=40)]
    answer = run_engine(
        batches,
        env=v2_on_cpu,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        max_model_len=96,
        block_size=32,
        num_gpu_blocks_override=7,
    )
    assert answer["runners"] == ["V2"]
    assert answer["metrics"]["vllm:num_preemptions"] > 0
    check(answer, batches)


@pytest.mark.exhaustive
def test_speculation_with_a_draft_model(run_engine, check, draft_dir, speculating_runner, v2_on_cpu):
    speculation = {"method": "draft_model", "model": str(draft_dir), "num_speculative_tokens": 2}
    if speculating_runner == "V1":
        batches = [batch(16, 20, MIXED, max_tokens=40)]
        answer = run_engine(batches, speculative_config=speculation)
    else:
        batches = [batch(6, 20, MIXED[:3], max_tokens=12)]
        answer = run_engine(batches, env=v2_on_cpu, speculative_config=speculation)
    assert answer["runners"] == [speculating_runner]
    # some drafted tokens were accepted and some were not, so every path of the rejection sampler was taken
    drafted, accepted = (answer["metrics"][f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert 0 < accepted < drafted
    check(answer, batches)
