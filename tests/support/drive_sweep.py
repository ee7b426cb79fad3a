"""A sweep of fake trainings in a process of its own, to be killed: `drive_sweep.py DIRECTORY PLACES [OVERRIDE ...]`."""

import sys
from pathlib import Path

from gtpo_verl.experiments.axes import Axis, members
from gtpo_verl.experiments.launchers import LocalLauncher
from gtpo_verl.experiments.scheduler import Scheduler, sweep_lock
from gtpo_verl.experiments.sweep import Sweep, write

FAKE = (sys.executable, str(Path(__file__).with_name("fake_training.py")))


def fake_sweep(directory: Path, *common: str, retries: int = 1, axes: tuple[Axis, ...] | None = None) -> Sweep:
    """Four runs of two arms and two seeds, or of the axes that are given."""
    axes = axes or (Axis("algo", ("dapo", "gtpo")), Axis("seed", ("0", "1")))
    return Sweep(
        name="fake",
        directory=directory,
        axes=axes,
        common=common,
        members=tuple(members(axes)),
        baseline=None,
        retries=retries,
    )


def drive(sweep: Sweep, lines: list[str], *, places: int = 2, **options: object) -> list[str]:
    """Train it by fake trainings, so many at once; returns what is not finished."""
    launcher = LocalLauncher([{}] * places, program=FAKE)
    with sweep_lock(sweep.directory):
        write(sweep)
        return Scheduler(sweep, launcher, announce=lines.append, **options).run()


if __name__ == "__main__":
    drive(fake_sweep(Path(sys.argv[1]), *sys.argv[3:]), [], places=int(sys.argv[2]))
