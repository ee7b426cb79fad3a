"""What a job asks a cluster for; how it is admitted is tested with a real Ray in test_shared_cluster.py."""

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.admission import memory_bundles, serving_bundles, training_bundles
from gtpo_verl.integrations.standalone import guide_servers, standalone

CPU = {"CPU": 1.0}


def composed(*overrides: str) -> DictConfig:
    return compose_config(["setting=quickstart", "hardware=cpu", *overrides])


def devices(bundles: list[dict[str, float]]) -> list[tuple[float, float]]:
    """GPUs and CPUs of the bundles with a GPU."""
    return [(bundle["GPU"], bundle["CPU"]) for bundle in bundles if "GPU" in bundle]


def test_a_training_takes_a_bundle_a_node_and_a_cpu_for_each_of_its_own_actors() -> None:
    bundles = training_bundles(composed("trainer.nnodes=2", "trainer.n_gpus_per_node=4"))
    assert devices(bundles) == [(4.0, 12.0)] * 2
    assert [bundle for bundle in bundles if "GPU" not in bundle] == [CPU] * 3  # task runner, controller, storage unit


def test_memory_is_spread_over_the_nodes() -> None:
    assert memory_bundles(7.0, 2) == [{"memory": 4.0}] * 2
    assert memory_bundles(0.0, 2) == []


def test_a_reward_model_of_its_own_takes_its_own_devices() -> None:
    reward = [f"reward.reward_model.{key}" for key in ("enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=2")]
    assert devices(training_bundles(composed(*reward))) == [(1.0, 3.0), (2.0, 6.0)]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "servers"), [(1, [(1.0, 2.0)] * 8), (2, [(2.0, 4.0)] * 4), (8, [(4.0, 8.0)] * 2)])
def test_servers_of_their_own_take_a_bundle_a_replica_and_node(
    parallel: int, servers: list[tuple[float, float]]
) -> None:
    rollout = [f"actor_rollout_ref.rollout.{key}" for key in ("nnodes=2", "n_gpus_per_node=4")]
    sizes = f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}"
    config = composed("trainer.v1.trainer_mode=separate_async", *rollout, sizes)
    assert devices(training_bundles(config)) == [(1.0, 3.0), *servers]


def test_an_evaluation_takes_what_its_training_would_for_servers() -> None:
    config = composed("trainer.n_gpus_per_node=2")
    standalone(config)
    bundles = serving_bundles(config)
    assert devices(bundles) == [(1.0, 2.0)] * 2
    assert [bundle for bundle in bundles if "GPU" not in bundle] == [CPU] * 2


def test_a_guide_takes_the_devices_of_its_replicas_besides() -> None:
    guide = [
        f"algorithm.guide.{key}" for key in ("source=server", "model=guide", "replicas=3", "tensor_parallel_size=2")
    ]
    assert devices(training_bundles(composed(*guide, "algorithm.guide.mode=mix"))) == [(1.0, 3.0), *[(2.0, 4.0)] * 3]
    assert devices(training_bundles(composed(*guide))) == [(1.0, 3.0)], "mode=off has no servers"


def test_the_guides_servers_hold_its_model_and_sample_as_the_training_does() -> None:
    settings = ("algorithm.guide.mode=mix", "algorithm.guide.source=server", "algorithm.guide.model=guide")
    rollout = [f"actor_rollout_ref.rollout.{key}" for key in ("temperature=0.7", "top_p=0.9", "load_format=dummy")]
    config = composed(*settings, *rollout, "actor_rollout_ref.model.lora_rank=8", "algorithm.entropy.source=actor")
    before = OmegaConf.to_container(config)
    served = guide_servers(config)
    assert served is not None
    assert OmegaConf.to_container(config) == before, "the training keeps its own"
    of_guide = served.actor_rollout_ref
    assert of_guide.model.path == "guide"
    assert "lora_rank" not in of_guide.model
    assert (of_guide.rollout.temperature, of_guide.rollout.top_p, of_guide.rollout.top_k) == (0.7, 1.0, -1)
    assert (of_guide.rollout.load_format, of_guide.rollout.calculate_log_probs) == ("auto", True)
    assert guide_servers(composed()) is None
