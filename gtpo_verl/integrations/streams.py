"""Every response is sampled from a random stream of its own, which follows from the run's seed.

The trainer gives each prompt a seed, the agent loop worker (`agent_loops`) makes one of it for each response, and the
client of the servers one for each request: vLLM starts the stream of a request at its seed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.seeds import derived

COLUMN = "sampling_seed"


def assign_streams(prompts: TensorDict, seed: int, partition_id: str, names: Iterable[str | int]) -> None:
    """Give each prompt the seed from which those of its responses are made, as a column (B,) int64.

    Args:
        prompts: B prompts, on their way to the agent loops.
        seed: the run's.
        partition_id: ``train`` or ``val``.
        names: B names. The responses to a prompt are the same wherever it has the same name, and the model is the same.
    """
    prompts[COLUMN] = torch.tensor([derived(seed, partition_id, name) for name in names], dtype=torch.int64)


def with_stream(sampling_params: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of one response, with a seed of its own where its prompt has one.

    Args:
        sampling_params: of its group.
        columns: those of its prompt and its ``session_id``; the seed is taken out, or it would be written to the rows.
    """
    seed = columns.pop(COLUMN, None)
    return (
        dict(sampling_params) if seed is None else sampling_params | {"seed": derived(int(seed), columns["session_id"])}
    )


class SeedingClient(LLMServerClient):
    """verl's client, with a stream for each request, and without the text of its answer.

    A response of several turns, or one that a weight update interrupted, is several requests; with one seed for all,
    tokens far apart would be drawn with the same random numbers. verl takes the tokens of an answer and drops its text,
    which vLLM decodes token by token; only strings to stop at need it.
    """

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        if "seed" in sampling_params:
            sampling_params = sampling_params | {"seed": derived(sampling_params["seed"], len(prompt_ids))}
        if self.config.actor_rollout_ref.rollout.name == "vllm" and not sampling_params.get("stop"):
            sampling_params = {"detokenize": False} | sampling_params
        return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)


class SeedingFullyAsyncClient(FullyAsyncLLMServerClient, SeedingClient):
    """verl's client for partial rollouts, with a stream for each segment of a response."""
