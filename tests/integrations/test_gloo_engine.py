"""Weights over gloo arrive as they were sent, at every rollout worker, update after update."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch
from gloo_engine import GlooCheckpointEngine, buckets

SHAPES = {"embed": (40, 8), "norm": (8,), "mask": (5,), "head": (8, 40), "scale": ()}
DTYPES = {"norm": torch.bfloat16, "mask": torch.uint8}  # of odd length: what follows it in a bucket is not aligned


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (100 * torch.rand(shape, generator=draw)).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def update(engines: list[GlooCheckpointEngine], senders: int, sent: dict[str, torch.Tensor]) -> list[dict]:
    """What verl's CheckpointEngineManager does for one update, every worker in a thread of its own; returns what
    arrived.
    """
    metadata = [engine.prepare() for engine in engines]
    of_senders, of_receivers = GlooCheckpointEngine.build_topology(senders, len(engines) - senders, metadata)
    arrived: list[dict] = [{} for _ in engines]
    exhausted = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from sent.items()
        exhausted.append(True)

    async def receive(engine: GlooCheckpointEngine, index: int) -> None:
        async for name, tensor in engine.receive_weights():
            arrived[index][name] = tensor

    def work(index: int) -> None:
        engine = engines[index]
        side, place = (of_senders, index) if index < senders else (of_receivers, index - senders)
        engine.init_process_group(**{name: values[place] for name, values in side.items()})
        asyncio.run(engine.send_weights(stream()) if index < senders else receive(engine, index))

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for engine in engines:
        engine.finalize()
    assert len(exhausted) == senders, "a rank that does not take part still has to gather its shards"
    return arrived[senders:]


@pytest.mark.parametrize("bucket_size", [1, 1400, 1 << 20])
def test_every_worker_gets_every_tensor(bucket_size: int) -> None:
    engines = [GlooCheckpointEngine(bucket_size, is_master=rank == 0) for rank in range(4)]
    for seed in (0, 1):  # the second update builds a group of its own
        sent = weights(seed)
        for arrived in update(engines, 2, sent):
            assert list(arrived) == list(sent)
            for name, tensor in sent.items():
                assert arrived[name].dtype == tensor.dtype
                assert torch.equal(arrived[name], tensor)


def test_buckets_hold_at_most_their_size_and_a_large_tensor_goes_alone() -> None:
    stream = [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("large", torch.zeros(100)), ("c", torch.zeros(1))]
    assert [[name for name, _ in bucket] for bucket in buckets(stream, size=16)] == [["a", "b"], ["large"], ["c"]]


def test_verl_finds_it_by_name() -> None:
    from verl.checkpoint_engine import CheckpointEngineRegistry

    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine
