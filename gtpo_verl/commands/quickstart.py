"""``gtpo-verl quickstart``: three arms on an embedded task, and a report that compares them.

Each arm is a separate ``gtpo-verl train``, the command that a user would type. They are scheduled like the runs of a
local sweep: as many at once as fit; on two cores one after the other.
"""

import argparse
import datetime as dt
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from gtpo_verl.config import choices, chosen, compose_config, quoted
from gtpo_verl.errors import UserError, did_you_mean
from gtpo_verl.experiments.axes import Axis, Member
from gtpo_verl.experiments.launchers import Launcher, local_launcher
from gtpo_verl.experiments.run import Where, full_disk
from gtpo_verl.experiments.scheduler import Scheduler, is_finished, sweep_lock
from gtpo_verl.experiments.sweep import Sweep
from gtpo_verl.files import local_path
from gtpo_verl.runs.directory import METRICS_FILE, read_record, write_record
from gtpo_verl.runs.pace import Pace, in_words
from gtpo_verl.runs.progress import progress_of
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.runs.terminal import LOG_FILE, describe
from gtpo_verl.tasks import EmbeddedTask, Task, set_thread_waiting, task
from gtpo_verl.tasks.prepare import locate, prepare_task

ARMS = ("dapo", "gtpo", "grpo_s")
TASK = "sums"
SET_UP = "starting Ray, FSDP and vLLM"
CONTROL = "reward.custom_reward_function.name=random_verdict"
# Without a terminal, progress is a line this often, and a line every tenth of the run.
LINE_EVERY = 30.0  # seconds
LINE_SHARE = 0.1

EPILOG = """\
The run directory is DIR/quickstart-TIME: report.html, run.json, and for each arm metrics.jsonl, validation samples,
checkpoints, TensorBoard files, the trained model in Hugging Face format and train.log.

The report is there after the first arm and grows with every other. Ctrl-C stops after the current step and writes a
report of what was trained; the same command resumes the run. Arms train side by side if there are two cores and 5 GiB
for each.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides for every arm")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="A,B", help="what to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps per arm (default: the setting's)")
    parser.add_argument(
        "--output",
        type=local_path,
        default=Path("outputs"),
        metavar="DIR",
        help="parent directory of the run (default: %(default)s)",
    )
    parser.add_argument("--parallel", type=int, metavar="N", help="arms at once (default: as many as fit)")
    parser.add_argument("--fresh", action="store_true", help="start a new run even if an unfinished one could resume")
    parser.add_argument(
        "--random-verdicts",
        action="store_true",
        help="control: random verdicts on training responses, so that nothing should be learnt",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, train every arm, report; returns the exit code."""
    set_thread_waiting()
    console = Console(highlight=False, soft_wrap=True)
    arms = _arms(args.arms)
    where = Where(local=True, parallel=args.parallel)
    embedded = _task(args.overrides)
    overrides = _overrides(embedded, locate(embedded.directory(args.output)), args)
    configs = [compose_config([*overrides, f"algo={arm}"]) for arm in arms]  # before anything takes time
    launcher = local_launcher(configs, where.parallel)
    request = {"arms": arms, "steps": args.steps, "overrides": args.overrides, "random_verdicts": args.random_verdicts}
    directory, resumed = _run_directory(args.output, request, fresh=args.fresh)
    with full_disk(directory), sweep_lock(directory):
        console.print(f"[bold]gtpo_verl quickstart[/]: {', '.join(arms)} on real verl, Ray and vLLM")
        console.print(f"{'Resuming' if resumed else 'Run'}: {directory}")
        console.print(f"[bold]1.[/] The task: {embedded.description}")
        prepared = prepare_task(embedded, embedded.directory(args.output))
        console.print(f"   baseline accuracy {prepared.baseline:.3f}")
        at_once = min(launcher.capacity, len(arms))
        steps = configs[0].trainer.total_training_steps
        order = f"{at_once} at once" if at_once > 1 else "one after the other"
        console.print(
            f"[bold]2.[/] Training of {steps} steps" + (f" each, {len(arms)} arms, {order}" * (len(arms) > 1))
        )
        sweep = _sweep(arms, directory, overrides)
        record = QuickstartRecord(sweep, request, embedded, prepared)
        return _train(sweep, record, launcher, steps, console)


def _train(sweep: Sweep, record: "QuickstartRecord", launcher: Launcher, steps: int, console: Console) -> int:
    """Train every arm and report.

    Returns:
        The exit code: 0, or 130 when it was stopped.

    Raises:
        UserError: an arm failed, and the others were stopped.
    """

    def announce(line: str) -> None:
        console.print(f"   {line}", markup=False)

    def look() -> None:
        if record.note_finished([name for name, state in scheduler.attempts.items() if state.open]) and record.left:
            _report(sweep.directory, console, table=False)
        if failed():
            scheduler.stops = max(scheduler.stops, 2)
        if not scheduler.stops:
            show()

    def failed() -> list[str]:
        return [name for name, state in scheduler.attempts.items() if state.failures]

    scheduler = Scheduler(sweep, launcher, announce=announce, show=look)
    with _shown(sweep, steps, launcher.capacity, console) as show:
        try:
            scheduler.run()
        finally:
            record.close("failed" if failed() else "interrupted" if record.left else "complete")
    _report(sweep.directory, console)
    for arm in failed():
        reason = scheduler.attempts[arm].reason
        raise UserError(f"the arm {arm} failed: {reason} The whole log is in {sweep.run_dir(arm) / LOG_FILE}.")
    if record.left:
        console.print("The same command goes on.")
        return 130
    return 0


def _arms(text: str) -> list[str]:
    arms = list(dict.fromkeys(arm.strip() for arm in text.split(",") if arm.strip()))
    known = choices("algo")
    for arm in arms:
        if arm not in known:
            hint = did_you_mean(arm, known) or "."
            raise UserError(f"--arms {arm}: no such algorithm{hint} Choose from: {', '.join(known)}.")
    if not arms:
        raise UserError("--arms names no algorithm: for instance --arms dapo,gtpo.")
    return arms


def _task(overrides: Sequence[str]) -> EmbeddedTask:
    return task(chosen(overrides, "task") or TASK)


def _sweep(arms: Sequence[str], directory: Path, overrides: Sequence[str]) -> Sweep:
    """The arms as a sweep, whose runs are not tried again: what fails in a quickstart fails again."""
    return Sweep(
        name=directory.name,
        directory=directory,
        axes=(Axis("algo", tuple(arms)),),
        common=tuple(overrides),
        members=tuple(Member(arm, (f"algo={arm}",)) for arm in arms),
        baseline=None,
        retries=0,
    )


def _overrides(embedded: EmbeddedTask, paths: Task, args: argparse.Namespace) -> list[str]:
    """The overrides of every arm."""
    overrides = [
        "setting=quickstart",
        "hardware=cpu",
        f"actor_rollout_ref.model.path={quoted(paths.model_path)}",
        f"data.train_files={quoted(paths.train_file)}",
        f"data.val_files={quoted(paths.val_file)}",
        f"reward.custom_reward_function.path={embedded.reward}",
    ]
    if args.steps is not None:
        overrides.append(f"trainer.total_training_steps={args.steps}")
    if args.random_verdicts:
        overrides.append(CONTROL)
    return [*overrides, *args.overrides]


def _run_directory(output: Path, request: dict[str, Any], *, fresh: bool) -> tuple[Path, bool]:
    """A new run directory, or the last one if it is unfinished and was started with the same request."""
    output = output.resolve()
    if not fresh:
        for directory in sorted(output.glob("quickstart-*"), reverse=True):
            facts = read_record(directory)
            if facts and facts["status"] != "complete" and facts["request"] == request:
                return directory, True
            if facts:
                break
    output.mkdir(parents=True, exist_ok=True)
    while True:
        directory = output / f"quickstart-{dt.datetime.now():%Y%m%d-%H%M%S}"
        try:
            directory.mkdir()
        except FileExistsError:  # one that was started in the same second
            time.sleep(1)
        else:
            return directory, False


class QuickstartRecord:
    """``run.json`` of a quickstart: request, commands, status. Written after every change."""

    def __init__(self, sweep: Sweep, request: dict[str, Any], embedded: EmbeddedTask, prepared: Task) -> None:
        self._sweep = sweep
        self.facts: dict[str, Any] = read_record(sweep.directory) or {
            "name": sweep.name,
            "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(["gtpo-verl", *sys.argv[1:]]),
            "versions": run_versions(),
            "hardware": hardware(),
            "arms": request["arms"],
            "request": request,
            "settings": {"task": embedded.data_source, "baseline accuracy": f"{prepared.baseline:.3f}"},
            "commands": {
                member.name: shlex.join(["gtpo-verl", "train", *sweep.overrides(member)]) for member in sweep.members
            },
            "complete": [],
            "notes": ["Control: the verdicts on training responses were random."] if request["random_verdicts"] else [],
        }
        self.note_finished()
        self.close("running")

    @property
    def left(self) -> list[str]:
        """The arms that are not trained to their end."""
        return [arm for arm in self.facts["arms"] if arm not in self.facts["complete"]]

    def note_finished(self, running: Collection[str] = ()) -> bool:
        """Write down which arms are trained to their end and not running; returns whether that has changed."""
        finished = [arm for arm in self.facts["arms"] if arm not in running and is_finished(self._sweep.run_dir(arm))]
        changed: bool = finished != self.facts["complete"]
        if changed:
            self.facts["complete"] = finished
            self.close("running")
        return changed

    def close(self, status: str) -> None:
        """Record the status."""
        self.facts["status"] = status
        write_record(self._sweep.directory, self.facts)


class Watch:
    """How far the arms are, in words and as a share, from their files."""

    def __init__(self, run_dirs: Mapping[str, Path], steps: int, at_once: int) -> None:
        done = [arm for arm, run_dir in run_dirs.items() if is_finished(run_dir)]
        self._run_dirs = {arm: run_dir for arm, run_dir in run_dirs.items() if arm not in done}
        # what an earlier attempt has logged says nothing of this one's time
        self._last = {arm: self._logged(arm) for arm in self._run_dirs}
        self._pace = Pace(steps, trainings=len(run_dirs), done=len(done), at_once=at_once)
        self._text = SET_UP

    def _logged(self, arm: str) -> int:
        """The last step that an arm has logged, -1 before the validation before the first."""
        progress = progress_of(self._run_dirs[arm])
        return progress.step if progress.metrics else -1

    def look(self) -> tuple[float, str]:
        """The share of all steps that have ended, and a line on what was seen last."""
        for arm, last in self._last.items():
            step = self._logged(arm)
            if step > last:
                self._last[arm] = step
                self._pace.saw(arm, step)
                data = dict(progress_of(self._run_dirs[arm]).metrics)
                self._text = f"{arm} {step}/{self._pace.steps}: {describe(step, data)}"
        left = self._pace.seconds_left
        return self._pace.share, ("" if left is None else f"about {in_words(left)} left, ") + self._text


@contextmanager
def _shown(sweep: Sweep, steps: int, at_once: int, console: Console) -> Iterator[Callable[[], None]]:
    """Gives what shows how far the arms are: a bar that moves, or lines where there is no terminal."""
    run_dirs = {member.name: sweep.run_dir(member.name) for member in sweep.members}
    watch = Watch(run_dirs, steps, at_once)
    if not console.is_terminal:
        due = Due(watch.look()[0])

        def line() -> None:
            share, text = watch.look()
            if due(share):
                console.print(f"   {share:4.0%}  {text}", markup=False)

        yield line
        return
    columns = (
        TextColumn("  "),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(SET_UP, total=1.0)

        def move() -> None:
            share, text = watch.look()
            progress.update(bar, completed=share, description=text)

        yield move


class Due:
    """Whether a line of progress is due: the time has come, or much has happened."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = (clock(), share)

    def __call__(self, share: float) -> bool:
        now = self._clock()
        printed, known = self._last
        due = now - printed >= LINE_EVERY or share - known >= LINE_SHARE or share == 1 > known
        if due:
            self._last = (now, share)
        return due


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
