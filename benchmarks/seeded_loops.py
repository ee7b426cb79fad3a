"""Agent loops with a seed per response, so that two trainings with the same data seed sample the same tokens.

The seed follows from data.seed, the prompt and the response's number in its group. Trainings of a pair then differ only
in what is compared: until rounding changes a token, they are identical. A prompt seen twice would get the same draws;
the short trainings of `paired_sources.py` see none twice.
"""

import hashlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from gtpo_verl.integrations.vllm.agent_loop import EntropySingleTurnAgentLoop


class Seeded(AgentLoopBase):
    """Sets the seed of every request of a loop."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        drawn = (self.config.data.seed, list(kwargs["raw_prompt"]), kwargs["session_id"])
        seed = int.from_bytes(hashlib.sha256(repr(drawn).encode()).digest()[:4], "big")
        return await super().run({**sampling_params, "seed": seed}, **kwargs)  # type: ignore[safe-super]


class SeededActor(Seeded, SingleTurnAgentLoop):
    """verl's own loop, for algorithm.entropy.source=actor."""


class SeededRollout(Seeded, EntropySingleTurnAgentLoop):
    """The loop that passes entropies on, for algorithm.entropy.source=rollout."""
