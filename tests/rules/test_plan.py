"""Known problems are found, and nothing is found in a configuration without one."""

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms.registry import algorithms
from gtpo_verl.config import choices
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.problems import errors_of
from gtpo_verl.rules.plan import problems

Run = Callable[..., DictConfig]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def messages(config: DictConfig, level: str, overrides: list[str] | None = None, **given: float) -> list[str]:
    found = problems(config, make_plan(config, given=given), overrides or ())
    return [problem.message for problem in found if problem.severity == level]


@pytest.mark.parametrize("setting", [name for name in choices("setting") if name not in ("default", "quickstart")])
@pytest.mark.parametrize("backend", choices("backend"))
@pytest.mark.slow
def test_settings_that_ship_have_nothing_wrong_and_fit_80_gb(run: Run, setting: str, backend: str) -> None:
    config = run(f"setting={setting}", f"backend={backend}")
    assert [problem for problem in problems(config, make_plan(config)) if problem.severity != "note"] == []


def test_one_gpu_fits_a_card_of_24_gb(run: Run) -> None:
    config = run("setting=one_gpu")
    assert errors_of(problems(config, make_plan(config, gpu="a10"))) == []


CASES: list[tuple[list[str], dict[str, Any], str, str]] = [
    (
        ["setting=paper_gtpo_7b"],
        {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 8},
        "error",
        "the model's 28 attention heads",
    ),
    (
        ["setting=paper_gtpo_32b", "backend=megatron"],
        {f"{ACTOR}.megatron.tensor_model_parallel_size": 16},
        "error",
        "40 attention heads",
    ),
    (
        ["setting=small_gpu", "backend=megatron"],
        {f"{ACTOR}.megatron.tensor_model_parallel_size": 4},
        "error",
        "2 key-value heads",
    ),
    (["setting=small_gpu"], {f"{ROLLOUT}.tensor_model_parallel_size": 8}, "error", "the model's 12 attention heads"),
    (
        ["setting=paper_gtpo_7b", "backend=megatron"],
        {f"{ACTOR}.megatron.pipeline_model_parallel_size": 8},
        "error",
        "28 layers",
    ),
    (
        ["setting=paper_dapo_32b"],
        {"actor_rollout_ref.model.use_remove_padding": False},
        "error",
        "sequence parallelism needs packed sequences",
    ),
    (
        ["setting=paper_gtpo_7b"],
        {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-Math-7B"},
        "error",
        "exceeds the 4096 positions",
    ),
    (["setting=paper_gtpo_7b"], {f"{ROLLOUT}.max_model_len": 200000}, "error", "vLLM rejects it"),
    (["setting=paper_gtpo_7b"], {f"{ROLLOUT}.max_model_len": None}, "warning", "max_model_len is not set"),
    (
        ["setting=paper_gtpo_7b"],
        {f"{ACTOR}.entropy_from_logits_with_chunking": False},
        "warning",
        "the entropies of a whole micro-batch",
    ),
    (["setting=paper_gtpo_7b"], {f"{ACTOR}.ppo_mini_batch_size": 128}, "note", "one update per step"),
    (["setting=paper_gtpo_7b"], {f"{ROLLOUT}.gpu_memory_utilization": 0.98}, "error", "generate needs about"),
    (
        ["setting=paper_gtpo_32b"],
        {f"{ROLLOUT}.tensor_model_parallel_size": 1},
        "error",
        "less than one sequence of 6,144",
    ),
    (
        ["setting=paper_gtpo_32b"],
        {"trainer.nnodes": 1, f"{ACTOR}.ppo_max_token_len_per_gpu": 24576},
        "error",
        "update needs about",
    ),
]


@pytest.mark.parametrize(("overrides", "changes", "level", "message"), CASES, ids=[case[3] for case in CASES])
def test_each_finding_is_found_where_it_is_and_not_elsewhere(
    run: Run, overrides: list[str], changes: dict[str, Any], level: str, message: str
) -> None:
    assert not any(message in found for found in messages(run(*overrides), level))
    assert any(message in found for found in messages(run(*overrides, changes), level))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (
            {"trainer.nnodes": 1, f"{ACTOR}.ppo_max_token_len_per_gpu": 98304},
            f"lower {ACTOR}.ppo_max_token_len_per_gpu",
        ),
        (
            {
                f"{ACTOR}.use_dynamic_bsz": False,
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": 32,
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
            },
            f"lower {ACTOR}.ppo_micro_batch_size_per_gpu",
        ),
        ({"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1}, f"set {ACTOR}.fsdp_config.offload_policy=true"),
    ],
)
def test_the_remedy_makes_the_update_smaller(run: Run, changes: dict[str, Any], remedy: str) -> None:
    """The setting that is named counts here, and what the plan says of the memory follows it."""
    config = run("setting=paper_gtpo_7b", changes)
    (found,) = [text for text in messages(config, "error") if text.startswith("update needs")]
    assert remedy in found
    key = remedy.split()[1].partition("=")[0]
    value = True if remedy.startswith("set") else OmegaConf.select(config, key) // 4
    total = [
        sum(make_plan(each).memory.phases["update"].values())
        for each in (config, run("setting=paper_gtpo_7b", changes | {key: value}))
    ]
    assert total[1] < 0.8 * total[0]


def test_more_ranks_than_key_value_heads_repeat_them_where_the_engine_does(run: Run) -> None:
    """Ulysses and vLLM repeat key-value heads over more ranks than there are heads; Megatron does not."""
    config = run("setting=small_gpu", {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 4})
    assert messages(config, "error") == []


def test_a_yield_below_the_budget_is_a_smaller_batch_or_the_end(run: Run) -> None:
    config = run("setting=paper_gtpo_7b")
    assert messages(config, "warning", sampling_yield=0.1) == []
    found = messages(config, "warning", sampling_yield=0.05)
    assert len(found) == 1
    assert "trains on about 64 of 128 groups" in found[0]
    stop = run("setting=paper_gtpo_7b", {"algorithm.filter_groups.on_budget": "stop"})
    assert "the run stops" in messages(stop, "warning", sampling_yield=0.05)[0]
    unlimited = run("setting=paper_gtpo_7b", {"algorithm.filter_groups.max_num_gen_batches": 0})
    assert messages(unlimited, "warning", sampling_yield=0.05) == []


IDLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # override; what makes it idle; what makes it count
    ("algorithm.gtpo.alpha2=0.2", {"algorithm.adv_estimator": "grpo"}, {"algorithm.adv_estimator": "gtpo"}),
    ("algorithm.grpo_s.beta2=0.2", {"algorithm.adv_estimator": "gtpo"}, {"algorithm.adv_estimator": "grpo_s"}),
    (
        "algorithm.norm_adv_by_std_in_grpo=true",
        {"algorithm.adv_estimator": "gtpo"},
        {"algorithm.adv_estimator": "grpo"},
    ),
    (
        f"{ACTOR}.policy_loss.seq_clip_ratio_low=0.1",
        {},
        {f"{ACTOR}.policy_loss.loss_mode": "grpo_s", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    ),
    (
        f"{ACTOR}.clip_ratio_high=0.3",
        {f"{ACTOR}.policy_loss.loss_mode": "grpo_s", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
        {},
    ),
    ("algorithm.filter_groups.max_num_gen_batches=3", {"algorithm.filter_groups.enable": False}, {}),
    ("data.gen_batch_size=512", {}, {"algorithm.filter_groups.enable": False}),
    (
        "reward.reward_kwargs.overlong_buffer_cfg.len=512",
        {"reward.reward_kwargs.overlong_buffer_cfg.enable": False},
        {},
    ),
    ("reward.reward_kwargs.max_resp_len=16384", {"reward.reward_kwargs.overlong_buffer_cfg.enable": False}, {}),
    ("algorithm.gtpo.length_denominator=max", {"algorithm.gtpo.length_penalty": "grop"}, {}),
    ("algorithm.gamma=0.99", {}, {"algorithm.adv_estimator": "gae"}),
    ("algorithm.rollout_correction.rollout_rs=token_k1", {f"{ROLLOUT}.calculate_log_probs": False}, {}),
    ("critic.optim.lr=1e-5", {}, {"algorithm.adv_estimator": "gae", "critic.enable": True}),
    ("algorithm.pf_ppo.weight_pow=3", {}, {"algorithm.use_pf_ppo": True, "algorithm.adv_estimator": "gae"}),
    ("algorithm.rollout_correction.rollout_is_threshold=3", {}, {"algorithm.rollout_correction.rollout_is": "token"}),
    (
        "algorithm.rollout_correction.rollout_rs_threshold=3",
        {},
        {"algorithm.rollout_correction.rollout_rs": "token_k1"},
    ),
    (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        {},
        {f"{ACTOR}.use_dynamic_bsz": False, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4},
    ),
    (
        f"{ACTOR}.ppo_max_token_len_per_gpu=20000",
        {
            f"{ACTOR}.use_dynamic_bsz": False,
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4,
        },
        {},
    ),
    (
        "+algorithm.dapo.x=1",
        {"algorithm.adv_estimator": "gtpo"},
        {"algorithm.adv_estimator": "grpo", f"{ACTOR}.policy_loss.loss_mode": "vanilla"},
    ),
    (f"{ACTOR}.kl_loss_coef=0.01", {}, {f"{ACTOR}.use_kl_loss": True}),
    ("algorithm.kl_ctrl.kl_coef=0.01", {}, {"algorithm.use_kl_in_reward": True}),
    ("algorithm.rollout_correction.rollout_is=token", {"algorithm.entropy.source": "rollout"}, {}),
]


def test_what_a_plan_of_another_trainer_mode_leaves_out_is_said(run: Run) -> None:
    plan = "setting=paper_gtpo_7b"
    assert not any("more GPUs" in message for message in messages(run(plan), "warning"))
    changes = {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.nnodes": 2, f"{ROLLOUT}.n_gpus_per_node": 8}
    assert any("on 2 × 8 more GPUs" in message for message in messages(run(plan, changes), "warning"))
    for mode, said in (
        ("colocate_async", "does not wait for unfinished responses"),
        ("mine", "mine is unknown to this planner"),
    ):
        changes = {"trainer.v1.trainer_mode": mode}
        (found,) = [item for item in messages(run(plan, changes), "warning") if f"trainer_mode={mode}" in item]
        assert said in found
        assert "more GPUs" not in found


def test_the_pass_that_compares_is_mentioned_where_the_times_leave_it_out(run: Run) -> None:
    def mentioned(changes: dict[str, Any]) -> bool:
        return any(
            "one of 20 after them" in message for message in messages(run("setting=paper_gtpo_7b", changes), "note")
        )

    assert mentioned({"algorithm.entropy.source": "rollout"})
    assert not mentioned({"algorithm.entropy.source": "rollout", "algorithm.entropy.check_every": 0})
    assert not mentioned({})


@pytest.mark.parametrize(("override", "idle", "read"), IDLE, ids=[case[0] for case in IDLE])
def test_a_setting_without_effect_is_named_with_the_reason(
    run: Run, override: str, idle: dict[str, Any], read: dict[str, Any]
) -> None:
    changes = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}
    found = messages(run("setting=paper_gtpo_7b", changes | idle), "warning", [override])
    assert [message for message in found if message.startswith(f"{override} has no effect: ")], found
    assert not any(
        "has no effect" in m for m in messages(run("setting=paper_gtpo_7b", changes | read), "warning", [override])
    )


@pytest.mark.parametrize(
    "override",
    [
        *(f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.clip_ratio=0.1", "critic.optim.lr=1e-5"),
        *("+custom_reward_function.path=x.py", "trainer.use_v1=false"),
        "algorithm.rollout_correction.loss_type=reinforce",
    ],
)
def test_keys_that_no_run_here_reads(run: Run, override: str) -> None:
    assert any(
        message.startswith(override) for message in messages(run("setting=paper_gtpo_7b"), "warning", [override])
    )


@pytest.mark.parametrize(
    "override",
    ["algo=gtpo", "data.train_batch_size=128", "algorithm.filter_groups.enable=false", f"{ACTOR}.clip_ratio_low=0.1"],
)
def test_keys_that_every_run_reads_are_left_alone(run: Run, override: str) -> None:
    assert messages(run("setting=paper_gtpo_7b"), "warning", [override]) == []


def test_settings_of_every_method_but_the_trained_one_have_no_effect(run: Run) -> None:
    """Whatever is registered, the methods of other packages included."""
    overrides = [f"+algorithm.{name}.x=1" for name in algorithms()]
    found = messages(run("setting=paper_gtpo_7b", "algo=gtpo"), "warning", overrides)
    reason = "has no effect: this run trains GTPO."
    assert found == [f"{override} {reason}" for override in overrides if ".gtpo." not in override]


def test_a_training_says_so_too_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    from gtpo_verl.cli import main

    assert main(["train", "algo=dapo", "algorithm.gtpo.alpha2=0.3", "hardware=cpu"]) == 2
    printed = capsys.readouterr()
    assert "algorithm.gtpo.alpha2=0.3 has no effect: this run trains DAPO" in printed.out
    assert "no model" in printed.err


@pytest.mark.parametrize(
    ("overrides", "contents", "size"),
    [
        (["backend=fsdp"], ["model", "optimizer", "extra"], "393.2 GB"),  # 12 bytes for each of 32.76 billion
        (["backend=fsdp"], ["model", "optimizer", "extra", "hf_model"], "524.2 GB"),
        (["backend=megatron"], ["model", "optimizer", "extra"], "458.7 GB"),  # weights in bfloat16, float32 masters
    ],
)
def test_a_checkpoint_costs_what_its_contents_do(
    run: Run, overrides: list[str], contents: list[str], size: str
) -> None:
    config = run("setting=paper_gtpo_32b", *overrides, {f"{ACTOR}.checkpoint.save_contents": contents})
    (found,) = [message for message in messages(config, "note") if message.startswith("a checkpoint")]
    assert f" is {size}, " in found
    assert ("`gtpo-verl export` makes it" in found) is ("hf_model" in contents)


def test_the_devices_of_a_guide(run: Run) -> None:
    guide = [f"algorithm.guide.{key}" for key in ("mode=mix", "source=server", "replicas=2", "tensor_parallel_size=4")]
    small = run("setting=paper_gtpo_7b", "algo=dapo_mixed", *guide, "algorithm.guide.model=Qwen/Qwen2.5-32B")
    (note,) = [message for message in messages(small, "note") if "the guide" in message]
    assert "has 8 GPUs of its own" in note
    assert "about 15.3 GiB on each" in note, "32.76e9 parameters of 2 bytes over 4"
    one = run("setting=paper_gtpo_7b", "algo=dapo_mixed", *guide[:3], "algorithm.guide.model=Qwen/Qwen2.5-32B")
    (error,) = [message for message in messages(one, "error") if "the guide" in message]
    assert "leaves no room for a KV cache" in error
    assert "raise algorithm.guide.tensor_parallel_size" in error
    assert not [message for message in messages(run("setting=paper_gtpo_7b"), "note") if "the guide" in message]
