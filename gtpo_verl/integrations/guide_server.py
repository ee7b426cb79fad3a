"""A guide that answers during training: vLLM replicas of a frozen model on devices of their own
(`algorithm.guide.source=server`).

They are verl's standalone replicas. No checkpoint engine knows them, so they get no weights and never sleep, and only
the agent loops of training prompts have their client.
"""

from functools import partial
from typing import Any

from omegaconf import DictConfig
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

CLIENT = "guide"  # its name among verl's clients of teachers, which reach the agent loops
FIRST_RANK = 1000  # of its replicas: ranks are in names of Ray actors and of sockets, and the policy's begin at 0


class GuideServerManager(LLMServerManager):
    """verl's manager of rollout servers, for the guide's.

    Args:
        config: from `standalone.guide_servers`.
    """

    def __init__(self, config: DictConfig, **options: Any) -> None:
        replica: Any = get_rollout_replica_class(config.actor_rollout_ref.rollout.name)
        named: Any = partial(replica, name_suffix=CLIENT)
        self.rollout_replica_class = named  # verl's base class leaves it as it is
        super().__init__(config, start_rank=FIRST_RANK, **options)
