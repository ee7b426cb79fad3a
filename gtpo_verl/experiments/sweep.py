"""What a sweep trains, from the command line and a file of the config group `sweep`, and the checks of its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.config import choices, chosen, compose_config, hydra_app, line_of, prepare, quoted, with_hardware
from gtpo_verl.errors import UserError, choose_from, first_line
from gtpo_verl.experiments.axes import combinations, parse, split
from gtpo_verl.problems import Problem, errors_of, refuse
from gtpo_verl.report.design import SEED, START
from gtpo_verl.rules import overrides as given
from gtpo_verl.rules.stages import problems
from gtpo_verl.runs.continuation import changes, refusal
from gtpo_verl.runs.directory import flatten, in_words, is_bookkeeping
from gtpo_verl.runs.lock import is_of_lock
from gtpo_verl.runs.state import state_of
from gtpo_verl.runs.sweep import RETRIES, Sweep, read
from gtpo_verl.tasks import EmbeddedTask, Task, task_of

GROUP = "sweep"
STEPS = "trainer.total_training_steps"
BASELINE = {"algo": "dapo"}  # of a sweep that names none


@dataclass
class SweepFile:
    """A file of the config group `sweep`."""

    axes: dict[str, str] = field(default_factory=dict)  # the values of each key, in Hydra's sweep syntax
    overrides: list[str] = field(default_factory=list)  # of every run
    baseline: dict[str, str] = field(default_factory=dict)  # values of the runs that the others are compared with
    retries: int = RETRIES  # after an attempt that failed without a new training step
    max_runs: int = 1000  # more are refused before they are counted out


# -------------------------------------------------------------------- definition


def define(overrides: Sequence[str], directory: Path | None = None, *, local: bool = False) -> Sweep:
    """The sweep that overrides and the file that they choose describe; a key on the command line replaces the file's.

    Args:
        overrides: as for `gtpo-verl train`, with several values where an axis is meant, `sweep=FILE` and
            `sweep.KEY=VALUE`.
        directory: by default `outputs/NAME`, where the name follows from the file or the axes, and the setting.
        local: whether the runs are processes of this machine, whose hardware they have unless they name another.

    Raises:
        UserError: an override, an axis or the file is wrong.
    """
    parsed = parse(overrides)
    settings = [item for item in parsed if item.key_or_group.split(".")[0] == GROUP]
    given = [item for item in parsed if item not in settings]
    file = _read_file(settings, [line_of(item) for item in given if item.is_hydra_override()])
    keys = {(item.key_or_group, item.package) for item in given}
    from_file = parse([*(f"{key}={values}" for key, values in file.axes.items()), *file.overrides])
    of_file = split(from_file, file.max_runs)[0]
    for key, value in file.baseline.items():
        if of_file and value not in of_file.get(key, ()):
            raise UserError(f"sweep.baseline: {key}={value} is not on an axis of the sweep.")
    kept = [item for item in from_file if (item.key_or_group, item.package) not in keys]
    axes, common = split([*kept, *given], file.max_runs)
    if not axes:
        raise UserError(
            "a sweep needs an axis: give a key several values, as in algo=dapo,gtpo or seed='range(8)', or choose a "
            "file with sweep=NAME."
        )
    if chosen(common, "trainer.run_dir") is not None:
        raise UserError("trainer.run_dir: each run has its own in the sweep's directory, which --output names.")
    baseline = on_axes(file.baseline or BASELINE, axes)
    asked = [line_of(item) for item in settings if item.key_or_group.startswith(f"{GROUP}.baseline")]
    if asked and baseline is None:
        raise UserError(f"{' '.join(asked)}: the baseline is not on the axes of the sweep.")
    if local:
        common, _ = with_hardware(common)
    named = chosen([line_of(item) for item in settings], GROUP)
    what = [named] if named else ["sweep", *(key.rsplit(".", 1)[-1].lstrip("+") for key in axes)]
    name = "-".join(filter(None, [*what, chosen(common, "setting")])).replace("/", "-")
    return Sweep(
        name=directory.resolve().name if directory else name,
        directory=(directory or Path("outputs") / name).resolve(),
        axes=axes,
        common=tuple(common),
        runs=combinations(axes),
        baseline=baseline,
        retries=file.retries,
    )


def _read_file(settings: Sequence[Override], search_path: Sequence[str]) -> SweepFile:
    """Compose the file that is chosen, with what the command line changes of it."""
    named = any(item.key_or_group == GROUP for item in settings)
    line = next((line_of(item) for item in settings), GROUP)
    known = [item.name for item in fields(SweepFile)]
    store = ConfigStore.instance()
    store.store(name="sweep_settings", node={GROUP: asdict(SweepFile())})
    store.store(name="sweep_of_file", node={"defaults": ["sweep_settings", {GROUP: "???"}]})
    # ++: axes and baseline have any keys, and those of a sweep are checked below, wherever they are from
    changes = [line_of(item) if item.key_or_group == GROUP else f"++{line_of(item)}" for item in settings]
    try:
        with hydra_app():
            found = compose("sweep_of_file" if named else "sweep_settings", overrides=[*search_path, *changes])[GROUP]
        for key in found:
            if key not in known:
                raise UserError(f"{line}: a sweep has no key {key}{choose_from(str(key), known)}")
        values: Any = OmegaConf.to_container(OmegaConf.merge(SweepFile, found))  # interpolations are the runs'
    except MissingConfigException as error:
        options = sorted(error.options or choices(GROUP))
        name = str(error.missing_cfg_file).partition("/")[2]
        raise UserError(f"{line}: no such file{choose_from(name, options)}") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: sweep=null
        raise UserError(f"{line}: {first_line(error)}") from error
    file = SweepFile(**values)
    if file.retries < 0:
        raise UserError(f"sweep.retries={file.retries}: it must be 0 or more.")
    return file


def on_axes(baseline: dict[str, str], axes: Mapping[str, Sequence[str]]) -> dict[str, str] | None:
    """A baseline where all of its values are on the axes, else None."""
    return baseline if all(value in axes.get(key, ()) for key, value in baseline.items()) else None


def embedded_task(sweep: Sweep) -> tuple[Sweep, EmbeddedTask | None]:
    """Give the runs the model and the data of the embedded task where they have its verifier and name neither."""
    if "task" in sweep.axes:
        raise UserError("task= is no axis of a sweep: accuracies of two tasks do not compare. Sweep each by itself.")
    config = compose_config([*sweep.common, *next(iter(sweep.runs.values()))])
    task = task_of(config.reward.custom_reward_function.path)
    given = (config.actor_rollout_ref.model.path, config.data.train_files, config.data.val_files)
    if task is None or any(item is not None for item in given):
        return sweep, None
    return replace(sweep, common=(*sweep.common, *task_overrides(task.directory(sweep.directory.parent)))), task


def task_overrides(directory: Path) -> list[str]:
    """The overrides of model and data that train on the embedded task prepared in a directory."""
    paths = Task(directory.absolute())
    return [
        f"actor_rollout_ref.model.path={quoted(paths.model_path)}",
        f"data.train_files={quoted(paths.train_file)}",
        f"data.val_files={quoted(paths.val_file)}",
    ]


def check_directory(sweep: Sweep) -> None:
    """Refuse a directory that holds something else than this sweep. UserError: what it holds."""
    found = read(sweep.directory)
    if found is None:
        if sweep.directory.is_dir() and any(not is_of_lock(item) for item in sweep.directory.iterdir()):
            raise UserError(f"{sweep.directory} is not empty and not a sweep: choose another --output.")
        return
    if sorted(found.axes) != sorted(sweep.axes):
        raise UserError(
            f"{sweep.directory} is a sweep over {', '.join(found.axes)}, not over {', '.join(sweep.axes)}: choose "
            "another --output."
        )


# -------------------------------------------------------------------- runs


def compose_runs(sweep: Sweep) -> dict[str, DictConfig]:
    """Compose and check every run: the configurations by name.

    Raises:
        UserError: a run does not compose; everything by which runs would fail; two have the same configuration; one is
            already in the directory with another configuration.
    """
    configs: dict[str, DictConfig] = {}
    failing: dict[str, list[str]] = {}  # the runs that have each problem
    for name in sweep.runs:
        overrides = sweep.overrides(name)
        try:
            config = compose_config(overrides)
            prepare(config, overrides)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        configs[name] = config
        for message in errors_of(problems(config)):
            failing.setdefault(message, []).append(name)
    failures = []
    for message, names in failing.items():
        others = f" and {len(names) - 1} other run{'s' * (len(names) > 2)}" if len(names) > 1 else ""
        failures.append(Problem(f"{names[0]}{others}: {message}"))
    refuse(failures)
    seen: dict[str, str] = {}
    for name, config in configs.items():
        values: Any = OmegaConf.to_container(config, resolve=True)
        trained = sorted((key, str(value)) for key, value in flatten(values) if not is_bookkeeping(key))
        twin = seen.setdefault(repr(trained), name)
        if twin != name:
            raise UserError(f"{name} and {twin} would be the same run: an axis has no effect there.")
        _check_recorded(sweep, name, config)
    return configs


def _check_recorded(sweep: Sweep, name: str, config: DictConfig) -> None:
    """Refuse a run whose directory holds another training, or one of other length that is not trained again."""
    run_dir = sweep.run_dir(name)
    found = changes(run_dir, config, contents=False)
    if message := refusal(found, list(config.trainer.allow_changes)):
        raise UserError(f"{name} in {sweep.directory}: {message}")
    if STEPS in found and state_of(run_dir).is_complete:
        raise UserError(
            f"{name}: {in_words({STEPS: found[STEPS]})}, and it is finished in {run_dir}. Restore it, remove that "
            "directory, or choose another --output."
        )


def idle_axes(sweep: Sweep, configs: Mapping[str, DictConfig]) -> list[str]:
    """Values on the axes that have no effect in a run, one line each."""
    found = []
    for name, overrides in sweep.runs.items():
        alone = [item for item in overrides if f"${{{item.partition('=')[0]}}}" not in " ".join(sweep.common)]
        found += [f"{name}: {idle.message}" for idle in given.without_effect(configs[name], alone)]
    return found


def untestable(sweep: Sweep) -> list[str]:
    """A line where the report will compare no arms, or the arms have too few seeds for a test to find a difference."""
    from gtpo_verl.evaluation.paired import least_sign_flip_p  # imports scipy

    seeds, starts = (max(1, len(sweep.axes.get(key, ()))) for key in (SEED, START))  # both make pairs
    if len(sweep.runs) == seeds * starts:  # one arm
        return []
    found = read(sweep.directory)  # its baseline stays, see `runs.sweep.write`
    if sweep.baseline is None and (found is None or found.baseline is None):
        return ["no arm is the baseline, so the report will compare none: name it, as in sweep.baseline={algo:dapo}."]
    least = least_sign_flip_p(seeds * starts)
    if least <= 0.05:
        return []
    arms = f"{seeds} seed{'s' * (seeds > 1)}{f' from {starts} starts' if starts > 1 else ''} for each arm"
    return [f"{arms}: the sign-flip test cannot reject at 5 %, its smallest p is {least:.2g}."]
