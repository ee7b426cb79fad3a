"""Ranges of single values in sections that have no dataclass of ours: what is outside could only fail later, and less
clearly. Rules of other modules calculate with these numbers, so they are asked first.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.errors import first_line
from gtpo_verl.planning.memory import ENGINE_DTYPES, MODEL_DTYPES
from gtpo_verl.problems import Problem
from gtpo_verl.seeds import LARGEST

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
GROUPS = "algorithm.filter_groups"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
MOST = 10**9
MOST_RESPONSES = 65_536  # to a prompt


@dataclass(frozen=True)
class Range:
    """What the values of some keys must be: a test, the same in words, and whether null is allowed too."""

    keys: tuple[str, ...]
    allows: Callable[[Any], bool]
    words: str
    null: bool = False


def whole(least: float, most: float = inf) -> Callable[[Any], bool]:
    """A whole number from `least` to `most`."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def real(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    """A number that passes a test."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and test(value)


def one_of(*names: str) -> Callable[[Any], bool]:
    """One of these words."""
    return lambda value: isinstance(value, str) and value in names


# Of every command that samples; the settings of a recorded run are among them.
SAMPLING = (
    Range(("seed",), whole(0, LARGEST), f"it must be a whole number from 0 to {LARGEST}"),
    Range(
        (
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
            "data.train_batch_size",
            "data.max_prompt_length",
            "data.max_response_length",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.ppo_epochs",
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ROLLOUT}.data_parallel_size",
            f"{ROLLOUT}.pipeline_model_parallel_size",
            f"{ROLLOUT}.max_num_seqs",
            "reward.reward_kwargs.max_resp_len",
        ),
        whole(1, MOST),
        f"it must be from 1 to {MOST:,}",
    ),
    Range(
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            f"{ACTOR}.megatron.tensor_model_parallel_size",
            f"{ACTOR}.megatron.pipeline_model_parallel_size",
            f"{ACTOR}.megatron.context_parallel_size",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
            f"{ROLLOUT}.max_model_len",
            f"{ROLLOUT}.max_num_batched_tokens",
            f"{ROLLOUT}.agent.num_workers",
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
            "trainer.total_epochs",
            "trainer.total_training_steps",
        ),
        whole(1, MOST),
        f"it must be from 1 to {MOST:,}",
        null=True,
    ),
    Range(
        (f"{ROLLOUT}.n", f"{ROLLOUT}.val_kwargs.n"),
        whole(1, MOST_RESPONSES),
        f"it must be from 1 to {MOST_RESPONSES:,}",
    ),
    Range(
        (f"{ROLLOUT}.top_p", f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.gpu_memory_utilization"),
        real(lambda value: 0 < value <= 1),
        "it must be above 0 and at most 1",
        null=True,
    ),
    Range(
        (
            f"{ACTOR}.optim.lr",
            f"{ACTOR}.optim.weight_decay",
            f"{ROLLOUT}.val_kwargs.temperature",
            f"{OVERLONG}.penalty_factor",
        ),
        real(lambda value: 0 <= value < inf),
        "it must be a finite number that is not negative",
        null=True,
    ),
    Range(
        ("algorithm.correct_threshold", f"{OVERLONG}.len", f"{ROLLOUT}.nnodes"),
        real(math.isfinite),
        "it must be a finite number",
        null=True,
    ),
    Range((f"{ROLLOUT}.dtype",), one_of(*ENGINE_DTYPES), f"choose of {', '.join(ENGINE_DTYPES)}"),
    Range(("trainer.test_freq", "trainer.save_freq"), whole(-inf), "it must be a number of steps"),
    Range(("algorithm.entropy.check_every",), whole(0), "it must be a number of steps, or 0 for never"),
)
# Of a training alone: a run that was recorded earlier may lack them.
TRAINING = (
    Range(
        (f"{ROLLOUT}.temperature",),
        real(lambda value: 0 < value < inf),
        "set it above 0: at 0 all responses of a group are the same, and there is nothing to learn",
    ),
    Range(
        ("guards.stall_timeout", "guards.phase_timeout", "guards.reward_timeout"),
        real(lambda value: value > 0),
        "it must be a number above 0",
        null=True,
    ),
    Range(
        ("guards.max_failed_share",), real(lambda value: 0 < value <= 1), "it must be a number above 0 and at most 1"
    ),
    Range(
        (f"{ACTOR}.fsdp_config.model_dtype",), one_of(*MODEL_DTYPES), f"choose of {', '.join(MODEL_DTYPES)}", null=True
    ),
    Range(("guards.not_finite",), one_of("stop", "skip"), "choose stop or skip"),
    Range(
        ("guards.max_skipped_steps", f"{GROUPS}.max_num_gen_batches", f"{GROUPS}.carry_over.max_age"),
        whole(0),
        "it must be a whole number, at least 0",
    ),
    Range((f"{GROUPS}.max_inflight_gen_batches",), whole(1), "it must be a whole number, at least 1"),
    Range((f"{GROUPS}.on_budget",), one_of("train_smaller", "stop"), "choose train_smaller or stop"),
    Range(
        ("trainer.resume_mode",),
        one_of("auto", "disable", "resume_path"),
        "choose auto, disable or resume_path",
    ),
)


def sampling(config: DictConfig) -> Iterator[Problem]:
    """Sizes and rates of a command that samples."""
    yield from _outside(config, SAMPLING)


def training(config: DictConfig) -> Iterator[Problem]:
    """The other settings of a training."""
    yield from _outside(config, TRAINING)


def _outside(config: DictConfig, table: tuple[Range, ...]) -> Iterator[Problem]:
    for row in table:
        for key in row.keys:
            try:
                value = OmegaConf.select(config, key)
            except OmegaConfBaseException as error:  # an interpolation of what is not there
                yield Problem(f"{key} has no value: {first_line(error)}")
                continue
            if not (value is None and row.null) and not row.allows(value):
                yield Problem(f"{key}={_shown(value)}: {row.words}.")


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


RULES = (sampling, training)
