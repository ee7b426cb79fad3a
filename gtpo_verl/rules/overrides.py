"""Overrides that nothing reads in a run, each with the reason: a table of keys and of when they are idle."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import algorithm_of, algorithms
from gtpo_verl.algorithms.config import ShapingConfig
from gtpo_verl.config import written
from gtpo_verl.problems import Problem, warning
from gtpo_verl.rules.algorithm import READ_NORM_BY_STD
from gtpo_verl.rules.ranges import ACTOR, GROUPS, OVERLONG, ROLLOUT

CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Idle:
    """Keys, or prefixes of them, that nothing reads where `when` is true; `but`: such keys that are read."""

    keys: tuple[str, ...]
    reason: str
    when: Callable[[DictConfig], bool] = lambda config: True
    but: tuple[str, ...] = ()


def _is(key: str, *values: Any) -> Callable[[DictConfig], bool]:
    return lambda config: OmegaConf.select(config, key) in values


def _not(key: str, *values: Any) -> Callable[[DictConfig], bool]:
    return lambda config: OmegaConf.select(config, key) not in values


_TABLE = (
    Idle(
        ("algorithm.norm_adv_by_std_in_grpo",),
        f"only verl's estimators {' and '.join(READ_NORM_BY_STD)} read it",
        # false is an error (`algorithm.ignored`)
        lambda config: (
            config.algorithm.norm_adv_by_std_in_grpo and config.algorithm.adv_estimator not in READ_NORM_BY_STD
        ),
    ),
    Idle(
        ("algorithm.gamma", "algorithm.lam"),
        "the advantage estimator has neither a discount nor a trace",
        lambda config: algorithm_of(config) is not None,
    ),
    Idle(
        (f"{ACTOR}.policy_loss.seq_",),
        "only the policy loss grpo_s has a sequence ratio",
        _not(f"{ACTOR}.policy_loss.loss_mode", "grpo_s"),
    ),
    Idle(
        (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio_c"),
        f"grpo_s clips the sequence ratio: {ACTOR}.policy_loss.seq_clip_ratio_low and _high",
        _is(f"{ACTOR}.policy_loss.loss_mode", "grpo_s"),
    ),
    Idle(
        (f"{ACTOR}.clip_ratio",),
        "clip_ratio_low and clip_ratio_high are set",
        but=tuple(f"{ACTOR}.clip_ratio_{which}" for which in ("low", "high", "c")),
    ),
    Idle(
        ("data.gen_batch_size",),
        "with dynamic sampling verl fetches prompts one by one; the number in flight is set by "
        f"{GROUPS}.max_inflight_gen_batches",
        _is(f"{GROUPS}.enable", True),
    ),
    Idle(
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        f"micro-batches are sized by tokens ({ACTOR}.ppo_max_token_len_per_gpu)",
        _is(f"{ACTOR}.use_dynamic_bsz", True),
    ),
    Idle(
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
        f"micro-batches are sized by responses: set {ACTOR}.use_dynamic_bsz=true",
        _is(f"{ACTOR}.use_dynamic_bsz", False),
    ),
    Idle(
        (f"{CORRECTION}.rollout_",),
        "with algorithm.entropy.source=rollout, the ratio is taken to the rollout's log-probs, and the clip bounds it",
        _is("algorithm.entropy.source", "rollout"),
    ),
    Idle(
        (f"{CORRECTION}.rollout_",),
        f"the rollout's log-probs are not kept: {ROLLOUT}.calculate_log_probs=true keeps them",
        _not(f"{ROLLOUT}.calculate_log_probs", True),
    ),
    Idle((f"{CORRECTION}.loss_type",), f"verl reads {ACTOR}.policy_loss.rollout_correction.loss_type"),
    Idle((f"{ACTOR}.grad_clip",), f"verl reads {ACTOR}.optim.clip_grad"),
    Idle(("trainer.use_v1",), "this command trains with verl's V1 trainers alone"),
    Idle(("critic.",), "none of the estimators has a critic", _is("critic.enable", False), but=("critic.enable",)),
    Idle(("reward_model.", "custom_reward_function.", "sandbox_fusion."), "verl's current trainer reads reward.*"),
)
# What belongs to a switch: keys, or prefixes of them, that nothing reads where it has this value.
_SWITCHES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("algorithm.use_pf_ppo", False, ("algorithm.pf_ppo.",)),
    (f"{GROUPS}.enable", False, (f"{GROUPS}.",)),
    (f"{OVERLONG}.enable", False, (f"{OVERLONG}.", "reward.reward_kwargs.max_resp_len")),
    (f"{CORRECTION}.rollout_is", None, (f"{CORRECTION}.rollout_is_",)),
    (f"{CORRECTION}.rollout_rs", None, (f"{CORRECTION}.rollout_rs_",)),
    (f"{ACTOR}.use_kl_loss", False, (f"{ACTOR}.kl_loss_",)),
    ("algorithm.use_kl_in_reward", False, ("algorithm.kl_ctrl.", "algorithm.kl_penalty")),
    ("algorithm.guide.mode", "off", ("algorithm.guide.",)),
    ("algorithm.entropy.source", "actor", ("algorithm.entropy.check_every",)),
)
_ROWS = (*_TABLE, *(Idle(keys, f"{key}={written(off)}", _is(key, off), but=(key,)) for key, off, keys in _SWITCHES))


def without_effect(config: DictConfig, given: Sequence[str]) -> Iterator[Problem]:
    """Overrides without effect in this run; given: the user's."""
    table = (*_of_methods(config), *_ROWS) if given else ()
    for override in given:
        key = override.lstrip("+~").partition("=")[0]
        reason = next(
            (row.reason for row in table if key.startswith(row.keys) and key not in row.but and row.when(config)), None
        )
        if reason is not None:
            yield warning(f"{override} has no effect: {reason}.")


def _of_methods(config: DictConfig) -> Iterator[Idle]:
    """Settings of methods that this run does not train, and of a length penalty that it does not use."""
    trained = algorithm_of(config)
    label = trained.label if trained else f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    others = tuple(f"algorithm.{method.name}." for method in algorithms().values() if method is not trained)
    yield Idle(others, f"this run trains {label}")
    if trained and issubclass(trained.config, ShapingConfig):
        penalty = f"algorithm.{trained.name}.length_penalty"
        for name, kind in (("length_denominator", "soft"), ("gamma", "grop")):
            yield Idle((f"algorithm.{trained.name}.{name}",), f"only {penalty}={kind} reads it", _not(penalty, kind))
