"""verl's agent loops, with two more columns in TransferQueue beside the response tokens.

* ``rollout_entropies``: (response_len,) float32, nats, 0 where ``response_mask`` is 0 (tool output, boundary tokens).
* ``rollout_versions``: (response_len,) int32, the trainer's step whose weights sampled the token, -1 where the mask is 0.

Every row has both, aligned with and truncated like ``responses``.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from pydantic import Field
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tokenizer.continuous_token import MergeResult
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm.wiring import ENTROPIES, VERSIONS


class RolloutEntropyOutput(AgentLoopOutput):
    """An agent loop's output with the entropies and weight versions of its response, (response_len,) each."""

    rollout_entropies: list[float] = Field(exclude=True)
    rollout_versions: list[int] = Field(exclude=True)

    def as_dict(self) -> dict[str, Any]:
        """verl's columns, and ours as tensors."""
        columns = super().as_dict()
        columns[ENTROPIES] = torch.tensor(self.rollout_entropies, dtype=torch.float32)
        columns[VERSIONS] = torch.tensor(self.rollout_versions, dtype=torch.int32)
        return columns


class _TurnRecorder:
    """The client of the LLM servers, remembering its last answer: verl's loops keep only the tokens and log-probs of it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.turn: TokenOutput | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        self.turn = await self._client.generate(*args, **kwargs)
        return self.turn


class RolloutEntropyMixin(AgentLoopBase):
    """Carries rollout entropies through an agent loop of verl's, whatever turns it takes.

    A loop adds every turn and every tool response with ``ct_merge_assistant_token`` and ``ct_merge_context_msg``, which align
    mask and log-probs with the tokens; entropies and versions are aligned by the same edits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = _TurnRecorder(self.server_manager)
        self.server_manager = cast(LLMServerClient, self._recorder)
        self._entropies: list[float] = []
        self._versions: list[float] = []

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        merged = await super().ct_merge_assistant_token(
            runtime_token_ids, assistant_token_ids, response_mask, *args, **kwargs
        )
        turn = self._recorder.turn
        assert turn is not None
        if ENTROPIES not in turn.extra_fields:
            raise UserError(
                "the rollout server returned no entropies: it is not the one of gtpo_verl. Call enable_rollout_entropy(config) "
                "before the trainer is built, or set algorithm.entropy.source=actor."
            )
        self._merge(
            merged[0], response_mask, turn.extra_fields[ENTROPIES].tolist(), turn.extra_fields[VERSIONS].tolist()
        )
        return merged

    async def ct_merge_context_msg(
        self,
        previous_messages: list[dict],
        updated_messages: list[dict],
        runtime_token_ids: list[int],
        response_mask: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        merged = await super().ct_merge_context_msg(
            previous_messages, updated_messages, runtime_token_ids, response_mask, *args, **kwargs
        )
        self._merge(merged[0], response_mask, None, None)
        return merged

    def _merge(
        self,
        merge: MergeResult,
        response_mask: list[int],
        entropies: Sequence[float] | None,
        versions: Sequence[float] | None,
    ) -> None:
        align = self.continuous_token_builder.align_response_metadata
        # a loop may discard a context merge that would not fit; its mask then tells how much of ours still counts
        kept = len(response_mask)
        _, self._entropies = align(merge, response_mask, self._entropies[:kept], assistant_logprobs=entropies)
        _, self._versions = align(merge, response_mask, self._versions[:kept], assistant_logprobs=versions)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> RolloutEntropyOutput:
        output = await super().run(sampling_params, **kwargs)  # type: ignore[safe-super]
        for raw in (ENTROPIES, VERSIONS):  # those of the first turn, not aligned
            output.extra_fields.pop(raw, None)
        mask = output.response_mask
        return RolloutEntropyOutput(
            **{name: getattr(output, name) for name in output.model_fields_set},
            rollout_entropies=[entropy if on else 0.0 for entropy, on in zip(self._entropies, mask, strict=False)],
            rollout_versions=[int(version) if on else -1 for version, on in zip(self._versions, mask, strict=False)],
        )


class EntropySingleTurnAgentLoop(RolloutEntropyMixin, SingleTurnAgentLoop):
    """verl's single-turn loop with rollout entropies."""


class EntropyToolAgentLoop(RolloutEntropyMixin, ToolAgentLoop):
    """verl's tool loop with rollout entropies of all turns; tokens that a tool wrote have none."""
