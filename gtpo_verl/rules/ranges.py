"""Ranges of single values in sections that have no dataclass of ours: what is outside could only fail later, and less
clearly. Rules of other modules calculate with these numbers, so they are asked first.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.errors import first_line
from gtpo_verl.planning.memory import ENGINE_DTYPES, MODEL_DTYPES
from gtpo_verl.problems import Problem
from gtpo_verl.runs.checkpoints import CONTENTS
from gtpo_verl.seeds import LARGEST

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
GROUPS = "algorithm.filter_groups"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
MOST = 10**9
MOST_RESPONSES = 65_536  # to a prompt
Table = tuple[tuple["Kind", str, str], ...]  # what values must be, their section, and their keys in it


@dataclass(frozen=True)
class Kind:
    """What a value must be: a test, the same in words, and whether null is allowed too."""

    allows: Callable[[Any], bool]
    words: str
    null: bool = False


def whole(least: float, most: float = 2**63 - 1) -> Callable[[Any], bool]:
    """A whole number from `least` to `most`, by default the largest of 64 bits."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def real(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    """A number that passes a test, and is not too large for a float."""

    def allows(value: Any) -> bool:
        try:
            return isinstance(value, int | float) and not isinstance(value, bool) and test(float(value))
        except OverflowError:
            return False

    return allows


def one_of(*names: str, null: bool = False) -> Kind:
    """One of these words."""
    listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) < 4 else f"of {', '.join(names)}"
    return Kind(lambda value: isinstance(value, str) and value in names, f"choose {listed}", null)


_SEED = Kind(whole(0, LARGEST), f"it must be a whole number from 0 to {LARGEST}")
_SIZE = Kind(whole(1, MOST), f"it must be from 1 to {MOST:,}")
_SIZE_IF_ANY = replace(_SIZE, null=True)
_RESPONSES = Kind(whole(1, MOST_RESPONSES), f"it must be from 1 to {MOST_RESPONSES:,}")
_SHARE = Kind(real(lambda value: 0 < value <= 1), "it must be above 0 and at most 1")
_RATE = Kind(real(lambda value: 0 <= value < inf), "it must be a finite number that is not negative", null=True)
_FINITE = Kind(real(math.isfinite), "it must be a finite number", null=True)
_POSITIVE = real(lambda value: 0 < value < inf)
_ABOVE_0 = Kind(_POSITIVE, "it must be a finite number above 0", null=True)
_SECONDS = Kind(real(lambda value: value > 0), "it must be a number above 0", null=True)
_COUNT = Kind(whole(0), "it must be a whole number, at least 0")
_CONTENTS = Kind(
    lambda value: isinstance(value, ListConfig) and all(each in CONTENTS for each in value),
    f"it must be a list of {', '.join(CONTENTS[:-1])} and {CONTENTS[-1]}",
)
# Of every command that samples; the settings of a recorded run are among them.
SAMPLING: Table = (
    (_SEED, "", "seed"),
    (_SIZE, "trainer", "nnodes n_gpus_per_node"),
    (_SIZE, "data", "train_batch_size max_prompt_length max_response_length"),
    (Kind(lambda value: isinstance(value, str), "it must name a column"), "data", "prompt_key reward_fn_key"),
    (_SIZE, ACTOR, "ppo_mini_batch_size ppo_epochs"),
    (_SIZE, ROLLOUT, "tensor_model_parallel_size data_parallel_size pipeline_model_parallel_size max_num_seqs"),
    (_SIZE, "reward.reward_kwargs", "max_resp_len"),
    (_SIZE, "reward", "num_workers"),
    (_SIZE_IF_ANY, ACTOR, "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu ulysses_sequence_parallel_size"),
    (_SIZE_IF_ANY, ROLLOUT, "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu"),
    (_SIZE_IF_ANY, ROLLOUT, "max_model_len max_num_batched_tokens agent.num_workers"),
    (_SIZE_IF_ANY, f"{ROLLOUT}.checkpoint_engine", "update_weights_bucket_megabytes"),
    (_SIZE_IF_ANY, "trainer", "total_training_steps"),
    (_RESPONSES, ROLLOUT, "n val_kwargs.n"),
    (_SHARE, ROLLOUT, "top_p val_kwargs.top_p gpu_memory_utilization"),
    (replace(_RATE, null=False), ACTOR, "optim.lr optim.weight_decay"),
    (_RATE, ACTOR, "clip_ratio clip_ratio_low clip_ratio_high"),
    (_RATE, ROLLOUT, "val_kwargs.temperature"),
    (_RATE, OVERLONG, "penalty_factor"),
    (replace(_FINITE, null=False), "algorithm", "correct_threshold"),
    (_FINITE, OVERLONG, "len"),
    (_FINITE, ROLLOUT, "nnodes"),
    (one_of(*ENGINE_DTYPES), ROLLOUT, "dtype"),
    (Kind(whole(-inf), "it must be a number of steps"), "trainer", "test_freq save_freq"),
    (Kind(whole(0), "it must be a number of steps, or 0 for never"), "algorithm", "entropy.check_every"),
)
_HOT = "set it above 0: at 0 all responses of a group are the same, and there is nothing to learn"
# Of a training alone.
TRAINING: Table = (
    (Kind(_POSITIVE, _HOT), ROLLOUT, "temperature"),
    (_FINITE, ACTOR, "entropy_coeff policy_loss.clip_cov_lb policy_loss.clip_cov_ub"),
    (_RATE, ACTOR, "kl_loss_coef policy_loss.clip_cov_ratio policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef"),
    (_ABOVE_0, ACTOR, "loss_scale_factor"),
    (Kind(whole(-1), "it must be a whole number, -1 for all"), "data", "train_max_samples val_max_samples"),
    (replace(_SEED, null=True), "data", "seed"),
    (_SIZE, "trainer", "total_epochs"),
    (Kind(lambda value: isinstance(value, str | ListConfig), "it must be a list of loggers"), "trainer", "logger"),
    (_CONTENTS, f"{ACTOR}.checkpoint", "save_contents load_contents"),
    (_SECONDS, "guards", "stall_timeout phase_timeout reward_timeout"),
    (_SHARE, "guards", "max_failed_share"),
    (one_of("stop", "skip"), "guards", "not_finite"),
    (_COUNT, "guards", "max_skipped_steps"),
    (_COUNT, GROUPS, "max_num_gen_batches carry_over.max_age"),
    (Kind(whole(1), "it must be a whole number, at least 1"), GROUPS, "max_inflight_gen_batches"),
    (one_of("train_smaller", "stop"), GROUPS, "on_budget"),
    (one_of("auto", "disable", "resume_path"), "trainer", "resume_mode"),
    (one_of("sync", "colocate_async", "separate_async"), "trainer.v1", "trainer_mode"),
    (_SIZE_IF_ANY, "trainer.v1.sampler", "max_off_policy_threshold"),
    (one_of("drop", "wait"), "trainer.v1.sampler", "max_off_policy_strategy"),
    (one_of("fsdp", "fsdp2", "megatron"), ACTOR, "strategy"),
)
# Of the actor's engine, in its own section.
_FSDP: Table = (
    (_SIZE, f"{ACTOR}.fsdp_config", "ulysses_sequence_parallel_size"),
    (Kind(whole(-1, MOST), f"it must be -1, for all GPUs, or from 1 to {MOST:,}"), f"{ACTOR}.fsdp_config", "fsdp_size"),
    (one_of(*MODEL_DTYPES, null=True), f"{ACTOR}.fsdp_config", "model_dtype"),
    (Kind(real(lambda value: value > 0), "it must be above 0; 1e9 clips nothing"), ACTOR, "optim.clip_grad"),
    (one_of("constant", "cosine"), ACTOR, "optim.lr_scheduler_type"),
)
_MEGATRON: Table = (
    (_SIZE, f"{ACTOR}.megatron", "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
    (one_of(*MODEL_DTYPES), f"{ACTOR}.megatron", "dtype"),
)


def _engine(config: DictConfig) -> Iterator[Problem]:
    """The section of the actor's engine is there, with sizes and a type."""
    strategy = config.actor_rollout_ref.actor.strategy
    name, table = ("megatron", _MEGATRON) if strategy == "megatron" else ("fsdp_config", _FSDP)
    if config.actor_rollout_ref.actor.get(name):
        yield from _outside(table, config)
    else:
        yield Problem(
            f"{ACTOR}.strategy={_shown(strategy)} needs the section {ACTOR}.{name}, which is not there: choose "
            "backend=fsdp or backend=megatron, which have their own."
        )


def _outside(table: Table, config: DictConfig) -> Iterator[Problem]:
    """Values of a configuration that are not what the table says."""
    for kind, section, names in table:
        for name in names.split():
            key = f"{section}.{name}" if section else name
            try:
                value = OmegaConf.select(config, key)
            except OmegaConfBaseException as error:  # an interpolation of what is not there
                yield Problem(f"{key} has no value: {first_line(error)}")
                continue
            if not (value is None and kind.null) and not kind.allows(value):
                yield Problem(f"{key}={_shown(value)}: {kind.words}.")


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


sampling = partial(_outside, SAMPLING)
RULES = (sampling, partial(_outside, TRAINING), _engine)
