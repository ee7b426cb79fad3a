"""Turns rollout entropies on for a run: refuses what cannot give exact ones, and names our classes to verl. Light to import."""

import secrets
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError

ENTROPIES = "rollout_entropies"
VERSIONS = "rollout_versions"
WORKER_EXTENSION = "gtpo_verl.integrations.vllm.worker_extension.PolicyWorkerExtension"
SOCKET_TOKEN = "gtpo_verl_socket_token"  # in verl's rollout.custom, see weight_socket.py
AGENT_LOOPS = Path(__file__).with_name("agent_loops.yaml")

INSTEAD = "or set algorithm.entropy.source=actor"


def enable_rollout_entropy(config: DictConfig) -> None:
    """Make the policy's vLLM servers return entropies and the agent loops pass them on.

    Called once, in the process that builds the trainer, before that makes workers or servers. Replicas
    of reward models and teachers come from the same registry and stay verl's own, see ``EntropyVLLMReplica``.

    Args:
        config: the composed run; in ``actor_rollout_ref.rollout``, ``agent.agent_loop_config_path`` and ``custom`` are set in place.

    Raises:
        UserError: the rollout's settings or the installed vLLM do not allow exact entropies, or its agent loop would drop them.
    """
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from gtpo_verl.integrations.vllm.patch import check_vllm_version

    rollout = config.actor_rollout_ref.rollout
    check_rollout(rollout)
    check_vllm_version()
    if rollout.agent.agent_loop_config_path is None:
        OmegaConf.update(rollout, "agent.agent_loop_config_path", str(AGENT_LOOPS), force_add=True)
    check_agent_loop(rollout.agent)
    OmegaConf.update(rollout, f"custom.{SOCKET_TOKEN}", secrets.token_hex(4), force_add=True)
    # the name stays "vllm": verl compares it in many places
    RolloutReplicaRegistry.register("vllm", _replica_class)


def check_rollout(rollout: Any) -> None:
    """Check that the entropies of this rollout will be exact.

    Args:
        rollout: verl's ``actor_rollout_ref.rollout``, as DictConfig or as ``RolloutConfig``.

    Raises:
        UserError: they will not; says which key is in the way.
    """
    engine = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    mode = engine.get("logprobs_mode", rollout.logprobs_mode)
    extension = engine.get("worker_extension_cls", WORKER_EXTENSION)
    if rollout.name != "vllm":
        raise UserError(f"rollout.name={rollout.name} returns no entropies: use rollout.name=vllm, {INSTEAD}.")
    if rollout.disaggregation.enabled:
        raise UserError(
            f"rollout.disaggregation.enabled=true runs servers of verl's own, without entropies: switch it off, {INSTEAD}."
        )
    if not rollout.calculate_log_probs:
        raise UserError(
            f"rollout.calculate_log_probs=false: entropies travel with the log-probs, switch them on, {INSTEAD}."
        )
    if mode != "processed_logprobs":
        raise UserError(
            f"rollout.logprobs_mode={mode} is not the distribution tokens are sampled from: set processed_logprobs, {INSTEAD}."
        )
    if rollout.temperature <= 0:
        raise UserError(f"rollout.temperature={rollout.temperature} samples greedily: set it above 0, {INSTEAD}.")
    if truncates(rollout):
        raise UserError(
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k} cut the distribution, and entropies would be those of what "
            f"is left: set top_p=1 and top_k=-1 for training, {INSTEAD}."
        )
    if extension != WORKER_EXTENSION:
        raise UserError(
            f"rollout.engine_kwargs.vllm.worker_extension_cls={extension} replaces the worker that computes entropies: "
            f"remove it, {INSTEAD}."
        )


def truncates(sampling: Any) -> bool:
    """Whether sampling settings cut the distribution: ``top_p`` below 1, ``top_k`` or ``min_p`` above 0."""
    return sampling.get("top_p", 1.0) < 1.0 or sampling.get("top_k", -1) > 0 or sampling.get("min_p", 0.0) > 0.0


def check_agent_loop(agent: Any) -> None:
    """Check that the default agent loop passes entropies on.

    Args:
        agent: verl's ``actor_rollout_ref.rollout.agent``.

    Raises:
        UserError: it does not, or ``agent_loop_config_path`` does not list it.
    """
    from hydra.utils import get_class
    from verl.utils.import_utils import resolve_config_path

    from gtpo_verl.integrations.vllm.agent_loop import RolloutEntropyMixin

    loops: Any = OmegaConf.load(resolve_config_path(agent.agent_loop_config_path))
    listed = {loop.name: loop._target_ for loop in loops}
    name = agent.default_agent_loop
    if name not in listed or not issubclass(get_class(listed[name]), RolloutEntropyMixin):
        raise UserError(
            f"the agent loop {name} drops rollout entropies: derive it from {RolloutEntropyMixin.__module__}.RolloutEntropyMixin "
            f"and list it in agent_loop_config_path, {INSTEAD}."
        )


def _replica_class() -> type:
    from gtpo_verl.integrations.vllm.server import EntropyVLLMReplica

    return EntropyVLLMReplica
