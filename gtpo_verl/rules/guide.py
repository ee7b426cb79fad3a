"""Rules of a run with rows of a guiding policy: who may have them, and what divides by their probabilities."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import algorithm_of
from gtpo_verl.algorithms.mixed_policy import GUIDED_LOSSES, GuideConfig, guide_config, has_rule
from gtpo_verl.config import written
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.problems import Problem
from gtpo_verl.rules.ranges import ACTOR, ROLLOUT

_WHOLE = "the guide's probabilities are those of the whole distribution"
# What a run with a guide needs, and why: (the guide's setting, key, value, reason).
_NEEDED: tuple[tuple[str, str, Any, str], ...] = (
    ("mode", "trainer.v1.trainer_mode", "sync", "the guide's rows have no weight version"),
    ("mode", "reward.reward_model.enable", False, "verdicts are needed in the rollout"),
    ("mode", "distillation.enabled", False, "it has a loss of its own"),
    ("mode", f"{ROLLOUT}.enable_rollout_routing_replay", False, "no rollout has routed the guide's tokens"),
    ("mode", f"{ROLLOUT}.agent.agent_loop_manager_class", None, "this project's own gives rows to the guide"),
    ("mode", "algorithm.use_kl_in_reward", False, "its KL term would be of the denominators of the guide's ratios"),
    ("ratio", f"{ROLLOUT}.top_p", 1.0, _WHOLE),
    ("ratio", f"{ROLLOUT}.top_k", -1, _WHOLE),
    ("ratio", f"{ROLLOUT}.calculate_log_probs", True, _WHOLE),
    ("source", f"{ROLLOUT}.name", "vllm", "the guide runs in vLLM"),
    ("source", f"{ROLLOUT}.logprobs_mode", "processed_logprobs", "log-probs are at the training temperature"),
)


def guide(config: DictConfig) -> Iterator[Problem]:
    """The guide's own settings, and all that a run must be to have its rows."""
    settings = guide_config(config.algorithm.guide)
    if settings.mode != "off":
        yield from _method(config, settings)
        yield from _run(config, settings)


def _method(config: DictConfig, guide: GuideConfig) -> Iterator[Problem]:
    """Advantages and loss say what a guide's row is to them."""
    key, estimator = f"algorithm.guide.mode={guide.mode}", config.algorithm.adv_estimator
    loss, chosen = config.actor_rollout_ref.actor.policy_loss.loss_mode, algorithm_of(config)
    if loss not in GUIDED_LOSSES:
        yield Problem(
            f"{key} does not go with {ACTOR}.policy_loss.loss_mode={loss}, which has no rule for the guide's rows: "
            f"choose one of {', '.join(GUIDED_LOSSES)}."
        )
        return
    if chosen is None or chosen.guide is None:
        yield Problem(
            f"{key} does not go with algorithm.adv_estimator={estimator}, which has no rule for the guide's rows: "
            "those of algo=dapo_mixed, gtpo and grpo_s have one."
        )
        return
    if not has_rule(chosen, guide):
        yield Problem(
            f"algorithm.guide.adv_scope={guide.adv_scope} does not go with algorithm.adv_estimator={estimator}, whose "
            "advantages are over all rows of a group: set it to union."
        )
    if guide.in_entropy_stats and (chosen.guide == "alike" or "old_log_probs" in chosen.needs):
        why = "compares no tokens" if chosen.guide == "alike" else "reads old log-probs, which guide rows lack"
        yield Problem(
            f"algorithm.guide.in_entropy_stats=true does not go with algorithm.adv_estimator={estimator}, which {why}: "
            "set it to false."
        )


def _run(config: DictConfig, guide: GuideConfig) -> Iterator[Problem]:
    key, n = f"algorithm.guide.mode={guide.mode}", config.actor_rollout_ref.rollout.n
    if guide.reserved >= n:
        yield Problem(
            f"{key} may give {guide.reserved} of the {ROLLOUT}.n={n} responses of a group to the guide, and the "
            "policy's own decide whether: lower algorithm.guide.n_off or n_zero, or raise n."
        )
    in_use = {"mode": True, "ratio": guide.ratio == "phi", "source": guide.served}
    for setting, name, needed, why in _NEEDED:
        value = OmegaConf.select(config, name, default=needed)
        if in_use[setting] and value != needed:
            otherwise = ", or algorithm.guide.ratio=one and algorithm.guide.clip=none" if setting == "ratio" else ""
            yield Problem(
                f"algorithm.guide.{setting}={getattr(guide, setting)} does not go with {name}={value} ({why}): set "
                f"{name}={written(needed)}{otherwise}."
            )
    if entropy_source(config).skips_actor_pass:
        yield Problem(
            f"{key} does not go with algorithm.entropy.source=rollout (no rollout has measured the guide's rows): set "
            "it to both or actor."
        )


RULES = (guide,)
