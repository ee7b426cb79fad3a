"""``gtpo-verl quickstart``: three arms on the embedded task, one after the other, and a report that compares them.

Each arm is a ``gtpo-verl train`` of its own, the command a user would type; what is measured here is the product.
"""

import argparse
import contextlib
import ctypes
import datetime as dt
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gtpo_verl.config import choices
from gtpo_verl.errors import UserError
from gtpo_verl.runs.directory import METRICS_FILE, read_metrics_from, read_record, write_record
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.tasks.sums.task import DATA_SOURCE, Task, prepare_task

ARMS = ("dapo", "gtpo", "grpo_s")
CONTROL = "reward.custom_reward_function.name=random_verdict"
POLL = 0.5  # seconds between looks at a running arm
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # loaded before a process forks, not after

EPILOG = """\
The run is kept in DIR/quickstart-TIME: report.html, run.json, and for each arm metrics.jsonl, validation samples,
checkpoints, TensorBoard files, the trained model in Hugging Face format and train.log.

Ctrl-C stops after the step in progress and reports what there is; the same command goes on where it stopped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides for every arm")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="A,B", help="what to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps an arm (default: the setting's)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs"), metavar="DIR", help="where runs are kept (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="start anew even if an unfinished run could go on")
    parser.add_argument(
        "--random-verdicts", action="store_true", help="control: verdicts by chance; nothing should be learnt"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, train every arm, report; returns the exit code."""
    # Read when torch is first imported. Spinning threads made the warm start five times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console(highlight=False, soft_wrap=True)
    arms = _arms(args.arms)
    request = {"arms": arms, "steps": args.steps, "overrides": args.overrides, "random_verdicts": args.random_verdicts}
    directory, resumed = _run_directory(args.output, request, fresh=args.fresh)
    console.print(f"[bold]gtpo_verl quickstart[/]: {', '.join(arms)} on real verl, Ray and vLLM, on this machine's CPU")
    console.print(f"{'Going on with' if resumed else 'Run'}: {directory}")

    console.print(
        "[bold]1.[/] The task: sums with written-out steps, and a tiny Qwen2 warm-started on noisy demonstrations"
    )
    task = prepare_task(args.output / "task")
    console.print(f"   it starts at an accuracy of {task.baseline:.3f}")

    record = QuickstartRecord(directory, request, task)
    code = 0
    for number, arm in enumerate(arms, start=2):
        if record.is_complete(arm):
            console.print(f"[bold]{number}.[/] {arm}: already trained")
            continue
        console.print(f"[bold]{number}.[/] {arm}: training")
        arguments = _overrides(arm, directory / arm, task, args)
        record.start(arm, shlex.join(["gtpo-verl", "train", *arguments]))
        try:
            code = ArmProcess(arm, directory / arm, arguments, console).wait()
        except UserError:
            record.close("failed")
            _report(directory, console)
            raise
        if code:
            break
        record.finish(arm)
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


def _overrides(arm: str, run_dir: Path, task: Task, args: argparse.Namespace) -> list[str]:
    overrides = [
        f"algo={arm}",
        "setting=quickstart",
        "hardware=cpu",
        f"actor_rollout_ref.model.path={task.model_path}",
        f"data.train_files={task.train_file}",
        f"data.val_files={task.val_file}",
        f"trainer.run_dir={run_dir}",
    ]
    if args.steps is not None:
        overrides.append(f"trainer.total_training_steps={args.steps}")
    if args.random_verdicts:
        overrides.append(CONTROL)
    return [*overrides, *args.overrides]


def _run_directory(output: Path, request: dict[str, Any], *, fresh: bool) -> tuple[Path, bool]:
    """A new run directory, or the last one when it is unfinished and was asked for in the same way."""
    output = output.resolve()
    if not fresh:
        for directory in sorted(output.glob("quickstart-*"), reverse=True):
            facts = read_record(directory)
            if facts and facts["status"] != "complete" and facts["request"] == request:
                return directory, True
            if facts:
                break
    directory = output / f"quickstart-{dt.datetime.now():%Y%m%d-%H%M%S}"
    directory.mkdir(parents=True)
    return directory, False


class QuickstartRecord:
    """``run.json`` of a quickstart: what was asked, what was run, and how far it came. Written after every change."""

    def __init__(self, directory: Path, request: dict[str, Any], task: Task) -> None:
        self.directory = directory
        self.facts: dict[str, Any] = read_record(directory) or {
            "name": directory.name,
            "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(["gtpo-verl", *sys.argv[1:]]),
            "versions": run_versions(),
            "hardware": hardware(),
            "arms": request["arms"],
            "request": request,
            "settings": {"task": DATA_SOURCE, "baseline accuracy": f"{task.baseline:.3f}"},
            "commands": {},
            "complete": [],
            "notes": ["Control: the verdicts were drawn by chance."] if request["random_verdicts"] else [],
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
        """Record how far the run came."""
        self.facts["status"] = status
        write_record(self.directory, self.facts)


class ArmProcess:
    """One training as a child process in a session of its own, so that Ctrl-C reaches it when we pass it on."""

    def __init__(self, arm: str, run_dir: Path, overrides: Sequence[str], console: Console) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.arm = arm
        self.run_dir = run_dir
        self.console = console
        self.log = run_dir / "train.log"
        self.steps = _total_steps(overrides)
        self._stops = 0
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gtpo_verl.train", *overrides],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )

    def wait(self) -> int:
        """Show progress until the arm ends; returns its exit code, 130 when it was stopped."""
        previous = {number: signal.signal(number, self._interrupt) for number in STOP_SIGNALS}
        try:
            self._watch()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.returncode
        if self._stops:
            return 130
        if code:
            raise UserError(f"the arm {self.arm} failed: {self._reason()} The whole log is in {self.log}.")
        return 0

    def _interrupt(self, signum: int, frame: Any) -> None:
        self._stops += 1
        if self._stops == 1:
            self.console.print("Stopping after this step; what there is will be reported. Ctrl-C again stops at once.")
        self.process.send_signal(signal.SIGINT)

    def _watch(self) -> None:
        columns = (
            TextColumn("  "),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task("starting Ray, FSDP and vLLM", total=self.steps)
            for step, data in self._new_metrics():
                text = describe(step, data)
                progress.update(bar, completed=step, description=text)
                if not self.console.is_terminal and (step % 10 == 0 or "validation" in text):
                    self.console.print(f"   step {step}/{self.steps}: {text}")

    def _new_metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps as the arm writes them, until it ends."""
        offset = 0
        while True:
            ended = self.process.poll() is not None
            lines, offset = read_metrics_from(self.run_dir, offset)
            for line in lines:
                yield line["step"], line["data"]
            if ended:
                return
            time.sleep(POLL)

    def _reason(self) -> str:
        with self.log.open(errors="replace") as log:
            lines = deque((line.strip() for line in log if line.strip()), maxlen=200)
        return next(
            (line for line in reversed(lines) if line.startswith("error: ")),
            lines[-1] if lines else "it printed nothing.",
        )


def _stop_with_parent() -> None:
    """In a child: be told to stop, as by Ctrl-C, when the quickstart is killed. Where there is no prctl, nothing happens."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _total_steps(overrides: Sequence[str]) -> int:
    from gtpo_verl.config import compose_config

    return int(compose_config(overrides).trainer.total_training_steps)


def describe(step: int, data: dict[str, float]) -> str:
    """One line on a step, for the progress bar."""
    parts = []
    validation = next(
        (value for name, value in data.items() if name.startswith("val-core/") and "/acc/mean@" in name), None
    )
    if "training/accuracy" in data:
        parts.append(f"accuracy {data['training/accuracy']:.2f}")
    if validation is not None:
        parts.append(f"validation {validation:.3f}")
    if "credit/entropy_all" in data:
        parts.append(f"entropy {data['credit/entropy_all']:.2f}")
    return ", ".join(parts) or f"step {step}"


def _report(directory: Path, console: Console) -> None:
    from gtpo_verl.report.page import print_table, write_report

    if not any(directory.glob(f"*/{METRICS_FILE}")):
        console.print("Nothing was trained yet, so there is nothing to report.")
        return
    report = write_report([directory], directory)
    print_table(report)
