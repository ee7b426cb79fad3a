"""Every prompt has a name that follows from its place in the training, and every response a random stream of its own,
which follows from that name and the run's seed.

The trainer gives each prompt a seed, `agent_loops` makes one of it for each response, and the client one for each
request, at which vLLM starts its stream.
"""

from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.integrations.transfer_queue import TRAIN, is_prompt, listed
from gtpo_verl.seeds import derived

COLUMN = "sampling_seed"
# How many requests of the current response had a prompt of each length.
_lengths: ContextVar[Counter[int] | None] = ContextVar("gtpo_verl_request_lengths", default=None)


class PromptNames:
    """Names prompts by their step and their number in it, the same where a step is repeated."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._step = 0
        self._next = 0  # number of the next prompt in the step

    def assign(self, prompts: TensorDict, step: int) -> None:
        """Name prompts that are about to be submitted, and give them their random streams."""
        names = self.names(len(prompts), step)
        tensordict_utils.assign_non_tensor_stack(prompts, "uid", names)
        assign_streams(prompts, self._config, TRAIN, names)

    def names(self, count: int, step: int) -> list[str]:
        """The names of the next prompts."""
        prefix = f"{step:06d}-"
        if step != self._step:
            # Groups of this very step wait where its first attempt ended with a spent budget.
            waiting = [key for key, tag in listed(TRAIN).items() if is_prompt(tag) and key.startswith(prefix)]
            taken = [int(key.removeprefix(prefix)) for key in waiting]
            self._step, self._next = step, max(taken, default=-1) + 1
        first, self._next = self._next, self._next + count
        return [f"{prefix}{number:06d}" for number in range(first, first + count)]


def assign_streams(prompts: TensorDict, config: DictConfig, partition_id: str, names: Iterable[str | int]) -> None:
    """Give each of B prompts, on their way to the agent loops, the seed of its responses, as a column (B,) int64: they
    are the same wherever a prompt has the same of B names, and the model is the same.

    Without ``trainer.seed_requests`` there is no such column, and vLLM draws from one stream for all requests; nor is
    there for another engine, whose requests have no ``seed``.
    """
    if not config.trainer.seed_requests or config.actor_rollout_ref.rollout.name != "vllm":
        return
    prompts[COLUMN] = torch.tensor([derived(config.seed, partition_id, name) for name in names], dtype=torch.int64)


def with_stream(sampling_params: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of one response from those of its group, with a seed of its own where its prompt has one.

    To be called in the asyncio task of the response, whose requests are counted from here on. The seed is taken out of
    the columns of the prompt, or it would be written to the rows.
    """
    seed = columns.pop(COLUMN, None)
    if seed is None:
        return dict(sampling_params)
    _lengths.set(Counter())
    return sampling_params | {"seed": derived(int(seed), columns["session_id"])}


class _CountingClient(LLMServerClient):
    """A client that gives the second request of a response with a prompt as long as the first's, and every later one,
    a seed of its own: an agent loop may sample several times from one prompt.
    """

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        lengths = _lengths.get()
        if "seed" in sampling_params and lengths is not None:
            before = lengths[len(prompt_ids)]
            lengths[len(prompt_ids)] += 1
            if before:
                sampling_params = sampling_params | {"seed": derived(sampling_params["seed"], "again", before)}
        return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)


class SegmentClient(LLMServerClient):
    """verl's client, with a stream for each segment of an answer, and without the text of the answer.

    A response of several turns, or one that a weight update interrupted, is several segments, each with a longer prompt
    than the one before. verl drops the text, which vLLM decodes token by token; only strings to stop at need it.
    """

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        if "seed" in sampling_params:
            sampling_params = sampling_params | {"seed": derived(sampling_params["seed"], len(prompt_ids))}
        if self.config.actor_rollout_ref.rollout.name == "vllm" and not sampling_params.get("stop"):
            sampling_params = {"detokenize": False} | sampling_params
        return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)


class SeedingClient(_CountingClient, SegmentClient):
    """verl's client, with a stream for each request."""


class SeedingFullyAsyncClient(_CountingClient, FullyAsyncLLMServerClient, SegmentClient):
    """verl's client for partial rollouts, with a stream for each request and each segment of its answer."""
