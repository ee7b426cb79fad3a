"""verl's client for partial rollouts, keeping entropies and weight versions across aborts and resumes.

``FullyAsyncLLMServerClient`` (colocate_async, separate_async) joins the segments of an interrupted response and drops
whatever a server put into ``extra_fields``. Here each segment is noted on its way up.
"""

from contextvars import ContextVar
from typing import Any

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.integrations.streams import SeedingFullyAsyncClient, SegmentClient
from gtpo_verl.integrations.vllm.names import ENTROPIES, VERSIONS

_segments: ContextVar[list[TokenOutput] | None] = ContextVar("gtpo_verl_segments", default=None)


class _SegmentRecorder(SegmentClient):
    """Stands between the two clients in the method resolution order, where one call is one segment."""

    async def generate(self, request_id: Any, **kwargs: Any) -> TokenOutput:
        segment = await super().generate(request_id, **kwargs)
        segments = _segments.get()
        assert segments is not None
        segments.append(segment)
        return segment


class EntropyFullyAsyncClient(SeedingFullyAsyncClient, _SegmentRecorder):
    """``FullyAsyncLLMServerClient`` whose answers have the entropies and weight versions of all segments.

    Every token keeps the entropy and the version of the weights that sampled it, however often the response was
    interrupted.
    """

    async def generate(self, request_id: Any, **kwargs: Any) -> TokenOutput:
        token = _segments.set([])
        try:
            output = await super().generate(request_id, **kwargs)
            segments = _segments.get()
        finally:
            _segments.reset(token)
        assert segments is not None
        for key in (ENTROPIES, VERSIONS):
            parts = [segment.extra_fields[key] for segment in segments if key in segment.extra_fields]
            if parts:  # none when the request asked for no log-probs
                output.extra_fields[key] = np.concatenate(parts)
        return output
