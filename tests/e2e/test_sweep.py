"""A sweep of real trainings that is killed and continued: four runs, each finished once, of one configuration but the
axes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = Path(__file__).parents[1] / "support" / "interrupted_sweep.py"


@pytest.mark.e2e
@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["1", "2"])
def test_a_sweep_that_is_killed_ends_with_every_run_finished_once(tmp_path: Path, parallel: str) -> None:
    arguments = ["algo=dapo,gtpo", "seed=1,2", "--local", "--parallel", parallel]
    command = [sys.executable, str(INTERRUPTED), "--dir", str(tmp_path / "sweep"), "--kills", "1", "--within", "90"]
    done = subprocess.run([*command, "--", *arguments], capture_output=True, text=True, timeout=2000)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout[done.stdout.index("\n{\n") :])
    assert (report["runs"], report["finished"], report["failures"], report["steps"]) == (4, 4, 0, [2])
    keys = {
        key for key in report["keys_that_differ"] if "seed" not in key.lower() and not key.startswith("algorithm.gtpo.")
    }
    assert keys == {"algorithm.adv_estimator"}
