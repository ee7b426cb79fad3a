"""Hands a composed run to verl: its environment, verl's own validation, and the job on Ray."""

import os
import warnings
from pathlib import Path

from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.checks import check_with_verl


def export_environment(config: DictConfig) -> dict[str, str]:
    """Set the run's environment variables in this process, and return them.

    verl settles its platform when it is imported, here and in every worker, so this comes before anything imports verl.
    """
    warnings.filterwarnings("ignore", message=".* engine is not available")  # verl names every engine it could not load
    variables = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    environment = {name: str(value) for name, value in variables.items()}
    os.environ.update(environment)
    return environment


def validate(config: DictConfig) -> None:
    """Check the run as verl will, and what only verl knows; ``trainer.device`` is set to the machine's, as verl's main does.

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
    """Make sure that Ray can start, or join, as the run asks.

    Raises:
        UserError: a cluster would be joined, to which a run cannot say how many CPUs it has.
    """
    ray_init = config.ray_kwargs.get("ray_init") or {}
    where = _joined_cluster(config)
    if where and any(ray_init.get(name) is not None for name in ("num_cpus", "num_gpus")):
        raise UserError(
            f"{where} names a Ray cluster, and this run brings CPUs and GPUs of its own (hardware=cpu does): ray_kwargs.ray_init.address=local "
            "starts a Ray for it alone, ray_kwargs.ray_init.num_cpus=null ray_kwargs.ray_init.num_gpus=null joins the cluster."
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
    """Check that a Ray started on this machine would have accelerators where the run is not ``hardware=cpu``.

    Raises:
        UserError: it would not. On a cluster that is joined, Ray itself checks.
    """
    from verl.plugin.platform import get_platform

    # verl falls back to its platform for NVIDIA where it finds none: its name says nothing
    if not get_platform().is_available() and not _joined_cluster(config):
        raise UserError(
            "this machine has no GPU: hardware=cpu trains without one. On a cluster, start Ray first (scripts/ray_node.sh head) and "
            "submit the run there; --check validates it here."
        )


def run_job(config: DictConfig) -> None:
    """Start Ray, run the job to its end, and shut Ray down.

    verl chooses a port for its process group and opens it when the workers have started; where something else took it meanwhile, the
    job is started once more.

    Raises:
        UserError: the job ended with one, in whatever process.
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
            print("The port that verl had chosen was taken by another process meanwhile: starting again.", flush=True)
        finally:
            ray.shutdown()
