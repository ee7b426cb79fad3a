"""The file of a sweep."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.runs.sweep import Sweep, load, read, write


def sweep(directory: Path, *seeds: str) -> Sweep:
    runs = {f"seed={seed}": (f"seed={seed}",) for seed in seeds}
    return Sweep("mine", directory, {"seed": seeds}, ("hardware=cpu",), runs, {"seed": "1"}, about={"command": "x"})


def test_what_is_written_is_read_and_grows(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    write(sweep(tmp_path, "1", "2"))
    first = load(tmp_path)
    assert (first.axes, first.runs) == (sweep(tmp_path, "1", "2").axes, sweep(tmp_path, "1", "2").runs)
    write(sweep(tmp_path, "2", "3"))
    found = load(tmp_path)
    assert (found.axes, list(found.runs)) == ({"seed": ("2", "3", "1")}, ["seed=1", "seed=2", "seed=3"])
    facts = json.loads((tmp_path / "sweep.json").read_text())
    assert (facts["schema"], facts["command"]) == (1, "x")
    assert facts["runs"]["seed=3"] == {"overrides": ["seed=3"]}
    assert facts["planned_seeds"] == 2
    write(replace(sweep(tmp_path, "3", "4"), baseline=None))  # which names none, and has none of its values
    assert load(tmp_path).baseline == {"seed": "1"}


def test_what_is_no_sweep_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no sweep: it has no sweep\.json"):
        load(tmp_path)
    for text, message in {
        "[": "is damaged",
        '{"runs": []}': "written by another version",
        '{"schema": 1, "name": "a", "axes": []}': "is damaged",
    }.items():
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)
