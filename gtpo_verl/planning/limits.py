"""Ranges of the numbers that a run is made of: what is outside could only fail later, and less clearly."""

from math import inf

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError

_COUNTS = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.megatron.context_parallel_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.agent.num_workers",
    "trainer.total_epochs",
    "trainer.total_training_steps",
)
_LARGEST_COUNT = 10**9
_RESPONSES = ("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.val_kwargs.n")  # to a prompt
_MOST_RESPONSES = 65_536
_SHARES = (
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_p",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
)
_RATES = ("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.weight_decay")


def check_limits(config: DictConfig) -> None:
    """Check that counts are at least 1 and not absurd, and that shares and rates are in their ranges; null passes.

    Raises:
        UserError: the first key whose value is outside, with its range.
    """
    for key in _COUNTS:
        value = OmegaConf.select(config, key)
        if value is not None and not 1 <= value <= _LARGEST_COUNT:
            raise UserError(f"{key}={value}: it must be from 1 to {_LARGEST_COUNT:,}.")
    for key in _RESPONSES:
        value = OmegaConf.select(config, key)
        if value is not None and not 1 <= value <= _MOST_RESPONSES:
            raise UserError(f"{key}={value}: it must be from 1 to {_MOST_RESPONSES:,}.")
    for key in _SHARES:
        value = OmegaConf.select(config, key)
        if value is not None and not 0 < value <= 1:
            raise UserError(f"{key}={value}: it must be above 0 and at most 1.")
    for key in _RATES:
        value = OmegaConf.select(config, key)
        if value is not None and not 0 <= value < inf:
            raise UserError(f"{key}={value}: it must be a finite number that is not negative.")
