"""Every size that is outside its range or does not divide is named, and all of them at once."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.problems import evaluate, refuse
from gtpo_verl.rules import ranges, sizes

Run = Callable[..., DictConfig]


def check_batches(config: DictConfig) -> None:
    refuse(evaluate(ranges.RULES, config) or evaluate([sizes.batches], config))


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ([], {"data.train_batch_size": 65}, "65 is not a multiple of"),
        ([], {"trainer.n_gpus_per_node": 6}, "does not divide over 6 data-parallel ranks"),
        ([], {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 5}, "32 responses, does not divide by"),
        ([], {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": None}, "is not set"),
        ([], {"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 7}, "32 responses, does not divide by"),
        # divides the batch of two mini-batches, and not the one that a step may end with
        ([], {"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64}, "32 responses, does not divide by"),
        (
            ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"],
            {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 7},
            "32 responses, does not divide by actor_rollout_ref.ref.",
        ),
        (
            [],
            {"actor_rollout_ref.rollout.tensor_model_parallel_size": 3},
            "one rollout engine takes 3 GPUs",
        ),
        (
            [],
            {"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 3},
            "ulysses_sequence_parallel_size=3",
        ),
        ([], {"actor_rollout_ref.actor.fsdp_config.fsdp_size": 3}, "fsdp_size=3"),
        (
            ["setting=small_gpu"],
            {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4000},
            "less than the longest sequence",
        ),
        (
            ["setting=small_gpu"],
            {"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 9},
            "log_prob_max_token_len_per_gpu=9",
        ),
        (["backend=megatron"], {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 3}, "3 × 1 × 1"),
        ([], {"trainer.n_gpus_per_node": 0}, "n_gpus_per_node=0: it must be from 1"),
        ([], {"actor_rollout_ref.rollout.tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0: it must be"),
        ([], {"actor_rollout_ref.actor.ppo_mini_batch_size": -1}, "ppo_mini_batch_size=-1"),
        ([], {"data.train_batch_size": 10**30}, "it must be from 1 to 1,000,000,000"),
        ([], {"trainer.total_training_steps": 0}, "total_training_steps=0"),
        ([], {"actor_rollout_ref.rollout.top_p": 3}, "top_p=3: it must be above 0 and at most 1"),
        ([], {"actor_rollout_ref.actor.optim.lr": -1}, "lr=-1: it must be a finite number"),
        ([], {"actor_rollout_ref.actor.optim.lr": float("nan")}, "lr=nan"),
        (["setting=paper_gtpo_32b", "backend=megatron"], {"trainer.nnodes": 3}, "over 3 data-parallel ranks"),
    ],
)
def test_what_does_not_divide_is_named(
    run: Run, overrides: list[str], changes: dict[str, object], message: str
) -> None:
    check_batches(run(*overrides))
    with pytest.raises(UserError, match=message):
        check_batches(run(*overrides, changes))


def test_all_that_does_not_divide_is_named_at_once(run: Run) -> None:
    wrong = {
        "data.train_batch_size": 100,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 5,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": None,
    }
    with pytest.raises(
        UserError, match=r"^3 settings do not fit: \(1\) data\.train_batch_size=100 .* \(2\) each rank's"
    ) as e:
        check_batches(run(wrong))
    assert "(3) actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu is not set" in str(e.value)
    devices = {"data.train_batch_size": 100, "actor_rollout_ref.rollout.tensor_model_parallel_size": 3}
    with pytest.raises(UserError, match=r"^2 settings do not fit: .*one rollout engine takes 3 GPUs"):
        check_batches(run(devices))
    outside = {"trainer.nnodes": 0, "actor_rollout_ref.rollout.n": 0, "data.train_batch_size": 100}
    with pytest.raises(UserError, match=r"^2 settings do not fit: \(1\) trainer\.nnodes=0: .* \(2\) .*rollout\.n=0: "):
        check_batches(run(outside))
