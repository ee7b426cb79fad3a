"""Every response is sampled from a random stream of its own, which follows from the run's seed.

The trainer gives each prompt a seed, an agent loop worker makes one of it for each response, and the client of the
servers one for each request: vLLM starts the stream of a request at its seed.
"""

from collections.abc import Iterable
from typing import Any, cast

import ray
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.seeds import derived

COLUMN = "sampling_seed"

_Worker: Any = cast(Any, AgentLoopWorkerTQ).__ray_actor_class__


def assign_streams(prompts: TensorDict, seed: int, partition_id: str, names: Iterable[str | int]) -> None:
    """Give each prompt the seed from which those of its responses are made, as a column (B,) int64.

    Args:
        prompts: B prompts, on their way to the agent loops.
        seed: the run's.
        partition_id: ``train`` or ``val``.
        names: B names. The responses to a prompt are the same wherever it has the same name, and the model is the same.
    """
    prompts[COLUMN] = torch.tensor([derived(seed, partition_id, name) for name in names], dtype=torch.int64)


class SeedingWorker(_Worker):
    """verl's agent loop worker, which samples each response of a group from a stream of its own."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], *args: Any, session_id: int, **kwargs: Any) -> Any:
        seeded = sampling_params | {"seed": derived(int(kwargs.pop(COLUMN)), session_id)}
        return await super()._run_agent_loop(seeded, *args, session_id=session_id, **kwargs)


class SeedingManager(AgentLoopManagerTQ):
    """verl's agent loop manager with such workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeedingWorker)


class SeedingClient(LLMServerClient):
    """verl's client, with a stream for each request.

    A response of several turns, or one that a weight update interrupted, is several requests; with one seed for all,
    tokens far apart would be drawn with the same random numbers.
    """

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        if "seed" in sampling_params:
            sampling_params = sampling_params | {"seed": derived(sampling_params["seed"], len(prompt_ids))}
        return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)


class SeedingFullyAsyncClient(FullyAsyncLLMServerClient, SeedingClient):
    """verl's client for partial rollouts, with a stream for each segment of a response."""
