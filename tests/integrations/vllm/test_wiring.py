"""Rollout settings that cannot give exact entropies are refused with the key in the way; only the policy's servers
change.
"""

import copy
import functools
import sys
from pathlib import Path

import hydra
import pytest
import verl
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import OWN_SOCKET, WORKER_EXTENSION, requirements, wiring, worker_extension


@functools.cache
def verls_own():
    config_dir = Path(next(iter(verl.__path__))) / "trainer" / "config"
    with hydra.initialize_config_dir(str(config_dir), version_base=None):
        return hydra.compose("ppo_trainer")


def compose(*changes):
    """verl's own trainer configuration with what entropies need, and changes in dotted form."""
    config = copy.deepcopy(verls_own())
    OmegaConf.set_struct(config, False)
    needed = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.calculate_log_probs=true"]
    config.merge_with_dotlist([*needed, *changes])
    return config


REFUSED = {
    "name=sglang": "rollout.name=sglang returns no entropies",
    "name=trtllm": "rollout.name=trtllm returns no entropies",
    "logprobs_mode=raw_logprobs": "rollout.logprobs_mode=raw_logprobs",
    "engine_kwargs.vllm.logprobs_mode=raw_logprobs": "rollout.logprobs_mode=raw_logprobs",
    "calculate_log_probs=false": "rollout.calculate_log_probs=false",
    "top_p=0.9": "rollout.top_p=0.9",
    "top_k=50": "top_k=50",
    "temperature=0": "rollout.temperature=0",
    "disaggregation.enabled=true": "rollout.disaggregation.enabled=true",
    "engine_kwargs.vllm.worker_extension_cls=my.Extension": "worker_extension_cls=my.Extension",
}


@pytest.mark.parametrize("change", REFUSED)
def test_refused_in_one_line_that_names_the_key_and_the_way_out(change):
    config = compose(f"actor_rollout_ref.rollout.{change}")
    with pytest.raises(UserError) as error:
        requirements.check_rollout(config.actor_rollout_ref.rollout)
    message = str(error.value)
    assert REFUSED[change] in message
    assert "algorithm.entropy.source=actor" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "change", ["top_k=-1", "top_k=0", "top_p=1", "temperature=0.6", "val_kwargs.top_p=0.7", "seed=3"]
)
def test_accepted(change):
    requirements.check_rollout(compose(f"actor_rollout_ref.rollout.{change}").actor_rollout_ref.rollout)


def test_the_servers_dataclass_is_checked_like_the_yaml():
    rollout = compose("actor_rollout_ref.rollout.top_p=0.9").actor_rollout_ref.rollout
    with pytest.raises(UserError, match=r"rollout\.top_p=0\.9"):
        requirements.check_rollout(omega_conf_to_dataclass(rollout))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False),
        ({"top_p": 1.0, "top_k": -1}, False),
        ({"top_p": 0.99}, True),
        ({"top_k": 1}, True),
        ({"min_p": 0.1}, True),
    ],
)
def test_truncates(sampling, expected):
    assert requirements.truncates(sampling) is expected


def test_enabling_names_our_loops_and_our_replica(registry):
    config = compose()
    wiring.enable_rollout_entropy(config)
    assert config.actor_rollout_ref.rollout.agent.agent_loop_config_path == str(wiring.AGENT_LOOPS)
    assert registry.get("vllm").__name__ == "EntropyVLLMReplica"


def test_an_attempt_is_configured_like_the_last_beside_what_a_user_put_there(registry):
    """MLflow refuses to continue a run with another value of a parameter."""
    configs = [compose("actor_rollout_ref.rollout.custom.mine=1") for _ in range(2)]
    for config in configs:
        wiring.enable_rollout_entropy(config)
    assert configs[0] == configs[1]
    assert configs[0].actor_rollout_ref.rollout.custom == {"mine": 1, OWN_SOCKET: True}


def test_an_older_vllm_is_refused_before_a_server_starts(registry, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.20.2")
    with pytest.raises(UserError, match=r"vLLM 0\.20\.2 is installed"):
        wiring.enable_rollout_entropy(compose())


@pytest.fixture
def registry(monkeypatch):
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    return RolloutReplicaRegistry


@pytest.mark.parametrize("role", [{}, {"is_reward_model": True}, {"is_teacher_model": True}])
def test_only_the_policy_gets_our_server(registry, role):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from gtpo_verl.integrations.vllm.server import EntropyVLLMHttpServer

    config = compose()
    wiring.enable_rollout_entropy(config)
    replica = registry.get("vllm")(0, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, **role)
    expected = vLLMHttpServer if role else EntropyVLLMHttpServer
    assert replica.server_class.__ray_actor_class__ is expected


@pytest.fixture
def own_loops(tmp_path, monkeypatch):
    """An ``agent_loop_config_path`` of the user's, with loops from a module of the user's."""
    (tmp_path / "users_loops.py").write_text(
        "from verl.experimental.agent_loop import SingleTurnAgentLoop\n"
        "from gtpo_verl.integrations.vllm.agent_loop import RolloutEntropyMixin\n"
        "class Plain(SingleTurnAgentLoop): ...\n"
        "class Mixed(RolloutEntropyMixin, SingleTurnAgentLoop): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_loops", raising=False)
    path = tmp_path / "loops.yaml"
    names = {"plain": "users_loops.Plain", "mixed": "users_loops.Mixed"}
    OmegaConf.save([{"name": name, "_target_": target} for name, target in names.items()], path)
    return path


def test_a_loop_of_the_users_that_carries_entropies_is_accepted(registry, own_loops):
    agent = "actor_rollout_ref.rollout.agent"
    config = compose(f"{agent}.agent_loop_config_path={own_loops}", f"{agent}.default_agent_loop=mixed")
    wiring.enable_rollout_entropy(config)
    assert config.actor_rollout_ref.rollout.agent.agent_loop_config_path == str(own_loops)


@pytest.mark.parametrize("name", ["plain", "single_turn_agent"])
def test_a_loop_that_drops_entropies_is_refused(registry, own_loops, name):
    agent = "actor_rollout_ref.rollout.agent"
    config = compose(f"{agent}.agent_loop_config_path={own_loops}", f"{agent}.default_agent_loop={name}")
    with pytest.raises(UserError, match=f"agent loop {name} drops rollout entropies"):
        wiring.enable_rollout_entropy(config)


def test_the_worker_extension_is_found_under_its_name():
    from hydra.utils import get_class

    assert get_class(WORKER_EXTENSION) is worker_extension.PolicyWorkerExtension


def test_the_worker_extension_adds_no_name_that_vllms_workers_have():
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    added = set(vars(worker_extension.PolicyWorkerExtension)) - set(vars(vLLMColocateWorkerExtension))
    added = {name for name in added if not name.startswith("__")}
    assert added
    assert not added & {*dir(CPUWorker), *dir(Worker)}  # vLLM would refuse to start
