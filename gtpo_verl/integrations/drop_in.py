"""The methods of this package in verl's own command (``python -m gtpo_verl.main_ppo``): credit assignment alone.

verl's main starts Ray and an actor that looks up its trainer by the mode; the actor here finds `CreditTrainer`. Run
directory, guards, dynamic sampling with a budget and seeds of ``gtpo-verl train`` are not here.
"""

import logging
from typing import Any, cast

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer import main_ppo
from verl.trainer.ppo import v1

from gtpo_verl.algorithms import algorithm_of
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.credit_trainer import credit_trainer_class
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.launch import verls_own
from gtpo_verl.integrations.losses import KEY, GTPOPolicyLossConfig
from gtpo_verl.integrations.plugin import check_registered
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.vllm.wiring import enable_rollout_entropy
from gtpo_verl.problems import evaluate, refuse

WITH_SETTINGS = ("grpo_s", "ce_gppo")  # losses that read what verl's settings of a loss do not have
_TaskRunner: Any = cast(Any, main_ppo.TaskRunnerV1).__ray_actor_class__  # verl's name is that of the Ray actor


class CreditTaskRunner(_TaskRunner):
    """verl's task runner, whose trainer has credit assignment."""

    def run(self, config: DictConfig) -> None:
        check_registered()
        ours = logging.getLogger("gtpo_verl")
        ours.setLevel(logging.WARNING)
        ours.addHandler(logging.StreamHandler())  # the root's shows errors alone
        print(
            f"gtpo_verl: algorithm.adv_estimator={config.algorithm.adv_estimator}, entropies of the "
            f"{config.algorithm.entropy.source}; a response is correct from algorithm.correct_threshold="
            f"{config.algorithm.correct_threshold} on. Metrics: credit/*",
            flush=True,
        )
        if entropy_source(config).from_rollout:
            enable_rollout_entropy(config)
        with temporarily(v1, "get_trainer_cls", credit_trainer_class):  # looked up when the run begins
            super().run(config)


def run(config: DictConfig) -> None:
    """Train as verl's main does, with its configuration; where it names a method of ours, with all settings of that."""
    method = algorithm_of(config)
    if OmegaConf.select(config, f"{KEY}.loss_mode") in WITH_SETTINGS:
        OmegaConf.update(config, f"{KEY}._target_", f"{GTPOPolicyLossConfig.__module__}.GTPOPolicyLossConfig")
    if method is None or method.verl_estimator is not None:
        cast(Any, main_ppo.main).__wrapped__(config)
        return
    refuse(evaluate([verls_own], config))
    try:
        main_ppo.run_ppo(config, task_runner_class=ray.remote(CreditTaskRunner))
    except Exception as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, UserError):  # raised in the actor: the error itself is a stack trace
            raise UserError(str(cause)) from error
        raise
