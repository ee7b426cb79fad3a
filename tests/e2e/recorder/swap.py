"""Changes the algorithm of a running training at the start of a step; sitecustomize.py beside this calls it.

``$GTPO_VERL_TEST_ALGORITHMS`` is a JSON list: for each step the overrides that choose its algorithm. Estimator and settings are read
from the trainer's configuration at every step, and the workers get the new loss as they get a critic's: by verl's ``set_loss_fn``.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

# all in which two algorithms differ; tests/test_config.py holds them to it
KEYS = (
    *("algorithm.adv_estimator", "algorithm.gtpo", "algorithm.grpo_s"),
    *("actor_rollout_ref.actor.policy_loss", "actor_rollout_ref.actor.loss_agg_mode"),
)


def swap_algorithms(module: ModuleType) -> None:
    """Replace ``trainer_class`` of gtpo_verl.integrations.trainer by one whose trainers follow the schedule."""
    schedule = json.loads(os.environ["GTPO_VERL_TEST_ALGORITHMS"])
    trainer_class = module.trainer_class

    def swapping_class(mode: str) -> type:
        stock = trainer_class(mode)

        def on_step_begin(self: Any) -> None:
            use(self, schedule[self.global_steps - 1])
            stock.on_step_begin(self)

        return type(f"Swapping{stock.__name__}", (stock,), {"on_step_begin": on_step_begin, "__module__": __name__})

    module.trainer_class = swapping_class  # type: ignore[attr-defined]


def use(trainer: Any, overrides: Sequence[str]) -> None:
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    from gtpo_verl.config import compose_config

    composed = compose_config(["setting=quickstart", "hardware=cpu", *overrides])
    for key in KEYS:
        OmegaConf.update(trainer.config, key, OmegaConf.select(composed, key), merge=False, force_add=True)
    actor = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
    trainer.actor_rollout_wg.set_loss_fn(partial(ppo_loss, config=actor))
