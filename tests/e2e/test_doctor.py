"""``gtpo-verl doctor``, which starts a Ray worker and a vLLM worker to know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.exhaustive
def test_a_machine_that_can_train_passes() -> None:
    """Also where the environment names a cluster: the doctor starts a Ray of its own."""
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "gtpo_verl.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for place in ("driver", "Ray worker", "vLLM worker"):
        (line,) = [line for line in done.stdout.splitlines() if f" {place} " in line]
        assert line.startswith("✓"), line


def test_a_vllm_that_is_not_supported_is_named_with_what_to_do(tmp_path: Path) -> None:
    installed = tmp_path / "vllm-0.20.2.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.2\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    command = [sys.executable, "-m", "gtpo_verl.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert "0.20.2" in done.stdout
    assert "rollout entropies need at least 0.24" in done.stdout.splitlines()[-1]
