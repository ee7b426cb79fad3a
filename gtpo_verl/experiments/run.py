"""Runs a sweep from its command line to its end: checks, directory, launcher, scheduler, and what the user sees."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gtpo_verl.errors import UserError
from gtpo_verl.experiments.launchers import Launcher, LocalLauncher, RayLauncher, cluster_slots, gpus_of, local_slots
from gtpo_verl.experiments.package import carried_files
from gtpo_verl.experiments.scheduler import FULL, Scheduler, cluster_of, unfinished
from gtpo_verl.experiments.status import progress_line, statuses, summary, table
from gtpo_verl.experiments.sweep import check_directory, compose_runs, define, embedded_task, idle_axes, untestable
from gtpo_verl.rules.stages import check
from gtpo_verl.runs.directory import STOP_FILE
from gtpo_verl.runs.lock import live_owner, sweep_lock
from gtpo_verl.runs.state import state_of
from gtpo_verl.runs.sweep import Sweep, load, write
from gtpo_verl.runs.terminal import outlive_terminal
from gtpo_verl.tasks.prepare import prepare_task

REFRESH = 2.0  # seconds between two tables
LINE_EVERY = 60.0  # seconds between two lines where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the runs of a sweep run."""

    local: bool = False  # in processes of this machine, else as jobs of the Ray cluster
    parallel: int | None = None  # runs at once, instead of what fits
    address: str | None = None  # of the cluster's dashboard

    def __post_init__(self) -> None:
        if self.parallel is not None and self.parallel < 1:
            raise UserError(f"--parallel {self.parallel}: it must be at least 1.")


def train(overrides: Sequence[str], directory: Path | None, where: Where) -> int:
    """Train every run of a sweep that is not finished; returns the exit code, 1 if a run failed, 130 when stopped."""
    outlive_terminal()
    console = _console()
    sweep, task = embedded_task(define(overrides, directory, local=where.local))
    configs = _checked(sweep, console, where)
    launcher = launcher_for(list(configs.values()), where)  # the cluster answers, before anything takes time
    with locked(sweep.directory):
        if task is not None:
            prepare_task(task, task.directory(sweep.directory.parent))
        count = len(sweep.runs) - len(unfinished(sweep))
        if count:
            console.print(f"{count} of {len(sweep.runs)} runs are finished already.")
        checked: set[tuple[str, ...]] = set()  # the models, data and rewards of runs
        for config in configs.values():
            data, model = config.data, config.actor_rollout_ref.model.path
            inputs = (model, str(data.train_files), str(data.val_files), OmegaConf.to_yaml(config.reward))
            if inputs not in checked:
                check(config)
            checked.add(inputs)
        scheduler = train_all(sweep, launcher, console)
    console.print(summary(statuses(sweep.directory)))
    console.print(f"Report: gtpo-verl report {sweep.directory}")
    if scheduler.stops:
        console.print("The same command goes on.")
        return 130
    return 1 if unfinished(sweep) else 0


def train_all(
    sweep: Sweep,
    launcher: Launcher,
    console: Console,
    *,
    ended: Callable[[Scheduler, str], object] = lambda scheduler, name: None,
    line_every: float = LINE_EVERY,
) -> Scheduler:
    """Train the runs of a sweep whose directory is locked, and show how far they are; returns their scheduler.

    ``ended`` is called with the name of a run whose attempt has ended; ``line_every``: seconds, see `LINE_EVERY`.
    """
    write(sweep)
    say = functools.partial(console.print, markup=False)
    with _shown(sweep.directory, launcher.capacity, console, line_every) as show:
        scheduler = Scheduler(sweep, launcher, announce=say, show=show, ended=lambda name: ended(scheduler, name))
        scheduler.run()
    return scheduler


def plan(overrides: Sequence[str], directory: Path | None, where: Where, *, gpu: str, measured: Path | None) -> int:
    """Print the runs of a sweep, their overrides and their cost; nothing is written, and no model or data is read."""
    if measured is not None:
        from gtpo_verl.planning.measured import read_steps  # imports pandas

        read_steps(measured)  # of one that cannot be read, each run would have no estimate
    console = _console()
    sweep, _ = embedded_task(define(overrides, directory, local=where.local))
    configs = _checked(sweep, console, where)
    costs = {name: cost_of(config, gpu, measured) for name, config in configs.items()}
    found = Table(box=None, pad_edge=False)
    for column in ("run", "overrides", "cost", ""):
        found.add_column(column, overflow="fold")
    for name, values in sweep.runs.items():
        state = "finished" if state_of(sweep.run_dir(name)).is_complete else ""
        found.add_row(name, " ".join(values), str(costs[name]), state)
    console.print(found)
    every = list(costs.values())
    hours = sum((one.hours or 0.0) * one.devices for one in every)
    unit = "rank-hours" if every[0].on_cpu else "GPU-hours"
    if any(one.hours is None for one in every):
        console.print(f"{len(every)} runs; their time is not estimated: --measured RUN takes it from a run.")
    else:
        console.print(f"{len(every)} runs, {hours:,.0f} {unit}, without validation and verifier.")
    return 0


@dataclass(frozen=True)
class Cost:
    """Devices of a run (ranks on a CPU), its steps, and hours on them where they can be estimated."""

    devices: int
    on_cpu: bool
    steps: int | None
    hours: float | None

    def __str__(self) -> str:
        plural, where = "s" * (self.devices > 1), " on CPUs" if self.on_cpu else ""
        time = "" if self.hours is None else f", {self.hours:,.1f} h"
        devices = f"{self.devices} {'rank' if self.on_cpu else 'GPU'}{plural}{where}"
        return f"{devices}, {self.steps or 'an unknown number of'} steps{time}"


def cost_of(config: DictConfig, gpu: str, measured: Path | None) -> Cost:
    """The cost of one run; on a CPU there is no estimate without a ``measured`` one. See `make_plan`."""
    from gtpo_verl.planning.plan import make_plan  # imports torch
    from gtpo_verl.planning.step import total_steps

    try:
        plan = make_plan(config, gpu=gpu, measured=measured)
        hours = None if plan.time is None else plan.time.total * plan.total_steps / 3600
    except UserError:  # the shape of its model is not known here, or its number of steps
        hours = None
    return Cost(gpus_of(config), config.trainer.device == "cpu", total_steps(config), hours)


def status(directory: Path) -> int:
    """Show the runs of a sweep: on a terminal until the sweep ends or Ctrl-C, else once. Returns the exit code, 1 where
    a run has failed.
    """
    console = _console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            runs = statuses(directory)
            live.update(table(runs), refresh=True)
            if not console.is_terminal or not live_owner(directory):
                return int(any(run.state == "failed" for run in runs))
            time.sleep(REFRESH)


def stop(directory: Path) -> int:
    """Stop a sweep: its runs finish their step and save a checkpoint. Runs that a killed sweep has left stop too."""
    console = _console()
    sweep = load(directory)
    console.print(f"Stopping {directory}: what runs finishes its step and saves a checkpoint.")
    if live_owner(directory):
        (directory / STOP_FILE).touch()
        while live_owner(directory):
            time.sleep(1)
    else:
        cluster = cluster_of(directory)
        launcher = launcher_for([], Where(local=cluster is None, parallel=1, address=cluster))
        with locked(directory):
            Scheduler(sweep, launcher, announce=functools.partial(console.print, markup=False), stops=1).run()
    console.print(table(statuses(directory)))
    return 0


def _checked(sweep: Sweep, console: Console, where: Where) -> dict[str, DictConfig]:
    """Say what a sweep trains and what of it shows nothing; compose its runs, see `compose_runs`."""
    check_directory(sweep)
    if not where.local:
        carried_files(Path.cwd())  # refuses a directory that is too large for its jobs
    console.print(f"[bold]Sweep {sweep.name}[/]: {len(sweep.runs)} runs in {sweep.directory}")
    console.print("every run:", " ".join(sweep.common), markup=False)
    configs = compose_runs(sweep)
    for line in (*idle_axes(sweep, configs), *untestable(sweep)):
        console.print(f"warning: {line}", markup=False)
    return configs


def launcher_for(configs: Sequence[DictConfig], where: Where) -> Launcher:
    """What starts runs with these configurations, as many at once as fit or ``where`` says."""
    if where.local:
        return LocalLauncher(local_slots(configs, where.parallel) if configs else [])
    from gtpo_verl.experiments.jobs import Jobs

    jobs = Jobs(where.address)
    return RayLauncher(jobs, where.parallel or cluster_slots(configs, jobs.address))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Be the only process that trains the runs in a directory; say in one line that its disk is full."""
    try:
        with sweep_lock(directory):
            (directory / STOP_FILE).unlink(missing_ok=True)  # of an earlier sweep; one from now on is for this one
            yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"the disk of {directory} is full: nothing runs any more. Free some space; the same command goes on."
        ) from error


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


@contextmanager
def _shown(directory: Path, at_once: int, console: Console, line_every: float) -> Iterator[Callable[[], None]]:
    """A table below the lines that are printed, or without a terminal a line now and then; gives what refreshes it."""
    if not console.is_terminal:
        last = time.monotonic()

        def say() -> None:
            nonlocal last
            if time.monotonic() - last >= line_every:
                last = time.monotonic()
                console.print(progress_line(statuses(directory), at_once), markup=False)

        yield say
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda: live.update(table(statuses(directory), at_once), refresh=True)
