"""A user's own agent loop, in two turns: what docs/guides/entropies.md says to write. Used by drive_verl.py."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from gtpo_verl.integrations.vllm.agent_loop import RolloutEntropyMixin

TURN = 40  # tokens


class TwoTurns(AgentLoopBase):
    """A turn of the policy, a message from outside, and a second turn, which the response's limit cuts."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        tokens = await self.ct_build_initial_tokens(messages)
        start = len(tokens)
        mask: list[int] = []
        log_probs: list[float] = []
        for turn in (1, 2):
            answer = await self.server_manager.generate(
                uuid4().hex, prompt_ids=tokens, sampling_params={**sampling_params, "max_tokens": TURN}
            )
            merged, mask, log_probs = await self.ct_merge_assistant_token(
                tokens, answer.token_ids, mask, log_probs, assistant_logprobs=answer.log_probs
            )
            tokens = merged.token_ids
            if turn == 1:
                said = [*messages, {"role": "assistant", "content": self.tokenizer.decode(answer.token_ids)}]
                messages = [*said, {"role": "user", "content": "7+7"}]
                merged, mask, log_probs = await self.ct_merge_context_msg(said, messages, tokens, mask, log_probs)
                tokens = merged.token_ids
        limit = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=tokens[:start],
            response_ids=tokens[start:][:limit],
            response_mask=mask[:limit],
            response_logprobs=log_probs[:limit],
            num_turns=4,
            metrics=AgentLoopMetrics(),
        )


class TwoTurnsWithEntropies(RolloutEntropyMixin, TwoTurns):
    """The same loop with rollout entropies."""
