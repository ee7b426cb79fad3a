"""What a step moves: bytes worked out by hand, and which engine waits for them."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from gtpo_verl.planning.parallel import parallelism
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.planning.shapes import load_shape
from gtpo_verl.planning.timing import GPUS
from gtpo_verl.planning.transfers import Network, checkpoint_bytes

Run = Callable[..., DictConfig]
SEVEN, LARGE = "setting=paper_gtpo_7b", "setting=paper_gtpo_32b"


def test_inside_a_node_the_links_count_and_between_nodes_the_network_of_all_its_gpus() -> None:
    network = Network(node_gpus=8, link=400.0, network=10.0, host=1.0)
    assert network.gather(800.0, 1) == 0
    assert network.gather(800.0, 8) == 700 / 400
    assert network.gather(800.0, 16) == 750 / 80
    fast = Network(node_gpus=8, link=400.0, network=100.0, host=1.0)
    assert fast.gather(800.0, 16) == 750 / 400  # the last meters, to every GPU


def test_fsdp_hides_its_gathers_and_megatron_waits(run: Run) -> None:
    """With infinitely fast links both take the computation alone; the same efficiency is assumed for both."""
    for backend in ("fsdp", "megatron"):
        config = run(LARGE, f"backend={backend}")
        free = make_plan(config, given={"gpu_link": 1e9, "gpu_network": 1e9}).time
        real = make_plan(config).time
        assert free is not None
        assert real is not None
        assert (real.update > 1.01 * free.update) == (backend == "megatron")
        assert (real.old_log_prob > 1.01 * free.old_log_prob) == (backend == "megatron")
    slow = make_plan(run(LARGE, "backend=fsdp"), given={"gpu_network": 1.0}).time
    fast = make_plan(run(LARGE, "backend=fsdp")).time
    assert slow is not None
    assert fast is not None
    assert slow.update > fast.update


def test_a_pipeline_has_a_bubble(run: Run) -> None:
    key = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
    none = make_plan(run(LARGE, "backend=megatron")).time
    four = make_plan(run(LARGE, "backend=megatron", {key: 4})).time
    assert none is not None
    assert four is not None
    assert four.old_log_prob > none.old_log_prob


def test_offload_takes_time_in_proportion_to_the_link(run: Run) -> None:
    actor = "actor_rollout_ref.actor.fsdp_config"
    config = run(SEVEN, {f"{actor}.param_offload": True, f"{actor}.optimizer_offload": True})
    seconds = make_plan(config, given={"host_link": 10.0, "transfer_efficiency": 0.5}).time
    assert seconds is not None
    share = load_shape("Qwen/Qwen2.5-7B").parameters / 64
    assert seconds.offload == pytest.approx((6 * 4 + 2 * 8) * share / 5e9)
    without = make_plan(run(SEVEN)).time
    assert without is not None
    assert without.offload == 0


@pytest.mark.slow
def test_a_checkpoint_of_32b_is_what_its_tensors_take(run: Run) -> None:
    parameters = load_shape("Qwen/Qwen2.5-32B").parameters
    with_hf = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    config = run(LARGE, with_hf)
    assert checkpoint_bytes(run(LARGE), load_shape("Qwen/Qwen2.5-32B"), parallelism(config)) == 12 * parameters
    assert checkpoint_bytes(config, load_shape("Qwen/Qwen2.5-32B"), parallelism(config)) == 16 * parameters
    assert round(16 * parameters / 1e9) == 524
    by_default = run(LARGE, {"actor_rollout_ref.actor.fsdp_config.model_dtype": None})  # float32, as verl has it
    assert checkpoint_bytes(by_default, load_shape("Qwen/Qwen2.5-32B"), parallelism(config)) == 12 * parameters
    megatron = run(LARGE, "backend=megatron")
    assert checkpoint_bytes(megatron, load_shape("Qwen/Qwen2.5-32B"), parallelism(megatron)) == 14 * parameters
    every = make_plan(config, given={"storage_bandwidth": 4.0}).time
    assert every is not None
    assert every.checkpoint == pytest.approx(16 * parameters / 4e9 / config.trainer.save_freq)


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_every_gpu_plans(run: Run, gpu: str) -> None:
    assert make_plan(run(SEVEN), gpu=gpu).time is not None
