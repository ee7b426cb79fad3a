"""verl's agent loops, with two more columns in TransferQueue beside the response tokens.

* ``rollout_entropies``: (response_len,) float32, nats, 0 where ``response_mask`` is 0 (tool output, boundary tokens).
* ``rollout_versions``: (response_len,) int32, the step whose weights sampled the token, -1 where the mask is 0.

Every row has both, aligned with and truncated like ``responses``.
"""

from typing import Any, cast

import numpy as np
import torch
from pydantic import ConfigDict, Field
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tokenizer.continuous_token import MergeResult
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import ENTROPIES, INSTEAD, VERSIONS

_TOKEN = np.dtype([("mask", np.int64), ("entropy", np.float32), ("version", np.int32)])


class RolloutEntropyOutput(AgentLoopOutput):
    """An agent loop's output with the entropies and weight versions of its response: (response_len,) float32, int32."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    rollout_entropies: torch.Tensor = Field(exclude=True)
    rollout_versions: torch.Tensor = Field(exclude=True)

    def as_dict(self) -> dict[str, Any]:
        """verl's columns and ours."""
        return super().as_dict() | {ENTROPIES: self.rollout_entropies, VERSIONS: self.rollout_versions}


class _TurnRecorder:
    """A client of the LLM servers that keeps its last answer; verl's loops keep only tokens and log-probs of it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.turn: TokenOutput | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        self.turn = await self._client.generate(*args, **kwargs)
        return self.turn


def _tokens(count: int, entropies: Any = 0.0, versions: Any = -1) -> np.ndarray:
    """(count,) of ``_TOKEN``; by default of tokens that the policy did not sample."""
    tokens = np.zeros(count, _TOKEN)
    tokens["entropy"], tokens["version"] = entropies, versions
    return tokens


class RolloutEntropyMixin(AgentLoopBase):
    """Carries rollout entropies through an agent loop of verl's, whatever turns it takes.

    A loop adds every turn and every tool response with ``ct_merge_assistant_token`` and ``ct_merge_context_msg``, which
    align mask and log-probs with the tokens; entropies and versions follow the same edits. A loop may discard a context
    merge, as verl's does with a tool response that does not fit: the mask that it passes next tells. An answer of three
    tokens, a tool response of two that the loop takes over, an answer of one:

        merge               mask passed     columns after it        offered
        assistant, 3        []              [1, 1, 1]
        context, 2          [1, 1, 1]       [1, 1, 1]               [1, 1, 1, 0, 0]
        assistant, 1        [1, 1, 1, 0, 0] [1, 1, 1, 0, 0, 1]

    Had the loop discarded the tool response, it would pass [1, 1, 1], and what was offered be forgotten.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = _TurnRecorder(self.server_manager)
        self.server_manager = cast(LLMServerClient, self._recorder)
        self._columns = _tokens(0)  # of the response so far
        self._offered: np.ndarray | None = None  # after a context merge that the loop has not taken yet

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
        if turn is None or list(turn.token_ids) != list(assistant_token_ids):
            raise UserError(
                f"{type(self).__name__} merged tokens that are not the server's last answer, so they have no "
                f"entropies: generate and merge one answer at a time, {INSTEAD}."
            )
        if ENTROPIES not in turn.extra_fields:
            raise UserError(
                "the rollout server returned no entropies: it is not the one of gtpo_verl. Call "
                f"enable_rollout_entropy(config) before the trainer is built, {INSTEAD}."
            )
        entropies, versions = turn.extra_fields[ENTROPIES], turn.extra_fields[VERSIONS]
        sampled = merged[0].appended_token_count
        if not len(entropies) == len(versions) == sampled:
            raise UserError(
                f"the rollout server returned {len(entropies)} entropies and {len(versions)} versions for {sampled} "
                "tokens: its answer must have one of each for every token."
            )
        self._columns = self._aligned(merged, response_mask, _tokens(sampled, entropies, versions))
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
        self._offered = self._aligned(merged, response_mask, _tokens(merged[0].appended_token_count))
        return merged

    def _aligned(
        self, merged: tuple[MergeResult, list[int], Any], response_mask: list[int], appended: np.ndarray
    ) -> np.ndarray:
        """The columns after a merge, which takes tokens off the end, adds some of others and then those appended."""
        merge, mask, _ = merged
        now = self._settled(response_mask)
        kept = max(len(response_mask) - merge.removed_prefix_token_count, 0)
        columns = np.concatenate([now[:kept], _tokens(len(merge.inserted_token_ids)), appended])
        self._refuse_more(len(mask), len(columns))
        columns = columns[: len(mask)]
        columns["mask"] = mask
        return columns

    def _settled(self, mask: list[int]) -> np.ndarray:
        """The columns of the response with this mask: with the last context merge if the loop took it over."""
        offered, self._offered = self._offered, None
        length = len(mask)
        if offered is not None and (offered["mask"][:length].tolist() == list(mask) or length > len(self._columns)):
            self._columns = offered
        self._refuse_more(length, len(self._columns))
        self._columns = self._columns[:length]
        return self._columns

    def _refuse_more(self, tokens: int, known: int) -> None:
        if tokens > known:
            raise UserError(
                f"{type(self).__name__} added tokens by other ways than ct_merge_assistant_token and "
                f"ct_merge_context_msg, so the response's entropies cannot be aligned: use these, {INSTEAD}."
            )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> RolloutEntropyOutput:
        output = await super().run(sampling_params, **kwargs)  # type: ignore[safe-super]
        if not isinstance(output, AgentLoopOutput):
            raise UserError(
                f"{type(self).__name__} returned several outputs for one response, whose entropies cannot be told "
                f"apart: return one, {INSTEAD}."
            )
        for raw in (ENTROPIES, VERSIONS):  # those of the first turn, not aligned
            output.extra_fields.pop(raw, None)
        columns = self._settled(output.response_mask)
        outside = np.array(output.response_mask) == 0  # also where the loop took tokens of the policy's out of it
        fields = {name: getattr(output, name) for name in output.model_fields_set}
        return RolloutEntropyOutput.model_construct(  # the loop's own output was validated
            **fields | {"extra_fields": output.extra_fields},  # also where a loop filled the default and set no field
            rollout_entropies=torch.from_numpy(np.where(outside, np.float32(0), columns["entropy"])),
            rollout_versions=torch.from_numpy(np.where(outside, np.int32(-1), columns["version"])),
        )


class EntropySingleTurnAgentLoop(RolloutEntropyMixin, SingleTurnAgentLoop):
    """verl's single-turn loop with rollout entropies."""


class EntropyToolAgentLoop(RolloutEntropyMixin, ToolAgentLoop):
    """verl's tool loop with rollout entropies of all turns; tokens that a tool wrote have none."""
