"""What is asked of every node of a cluster. Real Ray, two nodes of this machine.

Nodes of one machine see the same files, but for a path through ``/proc/self/cwd``: Ray's workers work in the directory
in which their node was started, and the second one was started elsewhere.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from gtpo_verl.errors import UserError
from gtpo_verl.integrations import nodes
from gtpo_verl.integrations.nodes import on_every_node, prove_shared

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # and in a process of its own, see the Makefile

OWN = Path("/proc/self/cwd/run")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine takes longer than Ray's 30
        patch.chdir(tmp_path_factory.mktemp("head"))
        head = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        here = Path.cwd()
        patch.chdir(tmp_path_factory.mktemp("other"))
        cluster.add_node(num_cpus=2, num_gpus=1)
        patch.chdir(here)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import the tests
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_function_runs_once_on_every_node() -> None:
    found = on_every_node(lambda: ray.get_runtime_context().get_node_id())
    assert len(found) == 2
    assert all(node == result for node, result in found.items())


@pytest.mark.usefixtures("cluster")
def test_a_directory_that_all_nodes_see_is_proven_and_left_as_it_was(tmp_path: Path) -> None:
    assert prove_shared(tmp_path / "run") == 2
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("there", [True, False], ids=["another directory", "no directory"])
def test_a_directory_of_one_node_is_refused_by_the_others_address(there: bool) -> None:
    def make() -> None:
        OWN.mkdir(exist_ok=True) if there else OWN.exists() and OWN.rmdir()

    on_every_node(make)
    with pytest.raises(UserError, match=rf"^node [\d.]+: trainer\.run_dir={OWN} is another directory there") as refused:
        prove_shared(OWN, within=2.0)
    assert "\n" not in str(refused.value)
    assert list(OWN.iterdir()) == []


@pytest.mark.usefixtures("cluster")
def test_what_fails_on_a_node_says_where() -> None:
    def fail() -> None:
        if os.getcwd() != driver:
            raise UserError("no such model.")

    driver = os.getcwd()
    with pytest.raises(UserError, match=r"^node [\d.]+: no such model\.$"):
        on_every_node(fail)


def test_an_nfs_clients_memory_is_outwaited_before_a_worker_is_given_up() -> None:
    assert nodes.SEEN_WITHIN < nodes.WORKER_TIMEOUT
