"""A sweep's directory: `sweep.json` says what is trained, and each run has its run directory in it.

Nothing but a run's own directory says whether it is finished.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtpo_verl.config import chosen, quoted
from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json, reading, write_json
from gtpo_verl.runs.directory import SWEEP_FILE

SCHEMA = 1
RETRIES = 2


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in their values on some axes.

    ``about``: what a report says of the sweep beside its runs: ``command``, ``created``, ``settings``, ``notes``,
    ``planned_seeds``, how many the first definition had.
    """

    name: str
    directory: Path
    axes: Mapping[str, tuple[str, ...]]  # the values of each key
    common: tuple[str, ...]  # overrides that all runs have
    runs: Mapping[str, tuple[str, ...]]  # the values on the axes as overrides, by the name of the run and its directory
    baseline: Mapping[str, str] | None = None  # values of the runs that the others are compared with
    retries: int = RETRIES  # after an attempt that failed without a new training step
    about: Mapping[str, Any] = field(default_factory=dict)

    def run_dir(self, name: str) -> Path:
        return self.directory / name

    def overrides(self, name: str) -> list[str]:
        """Every override of a run, as `gtpo-verl train` takes them."""
        overrides = [*self.common, *self.runs[name], f"trainer.run_dir={quoted(self.run_dir(name))}"]
        if chosen(overrides, "trainer.experiment_name") is None:
            overrides.append(f"trainer.experiment_name={quoted(f'{self.name}-{name}')}")
        return overrides


def write(sweep: Sweep) -> None:
    """Write `sweep.json`; runs of an earlier definition with the same axes and overrides stay in it."""
    found = read(sweep.directory)
    axes, runs = dict(sweep.axes), dict(sweep.runs)
    planned, baseline = len(axes.get("seed", ())), sweep.baseline
    if found is not None:
        baseline = baseline or found.baseline  # its runs are still there
        planned = found.about.get("planned_seeds", len(found.axes.get("seed", ())))
        axes = {key: tuple(dict.fromkeys((*values, *found.axes[key]))) for key, values in axes.items()}
        runs = {**found.runs, **runs}
    facts = {
        "schema": SCHEMA,
        "name": sweep.name,
        "axes": axes,
        "baseline": baseline,
        "common": sweep.common,
        "runs": {name: {"overrides": overrides} for name, overrides in runs.items()},
        "planned_seeds": planned,
    }
    write_json(sweep.directory / SWEEP_FILE, {**sweep.about, **facts})


def read(directory: Path) -> Sweep | None:
    """Read `sweep.json`; None where there is none. UserError: it is damaged, or of another version of this package."""
    file = directory / SWEEP_FILE
    with reading(file):
        facts = read_json(file)
        if facts is None:
            return None
        if facts.get("schema") != SCHEMA:
            raise UserError(f"{file} was written by another version of gtpo_verl, which this one does not read.")
        return Sweep(
            name=str(facts.pop("name")),
            directory=directory.resolve(),
            axes={str(key): tuple(map(str, values)) for key, values in facts.pop("axes").items()},
            common=tuple(map(str, facts.pop("common"))),
            runs={str(name): tuple(map(str, run["overrides"])) for name, run in facts.pop("runs").items()},
            baseline={str(key): str(value) for key, value in (facts.pop("baseline") or {}).items()} or None,
            about={key: value for key, value in facts.items() if key != "schema"},
        )


def load(directory: Path) -> Sweep:
    """The sweep in a directory. UserError: there is none."""
    sweep = read(directory)
    if sweep is None:
        raise UserError(f"{directory} is no sweep: it has no {SWEEP_FILE}.")
    return sweep
