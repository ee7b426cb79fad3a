"""What the cluster's doctor makes of what the nodes say."""

from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.cluster_probes import Bandwidth, NodeView, alike, look

NODE = NodeView(
    versions={"Python": "3.11.2", "verl": "0.9.1"},
    gpus=("NVIDIA H100",) * 8,
    driver="580.1",
    rdma=("mlx5_0/1",),
    rdma_library=True,
    model="",
)


def test_nodes_that_differ_are_refused_with_what_differs() -> None:
    assert alike([NODE, NODE]) == "2 alike: Python 3.11.2, verl 0.9.1"
    other = replace(NODE, versions=NODE.versions | {"verl": "0.9.0"}, driver="570.2", rdma=())
    with pytest.raises(UserError) as refused:
        alike([NODE, other])
    assert str(refused.value) == (
        "the nodes differ: verl 0.9.0 and 0.9.1; driver 570.2 and 580.1; RDMA mlx5_0/1 and none."
    )


def test_a_nodes_hardware_in_words() -> None:
    assert NODE.hardware() == "8 × NVIDIA H100, driver 580.1; RDMA on mlx5_0/1"
    assert replace(NODE, gpus=(), rdma=()).hardware() == "no NVIDIA GPU; no RDMA device: NCCL uses TCP"
    with pytest.raises(UserError, match="no libibverbs, without which NCCL falls back to TCP"):
        replace(NODE, rdma_library=False).hardware()


def test_a_model_that_a_node_cannot_read(tmp_path: Path) -> None:
    assert look().model == ""
    with pytest.raises(UserError, match=r"has no config\.json: the model must be readable"):
        look(str(tmp_path)).hardware()
    (tmp_path / "config.json").write_text("{}")
    assert look(str(tmp_path)).model.endswith("has no *.safetensors")
    (tmp_path / "model.safetensors").touch()
    assert look(str(tmp_path)).model == ""


def test_bandwidth_is_that_of_nccls_tests() -> None:
    """A ring sends each byte twice over every link but for the own part: 2 (n - 1) / n."""
    assert Bandwidth("nccl", 2, 10**9, 0.5).gigabytes_per_second == 2.0
    assert Bandwidth("nccl", 16, 10**9, 0.1).gigabytes_per_second == pytest.approx(18.75)
    assert str(Bandwidth("gloo", 2, 64 << 20, 0.5)) == "0.13 GB/s over gloo, 2 ranks, 64 MiB"
