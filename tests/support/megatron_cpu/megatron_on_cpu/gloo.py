"""Obstacle: gloo's ``scatter`` sends parts that are not contiguous as if they were, without an error.

Megatron-Bridge scatters the columns of row-parallel weights as views (param_mapping.py:504), so ranks would train on
wrong weights. NCCL makes such parts contiguous, so this concerns a CPU alone. Run as a program, this module is the
reproduction: ``python gloo.py`` prints what arrives from the columns of a matrix.
"""

import functools
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def install() -> None:
    """Let ``torch.distributed.scatter`` send contiguous parts."""
    scatter = dist.scatter

    @functools.wraps(scatter)
    def contiguous(tensor: torch.Tensor, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        parts = None if scatter_list is None else [part.contiguous() for part in scatter_list]
        return scatter(tensor, parts, *args, **kwargs)

    dist.scatter = contiguous


def scattered(rank: int, meeting: str, answers: Any) -> None:
    """Puts what this rank of two gets of the columns of ``arange(8).view(2, 4)``."""
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
    columns = torch.arange(8.0).view(2, 4).chunk(2, 1)
    received = torch.empty(2, 2)
    dist.scatter(received, list(columns) if rank == 0 else None, src=0)
    answers.put((rank, received.tolist(), columns[rank].tolist()))
    dist.destroy_process_group()


def reproduce() -> list[tuple[int, list[list[float]], list[list[float]]]]:
    """What each of two ranks received, and what was its own: ``(rank, received, expected)``."""
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(scattered, (f"file://{directory}/ranks", answers), nprocs=2)
    return sorted(answers.get() for _ in range(2))


if __name__ == "__main__":
    for rank, received, expected in reproduce():
        print(f"rank {rank} received {received}, expected {expected}")
