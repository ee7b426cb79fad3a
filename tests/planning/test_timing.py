"""Time: identities of the estimate, overriding and measuring assumptions."""

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import registry
from gtpo_verl.algorithms.registry import algorithm, algorithms
from gtpo_verl.errors import UserError
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.planning.shapes import load_shape
from gtpo_verl.planning.timing import StepTime, forward_flops
from gtpo_verl.rules.overrides import without_effect

Run = Callable[..., DictConfig]


def time_of(config: DictConfig, **given: float) -> StepTime:
    time = make_plan(config, given=given).time
    assert time is not None
    return time


def test_operations_are_those_that_verl_counts_but_for_the_embedding() -> None:
    """verl's counter has forward and backward (three forwards), and the input embedding as if it were multiplied
    with."""
    from transformers import Qwen2Config
    from verl.utils.flops_counter import _estimate_qwen2_flops

    shape = load_shape("Qwen/Qwen2.5-7B")
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    lengths = [2000] * 8
    achieved = _estimate_qwen2_flops(config, sum(lengths), lengths, 1.0)  # TFLOP
    ours = 3 * forward_flops(shape, 8, 2000) + 6 * shape.embedding * sum(lengths)
    assert ours / 1e12 == pytest.approx(achieved, rel=1e-3)  # norms and biases are what is left


def test_phases_scale_with_what_they_depend_on(run: Run) -> None:
    config = run("setting=paper_gtpo_7b")
    base = time_of(config)
    assert time_of(config, update_efficiency=0.7).update == pytest.approx(base.update / 2)
    assert time_of(config, log_prob_efficiency=0.8).old_log_prob == pytest.approx(base.old_log_prob / 2)
    assert time_of(config, advantage_ns=1000).advantage == pytest.approx(128 * 16 * 2048 * 1000e-9)
    shorter = time_of(config, response_length=512)
    assert shorter.update < base.update / 3
    assert shorter.generate < base.generate
    transfers = base.weight_sync + base.offload + base.checkpoint
    computed = base.generate + base.old_log_prob + base.advantage + base.update
    assert base.total == pytest.approx(computed + transfers + base.other)
    assert base.other / base.total == pytest.approx(0.03)


def test_a_guide_takes_time(run: Run) -> None:
    """Its rows are a second wave: what it adds is a response of mean length, or what its servers lag behind."""
    without = time_of(run("setting=paper_gtpo_7b"))
    assert without.guide == 0

    def guided(mode: str, *server: str, **given: float) -> StepTime:
        keys = [f"algorithm.guide.{key}" for key in (f"mode={mode}", *server)]
        return time_of(run("setting=paper_gtpo_7b", "algo=dapo_mixed", *keys), **given)

    assert guided("mix").guide == 0, "given rows in every group leave nothing to generate"
    again = guided("zero")
    assert again.guide > 0
    assert guided("zero", response_length=512).guide < again.guide / 1.5
    assert again.total == pytest.approx(guided("mix").total + again.guide / 0.97)

    served = ("source=server", "model=Qwen/Qwen2.5-7B")
    same = guided("mix", *served)
    assert same.guide == pytest.approx(again.guide), "a guide of the policy's size that keeps up"
    larger = guided("mix", "source=server", "model=Qwen/Qwen2.5-32B", "tensor_parallel_size=2")
    assert larger.guide > same.guide
    busy = guided("mix", *served, "n_off=8", guided_share=1.0)
    assert guided("mix", *served, "n_off=8", "replicas=4").guide < busy.guide
    assert guided("mix", *served, "n_off=8", guided_share=0.25).guide < busy.guide


def test_without_checkpointing_an_update_is_a_quarter_shorter(run: Run) -> None:
    config = run("setting=paper_gtpo_7b")
    without = run("setting=paper_gtpo_7b", {"actor_rollout_ref.model.enable_gradient_checkpointing": False})
    assert time_of(without).update == pytest.approx(time_of(config).update * 3 / 4)


def test_entropies_of_the_rollout_save_the_actors_pass(run: Run) -> None:
    config = run("setting=paper_gtpo_7b", {"algorithm.entropy.source": "rollout"})
    assert time_of(config).old_log_prob == 0
    plan = make_plan(config)
    assert all(arm.pass_seconds == 0 and arm.entropy_bytes == 0 for arm in plan.arms)
    assert all(arm.rollout_bytes == 8 * 128 * 16 * 2048 for arm in plan.arms)
    actor = make_plan(run("setting=paper_gtpo_7b", {"algorithm.entropy.source": "actor"}))
    assert all(arm.rollout_bytes == 0 and arm.entropy_bytes == 4 * 128 * 16 * 2048 for arm in actor.arms)


def test_the_arms_of_a_plan_are_the_registered_methods(run: Run) -> None:
    """In the order of the registry; GRPO has the estimator of DAPO, and with it the same cost."""
    config = run("setting=paper_gtpo_7b")
    tokens = 128 * 16 * 2048  # responses of half the limit
    costs = {arm.arm: arm.advantage_seconds for arm in make_plan(config).arms}
    assert list(costs)[:3] == ["dapo", "gtpo", "grpo_s"]
    assert set(costs) == {name for name, entry in algorithms().items() if entry.verl_estimator is None} | {"dapo"}
    for name, seconds in costs.items():
        assert seconds == pytest.approx(tokens * algorithm(name).advantage_ns * 1e-9), name


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A method that another package brings."""
    entry = replace(algorithm("gtpo"), name="mine", label="Mine", advantage_ns=1000.0)
    point = SimpleNamespace(name="mine", value="mine:ENTRY", load=lambda: entry)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    registry.algorithms.cache_clear()
    yield
    registry.algorithms.cache_clear()


@pytest.mark.usefixtures("mine")
def test_a_method_of_another_package_is_an_arm_too(run: Run) -> None:
    config = run("setting=paper_gtpo_7b", {"algorithm.adv_estimator": "mine"})
    plan = make_plan(config)
    assert [plan.arms[0].arm, plan.arms[-1].arm] == ["dapo", "mine"]
    assert plan.assumptions["advantage_ns"].value == 1000.0
    idle = without_effect(config, ["algorithm.gtpo.alpha2=0.2", "+algorithm.mine.x=1"])
    assert [problem.message for problem in idle] == ["algorithm.gtpo.alpha2=0.2 has no effect: this run trains Mine."]


def test_a_lower_yield_costs_generation_alone(run: Run) -> None:
    config = run("setting=paper_gtpo_7b")
    half, all_of_it = time_of(config, sampling_yield=0.5), time_of(config, sampling_yield=1.0)
    assert half.generate > all_of_it.generate
    assert half.update == all_of_it.update


def test_responses_wait_for_room_in_the_cache(run: Run) -> None:
    config = run("setting=paper_dapo_32b")
    tight = run("setting=paper_dapo_32b", {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.5})
    assert time_of(tight).concurrent < time_of(config).concurrent
    assert time_of(tight).generate > time_of(config).generate
    few = run("setting=paper_dapo_32b", {"actor_rollout_ref.rollout.max_num_seqs": 8})
    assert time_of(few).concurrent == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speed": 1.0}, "no such assumption"),
        ({"sampling_yield": 0.0}, "above 0 and at most 1"),
        ({"update_efficiency": 1.5}, "above 0 and at most 1"),
        ({"gpu_memory": -1.0}, "above 0"),
        ({"other_share": 1.0}, "would take no time"),
        ({"response_length": 5000.0}, "data.max_response_length=4096"),
    ],
)
def test_assumptions_out_of_range_are_refused(run: Run, given: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(run("setting=paper_gtpo_7b"), given=given)


# -------------------------------------------------------------------- a measured run


def record(directory: Path, config: DictConfig, steps: list[dict[str, Any]]) -> Path:
    """Write what a training leaves behind."""
    directory.mkdir()
    OmegaConf.save(config, directory / "config.yaml", resolve=True)
    lines = [json.dumps({"step": number, "data": data}) for number, data in enumerate(steps)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def logged(time: StepTime, responses: int, prompt: float, response: float, sampling_yield: float) -> dict[str, Any]:
    return {
        "timing_s/gen": time.generate,
        "timing_s/old_log_prob": time.old_log_prob,
        "timing_s/adv": time.advantage,
        "timing_s/update_actor": time.update,
        "timing_s/step": time.total,
        "prompt_length/mean": prompt,
        "response_length/mean": response,
        "perf/total_num_tokens": responses * (prompt + response),
        "training/filter_groups/yield": sampling_yield,
        "training/filter_groups/generated_groups": 128 / sampling_yield,
        "training/filter_groups/kept_groups": 128,
    }


def test_a_measured_run_predicts_itself(run: Run, tmp_path: Path) -> None:
    """A run that took other times than the defaults say: its plan, measured on it, gives these times back."""
    config = run("setting=paper_gtpo_7b")
    slow = StepTime(generate=300, old_log_prob=50, advantage=0.25, update=120, other=29.75, concurrent=0)
    step = logged(slow, responses=2048, prompt=150, response=1234, sampling_yield=0.4)
    warm_up = step | {"timing_s/gen": 5000.0, "timing_s/update_actor": 5000.0, "timing_s/step": 20000.0}
    directory = record(tmp_path / "run", config, [{"val-core/x": 1.0}, warm_up, step, step])
    plan = make_plan(config, measured=directory)
    assert plan.time is not None
    for phase in ("generate", "old_log_prob", "advantage", "update", "other"):
        assert getattr(plan.time, phase) == pytest.approx(getattr(slow, phase), rel=1e-6), phase
    assert plan.assumptions["response_length"].value == 1234
    assert plan.assumptions["update_efficiency"].origin == "measured: run, 2 steps on 64 GPUs"
    assert plan.step.generated_prompts == 320

    larger = make_plan(run("setting=paper_gtpo_7b", {"trainer.nnodes": 16}), measured=directory)
    assert larger.time is not None
    assert larger.time.update == pytest.approx(60)


def test_speeds_are_per_gpu_and_count_what_the_run_computed(run: Run, tmp_path: Path) -> None:
    """Two epochs without checkpointing are 2 × 3 forward passes; rejected groups are generated tokens as well."""
    changes = {"actor_rollout_ref.actor.ppo_epochs": 2, "actor_rollout_ref.model.enable_gradient_checkpointing": False}
    config = run("setting=paper_gtpo_7b", changes)
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    found = make_plan(config, measured=record(tmp_path / "run", config, [{}, step, step])).assumptions
    forward = forward_flops(load_shape("Qwen/Qwen2.5-7B"), 2048, 150 + 1234)
    peak = 989e12 * 64
    assert found["update_efficiency"].value == pytest.approx(6 * forward / 120 / peak)
    assert found["log_prob_efficiency"].value == pytest.approx(forward / 50 / peak)
    assert found["generated_tokens_per_gpu"].value == pytest.approx(2048 * 1234 / 0.4 / 300 / 64)
    assert found["advantage_ns"].value == pytest.approx(0.25 / (2048 * 1234) * 1e9)
    assert found["other_share"].value == pytest.approx(29.75 / 500)


def test_a_run_that_skips_the_old_log_prob_pass_does_not_measure_it(run: Run, tmp_path: Path) -> None:
    config = run("setting=paper_gtpo_7b", {"algorithm.entropy.source": "rollout"})
    step = logged(StepTime(300, 0.5, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    found = make_plan(config, measured=record(tmp_path / "run", config, [{}, step, step])).assumptions
    assert found["log_prob_efficiency"].origin.startswith("default")
    assert found["update_efficiency"].origin.startswith("measured")


def test_a_measured_run_whose_model_is_not_here_is_named(run: Run, tmp_path: Path) -> None:
    config = run("setting=paper_gtpo_7b")
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    gone = run("setting=paper_gtpo_7b", {"actor_rollout_ref.model.path": str(tmp_path / "gone")})
    directory = record(tmp_path / "run", gone, [step, step])
    with pytest.raises(UserError, match=r"--measured .*run: the model that it trained is not known here: .*gone"):
        make_plan(config, measured=directory)


def test_what_is_given_wins_over_what_was_measured(run: Run, tmp_path: Path) -> None:
    config = run("setting=paper_gtpo_7b")
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    directory = record(tmp_path / "run", config, [{}, step])
    assert make_plan(config, measured=directory, given={"response_length": 999}).step.tokens == 2048 * (150 + 999)


def test_another_model_generates_by_its_parameters(run: Run, tmp_path: Path) -> None:
    """A run of 7B and a plan of 32B: fewer tokens a second, by the ratio of the parameters that a token meets."""
    config, larger = run("setting=paper_gtpo_7b"), run("setting=paper_gtpo_32b")
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    directory = record(tmp_path / "run", config, [{}, step])
    own, other = (make_plan(each, measured=directory).assumptions for each in (config, larger))
    shapes = [load_shape(f"Qwen/Qwen2.5-{size}") for size in ("7B", "32B")]
    ratio = shapes[0].matmul_parameters / shapes[1].matmul_parameters
    assert ratio < 0.3
    speed, origin = own["generated_tokens_per_gpu"].value, other["generated_tokens_per_gpu"].origin
    assert other["generated_tokens_per_gpu"].value == pytest.approx(speed * ratio)
    assert origin == "measured: run, 1 steps on 64 GPUs, by parameters from Qwen/Qwen2.5-7B"
    assert other["update_efficiency"] == own["update_efficiency"]


def test_without_dynamic_sampling_every_group_is_trained_on(run: Run, tmp_path: Path) -> None:
    config = run("setting=paper_gtpo_7b")
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    directory = record(tmp_path / "run", config, [{}, step, step])
    off = run("setting=paper_gtpo_7b", {"algorithm.filter_groups.enable": False})
    assert make_plan(config, measured=directory).step.generated_prompts == 320
    assert make_plan(off, measured=directory).step.generated_prompts == 128
    with pytest.raises(UserError, match=r"sampling_yield=0\.3: algorithm\.filter_groups\.enable is false"):
        make_plan(off, given={"sampling_yield": 0.3})


def test_what_a_run_measured_out_of_range_is_not_called_given(run: Run, tmp_path: Path) -> None:
    config = run("setting=paper_gtpo_7b")
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    directory = record(tmp_path / "run", config, [{}, step])
    with pytest.raises(UserError, match=r"^response_length=1234 \(measured: run, .* give --response-length"):
        make_plan(run("setting=paper_gtpo_7b", {"data.max_response_length": 1024}), measured=directory)
    fast = record(tmp_path / "fast", config, [{}, step | {"timing_s/update_actor": 0.5}])
    with pytest.raises(UserError, match=r"^update_efficiency=.* the run's GPUs are faster than those of --gpu"):
        make_plan(config, measured=fast)


def test_a_run_without_a_step_is_no_plan(run: Run, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"prompt": [], "data_source": "a"}\n' * 2)
    changes = {"trainer.total_training_steps": None, "data.train_files": str(tmp_path / "two.jsonl")}
    with pytest.raises(UserError, match=r"has fewer prompts than a step, data\.train_batch_size="):
        make_plan(run("setting=paper_gtpo_7b", changes))


def test_a_directory_that_is_no_run_is_refused(run: Run, tmp_path: Path) -> None:
    config = run("setting=paper_gtpo_7b")
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        make_plan(config, measured=tmp_path)
    with pytest.raises(UserError, match="no finished training step"):
        make_plan(config, measured=record(tmp_path / "run", config, [{"val-core/x": 1.0}]))


def test_a_cpu_has_a_time_where_it_was_measured(run: Run, tmp_path: Path) -> None:
    config = run("setting=paper_gtpo_7b", {"trainer.device": "cpu"})
    assert make_plan(config).time is None
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    plan = make_plan(config, measured=record(tmp_path / "run", config, [{}, step, step | {"timing_s/gen": 300}]))
    assert plan.memory is None
    assert plan.time is not None
    assert plan.time.update == pytest.approx(120)


def test_steps_that_generated_nothing_have_no_yield(run: Run, tmp_path: Path) -> None:
    """A step that lives on carried groups alone logs none; the others are taken."""
    config = run("setting=paper_gtpo_7b")
    step = logged(StepTime(300, 50, 0.25, 120, 29.75, 0), 2048, 150, 1234, 0.4)
    without = {name: value for name, value in step.items() if not name.endswith("/yield")}
    plan = make_plan(config, measured=record(tmp_path / "run", config, [{}, step, step, without, step]))
    assert plan.step.sampling_yield == 0.4
