"""Ranges of the numbers that a run is made of: what is outside could only fail later, and less clearly."""

import math
from collections.abc import Iterator
from math import inf
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.errors import UserError, first_line, refuse

_ROLLOUT = "actor_rollout_ref.rollout."
_ACTOR = "actor_rollout_ref.actor."
_COUNTS = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_ACTOR}ppo_mini_batch_size",
    f"{_ACTOR}ppo_epochs",
    f"{_ROLLOUT}tensor_model_parallel_size",
    f"{_ROLLOUT}data_parallel_size",
    f"{_ROLLOUT}pipeline_model_parallel_size",
    f"{_ROLLOUT}max_num_seqs",
    "reward.reward_kwargs.max_resp_len",
)
_COUNTS_OR_NULL = (
    f"{_ACTOR}ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}ppo_max_token_len_per_gpu",
    f"{_ACTOR}fsdp_config.ulysses_sequence_parallel_size",
    f"{_ACTOR}megatron.tensor_model_parallel_size",
    f"{_ACTOR}megatron.pipeline_model_parallel_size",
    f"{_ACTOR}megatron.context_parallel_size",
    f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}log_prob_max_token_len_per_gpu",
    f"{_ROLLOUT}max_model_len",
    f"{_ROLLOUT}max_num_batched_tokens",
    f"{_ROLLOUT}agent.num_workers",
    "trainer.total_epochs",
    "trainer.total_training_steps",
)
_LARGEST_COUNT = 10**9
_RESPONSES = (f"{_ROLLOUT}n", f"{_ROLLOUT}val_kwargs.n")  # to a prompt
_MOST_RESPONSES = 65_536
_SHARES = (f"{_ROLLOUT}top_p", f"{_ROLLOUT}val_kwargs.top_p", f"{_ROLLOUT}gpu_memory_utilization")
_NOT_NEGATIVE = (
    f"{_ACTOR}optim.lr",
    f"{_ACTOR}optim.weight_decay",
    f"{_ROLLOUT}temperature",
    f"{_ROLLOUT}val_kwargs.temperature",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
)
_NUMBERS = ("algorithm.correct_threshold", "reward.reward_kwargs.overlong_buffer_cfg.len", f"{_ROLLOUT}nnodes")
_STEPS = ("algorithm.entropy.check_every", "trainer.test_freq", "trainer.save_freq")


def check_limits(config: DictConfig) -> None:
    """Check that counts are whole, at least 1 and not absurd, and that shares and rates are in their ranges.

    Raises:
        UserError: every key whose value is outside, with its range.
    """
    refuse(_outside(config))


def _outside(config: DictConfig) -> Iterator[str]:
    for key in (*_COUNTS, *_COUNTS_OR_NULL):
        value = _value(config, key)
        if value is None and key in _COUNTS_OR_NULL:
            continue
        if not _whole(value) or not 1 <= value <= _LARGEST_COUNT:
            yield f"{key}={_shown(value)}: it must be from 1 to {_LARGEST_COUNT:,}."
    for key in _RESPONSES:
        value = _value(config, key)
        if not _whole(value) or not 1 <= value <= _MOST_RESPONSES:
            yield f"{key}={_shown(value)}: it must be from 1 to {_MOST_RESPONSES:,}."
    for key in _SHARES:
        value = _value(config, key)
        if value is not None and not (_number(value) and 0 < value <= 1):
            yield f"{key}={_shown(value)}: it must be above 0 and at most 1."
    for key in _NOT_NEGATIVE:
        value = _value(config, key)
        if value is not None and not (_number(value) and 0 <= value < inf):
            yield f"{key}={_shown(value)}: it must be a finite number that is not negative."
    for key in _NUMBERS:
        value = _value(config, key)
        if value is not None and not (_number(value) and math.isfinite(value)):
            yield f"{key}={_shown(value)}: it must be a finite number."
    for key in _STEPS:
        if not _whole(_value(config, key)):
            yield f"{key}={_shown(_value(config, key))}: it must be a number of steps."


def _value(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException as error:  # an interpolation of what is not there
        raise UserError(f"{key} has no value: {first_line(error)}") from error


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
