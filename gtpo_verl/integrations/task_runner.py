"""The Ray actor that runs a job: verl's V1 task runner with our trainer in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.single_controller.ray.base import ResourcePoolManager

from gtpo_verl.integrations import plugin
from gtpo_verl.integrations.admission import Bundle, Placement, training_bundles
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.health import watched
from gtpo_verl.integrations.queue_namespace import QueueWatch
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.vllm.wiring import enable_rollout_entropy
from gtpo_verl.integrations.weights import fit_to_model
from gtpo_verl.seeds import seed_process


@contextmanager
def with_queue(config: DictConfig, bundles: Sequence[Bundle], check: Callable[[], None]) -> Iterator[None]:
    """TransferQueue for a job admitted with ``bundles``, until a process of it has ended or ``check`` raises."""
    placement, queue = Placement(bundles), QueueWatch()

    def check_all() -> None:
        placement.check()
        queue.check()
        check()

    # verl stops where it finds too little free; this job was admitted, and its wait is bounded
    unchecked = temporarily(ResourcePoolManager, "_check_resource_available", lambda pools: None)
    try:
        with watched(check_all), unchecked:
            tq.init(config.transfer_queue)
            yield
    except Exception:
        check_all()  # a dead process causes many other errors; this one names the cause
        raise
    finally:
        tq.close()


class TaskRunner:
    """Sets up TransferQueue, the trainer and the agent loops, and trains; see :class:`TaskRunnerClass`."""

    def run(self, config: DictConfig) -> None:
        """Run the job of a composed configuration to its end."""
        from verl.utils.import_utils import load_class_from_fqn
        from verl.utils.logging_utils import configure_verl_logging

        from gtpo_verl.integrations.agent_loops import SeededAgentLoopManager
        from gtpo_verl.integrations.trainer import trainer_class

        configure_verl_logging()
        plugin.log_by_name()
        plugin.check_registered()
        seed_process()  # again: the checks of the command may have drawn numbers
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        fit_to_model(config)
        if entropy_source(config).from_rollout:
            enable_rollout_entropy(config)
        trainer: Any = None
        succeeded = False

        def check() -> None:
            if trainer is not None:
                trainer.health.check()

        try:
            with with_queue(config, training_bundles(config), check):
                trainer = trainer_class(config.trainer.v1.trainer_mode)(config=config)
                trainer.init()
                name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
                manager: Any = load_class_from_fqn(name, "AgentLoopManager") if name else SeededAgentLoopManager
                agent_loops = manager.create(
                    config=config,
                    llm_client=trainer.get_llm_client(),
                    teacher_client=trainer.get_teacher_client(),
                    reward_loop_worker_handles=trainer.get_reward_handles(),
                )
                trainer.fit(agent_loops)
            succeeded = True
        finally:
            tracking = getattr(trainer, "logger", None)
            if tracking is not None:
                tracking.finish(exit_code=0 if succeeded else 1)


class TaskRunnerClass:
    """The task runner in the form that verl's ``run_ppo`` takes and, once Ray is up, makes an actor of."""

    def __init__(self, before: Callable[[], object]) -> None:
        self._before = before
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> "TaskRunnerClass":
        self._options = options
        return self

    def remote(self) -> Any:
        self._before()
        return ray.remote(num_cpus=1)(TaskRunner).options(**self._options).remote()
