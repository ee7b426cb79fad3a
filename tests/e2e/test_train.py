"""``algorithm.entropy.source=rollout`` in verl's synchronous trainer, and an engine that dies; with colocate_async, and
in every phase, these are exhaustive tests (test_trainer_modes.py, test_dead_engine.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Training = Any  # tests/e2e/conftest.py
Start = Callable[..., Training]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def from_rollout(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return start(
        tmp_path_factory.mktemp("from_rollout") / "run",
        *("algo=gtpo", "algorithm.entropy.source=rollout", "trainer.total_training_steps=1000"),
    )


def test_entropies_of_the_rollout_replace_the_actors_pass(from_rollout: Training, metrics: Metrics) -> None:
    """source=rollout: GTPO runs on the rollout's entropies; verl's old-log-prob pass is run twice for a comparison,
    then skipped.
    """
    from_rollout.wait_for_step(3)
    steps = metrics(from_rollout.run_dir)
    for data in steps.values():
        assert data["credit/entropy_all"] > 0.01
        assert data["credit/advantage_spread"] > 1e-3
    for compared in (1, 2):
        assert 0 < steps[compared]["rollout_entropy/abs_diff_max"] < 1e-4
        assert steps[compared]["rollout_entropy/stale_share"] == 0
        assert steps[compared]["rollout_entropy/check_s"] > 0
    assert "actor/entropy" not in steps[3]
    assert steps[3]["rollout_entropy/time_saved_s"] > 0


def test_a_killed_engine_ends_the_training_with_its_name(from_rollout: Training) -> None:
    """Runs last: the training does not survive it."""
    processes = from_rollout.process.children(recursive=True)
    (engine,) = [one for one in processes if "VLLM::EngineCor" in " ".join(one.cmdline() or [one.name()])]
    engine.kill()
    from_rollout.wait_for_end(code=2, seconds=300)
    lines = [line for line in from_rollout.output().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: vLLM died (server 0: its engine's process has ended). ")
    assert "EngineCore" not in from_rollout.output(), "vLLM's own sentence is for the log"
