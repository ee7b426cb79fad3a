"""Runs a composed configuration with verl: environment variables, verl's own validation, and the job on Ray."""

import io
import logging
import os
import secrets
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from hydra.errors import InstantiationException
from omegaconf import DictConfig

from gtpo_verl.config import IN_RAY_JOB
from gtpo_verl.errors import StepGivenUpError, UserError, first_line
from gtpo_verl.integrations.checks import RULES
from gtpo_verl.integrations.weights import fit_to_model
from gtpo_verl.problems import Problem, evaluate, note, refuse
from gtpo_verl.runs.directory import STOP_FILE
from gtpo_verl.runs.terminal import LOG_FILE, err, say

RESUME = "The same command resumes from the last checkpoint."
RAY_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # variables in which Ray takes one


def export_environment(config: DictConfig) -> dict[str, str]:
    """Set the run's environment variables in this process, and return them.

    verl chooses its platform when it is imported, here and in every worker, so call this before anything imports verl.
    """
    if not joined_cluster(config) and not any(name in os.environ for name in RAY_TOKENS):
        # Ray would leave a token in the home directory, and every cluster started there later would ask for it
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    fit_to_model(config)
    variables = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    environment = {name: str(value) for name, value in variables.items()}
    os.environ.update(environment)
    return environment


def validate(config: DictConfig, *, to_start: bool) -> None:
    """Check the run as verl will, and more; raises a UserError of everything that is refused.

    to_start: whether the run starts now, on this machine's devices; else a submitted job asks its cluster.
    """
    # it says which platform it found, which is no news in a command
    logging.getLogger("verl.plugin.platform.platform_manager").addFilter(lambda line: line.levelno > logging.INFO)
    refuse(evaluate((verls_own, *RULES, device if to_start else cluster_size), config))


def verls_own(config: DictConfig) -> Iterator[Problem]:
    """What verl's own validation says; sets ``trainer.device`` to the machine's, as verl's main does."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from gtpo_verl.integrations import plugin

    plugin.check_registered()
    auto_set_device(config)
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except InstantiationException as error:  # Hydra's, around what a dataclass of verl's or of ours raises
        yield Problem(f"verl refuses this configuration: {first_line(error.__cause__ or error)}")
    except (AssertionError, ValueError) as error:
        yield Problem(f"verl refuses this configuration: {error}")
    yield from (note(f"verl: {line}") for line in said.getvalue().splitlines() if "checks passed" not in line)


def device(config: DictConfig) -> Iterator[Problem]:
    """This machine has a GPU where the run needs one and starts its own Ray; where a cluster is joined, Ray checks."""
    from verl.plugin.platform import get_platform

    # verl falls back to its platform for NVIDIA where it finds none: its name says nothing
    if not get_platform().is_available() and not joined_cluster(config):
        yield Problem(
            "this machine has no GPU: hardware=cpu trains without one. On a cluster, start Ray first "
            "(`ray start --head`) and submit the run there; --check validates it here."
        )


def cluster_size(config: DictConfig) -> Iterable[Problem]:
    """In a submitted job: its cluster could hold the training, were it idle."""
    if IN_RAY_JOB in os.environ:
        from gtpo_verl.integrations.admission import check_size, training_bundles
        from gtpo_verl.integrations.nodes import joined

        with joined():
            check_size(training_bundles(config))
    return ()


def leave_to_cluster(config: DictConfig) -> None:
    """Where a cluster is joined, unset the numbers of CPUs and devices of hardware=cpu: it has its own."""
    ray_init = config.ray_kwargs.ray_init
    for name in ("num_cpus", "num_gpus"):
        if joined_cluster(config) and name in ray_init:
            ray_init[name] = None


def joined_cluster(config: DictConfig) -> str | None:
    """What makes Ray join a cluster instead of starting one, or None."""
    address, variable = (config.ray_kwargs.get("ray_init") or {}).get("address"), os.environ.get("RAY_ADDRESS")
    if (address or variable) == "local":
        return None
    if address:
        return f"ray_kwargs.ray_init.address={address}"
    if variable:
        return f"RAY_ADDRESS={variable}"
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    written = Path(temporary, "ray", "ray_current_cluster")  # by `ray start`
    return str(written) if written.exists() else None


def run_job(config: DictConfig, *, wait: bool = False, memory: float = 0.0) -> None:
    """Start Ray, run the job to its end, and shut Ray down.

    The job is started once more where another process has taken the port that verl had chosen. ``wait``: until the
    cluster has room for it. ``memory``: bytes that a cluster without GPUs must have free for it.

    Raises UserError: the job failed, in any of its processes; nodes do not share the run directory; or there is no
    room, and ``wait`` is off.
    """
    import ray
    from verl.trainer.main_ppo import run_ppo

    from gtpo_verl.integrations.admission import DevicesTakenError
    from gtpo_verl.integrations.nodes import prove_shared
    from gtpo_verl.integrations.task_runner import TaskRunnerClass

    leave_to_cluster(config)
    stop = signal.getsignal(signal.SIGTERM)
    ports_lost = 0

    def admit() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        signal.signal(signal.SIGTERM, stop)  # Ray's start has replaced it
        prove_shared(Path(config.trainer.run_dir))
        enter_cluster(config, training=True, wait=wait, memory=memory)

    while True:
        # Ray's processes inherit the mask, as Ray's own for SIGINT: a shell whose terminal is closed sends SIGHUP to
        # all of them, and the step could not be finished.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            with with_last_word(RESUME):
                run_ppo(config, task_runner_class=TaskRunnerClass(admit))
            return
        except Exception as error:
            cause = getattr(error, "cause", None) or error  # Ray wraps the error of a task
            if isinstance(cause, DevicesTakenError) and wait:
                say("Another job took the devices meanwhile: waiting again.")
                continue
            if isinstance(cause, StepGivenUpError):
                say(str(cause))
                return
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from error
            ports_lost += "EADDRINUSE" in str(error)
            if "EADDRINUSE" not in str(error) or ports_lost > 1:
                log = Path(config.trainer.run_dir) / LOG_FILE
                raise _in_one_line(error, f"The stack trace is at the end of {log}. {RESUME}") from error
            say("The port that verl had chosen is in use by another process: starting again.")
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
            ray.shutdown()


@contextmanager
def with_last_word(after: str) -> Iterator[None]:
    """Have it said, and ``after``, what to do, if this process ends inside the block, as Ray ends a driver at once, by
    `_exit`, when the node daemon dies.
    """
    # In the background of a shell that ends at once: Ray kills the children of a driver that it ends.
    script = "exec 3<&0; (trap '' INT TERM HUP; read -r left <&3 || printf '%s\\n' \"$0\" >&2) &"
    line = f"error: this process was killed, for lack of memory or by hand, or Ray's node daemon died. {after}"
    terminal = None if err() is sys.stderr else err()
    shell = subprocess.Popen(["sh", "-c", script, line], stdin=subprocess.PIPE, stderr=terminal, start_new_session=True)
    with shell:
        shell.wait()
        try:
            yield
        finally:
            shell.communicate(b"left\n")


@contextmanager
def in_one_line(after: str) -> Iterator[None]:
    """Raise a UserError in place of an error in the block that nobody expected, whose stack traces go to stderr; an
    OSError is one line already. ``after``: sentences behind it, where stderr goes, and what to do.
    """
    from ray.exceptions import RayError

    try:
        yield
    except Exception as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, UserError):
            # raised in a task: the error itself is a stack trace, and an instance of both classes
            raise UserError(str(cause)) from error
        if isinstance(error, UserError | OSError) and not isinstance(error, RayError):
            raise
        raise _in_one_line(error, after) from error


def _in_one_line(error: Exception, after: str) -> UserError:
    """What to tell the user about an error; its stack traces are printed."""
    from ray.exceptions import RayActorError, RayTaskError

    traceback.print_exception(error)
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RayTaskError):  # its own stack trace
        print(cause.traceback_str, file=sys.stderr, flush=True)
    if isinstance(cause, RayActorError):
        what = "a process of the run died; it was killed, for lack of memory or by hand, or its node is gone"
    elif isinstance(cause, RayTaskError):  # of a task within the job, whose trace ends with its error
        what = str(cause).strip().splitlines()[-1]
    else:
        what = f"{type(cause).__name__}: {first_line(cause)}"
    if "inline_container.cc" in what and "unexpected pos" in what:  # of PyTorch's writer, which names no cause
        what = f"a file was not written to its end, as where a disk is full or a quota is reached ({what.rstrip('.')})"
    return UserError(f"{what.rstrip('.')}. {after}")


def enter_cluster(config: DictConfig, *, training: bool, wait: bool, memory: float = 0.0) -> None:
    """Once Ray is up: return when there is room for this training or evaluation, ``memory`` in bytes.

    Raises UserError: there is none, and ``wait`` is off or the Ray is the run's own.
    """
    from gtpo_verl.integrations import admission

    bundles = admission.training_bundles(config) if training else admission.serving_bundles(config)
    if joined_cluster(config):
        stop = Path(config.trainer.run_dir) / STOP_FILE
        bundles += admission.memory_bundles(memory, config.trainer.nnodes)
        admission.admit(bundles, wait=wait, say=say, stopped=lambda: training and stop.exists())
    else:
        admission.check_room(bundles)
