"""``gtpo-verl doctor``: addresses that it cannot use."""

import socket

import pytest

from gtpo_verl.cli import main
from gtpo_verl.commands.doctor import check_address
from gtpo_verl.errors import UserError


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "127.0.0.1", "host:", ":6379", "host:port"])
def test_what_is_no_address_of_a_head_node_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="give the HOST:PORT of `ray start --head`"):
        check_address(address)


@pytest.mark.parametrize("option", [["--dir", "/tmp"], ["--model", "m"], ["--tensor-parallel", "2"]])
def test_what_only_a_cluster_is_asked_needs_its_option(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *option]) == 2
    assert "are for --cluster" in capsys.readouterr().err


def test_a_port_on_which_nothing_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_address(address)
    with pytest.raises(UserError, match=f"--cluster {address}: no Ray cluster can be joined"):
        check_address(address)
