"""Changes the algorithm of a running training at the start of a step; sitecustomize.py beside this calls it.

``$GTPO_VERL_TEST_ALGORITHMS`` is a JSON list: for each step the overrides that choose its algorithm. Estimator and
settings are read from the trainer's configuration at every step, and the workers get the new loss as they get a
critic's: by verl's ``set_loss_fn``.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any


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

    from gtpo_verl.algorithms.registry import algorithms
    from gtpo_verl.config import compose_config

    composed = compose_config(["setting=quickstart", "hardware=cpu", *overrides])
    # all in which two algorithms may differ; tests/test_config.py holds them to it
    keys = {key.rstrip(".") for entry in algorithms().values() for key in entry.keys}
    for key in keys:
        value = OmegaConf.select(composed, key)
        if value is not None:
            OmegaConf.update(trainer.config, key, value, merge=False, force_add=True)
    actor = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
    trainer.actor_rollout_wg.set_loss_fn(partial(ppo_loss, config=actor))
