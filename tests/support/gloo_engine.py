"""Weights from the trainer to separate rollout servers, over gloo: ``separate_async`` on a machine without a GPU.

verl's checkpoint engines need GPUs, and its ``naive`` one a server inside the trainer's process. A run imports this
module by ``actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gloo_engine`` and takes it by
``actor_rollout_ref.rollout.checkpoint_engine.backend=gloo``; its directory must be on PYTHONPATH in every process.
"""

import asyncio
import datetime as dt
import pickle
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

TIMEOUT = dt.timedelta(minutes=10)

Weights = Iterable[tuple[str, torch.Tensor]]


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts weights in buckets from the trainer's rank 0 to every rollout worker.

    A bucket's names and shapes go through the rendezvous store, its bytes through a gloo process group. Store and group
    are made anew for each update, because workers may have joined or left since.

    Args:
        bucket_size: bytes of a bucket; a tensor that is larger goes alone.
        is_master: whether this is the rank that sends.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = -1
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    def prepare(self) -> tuple[str, int] | None:
        """Open the store on the sending rank; returns its address."""
        if not self.is_master:
            return None
        address = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return address, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 for the trainer's first worker, -1 for its others, and 1, 2, ... for the rollout's."""

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [1 + rollout_world_size] * len(ranks),
                "address": [metadata[0]] * len(ranks),
            }

        return (
            arguments([0] + [-1] * (actor_wg_world_size - 1)),
            arguments(list(range(1, rollout_world_size + 1))),
        )

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Join the process group; a rank of -1 takes no part."""
        self.rank = rank
        if rank < 0:
            return
        if self._store is None:
            self._store = dist.TCPStore(*address, is_master=False, timeout=TIMEOUT)
        self._group = dist.ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leave the group and close the store."""
        self._group = self._store = None

    async def send_weights(self, weights: Generator[Any, None, None], global_steps: int | None = None) -> None:
        """Send everything that ``weights`` yields; all ranks must iterate over it, because it gathers their shards."""
        number = 0
        for number, bucket in enumerate(buckets(weights, self.bucket_size), start=1):
            if self.rank < 0:
                continue
            assert self._store is not None
            self._store.set(f"bucket {number}", _pickled([(n, w.shape, w.dtype) for n, w in bucket]))
            await self._broadcast(torch.cat([_as_bytes(weight) for _, weight in bucket]))
        if self._store is not None:
            self._store.set(f"bucket {number + 1}", _pickled([]))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, tensor) as they come."""
        assert self._store is not None
        number = 1
        while header := pickle.loads(await asyncio.to_thread(self._store.get, f"bucket {number}")):
            sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in header]
            data = torch.empty(sum(sizes), dtype=torch.uint8)
            await self._broadcast(data)
            for (name, shape, dtype), part in zip(header, data.split(sizes), strict=True):
                yield name, part.clone().view(dtype).view(shape)  # a part may begin anywhere; a view by dtype may not
            number += 1

    async def _broadcast(self, data: torch.Tensor) -> None:
        work = self._group.broadcast([data], dist.BroadcastOptions())
        await asyncio.to_thread(work.wait)


def buckets(weights: Weights, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Cut a stream of named tensors into lists of at most ``size`` bytes, in order; a larger tensor goes alone."""
    bucket: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, weight in weights:
        if bucket and filled + weight.nbytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, weight))
        filled += weight.nbytes
    if bucket:
        yield bucket


def _as_bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _pickled(header: list[tuple[str, torch.Size, torch.dtype]]) -> Any:
    return pickle.dumps(header)  # the store takes bytes, whatever torch's stub says
