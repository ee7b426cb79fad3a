"""What ``gtpo-verl eval`` evaluates: a run, a checkpoint or a model, and the configuration to evaluate it with."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError

from gtpo_verl.config import GROUPS, SEARCH_PATH, compose_config, parse_overrides, prepare, quoted, with_hardware
from gtpo_verl.errors import UserError, first_line
from gtpo_verl.files import reading
from gtpo_verl.runs.checkpoints import hf_weights, merging, newest
from gtpo_verl.runs.directory import CONFIG_FILE, RECORD_FILE, SWEEP_FILE

BEFORE = "before"  # the evaluation of the model that a run started from
_MISSING = object()


@dataclass(frozen=True)
class Subject:
    """A model, the directory of its evaluation, and the configuration file of the run that it comes from, if any."""

    path: str
    output: Path
    config_file: Path | None = None


def find_subject(name: str, *, before: bool = False) -> Subject:
    """What ``name`` is: a run (``before`` its training or after), a checkpoint of one, or a model, here or on the hub.

    Raises UserError where it cannot be evaluated.
    """
    directory = Path(name).expanduser()
    if (directory / RECORD_FILE).is_file() and (directory / CONFIG_FILE).is_file():
        return _of_run(directory, before=before)
    if before:
        raise UserError(f"--before: {name} is not a run of gtpo-verl train, so its initial model is not known.")
    if directory.name.startswith("global_step_") and (directory / "actor").is_dir():
        return _of_checkpoint(directory)
    if any((directory / file).is_file() for file in (RECORD_FILE, SWEEP_FILE)):
        one = next((file.parent for file in sorted(directory.glob(f"*/{CONFIG_FILE}"))), directory / "RUN")
        raise UserError(f"{name} holds several runs: name one of them, for example {one}.")
    return Subject(name, Path("outputs") / f"eval-{Path(name).name}")


def _of_run(directory: Path, *, before: bool) -> Subject:
    config_file = directory / CONFIG_FILE
    if before:
        with reading(config_file):
            start: Any = OmegaConf.load(config_file)
            model_before = str(start.actor_rollout_ref.model.path)
        return Subject(model_before, directory / "evaluation" / BEFORE, config_file)
    try:
        last = newest(directory / "checkpoints")
    except ValueError:  # what to do about the tracker is said where it is followed
        last = None
    if last is not None:  # `model` may link to an earlier one that was exported
        return _of_checkpoint(last)
    model = directory / "model"
    if not model.is_dir():
        raise UserError(
            f"{directory} has no trained model in Hugging Face format: `gtpo-verl export {directory}` makes it of the "
            "last checkpoint."
        )
    step = re.search(r"global_step_\d+", str(model.resolve()))
    return Subject(str(model.resolve()), directory / "evaluation" / (step[0] if step else "model"), config_file)


def _of_checkpoint(directory: Path) -> Subject:
    directory = Path(os.path.abspath(directory))  # not resolved: RUN/checkpoints may be a link to another disk
    model = hf_weights(directory)
    if model is None:
        command, merged = merging(directory)
        then = "evaluate MODEL" if merged == "MODEL" else "repeat this command"
        raise UserError(f"{directory} has no weights in Hugging Face format: run `{command}`, then {then}.")
    run = directory.parent.parent
    config_file = run / CONFIG_FILE
    if not config_file.is_file():
        return Subject(str(model), Path("outputs") / f"eval-{directory.name}")
    return Subject(str(model), run / "evaluation" / directory.name, config_file)


def configuration(subject: Subject, overrides: Sequence[str]) -> DictConfig:
    """The configuration of the subject's run with overrides, or one composed from them where there is no run."""
    if subject.config_file is None:
        overrides, note = with_hardware(overrides)
        if note:
            print(note, file=sys.stderr)
        config = compose_config([*overrides, f"actor_rollout_ref.model.path={quoted(subject.path)}"])
    else:
        with reading(subject.config_file):
            loaded = OmegaConf.load(subject.config_file)
            if not isinstance(loaded, DictConfig):
                raise ValueError("it is no configuration")
        config = override(loaded, overrides)
        config.actor_rollout_ref.model.path = subject.path
    try:
        prepare(config, overrides)
    except ConfigAttributeError as error:
        raise UserError(f"{subject.config_file} is damaged, or another version's: {first_line(error)}.") from error
    config.data.train_files = None  # nothing is trained
    return config


def override(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Apply KEY=VALUE overrides to the configuration of a run, in which the config groups are already resolved.

    Raises UserError for one that does not parse, chooses a group, or names a key that does not exist.
    """
    for item in parse_overrides(overrides):
        key = item.key_or_group
        if key == SEARCH_PATH:  # the run is composed already; presets may be looked up there
            continue
        if key in GROUPS:
            raise UserError(
                f"{key}=: the settings are those of the run. Override single keys, or evaluate RUN/model with {key}= "
                "and the other groups."
            )
        if item.is_delete() or item.is_sweep_override():
            raise UserError(f"{item.input_line}: an evaluation takes KEY=VALUE and +KEY=VALUE only.")
        if not (item.is_add() or item.is_force_add()) and OmegaConf.select(config, key, default=_MISSING) is _MISSING:
            raise UserError(f"{key}: the run has no such key. To add it, write +{key}=...")
        OmegaConf.update(config, key, item.value(), force_add=True)
    return config
