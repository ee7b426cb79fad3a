"""What can be said of a run where it is submitted, without verl and torch: syntax, choices, and files that lie here.

Everything else is checked by the job itself, on the cluster, before it trains.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from gtpo_verl.config import (
    GROUPS,
    MODEL_DIRS,
    SEARCH_PATH,
    absolute,
    check_single,
    choices,
    compose_config,
    line_of,
    parse_overrides,
    prepare,
    quoted,
)
from gtpo_verl.errors import UserError, choose_from
from gtpo_verl.problems import Problem, refuse
from gtpo_verl.rules.data import data

RUN_DIR = "trainer.run_dir"
DATA = ("data.train_files", "data.val_files")
# Too large to carry: they lie on a file system that all nodes share, and a relative path is the one that it has here.
SHARED = (*DATA, *(f"actor_rollout_ref.model.{name}" for name in MODEL_DIRS), "algorithm.guide.model")
CODE = (".py", ".yaml", ".yml", ".json", ".jinja", ".j2")  # of files that the job carries
# verl's names; a batch and a number of prompts that any file satisfies
SCHEMA = {"prompt_key": "prompt", "reward_fn_key": "data_source", "train_batch_size": 1, "train_max_samples": -1}


def run_dir_of(overrides: Sequence[str]) -> str:
    """The run directory on the cluster. UserError: there is none, or it is relative: a job runs elsewhere."""
    path = _values(parse_overrides(overrides)).get(RUN_DIR)
    if path is None or not Path(str(path)).is_absolute() or "${" in str(path):  # `stop` and retries look there
        raise UserError(
            f"add {RUN_DIR}=/DIRECTORY, an absolute path without ${{...}} on a file system that all nodes of the "
            "cluster share."
        )
    return str(path)


def check_request(overrides: Sequence[str], *, working_dir: Path, carried: Sequence[Path]) -> list[str]:
    """Check what can be checked here; returns the overrides for the job, with absolute paths of data and a local model.

    Where verl and torch are installed the configuration is composed and its rules are asked; elsewhere the choices of
    our config groups are looked at. Of data, what lies on this machine is checked. ``carried``: files of
    ``working_dir``, relative to it. UserError: everything that is wrong.
    """
    parsed = parse_overrides(overrides)
    check_single(parsed)
    run_dir_of(overrides)
    result = [_with_absolute_path(item) for item in parsed]
    items = parse_overrides(result)
    found = [*_missing(items), *_data(_values(items)), *_not_carried(items, working_dir, carried)]
    if _can_compose():
        from gtpo_verl.rules import stages  # imports torch

        config = compose_config(result)
        prepare(config, result)
        found += stages.problems(config, result)
    else:
        found += _choices(items)
    refuse(found)
    return [_with_copied_path(item, working_dir) for item in items]


def in_job(overrides: Sequence[str], working_dir: Path) -> list[str]:
    """Overrides as a job gets them, which runs in its copy of the working directory, without data and models."""
    absolute = [_with_absolute_path(item) for item in parse_overrides(overrides)]
    return [_with_copied_path(item, working_dir) for item in parse_overrides(absolute)]


def _can_compose() -> bool:
    return all(importlib.util.find_spec(name) for name in ("verl", "torch"))


def _values(items: Sequence[Override]) -> dict[str, Any]:
    return {item.key_or_group: item.value() for item in items if not item.is_delete()}


def _choices(items: Sequence[Override]) -> Iterator[Problem]:
    if any(item.key_or_group == SEARCH_PATH for item in items):
        return  # files of the user's are choices too
    for item in items:
        group, option = item.key_or_group, item.value()
        if group not in GROUPS or item.is_delete() or "/" in str(option):  # algo=ladder/...: the job knows
            continue
        known = choices(group)
        if option not in known:
            yield Problem(f"{group}={option}: no such {group}{choose_from(str(option), known)}")


# -------------------------------------------------------------------- files


def _listed(value: Any) -> list[str]:
    return [str(one) for one in (value if isinstance(value, list) else [value]) if one is not None]


def _paths(item: Override) -> list[str]:
    """What an override of a key in ``SHARED`` names; empty for any other."""
    return [] if item.key_or_group not in SHARED or item.is_delete() else _listed(item.value())


def _with_absolute_path(item: Override) -> str:
    """An override with absolute paths of what lies here."""
    given = _paths(item)
    here = {path: Path(path).expanduser() for path in given if _is_relative(path)}
    paths = [absolute(path) if path in here and here[path].exists() else path for path in given]
    if paths == given:
        return line_of(item)
    listed = ",".join(map(quoted, paths))
    return f"{line_of(item).partition('=')[0]}=" + (f"[{listed}]" if isinstance(item.value(), list) else listed)


def _is_relative(path: str) -> bool:
    return bool(path) and not ("://" in path or Path(path).is_absolute())


def _on_disk(path: str) -> Path | None:
    """The directory of an entry of Hydra's search path; None for a package."""
    scheme, _, place = path.partition("://")
    return Path(os.path.abspath(place)) if scheme == "file" else None


def _with_copied_path(item: Override, working_dir: Path) -> str:
    """An override with a search path of what the job carries."""
    if item.key_or_group != SEARCH_PATH:
        return line_of(item)
    paths = [
        f"file://{os.path.relpath(place, working_dir)}"
        if (place := _on_disk(path)) and place.is_relative_to(working_dir.absolute())
        else path
        for path in _listed(item.value())
    ]
    return f"{SEARCH_PATH}=[{','.join(map(quoted, paths))}]"


def _missing(items: Sequence[Override]) -> Iterator[Problem]:
    """Relative paths of what is not here; a model may be one on the hub."""
    for item in items:
        key = item.key_or_group
        for path in _paths(item):
            if _is_relative(path) and (key in DATA or path.startswith((".", "~"))):
                yield Problem(f"{key}={path}: no such file here. A path that only the cluster has must be absolute.")


def _data(values: dict[str, Any]) -> Iterator[Problem]:
    """The columns of those files that lie on this machine; an absolute path may be the cluster's alone."""
    given = {name: value for name in SCHEMA if type(value := values.get(f"data.{name}")) is type(SCHEMA[name])}
    settings: dict[str, Any] = SCHEMA | given  # another type is for the rules of ranges, or the job
    settings["custom_cls"] = {"path": values.get("data.custom_cls.path")}
    for key in DATA:
        files = values.get(key)
        if files in (None, "", []) and not (settings["custom_cls"]["path"] or SEARCH_PATH in values):  # theirs may
            yield Problem(f"no data: set {key}=FILE.parquet, on a file system that all nodes share.")
        if here := [file for file in _listed(files) if Path(file).exists()]:
            name = key.removeprefix("data.")
            yield from data(OmegaConf.create({"data": settings | {name: here}}), (name,))


def _not_carried(items: Sequence[Override], working_dir: Path, carried: Sequence[Path]) -> Iterator[Problem]:
    """Relative paths of code, and directories of configuration, that are not among the files that the job carries."""
    for item in items:
        for path in map(_on_disk, _listed(item.value()) if item.key_or_group == SEARCH_PATH else ()):
            if path and not any((working_dir / file).is_relative_to(path) for file in carried):
                yield Problem(
                    f"{SEARCH_PATH} (--config-dir) {path}: the job carries no file of it. It carries those of the "
                    f"working directory, {working_dir}, that no exclude pattern leaves out."
                )
        if not item.key_or_group.endswith("path") or item.is_delete():
            continue
        file = Path(str(item.value()))
        if file.suffix not in CODE or file.is_absolute() or "://" in str(item.value()):
            continue
        if Path(os.path.normpath(file)) not in carried:
            why = "which an exclude pattern leaves out" if (working_dir / file).is_file() else f"not in {working_dir}"
            yield Problem(f"{item.key_or_group}={file}: the job would not carry this file, {why}.")
