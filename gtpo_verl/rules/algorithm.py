"""Rules of the method: its settings, its objective, and settings beside it that it would not read."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import algorithm_of, algorithms
from gtpo_verl.algorithms.mixed_policy import GUIDED_LOSSES
from gtpo_verl.config import written
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.problems import Problem, note
from gtpo_verl.rules.ranges import ACTOR, GROUPS, OVERLONG
from gtpo_verl.runs.guards import read_bounds

# The estimators that get algorithm.norm_adv_by_std_in_grpo from verl's trainer; the functions of grpo_vectorized and
# gdpo have a parameter of this name, and the trainer does not pass it.
READ_NORM_BY_STD = ("grpo", "grpo_passk")
CLIPS_TOKENS = ("ce_gppo", "aspo", "dcpo_clip", "mixed")  # losses of ours, which do not fall back to `clip_ratio`


def method_settings(config: DictConfig) -> Iterator[Problem]:
    """`algorithm.<name>.*` of every method, and what is unusual about the one in use."""
    for name, entry in algorithms().items():
        try:
            _, unusual = entry.configure(config.algorithm.get(name) or {})
        except UserError as error:
            yield Problem(str(error))
            continue
        if config.algorithm.adv_estimator == entry.estimator:
            yield from (note(f"algorithm.{name}: {remark}") for remark in unusual)


def loss(config: DictConfig) -> Iterator[Problem]:
    """A loss of sequences needs the aggregation that averages over them and advantages of sequences, those of tokens a
    clip range, and a mean by a length needs the length.
    """
    actor, key = config.actor_rollout_ref.actor, f"{ACTOR}.policy_loss.loss_mode"
    loss, chosen, method = actor.policy_loss.loss_mode, actor.loss_agg_mode, algorithm_of(config)
    ours = (entry for entry in algorithms().values() if entry.loss == entry.name and entry.verl_estimator is None)
    needed = {entry.loss: entry.aggregation for entry in ours if entry.level == "sequence"}
    if chosen != needed.get(loss, chosen):
        yield Problem(
            f"{key}={loss} averages over sequences: set {ACTOR}.loss_agg_mode={needed[loss]} (it is {chosen})."
        )
    if (loss in needed or loss == "geo_mean") and method is not None and method.level == "token":
        yield Problem(
            f"{key}={loss} takes one advantage a response, and algorithm.adv_estimator={method.estimator} gives every "
            f"token its own: set {key}={method.loss}."
        )
    if chosen == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        yield Problem(
            f"{ACTOR}.loss_agg_mode={chosen} divides by the length of the longest response of each micro-batch: set "
            f"{ACTOR}.loss_scale_factor, for instance to data.max_response_length={config.data.max_response_length}."
        )
    guided = OmegaConf.select(config, "algorithm.guide.mode", default="off") != "off"
    if loss in CLIPS_TOKENS or (guided and GUIDED_LOSSES.get(loss) in CLIPS_TOKENS):
        if actor.clip_ratio_low is None or actor.clip_ratio_low > 1:
            yield Problem(f"{ACTOR}.clip_ratio_low must be from 0 to 1 with {key}={loss}.")
        if actor.clip_ratio_high is None:
            yield Problem(f"{ACTOR}.clip_ratio_high must be a number with {key}={loss}.")
    if loss in ("vanilla", *CLIPS_TOKENS) and not (actor.clip_ratio_c or 0) > 1:
        value = "null" if actor.clip_ratio_c is None else actor.clip_ratio_c
        yield Problem(
            f"{ACTOR}.clip_ratio_c={value} (dual clip) must be above 1 with {key}={loss}: set it to 1e9 to switch the "
            "dual clip off."
        )


def ignored(config: DictConfig) -> Iterator[Problem]:
    """Settings of verl that belong to other estimators, and that the one in use does not read or lacks."""
    settings, chosen = config.algorithm, algorithm_of(config)
    name = f"algorithm.adv_estimator={settings.adv_estimator}"
    if settings.use_kl_in_reward and chosen is not None and chosen.verl_estimator is None:
        yield Problem(
            f"algorithm.use_kl_in_reward=true has no effect with {name}, whose advantages come from verdicts and "
            f"entropies: set it to false. {ACTOR}.use_kl_loss=true puts a KL term into the loss of every algorithm."
        )
    if not settings.norm_adv_by_std_in_grpo and settings.adv_estimator not in READ_NORM_BY_STD:
        yield Problem(f"algorithm.norm_adv_by_std_in_grpo=false has no effect with {name}: set it to true.")
    needed = settings.adv_estimator == "gae"
    if config.critic.enable not in (None, needed):
        yield Problem(
            f"critic.enable={written(config.critic.enable)} does not go with {name}: "
            + ("gae needs a critic." if needed else "verl would train a critic that nothing reads.")
            + f" Set it to {written(needed)}."
        )
    if settings.use_pf_ppo and settings.adv_estimator != "gae":
        yield Problem(f"algorithm.use_pf_ppo=true has no effect with {name}: only gae reads it. Set it to false.")


def verdicts(config: DictConfig) -> Iterator[Problem]:
    """Every method needs verdicts, which a reward model alone does not give, and which can differ."""
    threshold, path = config.algorithm.correct_threshold, str(config.reward.custom_reward_function.path)
    if path.startswith("pkg://gtpo_verl.") and not 0 < threshold <= 1:
        yield Problem(
            f"algorithm.correct_threshold={threshold}: this verifier's `acc` is from 0 to 1, and "
            f"{'no' if threshold > 1 else 'every'} response would be right. Set it above 0 and at most 1."
        )
    if config.reward.reward_model.enable and not config.reward.custom_reward_function.path:
        yield Problem(
            "reward.reward_model.enable=true without a reward function gives scores and no verdict (`acc`): name a "
            "function that asks the reward model with reward.custom_reward_function.path=FILE.py and .name=FUNCTION."
        )
    if config.reward.reward_model.enable and not config.reward.reward_model.enable_resource_pool:
        yield Problem(
            "reward.reward_model.enable=true on the actor's devices gets no ground truth from verl, and gives no "
            "verdict: set reward.reward_model.enable_resource_pool=true, with its nnodes and n_gpus_per_node."
        )


def verifier(config: DictConfig) -> Iterator[Problem]:
    """A command that samples has a verifier to ask, and starts no reward model."""
    if config.reward.reward_model.enable:
        yield Problem("reward.reward_model.enable=true: this command needs a verifier, not a reward model.")


def overlong_penalty(config: DictConfig) -> Iterator[Problem]:
    """All algorithms get the same soft overlong penalty."""
    settings, manager, chosen = OmegaConf.select(config, OVERLONG), config.reward.reward_manager, algorithm_of(config)
    if not (settings and settings.enable):  # verl's own configuration has no such section
        name = chosen.name if chosen else ""
        if config.algorithm.get(name, {}).get("length_penalty") == "soft":
            yield Problem(
                f"algorithm.{name}.length_penalty=soft takes its lengths from {OVERLONG}, which is off: set "
                f"{OVERLONG}.enable=true, or algorithm.{name}.length_penalty=none."
            )
        return
    if (settings.get("penalty_factor") or 0) <= 0:
        yield Problem(
            f"{OVERLONG}.penalty_factor={settings.get('penalty_factor')}: it must be above 0; {OVERLONG}.enable=false "
            "switches the penalty off."
        )
    if manager.source == "register" and manager.name != "dapo":
        yield Problem(
            f"reward.reward_manager.name={manager.name} applies no overlong penalty: set it to dapo, or "
            f"{OVERLONG}.enable=false."
        )


def without_effect(config: DictConfig) -> Iterator[Problem]:
    """What of the method this run leaves without effect."""
    actor, chosen = config.actor_rollout_ref.actor, algorithm_of(config)
    if chosen is None:
        return
    objective = (actor.policy_loss.loss_mode, actor.loss_agg_mode)
    if chosen.verl_estimator is None and objective != (chosen.loss, chosen.aggregation):
        yield note(
            f"{chosen.label} is published with {ACTOR}.policy_loss.loss_mode={chosen.loss} and {ACTOR}.loss_agg_mode="
            f"{chosen.aggregation} (algo={chosen.name} has both): this run takes its advantages alone, with "
            f"{objective[0]} and {objective[1]}."
        )
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    if chosen.needs_several_updates and updates == 1 and not entropy_source(config).skips_actor_pass:
        yield note(
            f"{chosen.label} acts on ratios other than 1, and with one update a step all of them are 1: this run "
            f"trains with DAPO's loss, averaged as loss_agg_mode={actor.loss_agg_mode} says. A smaller "
            f"{ACTOR}.ppo_mini_batch_size makes several updates."
        )
    if chosen.trains_without_contrast and config.algorithm.filter_groups.enable:
        yield note(
            f"{chosen.label} trains on groups of one polarity too, and dynamic sampling removes them: set "
            f"{GROUPS}.enable=false."
        )
    penalised = OmegaConf.select(config, f"{OVERLONG}.enable")
    if chosen.trains_without_contrast and "rewards" not in chosen.needs and penalised:
        yield note(f"{chosen.label} reads the verdict alone: the overlong penalty has no effect on it.")


def dynamic_sampling(config: DictConfig) -> Iterator[Problem]:
    """Dynamic sampling, and groups that it carries over."""
    settings, mode = config.algorithm.filter_groups, config.trainer.v1.trainer_mode
    age = settings.carry_over.max_age
    if settings.enable and config.skip.rollout_tq.enable:
        yield Problem(
            "skip.rollout_tq.enable=true replays stored batches, which dynamic sampling would filter again: set "
            f"{GROUPS}.enable=false."
        )
    if age == 0 and settings.enable and settings.max_num_gen_batches and mode != "sync":
        yield note(
            f"trainer.v1.trainer_mode={mode} has no budget for dynamic sampling: {GROUPS}.max_num_gen_batches and "
            "on_budget have no effect, and prompts without contrast are replaced without limit. verl's filter compares "
            "`acc` as it is there, not whether it reaches algorithm.correct_threshold."
        )
    if age == 0:
        return
    if not settings.enable:
        yield Problem(
            f"{GROUPS}.carry_over.max_age={age} carries over what dynamic sampling leaves, and it is off: set "
            f"{GROUPS}.enable=true, or max_age=0."
        )
    if mode != "sync" or (config.trainer.v1.sampler.get("custom_sampler") or {}).get("path"):
        yield Problem(
            f"{GROUPS}.carry_over.max_age={age} needs trainer.v1.trainer_mode=sync with its own sampler: the "
            "asynchronous trainers keep their surplus already (trainer.v1.sampler.max_off_policy_threshold). Set "
            "max_age=0."
        )
    if not entropy_source(config).skips_actor_pass and config.algorithm.rollout_correction.rollout_is is None:
        yield note(
            f"{GROUPS}.carry_over: old log-probs of groups carried over are recomputed by the current actor, so the "
            "clipped ratio does not see their age; algorithm.rollout_correction.rollout_is=token corrects for it, and "
            "with algorithm.entropy.source=rollout the ratio is relative to the policy that generated them."
        )


def bounds(config: DictConfig) -> Iterator[Problem]:
    """Bounds of metrics."""
    entries = OmegaConf.to_container(config.guards.bounds, resolve=True)
    if not isinstance(entries, dict) or not all(entry is None or isinstance(entry, dict) for entry in entries.values()):
        yield Problem("guards.bounds: each entry is a section, such as NAME: {metric: actor/grad_norm, max: 10}.")
        return
    read_bounds({str(name): entry for name, entry in entries.items()})


RULES = (method_settings, loss, ignored, verdicts, overlong_penalty, without_effect, dynamic_sampling, bounds)
