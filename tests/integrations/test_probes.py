"""What the doctor makes of what the nodes of a cluster say."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.integrations import probes
from gtpo_verl.integrations.probes import NodeView, alike, bus_bandwidth, look

VERSIONS = {"Python": "3.11.2", **dict.fromkeys(probes.PACKAGES, "1.0")}
NODE = NodeView(
    common=VERSIONS | {"driver": "580.1", "GPUs": "NVIDIA H100", "RDMA": "mlx5_0/1"}, gpus=1, hardware="", problem=""
)


def test_nodes_that_differ_are_refused_with_what_differs() -> None:
    assert alike([NODE, NODE]).startswith("2 alike: Python 3.11.2, gtpo-verl 1.0, verl 1.0, ")
    other = replace(NODE, common=NODE.common | {"verl": "0.9.0", "driver": "570.2", "RDMA": ""})
    with pytest.raises(UserError) as refused:
        alike([NODE, other])
    assert str(refused.value) == (
        "the nodes differ: verl 0.9.0 and 1.0; driver 570.2 and 580.1; RDMA mlx5_0/1 and none."
    )


def test_a_node_without_gpus_has_other_hardware_and_the_same_versions() -> None:
    head = replace(NODE, common=NODE.common | {"driver": "", "GPUs": "", "RDMA": ""}, gpus=0)
    assert alike([head, NODE, NODE]).startswith("3 alike: ")
    with pytest.raises(UserError, match=r"the nodes differ: ray 0\.9 and 1\.0\.$"):
        alike([replace(head, common=head.common | {"ray": "0.9"}), NODE])


@pytest.fixture
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with two ports for RDMA, of which one is up."""
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        (tmp_path / "mlx5_0" / "ports" / port).mkdir(parents=True)
        (tmp_path / "mlx5_0" / "ports" / port / "state").write_text(state)
    monkeypatch.setattr(probes, "RDMA", tmp_path)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with eight GPUs, in the words of nvidia-smi."""
    answers = {"name": "NVIDIA H100\n" * 8, "driver_version": "580.1\n" * 8}

    def nvidia_smi(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        field = command[1].removeprefix("--query-gpu=")
        return subprocess.CompletedProcess(command, 0, stdout=answers[field])

    monkeypatch.setattr(subprocess, "run", nvidia_smi)


@pytest.mark.usefixtures("gpus", "ports")
@pytest.mark.parametrize("library", [None, "libibverbs.so.1"])
def test_a_nodes_hardware_in_words(monkeypatch: pytest.MonkeyPatch, library: str | None) -> None:
    monkeypatch.setattr(probes.ctypes.util, "find_library", lambda name: library)
    seen = look()
    assert (seen.gpus, seen.hardware) == (8, "8 × NVIDIA H100, driver 580.1; RDMA on mlx5_0/1")
    assert (seen.common["driver"], seen.common["RDMA"]) == ("580.1", "mlx5_0/1")
    assert ("no libibverbs, without which NCCL falls back to TCP" in seen.problem) == (library is None)


def test_a_node_without_gpus_and_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "RDMA", tmp_path)
    monkeypatch.setattr(probes, "nvidia_smi", lambda field: [])
    seen = look()
    assert (seen.gpus, seen.problem) == (0, "")
    assert seen.hardware == "no NVIDIA GPU; no RDMA device: NCCL uses TCP"


def test_a_model_that_a_node_cannot_read(tmp_path: Path) -> None:
    assert look().problem == ""
    assert look(str(tmp_path)).problem == (
        f"{tmp_path} has no config.json: the model must be readable under the same path on every node."
    )
    (tmp_path / "config.json").write_text("{}")
    assert f"{tmp_path} has no *.safetensors or *.bin: " in look(str(tmp_path)).problem
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "a blob that was not copied")
    assert f"{tmp_path}/model.safetensors: No such file or directory: the model" in look(str(tmp_path)).problem
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").touch()
    assert look(str(tmp_path)).problem == ""


def test_bandwidth_is_that_of_nccls_tests() -> None:
    """A ring sends each byte twice over every link but for the own part: 2 (n - 1) / n."""
    assert bus_bandwidth(2, 10**9, 0.5) == 2.0
    assert bus_bandwidth(16, 10**9, 0.1) == pytest.approx(18.75)
