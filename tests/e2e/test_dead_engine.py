"""An engine that dies in verl's synchronous trainer, alone or beside another one, in every phase of a step.

test_real_model.py kills the only engine of a training that is there anyway.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gtpo_verl.files import read_json
from gtpo_verl.runs.directory import PHASE_FILE

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Training = Any  # tests/e2e/conftest.py
Start = Callable[..., Training]

STEP = 2  # in which it dies; a validation ends it
PHASES = (
    "generating",
    "computing old log-probs",
    "updating the actor",
    "sending weights to the engines",
    "validating",
)


def wait_closely(training: Training, phase: str) -> None:
    """Return at the beginning of a phase, of which some last a moment."""
    deadline = time.monotonic() + 900
    file = training.run_dir / PHASE_FILE
    while not (found := read_json(file)) or (found["step"], found["phase"]) != (STEP, phase):
        assert training.process.poll() is None, training.said()
        assert time.monotonic() < deadline, training.said()
        time.sleep(0.005)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_the_run_ends_with_one_line_that_names_it(start: Start, tmp_path: Path, phase: str, count: int) -> None:
    """The step in which it died is not logged: nothing was trained on what another engine has left of it."""
    training = start(
        tmp_path / "run",
        *("algo=gtpo", "algorithm.entropy.source=actor", f"trainer.n_gpus_per_node={count}"),
        *("algorithm.filter_groups.enable=false", "trainer.total_training_steps=1000"),
        *(f"trainer.test_freq={STEP}", "data.val_max_samples=256"),
    )
    training.wait_for_step(STEP - 1)
    found = training.engines()
    assert len(found) == count
    wait_closely(training, phase)
    found[0].kill()
    training.wait_for_end(code=2, seconds=300)
    lines = [line for line in training.output().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: vLLM died (server ")
    assert str(training.run_dir) in lines[0]
    assert "EngineCore" not in training.output(), "vLLM's own sentence is for the log"
    assert training.steps() == set(range(1, STEP))
