"""Runs verl's main, or this package's, on a machine without a GPU: ``python verl_on_cpu.py MODULE ARGUMENTS``.

verl does not train on a CPU. What is added is the same for both: the platform ``cpu`` of the plugin, its worker class
around verl's, and the overrides of `OVERRIDES` and `FSDP`.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, cast

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"+{ROLLOUT}.engine_kwargs.vllm"
OVERRIDES = (
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "+trainer.v1.sampler.sampler_kwargs.poll_interval=0.1",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.enforce_eager=true",
    f"{ROLLOUT}.enable_chunked_prefill=false",
    f"{ROLLOUT}.free_cache_engine=false",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    f"{ENGINE}.worker_extension_cls=gtpo_verl.integrations.vllm.worker_extension.PolicyWorkerExtension",
    f"{ENGINE}.distributed_executor_backend=uni",
    f"{ROLLOUT}.agent.num_workers=1",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "ray_kwargs.ray_init.num_cpus=32",
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
    *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in ENVIRONMENT.items()),
)
FSDP = (
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.actor.strategy=fsdp2",
    *(
        f"{prefix}actor_rollout_ref.{role}.fsdp_config.{setting}"
        for role in ("actor", "ref")
        for prefix, setting in (
            ("", "model_dtype=fp32"),
            ("", "use_torch_compile=false"),
            *(("+", f"mixed_precision.{name}_dtype=fp32") for name in ("param", "reduce", "buffer")),
        )
    ),
)


def workers_for_cpu() -> None:
    """Let verl's trainers of this process make workers that run on a CPU."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    for trainer in (PPOTrainer, PPOTrainerSeparateAsync):  # the latter replaces the former's workers
        _with_cpu_workers(cast(Any, trainer))


def _with_cpu_workers(trainer: Any) -> None:
    import ray

    from gtpo_verl.integrations.cpu_platform import CpuWorkerMixin, for_cpu

    stock = trainer._init_resource_pool_mgr

    def init(self: Any) -> None:
        stock(self)
        for role, actor_class in self.role_worker_mapping.items():
            if not issubclass(actor_class.__ray_actor_class__, CpuWorkerMixin):
                self.role_worker_mapping[role] = ray.remote(for_cpu(actor_class.__ray_actor_class__))

    trainer._init_resource_pool_mgr = init


def on_cpu(run_ppo: Callable[..., None]) -> Callable[..., None]:
    """verl's ``run_ppo`` whose task runner makes workers for a CPU."""
    import ray

    def run(config: Any, task_runner_class: Any) -> None:
        stock = task_runner_class.__ray_actor_class__

        class OnCpu(stock):  # type: ignore[misc, valid-type]
            def run(self, config: Any) -> None:
                workers_for_cpu()
                super().run(config)

        run_ppo(config, task_runner_class=ray.remote(OnCpu))

    return run


def main() -> None:
    module, *arguments = sys.argv[1:]
    os.environ.update(ENVIRONMENT)
    from verl.trainer import main_ppo

    main_ppo.run_ppo = on_cpu(main_ppo.run_ppo)
    engine = () if "model_engine=megatron" in arguments else FSDP
    sys.argv = [module, *OVERRIDES, *engine, *arguments]
    cast(Any, importlib.import_module(module)).main()


if __name__ == "__main__":
    main()
