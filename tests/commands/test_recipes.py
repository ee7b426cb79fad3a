"""``gtpo-verl recipes``: lists every recipe, and copies recipes and launchers that work."""

import os
import subprocess
from pathlib import Path

import pytest

from gtpo_verl.cli import main
from gtpo_verl.commands.recipes import root

ROOT = Path(__file__).parents[2]


def test_every_recipe_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in listed if line and not line.startswith("`")]
    assert names == sorted(path.stem for path in (ROOT / "recipe").glob("*.sh") if path.stem != "launch")
    assert all(len(line.split()) > 4 for line in listed if line)
    assert all(line.count("(") == line.count(")") for line in listed)
    assert "meanwhile" in listed[1], "a sentence of several lines"


def test_the_copy_is_whole_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = tmp_path / "gtpo-verl"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    assert main(["recipes", "copy", str(tmp_path / "mine")]) == 0
    assert "start with" in capsys.readouterr().out
    for name in ("recipe", "scripts"):
        held = {path.name for path in (tmp_path / "mine" / name).iterdir()}
        assert held == {path.name for path in (ROOT / name).iterdir() if path.name != "__pycache__"}
    done = subprocess.run(
        [tmp_path / "mine" / "recipe" / "gtpo_small.sh", "trainer.logger=console"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.stdout.split()[:2] == ["train", "trainer.nnodes=1"], done.stderr
    assert done.stdout.split()[-2:] == ["trainer.logger=console", "hardware=gpu"]


def test_what_was_adapted_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "environment.sh").write_text("mine")
    assert main(["recipes", "copy", str(tmp_path)]) == 2
    assert f"{tmp_path / 'scripts'} is there already" in capsys.readouterr().err
    assert not (tmp_path / "recipe").exists()
    assert (tmp_path / "scripts" / "environment.sh").read_text() == "mine"


def test_the_path_is_that_of_the_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "path"]) == 0
    assert Path(capsys.readouterr().out.strip()) == root() == ROOT
