"""What several tests of the integrations share."""

from collections.abc import Iterator

import pytest
import ray
import transfer_queue as tq

from gtpo_verl.config import compose_config


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """A real TransferQueue, on a Ray of its own."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    config = compose_config(["hardware=cpu"]).transfer_queue
    config.enable = True
    tq.init(config)
    yield
    tq.close()
    ray.shutdown()
