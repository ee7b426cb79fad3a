"""Rules of where a run writes and logs, what it goes on from, and of the Ray that it starts or joins."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import check_path_in_job, chosen
from gtpo_verl.errors import UserError, choose_from
from gtpo_verl.files import check_writable, obstacle
from gtpo_verl.integrations.launch import joined_cluster
from gtpo_verl.problems import Problem, warning
from gtpo_verl.runs import checkpoints
from gtpo_verl.runs.checkpoints import FSDP, VERL_CONTENTS, Layout, Start
from gtpo_verl.runs.continuation import changes, refusal

CHECKPOINT = "actor_rollout_ref.actor.checkpoint"
# verl's loggers: the package that each imports, and variables and files of which one says who logs in.
_WANDB = (
    "wandb",
    (
        *("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"),
        *("~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings"),
    ),
)
LOGGERS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "console": (None, ()),
    "file": (None, ()),
    "rl_insight": ("rl_insight", ()),
    "tensorboard": ("tensorboard", ()),
    "mlflow": ("mlflow", ()),
    "trackio": ("trackio", ()),
    "wandb": _WANDB,
    "tracking": _WANDB,  # its older name
    "swanlab": ("swanlab", ("SWANLAB_API_KEY", "SWANLAB_MODE", "~/.swanlab/.netrc")),
    "clearml": ("clearml", ("CLEARML_API_ACCESS_KEY", "CLEARML_CONFIG_FILE", "~/clearml.conf")),
    "vemlp_wandb": ("volcengine_ml_platform", ("VOLC_ACCESS_KEY_ID",)),
}


def run_dir(config: DictConfig) -> Iterator[Problem]:
    """The run directory can be made, and written to."""
    if config.trainer.run_dir is None:  # composed, and not yet prepared for a run
        return
    if blocked := obstacle(Path(config.trainer.run_dir)):
        yield Problem(f"trainer.run_dir={config.trainer.run_dir}: {blocked}.")


def checkpoint(config: DictConfig) -> Iterator[Problem]:
    """There is nothing to resume, or what there is can be loaded, is of the same training, and has steps to come."""
    start, trainer = find_start(config), config.trainer
    if start.message:
        yield warning(start.message)
    if start.folder is None:
        return
    if isinstance(trainer.total_training_steps, int) and start.step > trainer.total_training_steps:
        yield Problem(
            f"trainer.total_training_steps={trainer.total_training_steps}: there is nothing to do, {start.folder} is "
            "saved already. Give more steps, or another trainer.run_dir."
        )
    actor = config.actor_rollout_ref.actor
    if not ({"model"} if actor.strategy in FSDP else {"model", "hf_model"}) & set(actor.checkpoint.load_contents):
        yield Problem(
            f"{CHECKPOINT}.load_contents={actor.checkpoint.load_contents}: the steps after {start.folder} would be "
            "trained on the weights of the base model. Add model, if it was saved, or begin in another trainer.run_dir."
        )
    run_dir = Path(trainer.run_dir)
    if message := refusal(changes(run_dir, config), list(trainer.allow_changes)):
        yield Problem(f"trainer.run_dir={run_dir}: {message}")


def saves_whole(config: DictConfig) -> Iterator[Problem]:
    """Checkpoints are completed, which verl's V1 trainers do not wait for where Megatron saves in the background, and
    have all that a training goes on with.
    """
    key = f"{CHECKPOINT}.async_save"
    if config.actor_rollout_ref.actor.strategy == "megatron" and OmegaConf.select(config, key):
        yield Problem(
            f"{key}=true: no checkpoint would be completed, as verl's trainer never waits for one. Remove it."
        )
    saved = config.actor_rollout_ref.actor.checkpoint.save_contents
    if lacking := ", ".join(name for name in VERL_CONTENTS if name not in saved):
        yield warning(
            f"{CHECKPOINT}.save_contents={saved} lacks {lacking}: a training that ended cannot go on as if it had not."
        )


def find_start(config: DictConfig) -> Start:
    """Find the checkpoint from which the run goes on; nothing is changed. Raises UserError: it would start again
    although there are checkpoints, or cannot load the one that there is.
    """
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    layout = Layout(actor.strategy, trainer.nnodes * trainer.n_gpus_per_node, tuple(actor.checkpoint.load_contents))
    if trainer.resume_mode == "auto":
        return checkpoints.find_start(Path(trainer.default_local_dir), layout)
    if trainer.resume_mode == "disable":
        return Start(None)
    if not trainer.resume_from_path:
        raise UserError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N.")
    folder = Path(str(trainer.resume_from_path))
    checkpoints.check_folder(folder, layout)
    return Start(folder)


def ray(config: DictConfig, given: Sequence[str] = ()) -> Iterator[Problem]:
    """The run's Ray settings fit the cluster that it would join, if any; given: the user's overrides."""
    ray_init = config.ray_kwargs.ray_init
    if ray_init.get("namespace") is not None:
        yield Problem(
            f"ray_kwargs.ray_init.namespace={ray_init.namespace}: two runs in one namespace would take each other's "
            "actors. Leave it out: Ray gives every job one of its own."
        )
    where = joined_cluster(config)
    if not where:
        return
    for name in ("num_cpus", "num_gpus"):
        key = f"ray_kwargs.ray_init.{name}"
        if chosen(given, key) is not None and ray_init[name] is not None:
            yield Problem(
                f"{key}={ray_init[name]} is for a Ray of this run's own, and {where} names a cluster to join: leave it "
                "out, or add ++ray_kwargs.ray_init.address=local to start a separate Ray."
            )


def loggers(config: DictConfig) -> Iterator[Problem]:
    """The loggers are verl's, installed here, and logged in: verl makes them after all engines have loaded."""
    chosen = config.trainer.logger
    variables = {**os.environ, **(config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {})}
    for name in [chosen] if isinstance(chosen, str) else chosen or ():
        key = f"trainer.logger={name}"
        if name not in LOGGERS:
            yield Problem(f"{key}: verl has no such logger{choose_from(str(name), LOGGERS)}")
            continue
        package, login = LOGGERS[name]
        if package is not None and importlib.util.find_spec(package) is None:
            yield Problem(f"{key}: the package {package} is not installed: install it on every node, or leave it out.")
        elif login and not any(word in variables or Path(word).expanduser().is_file() for word in login):
            yield Problem(f"{key}: nobody is logged in: set {login[0]}, or log in as {name} says, or leave it out.")


def check_output(directory: Path) -> Path:
    """The absolute path of a directory for results, which need not be there yet. Raises UserError: it would be lost
    with a submitted job, or nothing can be written there.
    """
    check_path_in_job("--output", directory)
    check_writable(directory)
    return directory.resolve()


RULES = (run_dir, checkpoint, saves_whole, loggers)
