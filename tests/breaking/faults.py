"""Faults of other kinds than a killed process: what a user, a disk, a machine or a reward function does to a training.

Each is a function of the lab that breaks something and returns what it found. Most start from a copy of the reference
that was killed before its last two steps, and those that resume must end with its weights.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from breaking.checks import file_problems, last_saved, lines_of, weights_difference
from breaking.lab import Lab
from breaking.training import Attempt, Ended, status_line
from gtpo_verl.runs.checkpoints import TRACKER
from gtpo_verl.runs.directory import CONFIG_FILE, METRICS_FILE, RECORD_FILE, STOP_FILE

REWARD = Path(__file__).with_name("reward.py")
NOBODY = 65534


@dataclass
class Found:
    """What came of a fault: in words, what of it breaks a promise, and the command's end."""

    happened: str
    problems: list[str]
    ended: Ended
    state: str = "before Ray starts"
    more: dict[str, Any] = field(default_factory=dict)


Fault = Callable[[Lab, str], Found]
FAULTS: dict[str, tuple[str, Fault]] = {}


def fault(name: str, expected: str) -> Callable[[Fault], Fault]:
    """Register a fault with what is expected of it."""

    def register(function: Fault) -> Fault:
        FAULTS[name] = expected, function
        return function

    return register


def run_fault(lab: Lab, name: str) -> dict[str, Any]:
    """Break one thing; returns its row."""
    expected, function = FAULTS[name]
    found = function(lab, "fault-" + re.sub(r"\W+", "-", name))
    return {
        "fault": name,
        "state": found.state,
        "expected": expected,
        "happened": found.happened,
        "ended": vars(found.ended),
        "problems": found.problems,
        **found.more,
    }


# ---------------------------------------------------------------- what several of them need


def finished(lab: Lab, run_dir: Path, *more: str) -> tuple[Ended, list[str]]:
    """Repeat the command to its end; what is wrong with the finished run."""
    with lab.training(run_dir, *more) as attempt:
        ended = attempt.end(lab.limit)
    return ended, finish_problems(lab, run_dir, ended)


def finish_problems(lab: Lab, run_dir: Path, ended: Ended) -> list[str]:
    """What is wrong with a run that should be finished, and as the reference."""
    if ended.code != 0:
        return [f"exit code {ended.code}: {'; '.join(ended.errors)}"]
    problems = file_problems(run_dir, lab.reference) + ([f"left behind: {ended.left}"] if ended.left else [])
    saved = last_saved(run_dir)
    if saved != lab.steps:
        return [*problems, f"step {saved} is the last that was saved"]
    difference = weights_difference(run_dir, lab.reference, saved)
    return problems + ([f"weights differ by up to {difference:.1e}"] if difference else [])


def said(ended: Ended) -> str:
    """The end of a command in words."""
    how = "still running at the limit" if ended.code is None else f"exit code {ended.code}"
    lines = [f"error: {line}" for line in ended.errors] or [f"warning: {line}" for line in ended.warnings]
    return "; ".join([how, *lines])


def resumed(lab: Lab, run_dir: Path, *words: str, more: tuple[str, ...] = ()) -> Found:
    """The command resumes with a warning that has these words, and ends with the reference's weights."""
    ended, problems = finished(lab, run_dir, *more)
    problems += [f"no warning with {word!r}" for word in words if not any(word in line for line in ended.warnings)]
    happened = said(ended) + ("" if problems else "; metrics, groups and weights are the reference's")
    return Found(happened, problems, ended)


def refused(lab: Lab, run_dir: Path, *words: str, more: tuple[str, ...] = (), user: int | None = None) -> Found:
    """The command refuses to start, in one line with these words."""
    attempt = Attempt(run_dir, lab.overrides(*more), user=user)
    ended = attempt.end(lab.limit)
    problems = [ended.one_line()] if ended.one_line() else []
    problems += [f"the line lacks {word!r}" for word in words if not any(word in line for line in ended.errors)]
    return Found(said(ended), problems + ([f"left behind: {ended.left}"] if ended.left else []), ended)


def reach(lab: Lab, attempt: Attempt, state: str) -> None:
    """Wait until the trainer is in a state.

    Raises:
        RuntimeError: the command ends before, so nothing was broken.
    """
    if not attempt.wait(lambda one: one.phase is not None and one.phase.state == state, lab.limit, closely=True):
        raise RuntimeError(f"it did not come to {state}: {attempt.said().strip().splitlines()[-1]}")
    attempt.look()


def cut(file: Path, share: float = 0.5) -> None:
    """Cut a file off."""
    with file.open("rb+") as content:
        content.truncate(int(file.stat().st_size * share))


def last(lab: Lab, name: str, count: int = 2, *, left: int = 2) -> tuple[Path, Path]:
    """A copy of the reference before its last steps, two of them, with so many checkpoints; and the newest of them."""
    end = lab.steps - left
    run_dir = lab.copy(name, range(end - count + 1, end + 1))
    return run_dir, run_dir / "checkpoints" / f"global_step_{end}"


def finished_before(lab: Lab, name: str) -> tuple[Path, Path]:
    """As `last`, with what says how the reference was trained."""
    run_dir, folder = last(lab, name)
    for file in (RECORD_FILE, CONFIG_FILE):
        shutil.copy(lab.reference / file, run_dir / file)
    return run_dir, folder


# ---------------------------------------------------------------- checkpoints


@fault("empty tracker", "a warning; resumes from the newest complete checkpoint, same weights")
def empty_tracker(lab: Lab, name: str) -> Found:
    run_dir, _ = last(lab, name)
    (run_dir / "checkpoints" / TRACKER).write_text("")
    return resumed(lab, run_dir, "is empty")


@fault("tracker names a missing folder", "a warning; resumes from the newest complete checkpoint, same weights")
def missing_folder(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name)
    shutil.rmtree(folder)
    return resumed(lab, run_dir, "no such folder")


@fault("truncated model shard", "a warning; resumes from the checkpoint before, same weights")
def truncated_shard(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name)
    cut(folder / "actor" / "model_world_size_1_rank_0.pt")
    return resumed(lab, run_dir, "was cut off")


@fault("empty data position", "a warning; resumes from the checkpoint before, same weights")
def empty_data(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name)
    (folder / "data.pt").write_bytes(b"")
    return resumed(lab, run_dir, "data.pt is empty")


@fault("all checkpoints truncated", "refused in one line")
def all_truncated(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name)
    for one in folder.parent.glob("global_step_*"):
        cut(one / "actor" / "optim_world_size_1_rank_0.pt")
    return refused(lab, run_dir, "no checkpoint is complete")


@fault("checkpoint of two ranks", "refused in one line, with the way to convert it")
def two_ranks(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name, 1)
    for file in folder.glob("actor/*_world_size_1_rank_0.pt"):
        for rank in (0, 1):
            shutil.copy(file, file.with_name(file.name.replace("size_1_rank_0", f"size_2_rank_{rank}")))
    config = folder / "actor" / "fsdp_config.json"
    config.write_text(config.read_text().replace('"world_size": 1', '"world_size": 2'))
    return refused(lab, run_dir, "gtpo-verl export")


@fault("one byte of a shard is another", "not found before Ray starts (documented)")
def flipped_byte(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name)
    file = folder / "actor" / "model_world_size_1_rank_0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with lab.training(run_dir) as attempt:
        ended = attempt.end(lab.limit)
    wrong = [ended.one_line()] if ended.code != 0 and ended.one_line() else []
    happened = said(ended)
    if ended.code == 0:
        difference = weights_difference(run_dir, lab.reference, lab.steps)
        happened += f"; trained on from the damaged weights, which in the end differ by up to {difference:.1e}"
    return Found(happened, wrong, ended)


@fault("torn last line of the metrics", "resumes; the step of that line, whose checkpoint is complete, is restored")
def torn_metrics(lab: Lab, name: str) -> Found:
    run_dir, _ = last(lab, name)
    file = run_dir / METRICS_FILE
    file.write_bytes(file.read_bytes()[:-100])
    ended, problems = finished(lab, run_dir)
    return Found(said(ended), problems, ended)


@fault("a foreign folder is half copied beside the checkpoints", "resumes from its own, same weights; so does `model`")
def foreign_folder(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name)
    shutil.copytree(folder / "actor" / "huggingface", folder.with_name("global_step_999") / "actor" / "huggingface")
    found = resumed(lab, run_dir)
    model = (run_dir / "model").resolve()
    if f"global_step_{lab.steps}" not in model.parts:
        found.problems.append(f"`model` is {model.relative_to(run_dir)}")
    return found


@fault("a copy of a checkpoint under another name", "left alone; every step is saved, same weights")
def stray_folder(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name)
    stray = folder.with_name(f"{folder.name}_backup")
    shutil.copytree(folder, stray)
    found = resumed(lab, run_dir)
    if not (stray / "data.pt").is_file():
        found.problems.append(f"{stray.name} was touched")
    return found


@fault("continued with another seed", "refused in one line with the difference, before Ray starts")
def other_seed(lab: Lab, name: str) -> Found:
    run_dir, _ = finished_before(lab, name)
    return refused(lab, run_dir, "seed was 0, is 1", "--allow-changes seed", more=("seed=1",))


@fault("continued with another algorithm", "refused in one line with the difference, before Ray starts")
def other_algorithm(lab: Lab, name: str) -> Found:
    run_dir, _ = finished_before(lab, name)
    return refused(lab, run_dir, "algorithm.adv_estimator was gtpo", "--allow-changes", more=("algo=grpo_s",))


# ---------------------------------------------------------------- inputs


@fault("truncated weights of the model", "refused in one line, before Ray starts")
def truncated_model(lab: Lab, name: str) -> Found:
    run_dir, model = lab.directory / name, lab.directory / f"{name}-model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(lab.task.model_path, model)
    cut(model / "model.safetensors")
    return refused(lab, run_dir, str(model), more=(f"actor_rollout_ref.model.path={model}",))


@fault("training data removed", "refused in one line, before Ray starts")
def missing_data(lab: Lab, name: str) -> Found:
    run_dir, _ = last(lab, name, 1)
    gone = lab.directory / "gone.parquet"
    return refused(lab, run_dir, str(gone), more=(f"data.train_files={gone}",))


@fault("read-only run directory", "refused in one line, before Ray starts")
def read_only(lab: Lab, name: str) -> Found:
    run_dir, _ = last(lab, name, 1)
    if os.geteuid() == 0:  # whom permissions do not bind
        subprocess.run(["mount", "--bind", run_dir, run_dir], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", run_dir], check=True)
    else:
        run_dir.chmod(0o555)
    try:
        return refused(lab, run_dir)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", run_dir], check=True)
        else:
            run_dir.chmod(0o755)


@fault("second training in the same directory", "refused in one line; the first goes on, same weights")
def second_training(lab: Lab, name: str) -> Found:
    run_dir, _ = last(lab, name)
    with lab.training(run_dir) as first:
        first.wait(lambda one: one.phase is not None, lab.limit)
        found = refused(lab, run_dir, "another training writes to")
        ended = first.end(lab.limit)
    found.problems += finish_problems(lab, run_dir, ended)
    found.state = "starting"
    found.happened += f"; the first: {said(ended)}"
    return found


# ---------------------------------------------------------------- signals and stalls


LEFT = 4  # steps to train where a command is asked to stop: a signal may arrive in the step after the one aimed at


def stopped(lab: Lab, run_dir: Path) -> tuple[int, str, list[str]]:
    """What a command that was asked to stop in its first step left: the last saved step, its status, what is wrong."""
    saved, status = last_saved(run_dir), status_line(run_dir)
    asked = lab.steps - LEFT + 1
    problems = [] if saved in (asked, asked + 1) else [f"step {saved} was saved, and it was asked to stop in {asked}"]
    problems += [] if status.startswith("interrupted") else [f"status: {status}"]
    return saved, status, problems


def signalled(lab: Lab, name: str, number: signal.Signals, *, state: str = "generating") -> Found:
    """A signal that asks to stop is sent to the command in its first step; afterwards it resumes."""
    run_dir, _ = last(lab, name, left=LEFT)
    with lab.training(run_dir) as attempt:
        reach(lab, attempt, state)
        attempt.send("driver", number)
        ended = attempt.end(lab.limit)
    saved, status, problems = stopped(lab, run_dir)
    problems += [] if ended.code == 0 else [f"exit code {ended.code}"]
    again, wrong = finished(lab, run_dir)
    happened = f"{said(ended)}; step {saved} was saved; {status}; then {said(again)}"
    return Found(happened, problems + wrong, ended, state=state)


@fault("SIGTERM", "the step is finished and saved, exit code 0, status interrupted; resumes with the same weights")
def sigterm(lab: Lab, name: str) -> Found:
    return signalled(lab, name, signal.SIGTERM)


@fault("SIGHUP", "the step is finished and saved, exit code 0, status interrupted; resumes with the same weights")
def sighup(lab: Lab, name: str) -> Found:
    return signalled(lab, name, signal.SIGHUP, state="updating")


@fault("the terminal closes", "the step is finished and saved, status interrupted; resumes with the same weights")
def closed_terminal(lab: Lab, name: str) -> Found:
    run_dir, _ = last(lab, name, left=LEFT)
    with lab.training(run_dir, terminal=True) as attempt:
        reach(lab, attempt, "updating")
        attempt.hang_up()
        ended = attempt.end(lab.limit)
    saved, status, problems = stopped(lab, run_dir)
    problems += [f"left behind: {ended.left}"] if ended.left else []
    again, wrong = finished(lab, run_dir)
    happened = f"exit code {ended.code}; step {saved} was saved; {status}; then {said(again)}"
    return Found(happened, problems + wrong, ended, state="updating")


@fault("Ctrl-C twice", "ends at once, exit code 130, status interrupted; resumes with the same weights")
def twice(lab: Lab, name: str) -> Found:
    run_dir, _ = last(lab, name)
    with lab.training(run_dir) as attempt:
        reach(lab, attempt, "generating")
        attempt.send("driver", signal.SIGINT)
        attempt.wait(lambda one: (run_dir / STOP_FILE).exists(), 10, closely=True)
        attempt.send("driver", signal.SIGINT)
        ended = attempt.end(lab.limit)
    status = status_line(run_dir)
    problems = [] if ended.code == 130 else [f"exit code {ended.code}"]
    problems += [] if status.startswith("interrupted") else [f"status: {status}"]
    problems += [f"left behind: {ended.left}"] if ended.left else []
    again, wrong = finished(lab, run_dir)
    return Found(f"{said(ended)}; {status}; then {said(again)}", problems + wrong, ended, state="generating")


def stalled(lab: Lab, name: str, kind: str, state: str, limit: float, key: str) -> Found:
    """A process is stopped by SIGSTOP: it lives and does nothing."""
    run_dir, _ = last(lab, name)
    with lab.training(run_dir, f"{key}={limit:.0f}") as attempt:
        reach(lab, attempt, state)
        attempt.send(kind, signal.SIGSTOP)
        ended = attempt.end(limit + 180)
    problems = [ended.one_line()] if ended.one_line() else []
    problems += [f"the line lacks {key}"] if not any(key in line for line in ended.errors) else []
    problems += [f"left behind: {ended.left}"] if ended.left else []
    return Found(said(ended), problems, ended, state=state)


WAITING = 60.0  # seconds
PHASE = 150.0  # seconds; longer than a start, which is a phase as well


@fault("vLLM engine stalls while generating", "guards.stall_timeout (60 s here) ends the run with one line")
def stalled_engine(lab: Lab, name: str) -> Found:
    return stalled(lab, name, "vLLM engine", "generating", WAITING, "guards.stall_timeout")


@fault("agent loop stalls while generating", "guards.stall_timeout (60 s here) ends the run with one line")
def stalled_agent_loop(lab: Lab, name: str) -> Found:
    return stalled(lab, name, "agent loop", "generating", WAITING, "guards.stall_timeout")


@fault(
    "TransferQueue's controller stalls while generating", "guards.phase_timeout (150 s here) ends the run with one line"
)
def stalled_controller(lab: Lab, name: str) -> Found:
    return stalled(lab, name, "queue controller", "generating", PHASE, "guards.phase_timeout")


@fault("FSDP worker stalls while updating", "guards.phase_timeout (150 s here) ends the run with one line")
def stalled_worker(lab: Lab, name: str) -> Found:
    return stalled(lab, name, "FSDP worker", "updating", PHASE, "guards.phase_timeout")


# ---------------------------------------------------------------- the machine


def killed_daemon(lab: Lab, name: str, kind: str) -> Found:
    """One of Ray's own daemons is killed in the first step; afterwards the run resumes."""
    run_dir, _ = last(lab, name)
    with lab.training(run_dir) as attempt:
        reach(lab, attempt, "generating")
        attempt.send(kind)
        ended = attempt.end(lab.limit)
    problems = [ended.one_line()] if ended.one_line() else []
    problems += [f"left behind: {ended.left}"] if ended.left else []
    again, wrong = finished(lab, run_dir)
    return Found(f"{said(ended)}; then {said(again)}", problems + wrong, ended, state="generating")


@fault("Ray's node daemon is killed", "one line ends the command; resumes with the same weights")
def node_daemon(lab: Lab, name: str) -> Found:
    return killed_daemon(lab, name, "node daemon")


@fault("Ray's head is killed", "one line ends the command; resumes with the same weights")
def head(lab: Lab, name: str) -> Found:
    return killed_daemon(lab, name, "cluster head")


@fault("Ray's agent of the node is killed", "one line ends the command; resumes with the same weights")
def node_agent(lab: Lab, name: str) -> Found:
    return killed_daemon(lab, name, "node agent")


@fault("Ray's agent of environments is killed", "one line ends the command; resumes with the same weights")
def environment_agent(lab: Lab, name: str) -> Found:
    return killed_daemon(lab, name, "environment agent")


def limited(lab: Lab, name: str, kind: str, size: int) -> Found:
    """A process cannot write files beyond a size any more, as on a full disk; afterwards the run resumes."""
    run_dir, _ = last(lab, name)
    with lab.training(run_dir) as attempt:
        reach(lab, attempt, "generating")
        for process in attempt.of_kind(kind):
            process.rlimit(psutil.RLIMIT_FSIZE, (size, size))
        ended = attempt.end(lab.limit)
    status = status_line(run_dir)
    problems = [ended.one_line()] if ended.one_line() else []
    problems += [f"left behind: {ended.left}"] if ended.left else []
    problems += [] if status.startswith("failed") else [f"status: {status}"]
    again, wrong = finished(lab, run_dir)
    return Found(f"{said(ended)}; then {said(again)}", problems + wrong, ended, state="saving")


@fault("the FSDP worker's files may not grow", "one line ends the command; resumes with the same weights")
def no_room_for_weights(lab: Lab, name: str) -> Found:
    return limited(lab, name, "FSDP worker", 100_000)


@fault("the trainer's files may not grow", "one line ends the command; resumes with the same weights")
def no_room_for_metrics(lab: Lab, name: str) -> Found:
    return limited(lab, name, "trainer", 2_000)


@fault("full disk", "one line ends the command; with room again it resumes with the same weights")
def full_disk(lab: Lab, name: str) -> Found:
    run_dir, folder = last(lab, name, 1)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    disk = run_dir / "checkpoints"
    aside = run_dir.with_name(f"{run_dir.name}-checkpoints")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.move(disk, aside)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size)}", "tmpfs", disk], check=True)
    try:
        shutil.copytree(aside, disk, dirs_exist_ok=True)
        with lab.training(run_dir) as attempt:
            ended = attempt.end(lab.limit)
        status = status_line(run_dir)
        shutil.rmtree(aside)
        shutil.copytree(disk, aside)
    finally:
        subprocess.run(["umount", disk], check=True)
    shutil.copytree(aside, disk, dirs_exist_ok=True)
    shutil.rmtree(aside)
    problems = [ended.one_line()] if ended.one_line() else []
    problems += [] if status.startswith("failed") else [f"status: {status}"]
    again, wrong = finished(lab, run_dir)
    return Found(f"{said(ended)}; then {said(again)}", problems + wrong, ended, state="saving")


# ---------------------------------------------------------------- reward functions


def reward_overrides(kind: str, at: int, times: int, *more: str) -> tuple[str, ...]:
    """A reward function that breaks in call number ``at`` and the next ones; a step has 16."""
    prefix = "++reward.custom_reward_function"
    return (
        *(f"{prefix}.path={REWARD}", f"{prefix}.name=compute_score"),
        f"{prefix}.reward_kwargs={{fault: {kind}, at: {at}, times: {times}}}",
        *more,
    )


def broken_reward(lab: Lab, name: str, overrides: tuple[str, ...], *words: str) -> Found:
    """The run ends with one line that has these words; with the right function it resumes."""
    run_dir, _ = last(lab, name)
    with lab.training(run_dir, *overrides) as attempt:
        ended = attempt.end(lab.limit)
    problems = [ended.one_line()] if ended.one_line() else []
    problems += [f"left behind: {ended.left}"] if ended.left else []
    problems += [f"the line lacks {word!r}" for word in words if not any(word in line for line in ended.errors)]
    return Found(f"{said(ended)}; step {last_saved(run_dir)} is saved", problems, ended, state="generating")


def tolerated_reward(lab: Lab, name: str, kind: str, *more: str) -> Found:
    """One response fails in the first step: it is counted and named, and the run goes on without it."""
    run_dir, _ = last(lab, name)
    with lab.training(run_dir, *reward_overrides(kind, 5, 1, *more)) as attempt:
        ended = attempt.end(lab.limit)
    problems = [] if ended.code == 0 else [f"exit code {ended.code}"]
    problems += [f"left behind: {ended.left}"] if ended.left else []
    problems += [] if any("reward" in line for line in ended.warnings) else ["no warning names the reward"]
    steps = {line["step"]: line["data"] for line in lines_of(run_dir / METRICS_FILE)}
    failed = steps.get(lab.steps - 1, {}).get("training/failed_responses")
    problems += [] if failed == 1 else [f"training/failed_responses is {failed}"]
    happened = f"{said(ended)}; {failed} responses of step {lab.steps - 1} failed, step {last_saved(run_dir)} is saved"
    return Found(happened, problems, ended, state="generating")


@fault("reward function hangs for one response", "after guards.reward_timeout (20 s here) it counts as failed; goes on")
def hanging_once(lab: Lab, name: str) -> Found:
    return tolerated_reward(lab, name, "hang", "guards.reward_timeout=20")


@fault("reward function hangs for all responses", "guards.stall_timeout (60 s here) ends the run with one line")
def hanging(lab: Lab, name: str) -> Found:
    return broken_reward(lab, name, reward_overrides("hang", 1, 10**6, "guards.stall_timeout=60"), "waiting for")


for what, kind in {
    "raises": "raise",
    "calls sys.exit": "exit",
    "returns a string": "string",
    "returns None": "nothing",
    "returns no score": "no_score",
}.items():

    @fault(f"reward function {what} for one response", "it counts as failed and is named; goes on")
    def failing_once(lab: Lab, name: str, kind: str = kind) -> Found:
        return tolerated_reward(lab, name, kind)


@fault("reward function returns None for all responses", "one line ends the command; nothing is trained")
def nothing(lab: Lab, name: str) -> Found:
    return broken_reward(lab, name, reward_overrides("nothing", 17, 10**6), "must be a number")


@fault("reward function raises for all responses", "one line ends the command; nothing is trained")
def raising(lab: Lab, name: str) -> Found:
    return broken_reward(lab, name, reward_overrides("raise", 17, 10**6))


@fault("the same, with dynamic sampling", "one line ends the command, by guards.max_failed_share; nothing is trained")
def raising_sampling(lab: Lab, name: str) -> Found:
    overrides = reward_overrides("raise", 1, 10**6, "algorithm.filter_groups.enable=true")
    return broken_reward(lab, name, overrides, "of the step failed")


@fault("reward function returns NaN", "one line ends the command, with step and cause; nothing is trained on it")
def nan_reward(lab: Lab, name: str) -> Found:
    return broken_reward(lab, name, reward_overrides("is_nan", 20, 1), "rm_scores", "the reward function returned it")


@fault("reward function dies", "one line ends the command, which names the reward worker")
def dying_reward(lab: Lab, name: str) -> Found:
    return broken_reward(lab, name, reward_overrides("die", 20, 1), "reward worker")
