"""``algorithm.entropy.source=rollout`` in verl's synchronous trainer; with colocate_async it is an exhaustive test
(test_trainer_modes.py).
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
        *("algo=gtpo", "algorithm.entropy.source=rollout", "trainer.total_training_steps=3"),
    )


def test_entropies_of_the_rollout_replace_the_actors_pass(from_rollout: Training, metrics: Metrics) -> None:
    """source=rollout: GTPO runs on the rollout's entropies; verl's old-log-prob pass is run twice for a comparison,
    then skipped.
    """
    steps = metrics(from_rollout.wait_for_end())
    for data in steps.values():
        assert data["credit/entropy_all"] > 0.01
        assert data["credit/advantage_spread"] > 1e-3
    for compared in (1, 2):
        assert 0 < steps[compared]["rollout_entropy/abs_diff_max"] < 1e-4
        assert steps[compared]["rollout_entropy/stale_share"] == 0
        assert steps[compared]["rollout_entropy/check_s"] > 0
    assert "actor/entropy" not in steps[3]
    assert steps[3]["rollout_entropy/time_saved_s"] > 0
