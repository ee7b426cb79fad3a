"""The arithmetic of one training step: prompts, responses, updates, micro-batches and tokens.

verl counts a mini-batch in prompts and a micro-batch in responses; a rollout step makes
train_batch_size / ppo_mini_batch_size × ppo_epochs optimizer updates. Nothing heavy is imported.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from gtpo_verl.config import files_of
from gtpo_verl.data.table import open_table
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.planning.parallel import Parallelism


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


def step_of(config: DictConfig, parallel: Parallelism, lengths: Lengths, sampling_yield: float) -> Step:
    """Work out one step of a composed run whose batch sizes divide; sampling_yield: share of generated groups with
    correct and wrong responses, in (0, 1], 1 without dynamic sampling.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    groups = config.algorithm.filter_groups
    prompts, n = config.data.train_batch_size, rollout.n
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
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


def total_steps(config: DictConfig) -> int | None:
    """Steps of a run; where its epochs say it, by the rows of its training data, of which verl may leave out overlong
    ones. None where these are not here.
    """
    trainer, files = config.trainer, config.data.train_files
    if trainer.total_training_steps is not None:
        return int(trainer.total_training_steps)
    if files is None or not all(Path(file).is_file() for file in files_of(files)):
        return None
    rows = sum(len(open_table(file)) for file in files_of(files))
    return rows // config.data.train_batch_size * int(trainer.total_epochs)
