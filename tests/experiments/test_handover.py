"""A hand-over arrives as it was given, whatever its characters, and only its owner can read it."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.experiments import handover
from gtpo_verl.experiments.handover import DIRECTORY, HandOver

HOSTILE = ("a='$HOME'", 'b="`id`"', "c=\n\\n", "d=%s{}", "e=ü漢\u2028", "f=a;b&c|d", "g=--help", "h='")


@pytest.fixture
def task() -> HandOver:
    values = {f"V{number}": text for number, text in enumerate(HOSTILE)}
    return HandOver(action="train", run_dir="/a b", overrides=HOSTILE, environment=values, plugin="0")


def test_it_is_read_as_it_was_written(task: HandOver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task.write(tmp_path / DIRECTORY)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert handover.read() == task
    monkeypatch.setattr(os, "environ", {"V0": "the node's", "OTHER": "stays"})
    handover.export_environment()
    assert os.environ == {"OTHER": "stays", **task.environment}


def test_only_its_owner_can_read_it(task: HandOver, tmp_path: Path) -> None:
    task.write(tmp_path / DIRECTORY)
    (file,) = (tmp_path / DIRECTORY).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keys = {"action", "run_dir", "overrides", "environment", "wait", "retries", "plugin"}
    assert set(json.loads(file.read_text())) == keys


def test_outside_a_job_there_is_none() -> None:
    with pytest.raises(UserError, match="not part of a job"):
        handover.read()
