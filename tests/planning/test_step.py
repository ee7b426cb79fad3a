"""The arithmetic of a step: the papers' numbers, verl's own micro-batches, and every size that does not divide."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.planning.parallel import parallelism
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.planning.step import Lengths, Step, step_of, token_micro_batches, total_steps

Run = Callable[..., DictConfig]


def plan_step(config: DictConfig, sampling_yield: float = 1.0) -> Step:
    return step_of(config, parallelism(config), Lengths(prompt=200, response=1000), sampling_yield)


def test_dapo_makes_sixteen_updates_of_512_responses(run: Run) -> None:
    """arXiv 2503.14476 §4.1: 512 prompts, 16 responses each, mini-batches of 512 responses, 16 gradient updates a
    rollout step."""
    step = plan_step(run("setting=paper_dapo_32b"))
    assert (step.prompts, step.responses, step.mini_batch_responses, step.updates) == (512, 8192, 512, 16)
    assert step.longest_sequence == 2048 + 20480


@pytest.mark.parametrize("size", ["7b", "32b"])
def test_gtpo_has_a_global_batch_of_128_prompts(run: Run, size: str) -> None:
    """arXiv 2508.04349, late text: global batch 128, G = 16; 512 responses an update is ours."""
    step = plan_step(run(f"setting=paper_gtpo_{size}"))
    assert (step.prompts, step.responses, step.mini_batch_responses, step.updates) == (128, 2048, 512, 4)
    assert step.longest_sequence == 2048 + 4096


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        (
            ["setting=paper_dapo_32b"],
            (128, 32, 1, 4, 32),
        ),  # GPUs, data ranks, tensor parallel, GPUs a sequence, rollout engines
        (["setting=paper_dapo_32b", "backend=megatron"], (128, 16, 8, 1, 32)),
        (["setting=paper_gtpo_32b"], (64, 64, 1, 1, 16)),
        (["setting=paper_gtpo_32b", "backend=megatron"], (64, 8, 8, 1, 16)),
        (["setting=paper_gtpo_7b"], (64, 64, 1, 1, 64)),
        (["setting=small_gpu"], (8, 8, 1, 1, 8)),
        (["setting=one_gpu"], (1, 1, 1, 1, 1)),
    ],
)
def test_gpus_of_every_setting(run: Run, overrides: list[str], groups: tuple[int, ...]) -> None:
    parallel = parallelism(run(*overrides))
    assert (parallel.gpus, parallel.data, parallel.tensor, parallel.split, parallel.replicas) == groups


def test_a_step_counts_epochs_micro_batches_and_ranks(run: Run) -> None:
    """64 prompts × 8 over 8 ranks, mini-batches of 32 prompts, micro-batches of 4: worked out by hand."""
    step = plan_step(run({"actor_rollout_ref.actor.ppo_epochs": 2}))
    assert step.responses == 512
    assert step.updates == 2 * 2
    assert step.micro_batches_per_update == 32 * 8 // 8 // 4
    assert step.micro_batches_per_step == 8 * 4
    assert step.old_log_prob_micro_batches == 64 // 8
    assert step.tokens == 512 * 1200


def test_dynamic_sampling_generates_what_the_yield_asks_for(run: Run) -> None:
    step = plan_step(run("setting=paper_dapo_32b"), sampling_yield=0.4)
    assert (step.generated_prompts, step.generated_responses) == (1280, 20480)
    assert step.sampling_overhead == pytest.approx(1.5)
    assert step.budget_prompts == 5120
    assert plan_step(run("setting=paper_dapo_32b")).sampling_overhead == 0


@pytest.mark.parametrize(
    "changes", [{"algorithm.entropy.source": "rollout"}, {"algorithm.rollout_correction.bypass_mode": True}]
)
def test_entropies_of_the_rollout_leave_the_pass_before_the_updates_out(run: Run, changes: dict[str, object]) -> None:
    assert plan_step(run(changes)).old_log_prob_micro_batches == 0
    assert plan_step(run()).old_log_prob_micro_batches > 0


@pytest.mark.parametrize(
    ("rows", "low", "high", "limit", "fits"),
    [(24, 5, 60, 128, True), (16, 30, 40, 1000, True), (7, 3, 9, 20, True), (12, 100, 128, 128, False)],
)
def test_micro_batches_by_tokens_are_those_that_verl_cuts(
    rows: int, low: int, high: int, limit: int, fits: bool
) -> None:
    """verl starts at the least number that holds all tokens, as planned, and takes more where sequences cannot be
    packed that tightly."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    lengths = torch.randint(low, high + 1, (rows,), generator=torch.Generator().manual_seed(rows))
    ids = torch.nested.as_nested_tensor([torch.zeros(int(n), dtype=torch.long) for n in lengths], layout=torch.jagged)
    batches, _ = rearrange_micro_batches(TensorDict({"input_ids": ids}, batch_size=rows), max_token_len=limit)
    planned = token_micro_batches(rows, lengths.double().mean().item(), limit)
    assert (len(batches) == planned) is fits
    assert len(batches) >= planned


def test_either_key_of_ulysses_is_read_as_verl_reads_it(run: Run) -> None:
    for key in ("fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"):
        parallel = parallelism(run({f"actor_rollout_ref.actor.{key}": 2}))
        assert (parallel.sequence, parallel.data) == (2, 4)


def test_the_steps_of_epochs_are_counted_in_the_data(run: Run, tmp_path: Path) -> None:
    epochs = {"trainer.total_training_steps": None, "trainer.total_epochs": 3}
    with pytest.raises(UserError, match=r"total_epochs=3: how many steps that is depends on data\.train_files"):
        make_plan(run("setting=small_gpu", epochs))
    pd.DataFrame({"prompt": range(200)}).to_parquet(tmp_path / "train.parquet")
    config = run("setting=small_gpu", epochs, {"data.train_files": str(tmp_path / "train.parquet")})
    assert (total_steps(config), make_plan(config).total_steps) == (9, 9)  # 200 prompts are 3 batches of 64
    assert total_steps(run("setting=small_gpu")) == 200
