"""Runs a sweep from its command line to its end: checks, directory, launcher, scheduler, and what the user sees."""

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gtpo_verl.errors import UserError
from gtpo_verl.experiments.launchers import Launcher, LocalLauncher, RayLauncher, cluster_slots, local_launcher
from gtpo_verl.experiments.scheduler import Scheduler, cluster_of, is_finished, sweep_lock
from gtpo_verl.experiments.status import is_scheduled, running_line, statuses, summary, table
from gtpo_verl.experiments.sweep import (
    Sweep,
    check_directory,
    compose_runs,
    define,
    embedded_task,
    few_seeds,
    idle_axes,
    load,
    task_directory,
    write,
)
from gtpo_verl.rules.stages import check
from gtpo_verl.runs.directory import STOP_FILE
from gtpo_verl.tasks.prepare import prepare_task

REFRESH = 2.0  # seconds between two tables
LINE_EVERY = 60.0  # seconds between two lines where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the runs of a sweep run.

    local: in processes of this machine, else as jobs of the Ray cluster whose dashboard is at `address`.
    parallel: runs at once, instead of what fits.
    """

    local: bool = False
    parallel: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.parallel is not None and self.parallel < 1:
            raise UserError(f"--parallel {self.parallel}: it must be at least 1.")


def train(overrides: Sequence[str], directory: Path | None, where: Where) -> int:
    """Train every run of a sweep that is not finished; returns the exit code, 1 where a run failed, 130 when stopped.

    Raises:
        UserError: what is wrong with the sweep, its directory or the place where it runs.
    """
    console = _console()
    sweep, task = embedded_task(define(overrides, directory, local=where.local))
    check_directory(sweep)
    console.print(f"[bold]Sweep {sweep.name}[/]: {len(sweep.members)} runs in {sweep.directory}")
    console.print("every run:", " ".join(sweep.common), markup=False)
    configs = compose_runs(sweep)
    _warn(sweep, configs, console)
    launcher = _launcher(list(configs.values()), where)  # the cluster answers, before anything takes time
    with full_disk(sweep.directory), sweep_lock(sweep.directory):
        if task is not None:
            prepare_task(task, task_directory(sweep, task))
        for config in _inputs(configs):
            check(config)
        write(sweep)
        _say_finished(sweep, console)
        with _shown(sweep.directory, console) as show:
            scheduler = Scheduler(sweep, launcher, announce=lambda line: console.print(line, markup=False), show=show)
            unfinished = scheduler.run()
    console.print(summary(statuses(sweep.directory)))
    console.print(f"Report: gtpo-verl report {sweep.directory}")
    if scheduler.stops:
        console.print("The same command goes on.")
        return 130
    return 1 if unfinished else 0


def plan(overrides: Sequence[str], directory: Path | None, where: Where, *, gpu: str, measured: Path | None) -> int:
    """Print the runs of a sweep, their overrides and their cost; nothing is written, and no model or data is read."""
    from gtpo_verl.experiments.cost import cost_of, total  # imports torch

    console = _console()
    sweep, _ = embedded_task(define(overrides, directory, local=where.local))
    check_directory(sweep)
    console.print(f"[bold]Sweep {sweep.name}[/]: {len(sweep.members)} runs in {sweep.directory}")
    console.print("every run:", " ".join(sweep.common), markup=False)
    configs = compose_runs(sweep)
    costs = {name: cost_of(config, gpu=gpu, measured=measured) for name, config in configs.items()}
    found = Table(box=None, pad_edge=False)
    for column in ("run", "overrides", "cost", ""):
        found.add_column(column, overflow="fold")
    for member in sweep.members:
        state = "finished" if is_finished(sweep.run_dir(member.name)) else ""
        found.add_row(member.name, " ".join(member.overrides), str(costs[member.name]), state)
    console.print(found)
    _warn(sweep, configs, console)
    console.print(total(list(costs.values())))
    return 0


def status(directory: Path) -> int:
    """Show the runs of a sweep: on a terminal until the sweep ends or Ctrl-C, else once."""
    console = _console()
    if not console.is_terminal or not is_scheduled(directory):
        console.print(table(statuses(directory)))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(table(statuses(directory)), refresh=True)
            if not is_scheduled(directory):
                return 0
            time.sleep(REFRESH)


def stop(directory: Path) -> int:
    """Stop a sweep: its runs finish their step and save a checkpoint. Runs that a killed sweep has left stop too."""
    console = _console()
    sweep = load(directory)
    console.print(f"Stopping {directory}: what runs finishes its step and saves a checkpoint.")
    if is_scheduled(directory):
        (directory / STOP_FILE).touch()
        while is_scheduled(directory):
            time.sleep(1)
    else:
        cluster = cluster_of(directory)
        launcher = _launcher([], Where(local=cluster is None, parallel=1, address=cluster))
        with sweep_lock(directory):
            Scheduler(sweep, launcher, announce=lambda line: console.print(line, markup=False), stops=1).run()
    console.print(table(statuses(directory)))
    return 0


def _warn(sweep: Sweep, configs: Mapping[str, DictConfig], console: Console) -> None:
    """Say what of the sweep shows nothing: axes that change nothing, too few seeds."""
    for line in (*idle_axes(sweep, configs), *few_seeds(sweep)):
        console.print(f"warning: {line}", markup=False)


def _inputs(configs: Mapping[str, DictConfig]) -> list[DictConfig]:
    """The first run with each model, data and reward."""
    first: dict[str, DictConfig] = {}
    for config in configs.values():
        data, model = config.data, config.actor_rollout_ref.model.path
        first.setdefault(f"{model} {data.train_files} {data.val_files} {OmegaConf.to_yaml(config.reward)}", config)
    return list(first.values())


def _launcher(configs: Sequence[DictConfig], where: Where) -> Launcher:
    if where.local:
        return local_launcher(configs, where.parallel) if configs else LocalLauncher([])
    from gtpo_verl.experiments.jobs import Jobs

    jobs = Jobs(where.address)
    return RayLauncher(jobs, where.parallel or cluster_slots(configs, jobs.address))


@contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """Say in one line that the disk of a directory is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"the disk of {directory} is full: nothing runs any more. Free some space; the same command goes on."
        ) from error


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _say_finished(sweep: Sweep, console: Console) -> None:
    count = sum(is_finished(sweep.run_dir(member.name)) for member in sweep.members)
    if count:
        console.print(f"{count} of {len(sweep.members)} runs are finished already.")


@contextmanager
def _shown(directory: Path, console: Console) -> Iterator[Callable[[], None]]:
    """A table below the lines that are printed, or without a terminal a line a minute; gives what refreshes it."""
    if not console.is_terminal:
        last = time.monotonic()

        def say() -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_EVERY:
                last = time.monotonic()
                console.print(running_line(statuses(directory)), markup=False)

        yield say
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda: live.update(table(statuses(directory)), refresh=True)
