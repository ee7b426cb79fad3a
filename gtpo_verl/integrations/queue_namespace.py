"""A TransferQueue of its own for every job of a Ray cluster.

TransferQueue finds its controller by one name in one namespace: a second job of the cluster would attach to the queue
of the first. Here every process looks in its job's namespace, and only the one that made a controller ends it.
"""

import time
from typing import Any

import ray
import transfer_queue
from transfer_queue import interface
from transfer_queue.storage.clients import ray_storage_client

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.health import ended_actors

START_TIMEOUT = 300.0  # seconds in which controller and storage units must have started


def namespace() -> str:
    """The namespace of this job's queue; all processes of a job have the same Ray job id, and no two jobs do."""
    return f"transfer_queue-{ray.get_runtime_context().get_job_id()}"


class InJobNamespace:
    """What TransferQueue takes from Ray, or one of its actor classes, with the job's namespace for TransferQueue's."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def get_actor(self, name: str, **_: Any) -> Any:
        return self._stock.get_actor(name, namespace=namespace())

    def options(self, **options: Any) -> Any:
        return self._stock.options(**options | {"namespace": namespace()})


def register() -> None:
    """Give TransferQueue the job's namespace in this process, and let only the creator of a controller end it."""
    if isinstance(interface.ray, InJobNamespace):
        return
    interface.ray = InJobNamespace(interface.ray)
    interface.TransferQueueController = InJobNamespace(interface.TransferQueueController)
    ray_storage_client.ray = InJobNamespace(ray_storage_client.ray)
    ray_storage_client.RayObjectRefStorage = InJobNamespace(ray_storage_client.RayObjectRefStorage)
    stock_close = interface.close

    def close() -> None:
        if interface._TQ_STORAGE is None:  # only the process that made the queue owns its storage
            interface._TQ_CONTROLLER = None  # TransferQueue kills whatever is there
        stock_close()

    interface.close = transfer_queue.close = close


class QueueWatch:
    """Checks the job's queue in the process that makes it; from before it is made."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + START_TIMEOUT

    def check(self) -> None:
        """Raise UserError where controller or a storage unit has ended, for whose answer every process would wait
        without end, or has not been made in ``START_TIMEOUT`` seconds.
        """
        if interface._TQ_CLIENT is None:
            if time.monotonic() > self._deadline:
                raise UserError(
                    f"TransferQueue did not start within {START_TIMEOUT:.0f} s: each of its storage units takes a CPU, "
                    "and Ray has none for one of them. transfer_queue.backend.SimpleStorage.num_data_storage_units is "
                    "their number."
                )
            return
        storage: dict[str, Any] = (interface._TQ_STORAGE or {}).get("SimpleStorage") or {}
        actors = {"TransferQueueController": interface._TQ_CONTROLLER} | storage
        dead = ended_actors({name: actor.__ray_ready__.remote() for name, actor in actors.items() if actor is not None})
        if dead:
            raise UserError(
                f"TransferQueue died ({'; '.join(dead)}): it was killed, for lack of memory or by hand, or its node is "
                "gone. Repeat the command: a training goes on from the last checkpoint in its trainer.run_dir, an "
                "evaluation from its last problem."
            )
