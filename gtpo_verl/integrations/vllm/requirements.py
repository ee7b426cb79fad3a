"""What rollout settings must be so that vLLM's entropies are exact. Light to import."""

from collections.abc import Iterator
from typing import Any

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import INSTEAD, WORKER_EXTENSION

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
