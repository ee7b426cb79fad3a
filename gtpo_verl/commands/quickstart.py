"""``gtpo-verl quickstart``: three arms on an embedded task, and a report that compares them.

It is a local sweep over the algorithm. Each arm is a separate ``gtpo-verl train``, the command that a user would type.
"""

import argparse
import datetime as dt
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gtpo_verl.commands.options import declare, overrides_of
from gtpo_verl.config import chosen, compose_config, known_presets
from gtpo_verl.errors import UserError
from gtpo_verl.experiments.launchers import Launcher
from gtpo_verl.experiments.run import Where, launcher_for, locked, train_all
from gtpo_verl.experiments.scheduler import Scheduler, unfinished
from gtpo_verl.experiments.sweep import BASELINE, on_axes, task_overrides
from gtpo_verl.runs.directory import METRICS_FILE, now
from gtpo_verl.runs.sweep import Sweep, read
from gtpo_verl.runs.terminal import LOG_FILE, outlive_terminal
from gtpo_verl.tasks import set_thread_waiting, task
from gtpo_verl.tasks.prepare import prepare_task

ARMS = ("dapo", "gtpo", "grpo_s")
TASK = "sums"
STEPS = 20  # optimiser steps of an arm, for 24 of the setting
PROMPTS = 256  # of a validation, for 1,024: a quarter of the time, and intervals twice as wide
CONTROL = "reward.custom_reward_function.name=random_verdict"
CONTROL_NOTE = "Control: the verdicts on training responses were random."
LINE_EVERY = 30.0  # seconds between two lines of progress where there is no terminal

EPILOG = """\
The run directory is DIR/quickstart-TIME: report.html, sweep.json, and for each arm metrics.jsonl, validation samples,
checkpoints, TensorBoard files, the trained model in Hugging Face format and train.log. `gtpo-verl status` shows how
far it is, also from another terminal.

The report is there after the first arm and grows with every other. Ctrl-C stops after the current step and writes a
report of what was trained; the same command resumes the run. Arms train side by side if there are a core and 7.5 GiB
of memory for each.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    control = "control: random verdicts on training responses, so that nothing should be learnt"
    declare(
        parser,
        ("overrides", "Hydra overrides for every arm"),
        "--config-dir",
        ("--output", "parent directory of the run (default: %(default)s)"),
        ("--fresh", "start a new run even if an unfinished one could resume"),
        ("--arms A,B", ",".join(ARMS), "what to train"),
        ("--steps N", STEPS, "optimiser steps per arm"),
        ("--parallel N", int, "arms at once (default: as many as fit)"),
        ("--random-verdicts", False, control),
    )
    parser.set_defaults(output=Path("outputs"))


def run(args: argparse.Namespace) -> int:
    """Prepare, train every arm, report; returns the exit code."""
    set_thread_waiting()
    outlive_terminal()
    args.overrides = overrides_of(args)
    console = Console(highlight=False, soft_wrap=True)
    where = Where(local=True, parallel=args.parallel)
    embedded = task(chosen(args.overrides, "task") or TASK)
    place = embedded.directory(args.output)
    arms, common = _arms(args.arms), _common(args, place)
    configs = [compose_config([*common, f"algo={arm}"]) for arm in arms]  # before anything takes time
    launcher = launcher_for(configs, where)
    sweep, resumed = _sweep(args.output.resolve(), arms, common, fresh=args.fresh)
    with locked(sweep.directory):
        console.print(f"[bold]gtpo_verl quickstart[/]: {', '.join(arms)} on real verl, Ray and vLLM")
        console.print(f"{'Resuming' if resumed else 'Run'}: {sweep.directory}")
        console.print(f"[bold]1.[/] The task: {embedded.description}")
        prepared = prepare_task(embedded, place)
        console.print(f"   baseline accuracy {prepared.baseline:.3f}")
        steps, at_once = configs[0].trainer.total_training_steps, min(launcher.capacity, len(arms))
        order = f"{at_once} at once" if at_once > 1 else "one after the other"
        several = f" each, {len(arms)} arms, {order}" if len(arms) > 1 else ""
        console.print(f"[bold]2.[/] Training of {steps} steps{several}")
        settings = {"task": embedded.data_source, "baseline accuracy": f"{prepared.baseline:.3f}"}
        sweep = replace(sweep, about={**sweep.about, "settings": settings})
        return train_and_report(sweep, launcher, console)


def train_and_report(sweep: Sweep, launcher: Launcher, console: Console) -> int:
    """Train every arm and report, also after each arm; the first failure stops the others and raises UserError. Returns
    the exit code, 130 when it was stopped.
    """

    def ended(scheduler: Scheduler, arm: str) -> None:
        if scheduler.attempts[arm].failures:
            scheduler.stops = max(scheduler.stops, 2)
        elif not scheduler.stops and unfinished(sweep):
            _report(sweep.directory, console, table=False)

    scheduler = train_all(sweep, launcher, console, ended=ended, line_every=LINE_EVERY)
    _report(sweep.directory, console)
    for arm, attempts in scheduler.attempts.items():
        if attempts.failures:
            raise UserError(
                f"the arm {arm} failed: {attempts.reason} The whole log is in {sweep.run_dir(arm) / LOG_FILE}."
            )
    if unfinished(sweep):
        console.print("The same command goes on.")
        return 130
    return 0


def _arms(text: str) -> list[str]:
    arms = list(dict.fromkeys(arm.strip() for arm in text.split(",") if arm.strip()))
    known_presets("--arms", arms)
    if not arms:
        raise UserError("--arms names no algorithm: for instance --arms dapo,gtpo.")
    return arms


def _common(args: argparse.Namespace, place: Path) -> list[str]:
    """The overrides of every arm; ``place``: where the task is prepared."""
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: it must be at least 1.")
    sizes = [f"trainer.total_training_steps={args.steps}", "trainer.test_freq=10", f"data.val_max_samples={PROMPTS}"]
    control = [CONTROL] if args.random_verdicts else []
    return ["setting=quickstart", "hardware=cpu", *task_overrides(place), *sizes, *control, *args.overrides]


def _sweep(output: Path, arms: Sequence[str], common: Sequence[str], *, fresh: bool) -> tuple[Sweep, bool]:
    """The arms as a sweep in a new directory, or the last one if that is the same and unfinished; and whether it is."""
    axes = {"algo": tuple(arms)}
    earlier = [] if fresh else sorted(output.glob("quickstart-*"), reverse=True)
    last = next(filter(None, map(read, earlier)), None)
    if last is not None and (last.axes, last.common) == (axes, tuple(common)) and unfinished(last):
        return replace(last, retries=0), True  # what fails in a quickstart fails again
    directory = _new_directory(output)
    about = {
        "created": now(),
        "command": shlex.join(["gtpo-verl", *sys.argv[1:]]),
        "notes": [CONTROL_NOTE] if CONTROL in common else [],
    }
    runs = {arm: (f"algo={arm}",) for arm in arms}
    baseline = on_axes(BASELINE, axes) or {"algo": arms[0]}
    return Sweep(directory.name, directory, axes, tuple(common), runs, baseline, retries=0, about=about), False


def _new_directory(output: Path) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    while True:
        directory = output / f"quickstart-{dt.datetime.now():%Y%m%d-%H%M%S}"
        try:
            directory.mkdir()
        except FileExistsError:  # one that was started in the same second
            time.sleep(1)
        else:
            return directory


def _report(directory: Path, console: Console, *, table: bool = True) -> None:
    from gtpo_verl.report.page import print_table, write_report

    if not any(directory.glob(f"*/{METRICS_FILE}")):
        console.print("No step was trained yet, so there is nothing to report.")
        return
    report = write_report([directory], directory)
    if table:
        print_table(report)
    else:
        console.print(f"   report so far: {report.html}")
