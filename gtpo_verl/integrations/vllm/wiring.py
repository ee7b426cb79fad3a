"""Turns rollout entropies on for a run: checks its settings, and registers our classes with verl. Light to import."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import INSTEAD, OWN_SOCKET
from gtpo_verl.integrations.vllm.requirements import check_rollout

AGENT_LOOPS = Path(__file__).with_name("agent_loops.yaml")


def enable_rollout_entropy(config: DictConfig) -> None:
    """Make the policy's vLLM servers return entropies and the agent loops pass them on.

    Called once, in the process that builds the trainer, before that makes workers or servers. In ``config``, the
    composed run, the rollout's ``agent.agent_loop_config_path`` and ``custom`` are set in place.

    Raises UserError: the rollout's settings or the installed vLLM do not allow exact entropies, or its agent loop would
    drop them.
    """
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from gtpo_verl.integrations.vllm.patch import check_vllm_version

    rollout = config.actor_rollout_ref.rollout
    check_rollout(rollout)
    check_vllm_version()
    if rollout.agent.agent_loop_config_path is None:
        OmegaConf.update(rollout, "agent.agent_loop_config_path", str(AGENT_LOOPS), force_add=True)
    check_agent_loop(rollout.agent)
    OmegaConf.update(rollout, f"custom.{OWN_SOCKET}", True, force_add=True)
    # the name stays "vllm": verl compares it in many places
    RolloutReplicaRegistry.register("vllm", _replica_class)


def check_agent_loop(agent: Any) -> None:
    """Raise a UserError where the default loop of verl's ``rollout.agent`` drops entropies or is not listed."""
    from hydra.utils import get_class
    from verl.utils.import_utils import resolve_config_path

    from gtpo_verl.integrations.vllm.agent_loop import RolloutEntropyMixin

    loops: Any = OmegaConf.load(resolve_config_path(agent.agent_loop_config_path))
    listed = {loop.name: loop._target_ for loop in loops}
    name = agent.default_agent_loop
    if name not in listed or not issubclass(get_class(listed[name]), RolloutEntropyMixin):
        raise UserError(
            f"the agent loop {name} drops rollout entropies: derive it from "
            f"{RolloutEntropyMixin.__module__}.RolloutEntropyMixin and list it in agent_loop_config_path, {INSTEAD}."
        )


def _replica_class() -> type:
    from gtpo_verl.integrations.vllm.server import EntropyVLLMReplica

    return EntropyVLLMReplica
