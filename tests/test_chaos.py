"""What `tests/chaos.py` says of run directories: it must see a lost step, a doubled one, and another weight."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoint_writer import write_fsdp
from safetensors.torch import save_file

TESTS = Path(__file__).parent
Module = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.syspath_prepend(TESTS)
    return importlib.import_module


def write(run_dir: Path, steps: list[int], *, saved: int = 0, weight: float = 1.0) -> Path:
    """The files of a run that are compared."""
    run_dir.mkdir()
    lines = [{"step": step, "data": {"actor/grad_norm": step / 2}} for step in steps]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = [{"step": step, "groups": {f"{step:06d}-000000": step}} for step in steps]
    (run_dir / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in groups))
    if saved:
        folder = write_fsdp(run_dir / "checkpoints", saved)
        (folder / "actor" / "huggingface").mkdir()
        save_file({"one": torch.tensor([weight, 2.0])}, folder / "actor" / "huggingface" / "model.safetensors")
    return run_dir


@pytest.mark.parametrize(
    ("steps", "problem"), [([1, 2, 3], ""), ([1, 3], "lacks steps: [2]"), ([1, 2, 2, 3], "steps twice: [2]")]
)
def test_steps_that_are_lost_or_doubled_are_found(
    steps: list[int], problem: str, module: Module, tmp_path: Path
) -> None:
    checks = module("breaking.checks")
    reference = write(tmp_path / "reference", [1, 2, 3, 4])
    found = checks.file_problems(write(tmp_path / "run", steps), reference)
    assert [line for line in found if problem not in line] == []
    assert bool(found) == bool(problem)


def test_another_number_or_group_than_the_references_is_found(module: Module, tmp_path: Path) -> None:
    checks = module("breaking.checks")
    reference, run_dir = write(tmp_path / "reference", [1, 2]), write(tmp_path / "run", [1, 2])
    for file in ("metrics.jsonl", "groups.jsonl"):
        text = (run_dir / file).read_text()
        (run_dir / file).write_text(text.replace("1.0", "1.5").replace("000002-000000", "000002-000001"))
    found = checks.file_problems(run_dir, reference)
    assert found == [
        "other groups than in the reference in steps [2]",
        "step 2 has other actor/grad_norm than the reference",
    ]


def test_weights_are_compared_bit_for_bit(module: Module, tmp_path: Path) -> None:
    checks = module("breaking.checks")
    reference = write(tmp_path / "reference", [1], saved=1)
    assert checks.weights_difference(write(tmp_path / "same", [1], saved=1), reference, 1) == 0.0
    other = write(tmp_path / "other", [1], saved=1, weight=1.0 + 2**-20)
    assert checks.weights_difference(other, reference, 1) == 2**-20


def test_a_row_is_completed_by_the_attempt_that_resumes(module: Module, tmp_path: Path) -> None:
    kills, training = module("breaking.kills"), module("breaking.training")
    lab: Any = type("Lab", (), {"reference": write(tmp_path / "reference", [1, 2, 3], saved=2)})
    rows: list[dict[str, Any]] = [{"problems": []}]
    run_dir = write(tmp_path / "run", [1, 2], saved=2, weight=3.0)
    kills.look_back(lab, run_dir, rows, [training.Phase(0.0, 0, "starting"), training.Phase(9.0, 3, "generating")], 1)
    assert rows[0]["resumed_with_step"] == 3
    assert rows[0]["weights"] == {"after_step": 2, "difference": 2.0}
    assert rows[0]["problems"] == [
        "step 1 was saved, and the next attempt began with step 3",
        "after step 2 the weights differ from the reference's by up to 2.0e+00",
    ]


def test_every_process_kind_meets_every_state_once(module: Module) -> None:
    kills = module("breaking.kills")
    pairs = kills.order(0)
    assert len(pairs) == len(set(pairs)) == len(kills.KILLED) * len(kills.PHASES) == 50
    assert pairs != kills.order(1)


def test_processes_that_outlive_their_parent_are_found_and_ended(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = module("breaking.training")
    monkeypatch.setattr(training, "GONE_WITHIN", 0.5)
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    popen = training.psutil.Popen
    monkeypatch.setattr(
        training.psutil, "Popen", lambda command, **rest: popen([sys.executable, "-c", program], **rest)
    )
    attempt = training.Attempt(tmp_path / "run", [])
    deadline = time.monotonic() + 60
    while len(attempt.of_kind(training.CLUSTER)) < 2 and time.monotonic() < deadline:
        attempt.wait(lambda one: False, 0.2)
    (orphan,) = (process for process in attempt.of_kind(training.CLUSTER) if process.pid != attempt.process.pid)
    attempt.send(training.DRIVER)
    ended = attempt.end(60)
    assert ended.code == -9
    assert len(ended.left) == 1
    assert not orphan.is_running() or orphan.status() == training.psutil.STATUS_ZOMBIE


def test_the_table_counts_what_held(module: Module) -> None:
    chaos = module("chaos")
    end = {"code": 2, "errors": ["vLLM died | twice"], "seconds": 12.0}
    row = {"process": "vLLM engine", "state": "saving", "step": 3, "phase": "saving a checkpoint", "ended": end}
    state = {
        "steps": 4,
        "kills": [
            row | {"problems": [], "weights": {"after_step": 3, "difference": 0.0}},
            row | {"problems": ["left behind: raylet"]},
        ],
        "chains": [{"problems": []}],
        "faults": [{"fault": "full disk", "not_tried": "no root"}],
    }
    text = chaos.table(state)
    assert "Kills: 2; everything held after 1." in text
    assert "bit for bit, after 1 and others after 0; none were compared after 1." in text
    assert "| vLLM engine |  |  |  | 1 **1 not** |  |" in text
    assert "exit code 2: vLLM died / twice" in text
    assert "not tried: no root" in text


def test_the_names_of_the_faults_are_listed(module: Module) -> None:
    faults = module("breaking.faults").FAULTS
    done = subprocess.run([sys.executable, TESTS / "chaos.py", "--list"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name}: {expected}" for name, (expected, _) in faults.items()]
    assert len(faults) >= 20


def test_what_is_published_has_no_path_of_the_machine(module: Module, tmp_path: Path) -> None:
    said = f"step 3 in {tmp_path}/chain-1 ({TESTS}/breaking/reward.py:31)"
    published = module("chaos").published({"kills": [{"ended": {"errors": [said]}}], "seed": 0}, tmp_path)
    assert published == {
        "kills": [{"ended": {"errors": ["step 3 in DIR/chain-1 (TESTS/breaking/reward.py:31)"]}}],
        "seed": 0,
    }
