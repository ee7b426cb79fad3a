"""One TransferQueue for the tests of this folder: starting it takes longer than most of them."""

from collections.abc import Iterator

import pytest
import ray
import transfer_queue as tq
from local_ray import start_ray

from gtpo_verl.config import compose_config


@pytest.fixture(scope="package")
def queue() -> Iterator[None]:
    """A real TransferQueue, on a Ray of its own."""
    start_ray(num_cpus=8)
    config = compose_config(["hardware=cpu"]).transfer_queue
    config.enable = True
    tq.init(config)
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture(autouse=True)
def empty_queue(queue: None) -> Iterator[None]:
    """No test finds the rows of another."""
    yield
    for partition, rows in tq.kv_list().items():
        if rows:
            tq.kv_clear(keys=list(rows), partition_id=partition)
