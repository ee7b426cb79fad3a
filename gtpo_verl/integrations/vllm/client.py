"""verl's client for partial rollouts (colocate_async, separate_async), keeping entropies and weight versions.

verl's own joins the segments of an interrupted response and drops what a server put into ``extra_fields``; here each
segment is noted on its way up.
"""

from contextvars import ContextVar
from typing import Any

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.integrations.streams import SeedingFullyAsyncClient, SegmentClient
from gtpo_verl.integrations.temporarily import bound
from gtpo_verl.integrations.vllm import ENTROPIES, VERSIONS

_segments: ContextVar[list[TokenOutput]] = ContextVar("gtpo_verl_segments")


class _SegmentRecorder(SegmentClient):
    """Stands between the two clients in the method resolution order, where one call is one segment."""

    async def generate(self, request_id: Any, **kwargs: Any) -> TokenOutput:
        segment = await super().generate(request_id, **kwargs)
        _segments.get().append(segment)
        return segment


class EntropyFullyAsyncClient(SeedingFullyAsyncClient, _SegmentRecorder):
    """``FullyAsyncLLMServerClient`` in whose answers every token has the entropy and version of its own segment."""

    async def generate(self, request_id: Any, **kwargs: Any) -> TokenOutput:
        segments: list[TokenOutput] = []
        with bound(_segments, segments):
            output = await super().generate(request_id, **kwargs)
        for key in (ENTROPIES, VERSIONS):
            parts = [segment.extra_fields[key] for segment in segments if key in segment.extra_fields]
            if parts:  # none when the request asked for no log-probs
                output.extra_fields[key] = np.concatenate(parts)
        return output
