"""In verl's reward loop: its own loader and DAPO manager call the rules, and carry what they return."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager

from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.step.credit import verifier_metrics
from gtpo_verl.verifiers import RULES, reward
from gtpo_verl.verifiers.pool import VerifierPool

KEYS = {"score", "acc", "pred", "verifier_failure"}


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    yield
    reward.close_pools()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def composed(rule: str, *overrides: str) -> DictConfig:
    return compose_config(
        [
            *(f"verifier={rule}", "reward.reward_kwargs.max_resp_len=64", "data.max_response_length=64"),
            "reward.reward_kwargs.overlong_buffer_cfg.len=16",
            *overrides,
        ]
    )


def row(tokenizer: PreTrainedTokenizerFast, response: str, truth: Any, width: int = 64) -> DataProto:
    """One response of a batch, right-padded, as verl's agent loop hands it over."""
    ids = tokenizer(response)["input_ids"]
    assert 0 < len(ids) <= width
    padded = torch.tensor([ids + [0] * (width - len(ids))])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids))])
    return DataProto.from_dict(
        tensors={"responses": padded, "attention_mask": mask},
        non_tensors={
            "data_source": np.array(["math"], dtype=object),
            "reward_model": np.array([{"ground_truth": truth}], dtype=object),
        },
    )


def run(config: DictConfig, tokenizer: PreTrainedTokenizerFast, *samples: tuple[str, Any]) -> list[dict[str, Any]]:
    async def all_at_once() -> list[dict[str, Any]]:
        manager = load_reward_manager(config, tokenizer)
        return await asyncio.gather(*(manager.run_single(row(tokenizer, *sample)) for sample in samples))

    return asyncio.run(all_at_once())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [("answer", "Answer: 7", "Answer: 8"), ("boxed", r"so \boxed{14/2}", r"so \boxed{8}")],
)
def test_plus_and_minus_one_with_the_verdict_beside_it(
    tokenizer: PreTrainedTokenizerFast, rule: str, right: str, wrong: str
) -> None:
    results = run(composed(rule), tokenizer, (right, "7"), (wrong, "7"), (right, 7))
    assert [float(result["reward_score"]) for result in results] == [1.0, -1.0, 1.0]
    for result, acc in zip(results, [1.0, 0.0, 1.0], strict=True):
        info = result["reward_extra_info"]
        assert info["acc"] == acc
        assert info["score"] == 2 * acc - 1
        assert set(info) >= KEYS
        assert info["verifier_failure"] == ""


def test_the_overlong_punishment_is_in_the_reward_and_not_in_the_verdict(tokenizer: PreTrainedTokenizerFast) -> None:
    """48 tokens are free and 16 the cache: 56 cost half a point (DAPO eq. 13), the right answer stays right."""
    response = "x" * 47 + "\nAnswer: 7"
    assert len(response) == 57
    free, punished = run(composed("answer"), tokenizer, ("Answer: 7", "7"), (response, "7"))
    assert float(free["reward_score"]) == 1.0
    assert float(punished["reward_score"]) == 1.0 - (57 - 48) / 16
    assert punished["reward_extra_info"]["acc"] == 1.0
    assert punished["reward_extra_info"]["score"] == 1.0


@pytest.mark.slow
def test_a_sample_that_hangs_costs_itself_and_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    """Every sample has the same keys, which verl's batches need, and the share is what the trainer logs."""
    config = composed("boxed", "reward.custom_reward_function.reward_kwargs.timeout=8")
    results = run(config, tokenizer, (r"\boxed{9^{9^{9^9}}}", "9^{9^{9^8}}"), (r"\boxed{7}", "7"))
    assert [float(result["reward_score"]) for result in results] == [-1.0, 1.0]
    infos = [result["reward_extra_info"] for result in results]
    assert [info["verifier_failure"] for info in infos] == ["timeout", ""]
    assert set(infos[0]) == set(infos[1])
    assert verifier_metrics(infos) == {
        "verifier/failure_share": 0.5,
        "verifier/timeout_share": 0.5,
        "verifier/memory_share": 0.0,
        "verifier/crash_share": 0.0,
        "verifier/error_share": 0.0,
    }


def test_a_reward_function_that_says_nothing_of_failures_has_no_share_of_them() -> None:
    assert verifier_metrics([{"score": 1.0, "acc": 1.0}]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_the_keys_of_the_config_are_the_functions_arguments(rule: str) -> None:
    """Same names and same defaults: what the YAML shows is what a call without it would do. The rule `answer` reads
    less of a response than `max_chars` leaves.
    """
    function = compose_config([f"verifier={rule}"]).reward.custom_reward_function
    assert function.path == "pkg://gtpo_verl.verifiers.reward"
    functions = (getattr(reward, function.name), VerifierPool)
    parameters = [p for each in functions for p in inspect.signature(each).parameters.values()]
    left_out = {"reward_router_address", "reward_model_tokenizer", *(["max_chars"] if rule == "answer" else [])}
    ours = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in left_out}
    assert dict(function.reward_kwargs) == ours


@pytest.mark.slow
def test_a_misspelt_key_is_an_error() -> None:
    with pytest.raises(UserError, match=r"reward_kwargs\.timeot: no such key"):
        compose_config(["verifier=boxed", "reward.custom_reward_function.reward_kwargs.timeot=1"])
    config = compose_config(["verifier=boxed", "+reward.custom_reward_function.reward_kwargs.timeot=1"])
    judge = get_custom_reward_fn(config)
    assert judge is not None
    with pytest.raises(TypeError, match="timeot"):
        asyncio.run(judge(data_source="", solution_str="", ground_truth="1"))


@pytest.mark.parametrize("truth", [["7"], None, {"answer": 7}])
def test_a_truth_that_is_no_text_is_an_error_and_not_a_verdict(truth: Any) -> None:
    with pytest.raises(UserError, match=r"reward_model\.ground_truth must be text or a number"):
        asyncio.run(reward.boxed("", r"\boxed{7}", truth))


def test_numbers_of_numpy_are_numbers() -> None:
    assert [reward.truth_text(truth) for truth in ("7", 7, np.int64(7), np.str_("7"), 0.5)] == [
        "7",
        "7",
        "7",
        "7",
        "0.5",
    ]


def test_a_pool_is_shared_by_calls_and_outlives_an_event_loop() -> None:
    for _ in range(2):
        assert asyncio.run(reward.answer("", "Answer: 7", "7"))["acc"] == 1.0
    assert len(reward._pools) == 1
    (pool,) = reward._pools.values()
    assert pool.counts == {"samples": 2}
