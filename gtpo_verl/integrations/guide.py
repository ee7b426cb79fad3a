"""The guide's rows in groups of responses (`algorithm.guide`): which they are, who fills them, and the servers of a
guide that answers during training (`source=server`).

Rows of a group that may go to the guide are its last sessions. They wait for the verdicts on the others, and are then
filled by the guide or by the policy. A row of the guide is known by its session number, from `FIRST_SESSION` on.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

from gtpo_verl.algorithms.mixed_policy import GuideConfig
from gtpo_verl.data.traces import Trace
from gtpo_verl.integrations.transfer_queue import parse_key
from gtpo_verl.integrations.vllm.agent_loop import RolloutEntropyOutput
from gtpo_verl.runs.correctness import is_correct, verdict

FIRST_SESSION = 1_000_000  # of the guide's rows; those of the policy are numbered from 0
CLIENT = "guide"  # its name among verl's clients of teachers, which reach the agent loops
FIRST_RANK = 1000  # of its replicas: ranks are in names of Ray actors and of sockets, and the policy's begin at 0


def is_guide(key: str) -> bool:
    """Whether a row is the guide's."""
    return parse_key(key).session >= FIRST_SESSION


class GuideServerManager(LLMServerManager):
    """verl's manager of standalone replicas, for the guide's: no checkpoint engine knows them, so they get no weights
    and never sleep. ``config`` is from `standalone.guide_servers`.
    """

    def __init__(self, config: DictConfig, **options: Any) -> None:
        replica: Any = get_rollout_replica_class(config.actor_rollout_ref.rollout.name)
        named: Any = partial(replica, name_suffix=CLIENT)
        self.rollout_replica_class = named  # verl's base class leaves it as it is
        super().__init__(config, start_rank=FIRST_RANK, **options)


class Reserve:
    """The sessions of a group of ``size`` responses that wait for the verdicts on the others."""

    def __init__(self, config: GuideConfig, size: int, threshold: float) -> None:
        self.drop_wrong = config.drop_wrong
        self._config = config
        self._first = size - config.reserved
        self._threshold = threshold
        self._open = self._first
        self._verdicts: list[bool] = []
        self._example: AgentLoopOutput | None = None
        self._judged = asyncio.Event()

    def holds(self, session: int) -> bool:
        """Whether this session waits."""
        return session >= self._first

    @contextmanager
    def awaited(self, session: int) -> Iterator[None]:
        """The block in which a session of the policy is generated and judged; those that wait wait for its end.

        Leaving it without `judge`, as a failed response does, is no verdict.
        """
        try:
            yield
        finally:
            if not self.holds(session):
                self._open -= 1
                if self._open == 0:
                    self._judged.set()

    def judge(self, session: int, outputs: Sequence[AgentLoopOutput]) -> None:
        """Note the verdict on the scored outputs of a session; those that wait decide nothing."""
        if not self.holds(session):
            self._verdicts.append(self.is_correct(outputs[-1]))
            self._example = self._example or outputs[0]

    def is_correct(self, output: AgentLoopOutput) -> bool:
        """The verdict on a scored response; raises UserError where it has none."""
        info = output.extra_fields.get("reward_extra_info", {})
        return is_correct(verdict(info, "on a response of a group with a guide"), self._threshold)

    async def turn(self, session: int) -> tuple[int, AgentLoopOutput] | None:
        """Once the others are judged, for a session that waits: which response of the guide it is, from 0, and one of
        the policy's own to the same prompt; None where the response is to be the policy's.
        """
        await self._judged.wait()
        number = session - self._first
        if self._example is None or number >= self._config.rows(self._verdicts):
            return None
        return number, self._example


def as_output(trace: Trace, example: AgentLoopOutput) -> AgentLoopOutput:
    """A response of the guide with the columns of an own response to the same prompt, so that both fit into a batch."""
    count = len(trace.ids)
    changes: dict[str, Any] = {
        "response_ids": trace.ids,
        "response_mask": [1] * count,
        "num_turns": 2,
        "metrics": AgentLoopMetrics(),
        "reward_score": None,
        "extra_fields": versions_of(example) | {"turn_scores": [], "tool_rewards": []},
    }
    if example.response_logprobs is not None:
        changes["response_logprobs"] = trace.log_probs or [0.0] * count
    if isinstance(example, RolloutEntropyOutput):
        changes["rollout_entropies"] = torch.zeros(count)
        changes["rollout_versions"] = torch.full((count,), -1, dtype=torch.int32)
    return example.model_copy(update=changes)


def versions_of(example: AgentLoopOutput) -> dict[str, Any]:
    """The versions of an own response's weights, for one of the guide: it has none, and verl's metrics need numbers."""
    names = ("global_steps", "min_global_steps", "max_global_steps")
    return {name: example.extra_fields.get(name) for name in names}
