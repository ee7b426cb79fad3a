"""A sweep of fake trainings in a process of its own, to be killed: `drive_sweep.py DIRECTORY PLACES [OVERRIDE ...]`."""

import sys
from collections.abc import Mapping
from pathlib import Path

from gtpo_verl.experiments.axes import combinations
from gtpo_verl.experiments.launchers import LocalLauncher
from gtpo_verl.experiments.scheduler import Scheduler
from gtpo_verl.runs.lock import sweep_lock
from gtpo_verl.runs.sweep import Sweep, write

FAKE = (sys.executable, str(Path(__file__).with_name("fake_training.py")))


ARMS_AND_SEEDS = {"algo": ("dapo", "gtpo"), "seed": ("0", "1")}


def fake_sweep(
    directory: Path, *common: str, retries: int = 1, axes: Mapping[str, tuple[str, ...]] = ARMS_AND_SEEDS
) -> Sweep:
    """A run for every combination of the axes: four, of two arms and two seeds."""
    return Sweep("fake", directory, axes, common, combinations(axes), retries=retries)


def drive(sweep: Sweep, lines: list[str], *, places: int = 2, **options: object) -> list[str]:
    """Train it by fake trainings, so many at once; returns what is not finished."""
    launcher = LocalLauncher([{}] * places, program=FAKE)
    with sweep_lock(sweep.directory):
        write(sweep)
        return Scheduler(sweep, launcher, announce=lines.append, **options).run()


if __name__ == "__main__":
    drive(fake_sweep(Path(sys.argv[1]), *sys.argv[3:]), [], places=int(sys.argv[2]))
