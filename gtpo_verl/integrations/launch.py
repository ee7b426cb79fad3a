"""Runs a composed configuration with verl: environment variables, verl's own validation, and the job on Ray."""

import os
import warnings
from pathlib import Path

from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.checks import check_with_verl


def export_environment(config: DictConfig) -> dict[str, str]:
    """Set the run's environment variables in this process, and return them.

    verl chooses its platform when it is imported, here and in every worker, so call this before anything imports verl.
    """
    # verl warns about every training engine that is not installed
    warnings.filterwarnings("ignore", message=".* engine is not available")
    variables = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    environment = {name: str(value) for name, value in variables.items()}
    os.environ.update(environment)
    return environment


def validate(config: DictConfig) -> None:
    """Check the run as verl will, and more; sets ``trainer.device`` to the machine's, as verl's main does.

    Raises:
        UserError: the plugin is not loaded, verl refuses the configuration, or one of ``integrations.checks`` fails.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from gtpo_verl.integrations import plugin

    plugin.check_registered()
    auto_set_device(config)
    try:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except (AssertionError, ValueError) as error:
        raise UserError(f"verl refuses this configuration: {error}") from error
    check_with_verl(config)


def check_ray(config: DictConfig) -> None:
    """Check that the run's Ray settings fit the cluster that it would join, if any.

    Raises:
        UserError: they set a number of CPUs or GPUs, which Ray refuses when it joins a cluster.
    """
    ray_init = config.ray_kwargs.get("ray_init") or {}
    where = _joined_cluster(config)
    if where and any(ray_init.get(name) is not None for name in ("num_cpus", "num_gpus")):
        raise UserError(
            f"{where} names a Ray cluster, which conflicts with ray_kwargs.ray_init.num_cpus or num_gpus of this run "
            "(hardware=cpu sets both): add ray_kwargs.ray_init.address=local to start a separate Ray, or "
            "ray_kwargs.ray_init.num_cpus=null ray_kwargs.ray_init.num_gpus=null to join the cluster."
        )


def _joined_cluster(config: DictConfig) -> str | None:
    """What makes Ray join a cluster instead of starting one, or None."""
    address = (config.ray_kwargs.get("ray_init") or {}).get("address")
    if address == "local":
        return None
    if address:
        return f"ray_kwargs.ray_init.address={address}"
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
    current = Path("/tmp/ray/ray_current_cluster")
    return str(current) if current.exists() else None


def check_gpus(config: DictConfig) -> None:
    """Check that this machine has a GPU where the run needs one and starts its own Ray.

    Raises:
        UserError: it has none. Where a cluster is joined, Ray checks its resources.
    """
    from verl.plugin.platform import get_platform

    # verl falls back to its platform for NVIDIA where it finds none: its name says nothing
    if not get_platform().is_available() and not _joined_cluster(config):
        raise UserError(
            "this machine has no GPU: hardware=cpu trains without one. On a cluster, start Ray first "
            "(scripts/ray_node.sh head) and submit the run there; --check validates it here."
        )


def run_job(config: DictConfig) -> None:
    """Start Ray, run the job to its end, and shut Ray down.

    verl chooses a port for its process group and opens it after the workers have started. If another process has taken
    the port in between, the job is started once more.

    Raises:
        UserError: one was raised in any process of the job.
    """
    import ray
    from ray.exceptions import RayTaskError
    from verl.trainer.main_ppo import run_ppo

    from gtpo_verl.integrations.task_runner import task_runner_class

    for last_try in (False, True):
        try:
            run_ppo(config, task_runner_class=task_runner_class())
            return
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            if last_try or "EADDRINUSE" not in str(error):
                raise
            print("The port that verl had chosen is in use by another process: starting again.", flush=True)
        finally:
            ray.shutdown()
