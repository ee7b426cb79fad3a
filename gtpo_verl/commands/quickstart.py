"""``gtpo-verl quickstart``: three arms on an embedded task, one after the other, and a report that compares them.

Each arm is a separate ``gtpo-verl train``, the command that a user would type. An arm starts its processes while the
one before it trains, whose steps leave almost half of two cores idle.
"""

import argparse
import datetime as dt
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from gtpo_verl.config import choices, chosen, compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.experiments.launchers import CPU_MEMORY, OWN_RAY
from gtpo_verl.files import local_path
from gtpo_verl.runs.directory import METRICS_FILE, read_record, write_record
from gtpo_verl.runs.pace import Pace, in_words
from gtpo_verl.runs.process import TrainingProcess
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.runs.terminal import describe
from gtpo_verl.tasks import EmbeddedTask, Task, set_thread_waiting, task
from gtpo_verl.tasks.prepare import prepare_task

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
report of what was trained; the same command resumes the run.
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
    embedded = _task(args.overrides)
    request = {"arms": arms, "steps": args.steps, "overrides": args.overrides, "random_verdicts": args.random_verdicts}
    directory, resumed = _run_directory(args.output, request, fresh=args.fresh)
    console.print(f"[bold]gtpo_verl quickstart[/]: {', '.join(arms)} on real verl, Ray and vLLM, on this machine's CPU")
    console.print(f"{'Resuming' if resumed else 'Run'}: {directory}")

    console.print(f"[bold]1.[/] The task: {embedded.description}")
    prepared = prepare_task(embedded, embedded.directory(args.output))
    console.print(f"   baseline accuracy {prepared.baseline:.3f}")

    record = QuickstartRecord(directory, request, embedded, prepared)
    overrides = {arm: _overrides(arm, directory / arm, embedded, prepared, args) for arm in arms}
    left = [arm for arm in arms if not record.is_complete(arm)]
    code = 0
    trainer = compose_config(overrides[arms[0]]).trainer
    trainings = Trainings(directory, overrides, memory=CPU_MEMORY * trainer.n_gpus_per_node)
    stopping = "Stopping after this step, then reporting what was trained. Ctrl-C again stops at once."

    def stop() -> None:
        console.print(stopping)
        trainings.stop()

    try:
        for number, arm in enumerate(arms, start=2):
            if arm not in left:
                console.print(f"[bold]{number}.[/] {arm}: already trained")
                continue
            console.print(f"[bold]{number}.[/] {arm}: training")
            record.start(arm, shlex.join(["gtpo-verl", "train", *overrides[arm]]))
            training = trainings.start(arm)
            following = left[left.index(arm) + 1 :]

            def begin_next(step: int, arm: str = arm, following: Sequence[str] = following) -> None:
                if step > 0 and following:
                    trainings.start_early(following[0], after=arm)

            pace = Pace(trainer.total_training_steps, before=number - 2, after=len(arms) - number + 1)
            try:
                with training.stoppable(stop):
                    show = _show_bar if console.is_terminal else _show_lines
                    show(training, arm, pace, console, begin_next)
                code = _outcome(training, arm)
            except UserError:
                trainings.close()
                record.close("failed")
                _report(directory, console)
                raise
            if code:
                break
            record.finish(arm)
            if arm != arms[-1]:
                _report(directory, console, table=False)
    finally:
        trainings.close()
    record.close("complete" if code == 0 else "interrupted")
    _report(directory, console)
    return code


def _arms(text: str) -> list[str]:
    arms = [arm.strip() for arm in text.split(",") if arm.strip()]
    known = choices("algo")
    for arm in arms:
        if arm not in known:
            raise UserError(f"--arms {arm}: no such algorithm. Choose from: {', '.join(known)}.")
    if not arms:
        raise UserError("--arms names no algorithm: for instance --arms dapo,gtpo.")
    return arms


def _task(overrides: Sequence[str]) -> EmbeddedTask:
    return task(chosen(overrides, "task") or TASK)


def _overrides(arm: str, run_dir: Path, embedded: EmbeddedTask, prepared: Task, args: argparse.Namespace) -> list[str]:
    overrides = [
        f"algo={arm}",
        "setting=quickstart",
        "hardware=cpu",
        f"actor_rollout_ref.model.path={prepared.model_path}",
        f"data.train_files={prepared.train_file}",
        f"data.val_files={prepared.val_file}",
        f"reward.custom_reward_function.path={embedded.reward}",
        f"trainer.run_dir={run_dir}",
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

    def __init__(self, directory: Path, request: dict[str, Any], embedded: EmbeddedTask, prepared: Task) -> None:
        self.directory = directory
        self.facts: dict[str, Any] = read_record(directory) or {
            "name": directory.name,
            "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(["gtpo-verl", *sys.argv[1:]]),
            "versions": run_versions(),
            "hardware": hardware(),
            "arms": request["arms"],
            "request": request,
            "settings": {"task": embedded.data_source, "baseline accuracy": f"{prepared.baseline:.3f}"},
            "commands": {},
            "complete": [],
            "notes": ["Control: the verdicts on training responses were random."] if request["random_verdicts"] else [],
        }
        self.close("running")

    def is_complete(self, arm: str) -> bool:
        return arm in self.facts["complete"]

    def start(self, arm: str, command: str) -> None:
        self.facts["commands"][arm] = command
        self.close("running")

    def finish(self, arm: str) -> None:
        self.facts["complete"].append(arm)
        self.close("running")

    def close(self, status: str) -> None:
        """Record the status."""
        self.facts["status"] = status
        write_record(self.directory, self.facts)


class Trainings:
    """The trainings of the arms, of which the next one may start its processes while one trains.

    Args:
        directory: of the run.
        overrides: of each arm.
        memory: bytes that a training may need.
    """

    def __init__(self, directory: Path, overrides: Mapping[str, Sequence[str]], *, memory: int) -> None:
        self._directory = directory
        self._overrides = overrides
        self._memory = memory
        self._early: dict[str, TrainingProcess] = {}

    def start(self, arm: str) -> TrainingProcess:
        """The training of an arm, whose turn it is."""
        return self._early.pop(arm, None) or TrainingProcess(self._directory / arm, self._overrides[arm])

    def start_early(self, arm: str, after: str) -> None:
        """Start an arm that trains when another has ended, if the memory suffices for both; once is enough."""
        joins = any("ray_init.address" in override for override in self._overrides[arm])
        if arm in self._early or joins or psutil.virtual_memory().available < self._memory:
            return
        waits = [OWN_RAY, f"trainer.after_run_dir={self._directory / after}"]
        self._early[arm] = TrainingProcess(self._directory / arm, [*self._overrides[arm], *waits])

    def stop(self) -> None:
        """Ask those whose turn has not come to end; returns at once."""
        for training in self._early.values():
            training.stop()

    def close(self) -> None:
        """End those whose turn has not come."""
        for training in self._early.values():
            training.end()


def _outcome(training: TrainingProcess, arm: str) -> int:
    """What the training of an arm has come to.

    Returns:
        0, or 130 when it was stopped.

    Raises:
        UserError: the training failed.
    """
    if training.stops:
        return 130
    if training.returncode:
        raise UserError(f"the arm {arm} failed: {training.reason()} The whole log is in {training.log}.")
    return 0


def _show_bar(
    training: TrainingProcess, arm: str, pace: Pace, console: Console, on_step: Callable[[int], object]
) -> None:
    """Show progress on one line that moves, until the training ends."""
    columns = (
        TextColumn("  "),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    text = f"{arm}: {SET_UP}"
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(text, total=1.0)

        def move() -> None:
            progress.update(bar, completed=pace.share, description=f"{_left(pace)}{text}")

        for step, data in training.metrics(waiting=move):
            pace.saw(step)
            text = f"{arm} {step}/{pace.steps}: {describe(step, data)}"
            on_step(step)


def _show_lines(
    training: TrainingProcess, arm: str, pace: Pace, console: Console, on_step: Callable[[int], object]
) -> None:
    """Print progress line by line, for a log or a notebook, until the training ends."""
    text = f"{arm}: {SET_UP}"
    due = Due(pace.share)

    def line() -> None:
        if due(pace.share):
            console.print(f"   {pace.share:4.0%}  {_left(pace)}{text}")

    for step, data in training.metrics(waiting=line):
        pace.saw(step)
        text = f"{arm} {step}/{pace.steps}: {describe(step, data)}"
        on_step(step)
        line()


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


def _left(pace: Pace) -> str:
    return "" if pace.seconds_left is None else f"about {in_words(pace.seconds_left)} left, "


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
