"""What a job asks a cluster for; how it is admitted is tested with a real Ray in test_shared_cluster.py."""

import pytest
from omegaconf import DictConfig

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.admission import serving_bundles, training_bundles
from gtpo_verl.integrations.evaluate import standalone

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
