"""Turns rollout entropies on for a run: what its settings must be for that, and our classes registered with verl.

Light to import.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import INSTEAD, OWN_SOCKET, WORKER_EXTENSION

AGENT_LOOPS = Path(__file__).with_name("agent_loops.yaml")
KEY = "actor_rollout_ref.rollout"


def check_rollout(rollout: Any) -> None:
    """Check that the entropies of a rollout, a DictConfig or a ``RolloutConfig``, will be exact.

    Raises UserError: they will not; says which key is in the way.
    """
    for fault in rollout_faults(rollout):
        raise UserError(fault)


def rollout_faults(rollout: Any) -> Iterator[str]:
    """Everything that keeps the entropies of a rollout from being exact, a line each."""
    engine = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    mode = engine.get("logprobs_mode", rollout.logprobs_mode)
    extension = engine.get("worker_extension_cls", WORKER_EXTENSION)
    if rollout.name != "vllm":
        yield f"{KEY}.name={rollout.name} returns no entropies: set it to vllm, {INSTEAD}."
    if rollout.disaggregation.enabled:
        key = f"{KEY}.disaggregation.enabled=true"
        yield f"{key} runs servers of verl's own, without entropies: switch it off, {INSTEAD}."
    if not rollout.calculate_log_probs:
        yield f"{KEY}.calculate_log_probs=false: entropies travel with the log-probs, switch them on, {INSTEAD}."
    if mode != "processed_logprobs":
        yield (
            f"{KEY}.logprobs_mode={mode} returns log-probs of another distribution than the sampled one: set it to "
            f"processed_logprobs, {INSTEAD}."
        )
    if (rollout.temperature or 0) <= 0:
        yield f"{KEY}.temperature={rollout.temperature} samples greedily: set it above 0, {INSTEAD}."
    if truncates(rollout):
        yield (
            f"{KEY}.top_p={rollout.top_p}, top_k={rollout.top_k} cut the distribution, and entropies would be those of "
            f"what is left: set top_p=1 and top_k=-1 for training, {INSTEAD}."
        )
    if extension != WORKER_EXTENSION:
        yield (
            f"{KEY}.engine_kwargs.vllm.worker_extension_cls={extension} replaces the worker that computes entropies: "
            f"remove it, {INSTEAD}."
        )


def truncates(sampling: Any) -> bool:
    """Whether sampling settings cut the distribution: ``top_p`` below 1, ``top_k`` or ``min_p`` above 0."""
    return sampling.get("top_p", 1.0) < 1.0 or sampling.get("top_k", -1) > 0 or sampling.get("min_p", 0.0) > 0.0


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
