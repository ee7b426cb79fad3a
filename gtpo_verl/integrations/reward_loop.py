"""verl's reward workers, which wait for no reward without a limit, say what is wrong with one, and judge the last
output of a session as it is; an audit's responses are scored many in one call.
"""

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.protocol import DataProto

from gtpo_verl.errors import UserError, raised_in


@dataclass(frozen=True)
class Scorable:
    """A response of one turn as the reward worker needs it.

    ``prompt``, ``response``: (P,) and (R,) int64, token ids of a text. ``columns``: those of the data set.
    """

    prompt: np.ndarray
    response: np.ndarray
    columns: dict[str, Any]

    def as_batch(self) -> DataProto:
        """The batch of one row that verl's agent loops send; nothing of it is shared with another row."""
        tokens = torch.from_numpy(np.concatenate([self.prompt, self.response]))
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
                **{name: np.array([value]) for name, value in copy.deepcopy(self.columns).items()},
                "__num_turns__": np.array([2]),
                "tool_extra_fields": np.array([{}], dtype=object),
                "prompt_len": np.array([len(self.prompt)]),
                "response_len": np.array([len(self.response)]),
            },
        )


class RewardError(UserError):
    """The reward function gave a response no reward."""


def checked(function: Callable[..., Any], file: str | None) -> Callable[..., Any]:
    """A reward function that raises a :class:`RewardError` where ``function``, of a file, raises or gives no number.

    SystemExit too: in a worker's thread it would end the event loop that everything waits for.
    """

    @contextmanager
    def in_words() -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            raise RewardError(f"the reward function raised {raised_in(file, error)}") from error

    @functools.wraps(function)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        with in_words():
            result = await function(*args, **kwargs)
        return _with_number(result)

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        with in_words():
            result = function(*args, **kwargs)
        return _with_number(result)

    return asynchronous if inspect.iscoroutinefunction(function) else synchronous


def _with_number(result: Any) -> Any:
    score: Any = result.get("score") if isinstance(result, dict) else result
    try:
        if isinstance(score, str):
            raise TypeError
        float(score)
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward function returned {result!r:.80}, and the reward must be a number") from error
    return result


def last_output(outputs: DataProto) -> DataProto:
    """The last output of a session, the one that a reward manager judges, as a batch of its own.

    verl pads the outputs of a session at their ends, prompt and response together, and its managers take the end of the
    padded mask for that of the response: beside a longer output they would judge a part of it, or nothing.
    """
    if len(outputs) == 1:
        return outputs
    last = outputs[-1:]
    prompt, response = (int(last.non_tensor_batch[name][0]) for name in ("prompt_len", "response_len"))
    lengths = {"prompts": prompt, "responses": response}
    columns = {name: column[..., : lengths.get(name, prompt + response)] for name, column in last.batch.items()}
    return DataProto(batch=TensorDict(columns, batch_size=1), non_tensor_batch=last.non_tensor_batch)


class BoundedRewardLoopWorker(RewardLoopWorker):
    """verl's reward worker with ``guards.reward_timeout`` and a :class:`RewardError` for what is no reward."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._limit = config.guards.reward_timeout
        manager: Any = self.reward_manager
        manager.compute_score = checked(manager.compute_score, config.reward.custom_reward_function.path)

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """verl's, with a TimeoutError after ``guards.reward_timeout`` seconds; a function that never returns keeps its
        thread.
        """
        try:
            async with asyncio.timeout(self._limit) as limit:
                return await super().compute_score(last_output(data))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no reward within guards.reward_timeout={self._limit} s") from error

    async def compute_scores(self, responses: list[Scorable]) -> list[dict[str, Any] | BaseException]:
        """Score responses at the same time; an exception takes the place of a score."""
        scores = (self.compute_score(response.as_batch()) for response in responses)
        return await asyncio.gather(*scores, return_exceptions=True)


class BoundedRewardLoopManager(RewardLoopManager):
    """verl's reward loop with our workers."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = ray.remote(BoundedRewardLoopWorker)
        super()._init_reward_loop_workers()
