"""The arithmetic of one training step: prompts, responses, updates, micro-batches and tokens.

verl counts a mini-batch in prompts and a micro-batch in responses; a rollout step makes
train_batch_size / ppo_mini_batch_size × ppo_epochs optimizer updates. Nothing heavy is imported.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError, refuse
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.limits import check_limits
from gtpo_verl.planning.parallel import Parallelism, parallelism


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt and of a response: assumed, given or measured."""

    prompt: float
    response: float

    @property
    def whole(self) -> float:
        """Tokens of prompt and response together."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Step:
    """One training step. Micro-batches are per rank; if they are sized by tokens, the minimum at the mean lengths.

    ``generated_*`` is the minimum that dynamic sampling generates at the given yield: whole rounds may add to it.
    """

    prompts: int
    responses_per_prompt: int
    responses: int
    mini_batch_prompts: int
    mini_batch_responses: int
    updates: int
    responses_per_rank: int
    micro_batches_per_update: int
    micro_batches_per_step: int
    old_log_prob_micro_batches: int
    tokens: int
    longest_sequence: int
    generated_prompts: int
    generated_responses: int
    generated_tokens: int
    sampling_yield: float
    sampling_overhead: float
    budget_prompts: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def check_batches(config: DictConfig) -> Parallelism:
    """Check that the batches of a run divide over mini-batches, ranks and micro-batches; returns the parallelism.

    Raises:
        UserError: every size that does not divide, and what to change; or every number outside its range.
    """
    refuse(batch_problems(config))
    return parallelism(config)


def batch_problems(config: DictConfig) -> list[str]:
    """The sizes that do not divide, in one sentence each; those that follow from another wrong size are not judged.

    Raises:
        UserError: numbers outside their range.
    """
    check_limits(config)
    found: list[str] = []
    batch, mini, n = config.data.train_batch_size, _mini_batch(config), config.actor_rollout_ref.rollout.n
    if batch % mini:
        found.append(
            f"data.train_batch_size={batch} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}: "
            "both count prompts, and their quotient is the number of updates per step."
        )
    try:
        parallel = parallelism(config)
    except UserError as error:
        return [*found, str(error)]
    per_rank, rest = divmod(mini * n, parallel.data)
    if rest:
        found.append(
            f"a mini-batch of {mini} prompts × {n} responses does not divide over {parallel.data} data-parallel ranks: "
            "change actor_rollout_ref.actor.ppo_mini_batch_size or actor_rollout_ref.rollout.n."
        )
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return [*found, *_token_limit_problems(config, parallel)]
    whole = None if rest or batch % mini else per_rank * _mini_batches(config)
    return [*found, *_micro_batch_problems(config, None if rest else per_rank, whole)]


def _token_limit_problems(config: DictConfig, parallel: Parallelism) -> Iterator[str]:
    """Micro-batches by tokens that cannot hold the longest sequence."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    for key in (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    ):
        limit = OmegaConf.select(config, key)
        if limit * parallel.split < longest:
            yield (
                f"{key}={limit}{f' × {parallel.split} GPUs per sequence' if parallel.split > 1 else ''} is less "
                f"than the longest sequence, data.max_prompt_length + data.max_response_length = {longest}: verl "
                "fails at the first one of that length."
            )


def _micro_batch_problems(config: DictConfig, mini_batch: int | None, batch: int | None) -> Iterator[str]:
    """Micro-batches by responses that do not divide a rank's share of the mini-batch or of the batch, where known."""
    for key, rows, what in (
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", mini_batch, "a mini-batch"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", batch, "the batch"),
    ):
        micro = OmegaConf.select(config, key)
        if micro is None:
            yield f"{key} is not set: set it, or actor_rollout_ref.actor.use_dynamic_bsz=true."
        elif rows is not None and rows % micro:
            yield f"each rank's share of {what}, {rows} responses, does not divide by {key}={micro}."


def _mini_batch(config: DictConfig) -> int:
    return int(config.actor_rollout_ref.actor.ppo_mini_batch_size)


def _mini_batches(config: DictConfig) -> int:
    return int(config.data.train_batch_size) // _mini_batch(config)


def step_of(config: DictConfig, parallel: Parallelism, lengths: Lengths, sampling_yield: float) -> Step:
    """Work out one step of a run whose batch sizes divide.

    Args:
        config: a composed run.
        parallel: from :func:`check_batches`.
        lengths: mean tokens.
        sampling_yield: share of generated groups with correct and wrong responses, in (0, 1]; 1 without dynamic
            sampling.
    """
    actor, rollout, groups = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.algorithm.filter_groups,
    )
    prompts, n = config.data.train_batch_size, rollout.n
    mini_batches = _mini_batches(config)
    updates = mini_batches * actor.ppo_epochs
    per_rank = actor.ppo_mini_batch_size * n // parallel.data
    whole_rank = prompts * n // parallel.data
    if actor.use_dynamic_bsz:
        micro = token_micro_batches(per_rank, lengths.whole, actor.ppo_max_token_len_per_gpu * parallel.split)
        old = token_micro_batches(whole_rank, lengths.whole, rollout.log_prob_max_token_len_per_gpu * parallel.split)
    else:
        micro = per_rank // actor.ppo_micro_batch_size_per_gpu
        old = whole_rank // rollout.log_prob_micro_batch_size_per_gpu
    generated = math.ceil(prompts / sampling_yield)
    budget = groups.max_num_gen_batches * prompts if groups.enable and groups.max_num_gen_batches else None
    return Step(
        prompts=prompts,
        responses_per_prompt=n,
        responses=prompts * n,
        mini_batch_prompts=actor.ppo_mini_batch_size,
        mini_batch_responses=actor.ppo_mini_batch_size * n,
        updates=updates,
        responses_per_rank=whole_rank,
        micro_batches_per_update=micro,
        micro_batches_per_step=micro * updates,
        old_log_prob_micro_batches=0 if skips_old_log_prob(config) else old,
        tokens=round(prompts * n * lengths.whole),
        longest_sequence=config.data.max_prompt_length + config.data.max_response_length,
        generated_prompts=generated,
        generated_responses=generated * n,
        generated_tokens=round(generated * n * lengths.response),
        sampling_yield=sampling_yield,
        sampling_overhead=generated / prompts - 1,
        budget_prompts=budget,
    )


def token_micro_batches(rows: int, mean_length: float, limit: int) -> int:
    """Fewest micro-batches of at most ``limit`` tokens for ``rows`` sequences; verl makes more if they do not pack."""
    return min(rows, math.ceil(rows * mean_length / limit))


def skips_old_log_prob(config: DictConfig) -> bool:
    """Whether the old-log-prob pass is skipped (verl's bypass mode)."""
    return entropy_source(config).skips_actor_pass or config.algorithm.rollout_correction.bypass_mode
