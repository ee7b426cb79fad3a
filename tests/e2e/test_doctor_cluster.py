"""``gtpo-verl doctor --cluster`` on a real Ray cluster of two nodes without GPUs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine takes longer than Ray's 30
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=4, num_gpus=1)
    yield cluster.address
    cluster.shutdown()


def test_two_nodes_without_gpus_reduce_over_gloo_and_read_the_model(address: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    command = [sys.executable, "-m", "gtpo_verl.cli", "doctor", "--cluster", address]
    command += ["--dir", str(tmp_path / "run"), "--model", str(model)]
    environment = os.environ | {"COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("no NVIDIA GPU" in line for line in lines) == 2
    for words in ("2 alike: Python", "run is one on 2 nodes", "GB/s over gloo, 2 ranks, 64 MiB", "nat from float64"):
        (line,) = [line for line in lines if words in line]
        assert line.startswith("✓")
    assert lines[-1] == "A run would work on this cluster."
    assert list((tmp_path / "run").iterdir()) == []
