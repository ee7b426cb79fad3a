"""verl's single-turn agent loop with a seed for every response, so that two runs of one command can be compared."""

import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SeededLoop(SingleTurnAgentLoop):
    """Its seeds follow from the prompt and the number of the response to it."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **columns: Any) -> AgentLoopOutput:
        seed = zlib.crc32(f"{columns['raw_prompt']} {columns['session_id']}".encode())
        return await super().run(sampling_params | {"seed": seed}, priority, **columns)
