"""Rules of the loggers: verl makes them after all engines have loaded, and fails there at one that cannot be."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from gtpo_verl.errors import did_you_mean
from gtpo_verl.problems import Problem

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


def loggers(config: DictConfig) -> Iterator[Problem]:
    """The loggers are verl's, installed here, and logged in where that can be seen."""
    chosen = config.trainer.logger
    variables = {**os.environ, **(config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {})}
    for name in [chosen] if isinstance(chosen, str) else chosen or ():
        key = f"trainer.logger={name}"
        if name not in LOGGERS:
            hint = did_you_mean(str(name), LOGGERS) or "."
            yield Problem(f"{key}: verl has no such logger{hint} Known: {', '.join(LOGGERS)}.")
            continue
        package, login = LOGGERS[name]
        if package is not None and importlib.util.find_spec(package) is None:
            yield Problem(f"{key}: the package {package} is not installed: install it on every node, or leave it out.")
        elif login and not any(word in variables or Path(word).expanduser().is_file() for word in login):
            yield Problem(f"{key}: nobody is logged in: set {login[0]}, or log in as {name} says, or leave it out.")


RULES = (loggers,)
