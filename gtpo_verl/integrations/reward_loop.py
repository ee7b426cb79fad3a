"""verl's reward workers, which score the responses of a group in one call.

verl sends each response in a call of its own, as a ``DataProto``: most of its CPU time goes into packing and unpacking
that. Here the responses travel as arrays, and the worker makes the same ``DataProto`` of each.
"""

import asyncio
import copy
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.protocol import DataProto

from gtpo_verl.collector import never_collect_what_is_loaded

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scorable:
    """A response as the reward worker needs it.

    ``prompt``, ``response``: (P,) and (R,) int64, token ids of a text. ``num_turns`` and ``extra_fields`` are the agent
    loop's. ``columns``: those of the data set, and the number of the response in its group.
    """

    prompt: np.ndarray
    response: np.ndarray
    num_turns: int
    extra_fields: dict[str, Any]
    columns: dict[str, Any]

    def as_batch(self) -> DataProto:
        """The batch of one row that verl's worker would get; nothing of it is shared with another row."""
        tokens = torch.from_numpy(np.concatenate([self.prompt, self.response]))
        columns = copy.deepcopy(self.columns)
        return DataProto(
            batch=TensorDict(
                {
                    "prompts": torch.tensor(self.prompt)[None],
                    "responses": torch.tensor(self.response)[None],
                    "attention_mask": torch.ones_like(tokens)[None],
                    "input_ids": tokens[None],
                    "position_ids": torch.arange(len(tokens))[None],
                },
                batch_size=1,
            ),
            non_tensor_batch={
                **{name: np.array([value]) for name, value in columns.items()},
                "__num_turns__": np.array([self.num_turns]),
                "tool_extra_fields": np.array([copy.deepcopy(self.extra_fields)], dtype=object),
                "prompt_len": np.array([len(self.prompt)]),
                "response_len": np.array([len(self.response)]),
            },
        )


class GroupRewardLoopWorker(RewardLoopWorker):
    """verl's reward worker, which also takes several responses in one call and waits for none without a limit."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._limit = OmegaConf.select(config, "guards.reward_timeout")  # of a run recorded earlier: no such key
        never_collect_what_is_loaded()

    async def compute_scores(self, responses: list[Scorable]) -> list[dict[str, Any] | Exception]:
        """Score responses at the same time, each as ``compute_score`` does; an exception takes the place of a score."""
        found = await asyncio.gather(*map(self._score, responses))
        return list(found)

    async def _score(self, response: Scorable) -> dict[str, Any] | Exception:
        try:
            return await self.compute_score(response.as_batch())
        except Exception as error:
            return error

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """verl's, within ``guards.reward_timeout`` seconds; a function that never returns keeps its thread.

        Raises:
            TimeoutError: the limit is over.
        """
        try:
            async with asyncio.timeout(self._limit) as limit:
                return await super().compute_score(data)
        except TimeoutError as error:
            if not limit.expired():
                raise
            logger.warning("The reward function gave no result within guards.reward_timeout=%s s.", self._limit)
            raise TimeoutError(f"no reward within guards.reward_timeout={self._limit} s") from error


class GroupRewardLoopManager(RewardLoopManager):
    """verl's reward loop with workers that score a group in one call."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = ray.remote(GroupRewardLoopWorker)
        super()._init_reward_loop_workers()
