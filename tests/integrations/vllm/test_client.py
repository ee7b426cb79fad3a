"""Partial rollouts: a response interrupted by weight updates keeps every token's entropy and version."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.integrations.vllm.client import EntropyFullyAsyncClient


def segment(tokens, step, stop_reason):
    """What a server returns before it is interrupted, or at the end."""
    extra = {"global_steps": step, "num_cached_tokens": 0}
    extra["rollout_entropies"] = np.array(tokens, np.float32) / 8
    extra["rollout_versions"] = np.full(len(tokens), step, np.int32)
    return TokenOutput(token_ids=tokens, log_probs=[-1.0] * len(tokens), stop_reason=stop_reason, extra_fields=extra)


class ScriptedClient(EntropyFullyAsyncClient):
    """The client with its servers and load balancer replaced; the merging is verl's and ours."""

    def __init__(self, segments):
        super().__init__(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 64}}}))
        self.segments = {request: iter(parts) for request, parts in segments.items()}

    async def _acquire_server(self, request_id, **extra):
        async def answer(prompt_ids, **request):
            await asyncio.sleep(0.01)  # let other requests in between
            return next(self.segments[request_id])

        return "server", SimpleNamespace(generate=SimpleNamespace(remote=answer))

    def _release_server(self, server_id, request_id=None):
        pass


def generate(segments, **params):
    client = ScriptedClient(segments)

    async def go():
        requests = [
            client.generate(name, prompt_ids=[1, 2], sampling_params={"logprobs": True, **params}) for name in segments
        ]
        return await asyncio.gather(*requests)

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """verl waits a second between the segments of a response."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


def test_segments_are_joined_in_order():
    (output,) = generate(
        {"a": [segment([8, 16], 3, "aborted"), segment([], 4, "aborted"), segment([24], 5, "completed")]}
    )
    assert output.token_ids == [8, 16, 24]
    assert output.extra_fields["rollout_entropies"].tolist() == [1.0, 2.0, 3.0]
    assert output.extra_fields["rollout_versions"].tolist() == [3, 3, 5]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 5)


def test_concurrent_responses_do_not_mix():
    outputs = generate(
        {
            "a": [segment([8], 1, "aborted"), segment([16], 2, "completed")],
            "b": [segment([80], 1, "aborted"), segment([160, 240], 2, "completed")],
        }
    )
    assert [output.extra_fields["rollout_entropies"].tolist() for output in outputs] == [[1.0, 2.0], [10.0, 20.0, 30.0]]


def test_an_uninterrupted_response_passes_through():
    (output,) = generate({"a": [segment([8, 16], 3, "completed")]})
    assert output.extra_fields["rollout_versions"].tolist() == [3, 3]


def test_without_log_probs_there_is_nothing_to_join():
    plain = TokenOutput(token_ids=[8], stop_reason="completed", extra_fields={"global_steps": 1})
    (output,) = generate({"a": [plain]})
    assert "rollout_entropies" not in output.extra_fields
