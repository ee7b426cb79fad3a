"""Names and random streams of the prompts that a step generates."""

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils

from gtpo_verl.integrations.streams import assign_streams
from gtpo_verl.integrations.transfer_queue import prompt_keys


class PromptNames:
    """Names prompts by their step and their number in it, in place of verl's random names.

    They are the same in every run of the same seed, also where a step is repeated after a restart.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._step = 0
        self._next = 0  # number of the next prompt in the step

    def assign(self, prompts: TensorDict, step: int) -> None:
        """Name prompts that are about to be submitted, and give them their random streams."""
        names = self.names(len(prompts), step)
        tensordict_utils.assign_non_tensor_stack(prompts, "uid", names)
        assign_streams(prompts, self._config, "train", names)

    def names(self, count: int, step: int) -> list[str]:
        """The names of the next prompts."""
        prefix = f"{step:06d}-"
        if step != self._step:
            # Groups of this very step wait where its first attempt ended with a spent budget.
            taken = [int(key.removeprefix(prefix)) for key in prompt_keys("train") if key.startswith(prefix)]
            self._step, self._next = step, max(taken, default=-1) + 1
        first, self._next = self._next, self._next + count
        return [f"{prefix}{number:06d}" for number in range(first, first + count)]
