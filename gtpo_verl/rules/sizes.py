"""Rules of sizes: groups, batches over ranks, lengths, and the servers and updates of `separate_async`."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import written
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.planning.parallel import Parallelism, parallelism
from gtpo_verl.problems import Problem
from gtpo_verl.rules.ranges import ACTOR, OVERLONG, ROLLOUT

PROMPT_AND_RESPONSE = "data.max_prompt_length + data.max_response_length"


def longest_sequence(config: DictConfig) -> int:
    """Tokens of the longest prompt and response together."""
    return int(config.data.max_prompt_length + config.data.max_response_length)


def group(config: DictConfig) -> Iterator[Problem]:
    """A group has responses to compare."""
    if config.actor_rollout_ref.rollout.n < 2:
        yield Problem(
            f"{ROLLOUT}.n={config.actor_rollout_ref.rollout.n}: a group needs at least two responses to be compared."
        )


def batches(config: DictConfig) -> Iterator[Problem]:
    """Batches divide over mini-batches, ranks and micro-batches; what follows from another wrong size is not judged."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    of_rollout = config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
    if of_rollout != actor.use_dynamic_bsz:
        yield Problem(
            f"{ROLLOUT}.log_prob_use_dynamic_bsz={written(of_rollout)} differs from {ACTOR}.use_dynamic_bsz="
            f"{written(actor.use_dynamic_bsz)}: verl takes one for both. Remove the override."
        )
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if batch % mini:
        yield Problem(
            f"data.train_batch_size={batch} is not a multiple of {ACTOR}.ppo_mini_batch_size={mini}: both count "
            "prompts, and their quotient is the number of updates per step."
        )
    parallel = parallelism(config)  # whose UserError is a problem too
    per_rank, rest = divmod(mini * n, parallel.data)
    if rest:
        yield Problem(
            f"a mini-batch of {mini} prompts × {n} responses does not divide over {parallel.data} data-parallel ranks: "
            f"change {ACTOR}.ppo_mini_batch_size or {ROLLOUT}.n."
        )
    if actor.use_dynamic_bsz:
        yield from _token_limits(config, parallel)
        return
    yield from _micro_batches(config, None if rest else per_rank)


def _token_limits(config: DictConfig, parallel: Parallelism) -> Iterator[Problem]:
    """Micro-batches by tokens hold the longest sequence."""
    longest = longest_sequence(config)
    for key in (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"):
        limit = OmegaConf.select(config, key)
        if limit is None:
            yield Problem(f"{key} is not set: set it to {longest} or more, or {ACTOR}.use_dynamic_bsz=false.")
        elif limit * parallel.split < longest:
            yield Problem(
                f"{key}={limit}{f' × {parallel.split} GPUs per sequence' if parallel.split > 1 else ''} is less "
                f"than the longest sequence, {PROMPT_AND_RESPONSE} = {longest}: verl fails at the first one of that "
                "length."
            )


def _micro_batches(config: DictConfig, rows: int | None) -> Iterator[Problem]:
    """Micro-batches by responses divide a rank's share of a mini-batch, where it is known: a step may end with one."""
    keys = [f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"]
    of_reference = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if of_reference and not config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz:
        keys.append("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu")
    for key in keys:
        micro = OmegaConf.select(config, key)
        if micro is None:
            yield Problem(f"{key} is not set: set it, or {ACTOR}.use_dynamic_bsz=true.")
        elif rows is not None and rows % micro:
            yield Problem(f"each rank's share of a mini-batch, {rows} responses, does not divide by {key}={micro}.")


def separate_servers(config: DictConfig) -> Iterator[Problem]:
    """What `separate_async` asserts when the trainer is made, minutes after the start."""
    if config.trainer.v1.trainer_mode != "separate_async":
        return
    for name in ("nnodes", "n_gpus_per_node"):
        value = config.actor_rollout_ref.rollout[name]
        if value is None or value < 1:
            yield Problem(
                f"{ROLLOUT}.{name}={value}: trainer.v1.trainer_mode=separate_async has rollout servers on devices of "
                "their own; say how many, besides those of trainer."
            )
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    updates = config.trainer.v1.separate_async.parameter_sync_step
    if batch % mini == 0 and updates * mini != batch:
        yield Problem(
            f"trainer.v1.separate_async.parameter_sync_step={updates}: it must be {batch // mini}, the updates of a "
            f"step (data.train_batch_size / {ACTOR}.ppo_mini_batch_size)."
        )


def offload(config: DictConfig) -> Iterator[Problem]:
    """`separate_async` saves the weights before each update, for old log-probs: FSDP's must not be on the CPU then."""
    actor, updates = config.actor_rollout_ref.actor, config.trainer.v1.separate_async.parameter_sync_step
    if config.trainer.v1.trainer_mode != "separate_async" or updates == 1 or actor.strategy == "megatron":
        return
    reads_actor = not entropy_source(config).skips_actor_pass or config.algorithm.entropy.check_every > 0
    offloaded = actor.fsdp_config.param_offload or actor.fsdp_config.offload_policy
    if offloaded and reads_actor and config.trainer.device != "cpu":  # `cpu_platform` copies
        yield Problem(
            f"{ACTOR}.fsdp_config.param_offload or offload_policy does not go with {updates} updates a step of "
            "trainer.v1.trainer_mode=separate_async: verl saves weights that are on the CPU without a copy, and would "
            "lose all updates but the last. Switch it off, or take old log-probs from the rollout "
            "(algorithm.entropy.source=rollout with check_every=0)."
        )


def lengths(config: DictConfig) -> Iterator[Problem]:
    """The engine holds the longest sequence, and the overlong penalty grows up to the limit of a response."""
    reward, limit = config.reward.get("reward_kwargs") or {}, config.data.max_response_length
    overlong, longest = reward.get("overlong_buffer_cfg") or {}, longest_sequence(config)
    engine = config.actor_rollout_ref.rollout.max_model_len
    if engine is not None and engine < longest:
        yield Problem(
            f"{ROLLOUT}.max_model_len={engine} is shorter than {PROMPT_AND_RESPONSE} = {longest}: raise it, or set it "
            "to null."
        )
    tokens, requests = (config.actor_rollout_ref.rollout[key] for key in ("max_num_batched_tokens", "max_num_seqs"))
    if tokens is not None and tokens < requests:
        yield Problem(
            f"{ROLLOUT}.max_num_batched_tokens={tokens} is below max_num_seqs={requests}, which vLLM refuses: raise "
            "it, or lower the other."
        )
    if not overlong.get("enable"):
        return
    of_reward, length = reward.get("max_resp_len"), overlong.get("len")
    if of_reward != limit:
        why = (
            "the full penalty would never be reached"
            if (of_reward or 0) > limit
            else "verl's DAPO reward would go beyond the full penalty, and GTPO's and GRPO-S's would not"
        )
        yield Problem(
            f"reward.reward_kwargs.max_resp_len={of_reward} differs from data.max_response_length={limit}: {why}. It "
            "follows the limit in `gtpo-verl train` unless it is overridden; set it to the same."
        )
    if not isinstance(length, int) or not 0 < length <= limit:
        yield Problem(
            f"{OVERLONG}.len={length} must be a whole number from 1 to data.max_response_length={limit}: the tokens "
            "before the limit over which the penalty grows."
        )


RULES = (group, batches, separate_servers, offload, lengths)
