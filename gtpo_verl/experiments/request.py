"""What can be said of a run where it is submitted, without verl and torch: syntax, choices, and files that lie here.

Everything else is checked by the job itself, on the cluster, before it trains.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from gtpo_verl import preflight
from gtpo_verl.config import GROUPS, choices, compose_config
from gtpo_verl.errors import UserError, did_you_mean

RUN_DIR = "trainer.run_dir"
DATA = ("data.train_files", "data.val_files")
# Too large to carry: they lie on a file system that all nodes share, and a relative path is the one that it has here.
SHARED = (*DATA, "actor_rollout_ref.model.path")
CODE = (".py", ".yaml", ".yml", ".json", ".jinja", ".j2")  # of files that the job carries
SCHEMA = {"prompt_key": "prompt", "reward_fn_key": "data_source", "train_batch_size": 1}  # verl's names; any batch


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Hydra's view of overrides.

    Raises:
        UserError: one does not parse.
    """
    found: list[Override] = []
    for text in overrides:
        try:
            found += OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            raise UserError(f"{text!r} is no override KEY=VALUE: {' '.join(str(error).split())}") from error
    return found


def run_dir_of(overrides: Sequence[str]) -> str:
    """The run directory, on the cluster.

    Raises:
        UserError: there is none, or it is relative: a job does not run where it was submitted.
    """
    path = _values(parsed(overrides)).get(RUN_DIR)
    if path is None or not Path(str(path)).is_absolute():
        raise UserError(
            f"add {RUN_DIR}=/DIRECTORY, an absolute path on a file system that all nodes of the cluster share."
        )
    return str(path)


def check_request(overrides: Sequence[str], *, working_dir: Path, carried: Sequence[Path]) -> list[str]:
    """Check what can be checked here; returns the overrides with absolute paths for data and a local model.

    Where verl and torch are installed the configuration is composed, so that every key is checked; elsewhere the
    choices of our config groups are. Of data, what lies on this machine is checked.

    Args:
        overrides: of the run, relative paths of data and model from the current directory.
        working_dir: the directory that the job's working directory is made from.
        carried: its files that the job carries, relative to it.

    Raises:
        UserError: the first problem.
    """
    run_dir_of(overrides)
    result = [_with_absolute_path(item, text) for item, text in zip(parsed(overrides), overrides, strict=True)]
    items = parsed(result)
    if _can_compose():
        compose_config(result)
    else:
        _check_choices(items)
    _check_data(_values(items))
    for item in items:
        _check_carried(item, working_dir, carried)
    return result


def _can_compose() -> bool:
    return all(importlib.util.find_spec(name) for name in ("verl", "torch"))


def _values(items: Sequence[Override]) -> dict[str, Any]:
    return {item.key_or_group: item.value() for item in items if not item.is_delete()}


def _check_choices(items: Sequence[Override]) -> None:
    for item in items:
        group, option = item.key_or_group, item.value()
        if group not in GROUPS or item.is_delete() or "/" in str(option):  # algo=ladder/...: the job knows
            continue
        known = choices(group)
        if option not in known:
            close = did_you_mean(str(option), known) or "."
            raise UserError(f"{group}={option}: no such {group}{close} Choose one of: {', '.join(known)}.")


# -------------------------------------------------------------------- files


def _with_absolute_path(item: Override, text: str) -> str:
    """An override of a key in ``SHARED`` with absolute paths; any other as it is."""
    if item.key_or_group not in SHARED or item.is_delete() or item.value() is None:
        return text
    value = item.value()
    given = [str(path) for path in value] if isinstance(value, list) else [str(value)]
    paths = [_absolute(item.key_or_group, path) for path in given]
    if paths == given:
        return text
    quoted = ",".join("'{}'".format(path.replace("'", r"\'")) for path in paths)
    return f"{text.partition('=')[0]}=" + (f"[{quoted}]" if isinstance(value, list) else quoted)


def _absolute(key: str, path: str) -> str:
    if "://" in path or Path(path).is_absolute():
        return path
    here = Path(path).expanduser().resolve()
    if here.exists():
        return str(here)
    if key in DATA or path.startswith((".", "~")):
        raise UserError(f"{key}={path}: no such file here. A path that only the cluster has must be absolute.")
    return path  # a model on the hub


def _check_data(values: dict[str, Any]) -> None:
    """Check the columns of those files that lie on this machine; an absolute path may be the cluster's alone."""
    data = SCHEMA | {name: values[f"data.{name}"] for name in SCHEMA if f"data.{name}" in values}
    for key in DATA:
        files = values.get(key)
        if files is None:
            raise UserError(f"no data: set {key}=FILE.parquet, on a file system that all nodes share.")
        here = [str(file) for file in (files if isinstance(files, list) else [files]) if Path(str(file)).exists()]
        name = key.removeprefix("data.")
        if here:
            preflight.check_data(OmegaConf.create({"data": data | {name: here}}), (name,))


def _check_carried(item: Override, working_dir: Path, carried: Sequence[Path]) -> None:
    """Check that a relative path of code or configuration is among the files that the job carries."""
    if not item.key_or_group.endswith("path") or item.is_delete():
        return
    file = Path(str(item.value()))
    if file.suffix not in CODE or file.is_absolute() or "://" in str(item.value()):
        return
    if Path(os.path.normpath(file)) not in carried:
        why = "which an exclude pattern leaves out" if (working_dir / file).is_file() else f"not in {working_dir}"
        raise UserError(f"{item.key_or_group}={file}: the job would not carry this file, {why}.")
