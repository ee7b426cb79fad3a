"""Kills at random moments: a training of a few steps whose processes are killed again and again, until it is finished.

A chain is one run directory. Each attempt in it is the same command; all but the last are killed, in their first or
second step. After each kill the next attempt must go on from the last checkpoint, and whatever it saves must have the
weights that the reference had after that step.
"""

import itertools
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from breaking.checks import file_problems, last_saved, weights_difference
from breaking.lab import Lab
from breaking.training import CLUSTER, DRIVER, KINDS, PHASES, Attempt, Ended, Phase, status_line

# What a training has on any machine; Ray's daemons are among the faults.
KILLED = (DRIVER, *list(KINDS)[:8], CLUSTER)
NOTICED_WITHIN = 180.0  # seconds; processes are asked every 10, and this machine may be slow


def order(seed: int) -> list[tuple[str, str]]:
    """Every process kind in every state, in random order."""
    pairs = list(itertools.product(KILLED, PHASES))
    Random(seed).shuffle(pairs)
    return pairs


def lasting(phases: list[Phase]) -> dict[str, float]:
    """The median duration of each state that an attempt has ended, seconds."""
    found: dict[str, list[float]] = {}
    for now, following in itertools.pairwise(phases):
        found.setdefault(now.state, []).append(following.at - now.at)
    lasts = {state: median(values) for state, values in found.items()}
    begun = [phase.at for phase in phases if phase.state != "starting"]
    return lasts | {"starting": begun[0]} if begun else {}


def kill_one(lab: Lab, run_dir: Path, kind: str, state: str, rng: Random) -> tuple[dict[str, Any], Attempt]:
    """Start the training, kill, wait for the end; returns the row, without what the next attempt shows, and the
    attempt. The row is empty where the training ended before.
    """
    saved = last_saved(run_dir)
    step = min(saved + 1 + rng.randrange(2), lab.steps)
    share = rng.random()
    with lab.training(run_dir) as attempt:
        moment = _wait_for(attempt, kind, state, step, share, lab)
        if not moment:
            attempt.end(lab.limit)
            return {}, attempt
        attempt.look(scan=False)
        hit = attempt.phase
        attempt.send(kind)
        ended = attempt.end(NOTICED_WITHIN)
    row = {
        "process": kind,
        "state": hit.state if hit else "starting",
        "aimed_at": state,
        "step": hit.step if hit else 0,
        "phase": hit.name if hit else "before the trainer",
        "ended": vars(ended),
        "status": status_line(run_dir),
    }
    row["expected"] = _expected(kind)
    row["problems"] = _problems(kind, ended, row["status"], hit) + _losses(run_dir, hit)
    return row, attempt


def _wait_for(attempt: Attempt, kind: str, state: str, step: int, share: float, lab: Lab) -> bool:
    """Wait for a random moment of a state; False where the training ends before."""
    lasts = lab.lasting.get(state, 0.0)
    if state == "starting":
        there = 0.0 if kind in (DRIVER, CLUSTER) else lab.seen.get(kind, 0.0)
        begun = attempt.wait(lambda one: kind in (DRIVER, CLUSTER) or bool(one.of_kind(kind)), lab.limit)
        pause = share * max(0.0, lasts - there)
    else:
        before = attempt.wait(lambda one: one.phase is not None and one.phase.state != "starting", lab.limit)
        begun = before and attempt.wait(lambda one: _reached(one, state, step), lab.limit, closely=True)
        pause = share * lasts
    if begun:
        attempt.wait(lambda one: False, pause, closely=state != "starting")
    return begun and attempt.process.poll() is None


def _reached(attempt: Attempt, state: str, step: int) -> bool:
    phase = attempt.phase
    return phase is not None and phase.step >= step and phase.state == state


def _expected(kind: str) -> str:
    if kind in (DRIVER, CLUSTER):
        return "nothing of it is left; the same command resumes"
    return "one line ends the command, which names what died; the same command resumes"


def _problems(kind: str, ended: Ended, status: str, hit: Phase | None) -> list[str]:
    found = [f"left behind: {', '.join(ended.left)}"] if ended.left else []
    if kind not in (DRIVER, CLUSTER) and ended.code != 0 and ended.one_line():  # 0: it was finished without it
        found.append(ended.one_line())
    # before the trainer there may be none
    wanted = ("complete",) if ended.code == 0 else ("failed", "interrupted", *["no record"] * (hit is None))
    if not status.startswith(wanted):
        found.append(f"status: {status}")
    return found


def _losses(run_dir: Path, hit: Phase | None) -> list[str]:
    """A step before the one that was killed is saved: the checkpoint interval is 1."""
    saved = last_saved(run_dir)
    return (
        [f"killed in step {hit.step}, and step {saved} is the last that was saved"]
        if hit and saved < hit.step - 1
        else []
    )


def look_back(lab: Lab, run_dir: Path, rows: list[dict[str, Any]], phases: list[Phase], before: int) -> None:
    """Complete the rows of a chain after an attempt has resumed.

    Args:
        rows: of the chain so far; those whose weights nothing has shown yet are completed.
        phases: of the attempt.
        before: the last saved step when the attempt began.
    """
    saved = last_saved(run_dir)
    steps = [phase.step for phase in phases if phase.step]
    problems = file_problems(run_dir, lab.reference)
    if steps and steps[0] != before + 1:
        problems.append(f"step {before} was saved, and the next attempt began with step {steps[0]}")
    if rows and steps:
        rows[-1]["resumed_with_step"] = steps[0]
    if rows:
        rows[-1]["problems"] += problems
    if saved <= before:
        return
    difference = weights_difference(run_dir, lab.reference, saved)
    for row in rows:
        if "weights" in row:
            continue
        row["weights"] = {"after_step": saved, "difference": difference}
        if difference:
            row["problems"].append(
                f"after step {saved} the weights differ from the reference's by up to {difference:.1e}"
            )
