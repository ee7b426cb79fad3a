"""Asks every node of a Ray cluster, and proves that all of them see one directory."""

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gtpo_verl.errors import UserError, first_line

WORKER_TIMEOUT = 180.0  # seconds until a worker on every node has started and answered
SEEN_WITHIN = 60.0  # seconds; an NFS client may remember for as long that a directory was not there
POLL = 0.5  # seconds


@contextmanager
def joined() -> Iterator[None]:
    """Join the Ray that is running, without its workers' output, for a block that only asks."""
    ray.init(log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def nodes() -> dict[str, str]:
    """{node id: address} of the nodes that are alive."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def gpus() -> dict[str, int]:
    """{node id: GPUs that Ray has there}, perhaps not all that the node has."""
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


def on_every_node(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Call a function in a worker on every node at once; it takes no CPU of the cluster's.

    Returns {node id: result}, for the nodes of :func:`nodes`.
    Raises UserError: no worker starts on a node, or the function fails there with a UserError; with the node's address.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    places = nodes()
    references = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node in places
    }
    results = {}
    for node, reference in references.items():
        try:
            results[node] = ray.get(reference, timeout=WORKER_TIMEOUT)
        except GetTimeoutError as error:
            raise UserError(f"node {places[node]}: no worker answered within {WORKER_TIMEOUT:.0f} s.") from error
        except RayError as error:
            cause = getattr(error, "cause", None)
            text = str(cause) if isinstance(cause, UserError) else f"a worker failed: {first_line(error)}"
            raise UserError(f"node {places[node]}: {text}") from error
    return results


def prove_shared(directory: Path, name: str = "trainer.run_dir", within: float = SEEN_WITHIN) -> int:
    """Check that every node sees ``directory``, made if need be, under the same path: each reads a nonce that this
    process writes there, and this process finds what each of them leaves.

    name: what messages call it.
    within: seconds that a file may take from one node to another.
    Returns the number of nodes. One node is not asked.
    Raises UserError: one of them sees another directory, or cannot write to this one.
    """
    places = nodes()
    if len(places) == 1:
        return 1
    nonce = secrets.token_hex(8)
    here = directory / f".nodes-{nonce}"
    try:
        here.mkdir(parents=True)
        (here / "nonce").write_text(nonce)
        left = on_every_node(_answer, str(here), nonce, name, within)
        for node, file in left.items():
            if not _appears(here / file, within):
                raise UserError(f"{name}={directory}: what node {places[node]} writes there is not seen here. {_SHARE}")
    except OSError as error:
        raise UserError(f"{name}={directory}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(here, ignore_errors=True)
    return len(places)


_SHARE = "It must be on a file system that all nodes mount under the same path."


def _answer(directory: str, nonce: str, name: str, within: float) -> str:
    """Read the nonce, and leave a file; returns its name. A worker's function."""
    here = Path(directory)
    if not _appears(here / "nonce", within) or (here / "nonce").read_text() != nonce:
        raise UserError(f"{name}={here.parent} is another directory there, or none. {_SHARE}")
    file = f"{os.getpid()}-{secrets.token_hex(8)}"
    try:
        (here / file).touch()
    except OSError as error:
        raise UserError(f"{name}={here.parent} cannot be written there: {error.strerror}.") from error
    return file


def _appears(file: Path, within: float) -> bool:
    """Whether a file is there, or comes within so many seconds."""
    deadline = time.monotonic() + within
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
