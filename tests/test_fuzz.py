"""Random hostile input, a little of it: `tests/fuzz.py` has the families and runs many more."""

import importlib
import json
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from rich.progress import Progress

from gtpo_verl.algorithms import algorithms

TESTS = Path(__file__).parent
FEW = {"estimators": 200, "losses": 100, "verdicts": 300, "rows": 20, "run_files": 6, "settings": 40}
MANY = {"estimators": 5000, "losses": 2000, "verdicts": 5000, "rows": 500, "run_files": 150, "settings": 500}
COMMANDS = 10


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TESTS)
    return importlib.import_module("fuzz")


def broken(fuzz: ModuleType, family: str, count: int, directory: Path) -> list[str]:
    """The traces of cases that break a rule."""
    return [trace for number in range(count) if (trace := fuzz.run_case(family, number, 1, directory)[1])]


@pytest.mark.parametrize("family", FEW)
def test_a_few_cases_break_no_rule(family: str, fuzz: ModuleType, tmp_path: Path) -> None:
    assert broken(fuzz, family, FEW[family], tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", MANY)
def test_many_cases_break_no_rule(family: str, fuzz: ModuleType, tmp_path: Path) -> None:
    assert broken(fuzz, family, MANY[family], tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_whole_commands_break_no_rule(fuzz: ModuleType, tmp_path: Path) -> None:
    assert broken(fuzz, "commands", COMMANDS, tmp_path) == []


def test_every_setting_of_every_method_is_drawn(fuzz: ModuleType) -> None:
    tensors = importlib.import_module("fuzzing.tensors")
    fields = {name for entry in algorithms().values() for name in entry.config.__dataclass_fields__}
    unknown, needless = fields - set(tensors.SETTINGS), set(tensors.SETTINGS) - fields
    assert not unknown, f"SETTINGS of tests/fuzzing/tensors.py has no way to draw {unknown}"
    assert not needless, f"SETTINGS of tests/fuzzing/tensors.py draws {needless}, which no method has"


def test_a_broken_rule_is_found_and_can_be_repeated(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is NaN where the ratio is 0, in 50 cases."""
    tensors = importlib.import_module("fuzzing.tensors")
    name, (loss, settings) = next(iter(tensors.LOSSES.items()))

    def faulty(new: Any, *rest: Any, **options: Any) -> Any:
        values, metrics = loss(new, *rest, **options)
        return values / (new < -1e4).logical_not(), metrics

    monkeypatch.setattr(tensors, "LOSSES", {name: (faulty, settings)})
    outcomes = [fuzz.run_case("losses", number, 0, tmp_path) for number in range(50)]
    number = next(number for number, (outcome, _) in enumerate(outcomes) if outcome == "broken")
    assert f"{name}: losses" in outcomes[number][1]
    assert fuzz.run_case("losses", number, 0, tmp_path)[1] == outcomes[number][1]


def test_it_goes_on_where_it_was_stopped(fuzz: ModuleType, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, counts in ((whole, [12]), (parts, [5, 12])):
        directory.mkdir()
        for count in counts:
            with Progress(disable=True) as progress:
                fuzz.fuzz({"losses": count}, 0, directory, progress)
    states = [json.loads((directory / "state.json").read_text()) for directory in (whole, parts)]
    assert states[0] == states[1]
    assert sum(states[0]["families"]["losses"]["outcomes"].values()) == 12


def test_what_is_refused_must_be_one_line(fuzz: ModuleType, tmp_path: Path) -> None:
    fuzzing = importlib.import_module("fuzzing")

    def two_lines(rng: Random, directory: Path) -> str:
        return fuzzing.refused(ValueError("one\ntwo"))

    assert fuzzing.attempt(two_lines, Random(0), tmp_path)[0] == "broken"
