"""verl's vLLM server and replica for the policy, whose answers carry entropies.

A generation's ``TokenOutput.extra_fields`` gains two arrays aligned with its ``token_ids``:

* ``rollout_entropies``: (T,) float32, nats, of the distribution each token was sampled from; NaN when the request cut
  that distribution (top-p, top-k, min-p), which only validation may do.
* ``rollout_versions``: (T,) int32, the step whose weights sampled the token; -1 before the first weight update.
"""

import argparse
import os
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import ENTROPIES, ENV_FLAG, VERSIONS, WORKER_EXTENSION, codec
from gtpo_verl.integrations.vllm.patch import check_vllm_version
from gtpo_verl.integrations.vllm.requirements import check_rollout, truncates


class _EngineTap:
    """vLLM's engine, remembering the last output of each request until it is taken; verl drops most of it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._outputs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        async for output in self._engine.generate(*args, request_id=request_id, **kwargs):
            self._outputs[request_id] = output
            yield output

    def take(self, request_id: str) -> Any:
        return self._outputs.pop(request_id, None)


class EntropyVLLMHttpServer(vLLMHttpServer):
    """verl's vLLM server with exact entropies of the sampling policy in its answers.

    Raises UserError: the rollout's settings or the installed vLLM do not allow exact entropies, or a worker returns
    none.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        check_vllm_version()
        check_rollout(config)
        os.environ[ENV_FLAG] = "1"  # the engine and its workers are started by this process and inherit it
        super().__init__(config, *args, **kwargs)

    def _get_worker_extension_cls(self) -> str:
        return WORKER_EXTENSION

    async def run_server(self, args: argparse.Namespace) -> None:
        await super().run_server(args)
        self._tap = _EngineTap(self.engine)
        self.engine = cast(AsyncLLM, self._tap)
        await self._check_first_token()

    async def _check_first_token(self) -> None:
        """Look for the entropy of a first token: an unpatched worker is found now, and not in the first step.

        At temperature 1 and at the run's, for which V2 compiles its kernel in two versions.
        """
        for temperature in sorted({1.0, float(self.config.temperature)}):
            params = SamplingParams(max_tokens=1, temperature=temperature, logprobs=0, detokenize=False)
            request_id = f"gtpo_verl-first-token-{temperature}"
            async for _ in self.engine.generate({"prompt_token_ids": [0]}, params, request_id=request_id):
                pass
            completion = self._tap.take(request_id).outputs[0]
            try:
                codec.check_packed(codec.packed_words(completion.token_ids, completion.logprobs))
            except UserError:
                self.engine.shutdown()
                raise

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        wanted = bool(sampling_params.get("logprobs"))
        truncated = truncates(sampling_params)
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        finally:
            final = self._tap.take(request_id)
        if not wanted:
            return output
        if truncated:
            entropies = np.full(len(output.token_ids), np.nan, np.float32)
        elif output.token_ids:
            entropies = codec.completion_entropies(output.token_ids, final.outputs[0].logprobs)
        else:  # aborted before the first token
            entropies = np.empty(0, np.float32)
        step = output.extra_fields["global_steps"]
        output.extra_fields[ENTROPIES] = entropies
        output.extra_fields[VERSIONS] = np.full(len(entropies), -1 if step is None else step, np.int32)
        return output


class EntropyVLLMReplica(vLLMReplica):
    """verl's vLLM replica: ``EntropyVLLMHttpServer`` for the policy, verl's own for reward models and teachers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(EntropyVLLMHttpServer)
