"""A vLLM server of verl's that also continues many prefixes in one call: no agent loop and no Ray call for a sample.

Requests share vLLM's prefix cache with each other. Where a request asks for them, its samples carry the log-prob and
the exact entropy of every token.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from gtpo_verl.evaluation.continuations import BulkSample
from gtpo_verl.integrations.vllm import codec
from gtpo_verl.integrations.vllm.server import EntropyVLLMHttpServer, EntropyVLLMReplica


@dataclass(frozen=True)
class BulkRequest:
    """Continue `token_ids` `count` times by at most `limit` tokens; the streams follow from `seed` (62 bits)."""

    token_ids: tuple[int, ...]
    count: int
    limit: int
    seed: int
    entropies: bool = False


class BulkVLLMHttpServer(EntropyVLLMHttpServer):
    """verl's server with `continue_all`."""

    async def continue_all(self, requests: list[BulkRequest], sampling: dict[str, Any]) -> list[list[BulkSample]]:
        """The samples of each request. `sampling`: temperature, top_p, top_k and so on, as of vLLM's SamplingParams."""
        return list(await asyncio.gather(*(self._continue(request, sampling) for request in requests)))

    async def _continue(self, request: BulkRequest, sampling: dict[str, Any]) -> list[BulkSample]:
        params = SamplingParams(
            **sampling,
            n=request.count,
            seed=request.seed,
            max_tokens=request.limit,
            logprobs=0 if request.entropies else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"bulk-{request.seed}-{len(request.token_ids)}"
        async for _ in self.engine.generate({"prompt_token_ids": list(request.token_ids)}, params, request_id=name):
            pass
        return [_sample(output, request.entropies) for output in self._tap.take(name).outputs]


def _sample(output: Any, entropies: bool) -> BulkSample:
    tokens = np.array(output.token_ids, dtype=np.int32)
    ended = output.finish_reason == "stop"
    if not entropies:
        return BulkSample(tokens=tokens, ended=ended)
    log_probs = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    found = codec.completion_entropies(output.token_ids, output.logprobs)
    return BulkSample(tokens=tokens, ended=ended, entropies=found, log_probs=np.array(log_probs, dtype=np.float32))


class BulkVLLMReplica(EntropyVLLMReplica):
    """verl's replica with `BulkVLLMHttpServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(BulkVLLMHttpServer)
