"""Where the valid tokens of a padded batch are.

Padding is most of a [B, T] batch, and a pass over all of it costs more than the mathematics. So the mask is read once,
in blocks that stay in the cache, for the extent of each row; after that only the valid part of each row is touched.
"""

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_ROWS_PER_BLOCK = 64  # 64 rows of 20k bool fit in a second-level cache
_BYTES_PER_WORD = 8
_WORDS_PER_SPAN = 128  # below 256, so that adding the words of a span never carries from one byte into the next
_SPAN = _BYTES_PER_WORD * _WORDS_PER_SPAN


@dataclass(frozen=True)
class Group:
    """The responses to one prompt: `rows` of the batch, the `n` correct ones first, `width` columns up to the longest
    end.
    """

    rows: list[int]
    n: int
    width: int

    @property
    def one_polarity(self) -> bool:
        return self.n in (0, len(self.rows))


@dataclass(frozen=True)
class Layout:
    """Where the valid tokens of a batch are.

    groups: non-empty rows only, in ascending order of the group id. extents: (B,) one past the last valid column of a
    row.
    lengths: (B,) valid tokens of a row. A row has holes where the two differ.
    """

    groups: list[Group]
    extents: list[int]
    lengths: list[int]


def check_batch(response_mask: torch.Tensor, group: torch.Tensor, **rows: torch.Tensor | None) -> None:
    """Refuse a batch whose shapes or types disagree; `rows` are further tensors with one value per response.

    Raises ValueError that names the argument and the first row without a partner.
    """
    if not isinstance(response_mask, torch.Tensor) or response_mask.dim() != 2 or response_mask.is_complex():
        raise ValueError(f"response_mask must be (B, T), a tensor of 0 and 1, got {_described(response_mask)}")
    check_group_type(group)
    size = response_mask.shape[0]
    for name, values in {"group": group, **rows}.items():
        if values is None:
            continue
        if not isinstance(values, torch.Tensor):
            raise ValueError(f"{name} must be a tensor of shape ({size},), got {type(values).__name__}")
        if values.is_complex():
            raise ValueError(f"{name} must be real, got {values.dtype}")
        if values.dim() != 1:
            raise ValueError(f"{name} must have shape ({size},), one value per response, got {tuple(values.shape)}")
        if len(values) != size:
            raise ValueError(
                f"{name} has {len(values)} rows and response_mask has {size}: row {min(len(values), size)} has no "
                "partner"
            )
        if values.device != response_mask.device:
            raise ValueError(f"{name} is on {values.device} and response_mask on {response_mask.device}")
    guide = rows.get("guide")
    if guide is not None and guide.dtype != torch.bool:
        raise ValueError(f"guide must be bool, the rows of a guiding policy, got {guide.dtype}")
    correct = rows.get("correct")
    if correct is not None and correct.dtype != torch.bool:
        raise ValueError(f"correct must be bool, the verdict of the verifier (acc >= threshold), got {correct.dtype}")


def check_group_type(group: torch.Tensor) -> None:
    """Refuse group ids that are not an integer tensor."""
    if group is None:
        raise ValueError("group must be an integer tensor (B,), got None")
    if not isinstance(group, torch.Tensor):
        bad = next((i for i, ident in enumerate(group) if isinstance(ident, bool) or not isinstance(ident, int)), 0)
        raise ValueError(
            f"group must be an integer tensor (B,), got {type(group).__name__} with {group[bad]!r} at row {bad}"
            if len(group)
            else f"group must be an integer tensor (B,), got an empty {type(group).__name__}"
        )
    if group.is_floating_point() or group.is_complex() or group.dtype == torch.bool:
        where = f": row 0 holds {group.flatten()[0].item()!r}" if group.numel() else ""
        raise ValueError(f"group ids must be integers (int64), got {group.dtype}{where}")


def check_tokens(values: torch.Tensor, response_mask: torch.Tensor, name: str = "entropy") -> None:
    """Refuse numbers of tokens, such as entropies, that are not floating point or do not have the mask's shape; names
    the first row or position too many.
    """
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise ValueError(f"{name} must be floating point (nats), got {_described(values)}")
    if values.dim() != 2:
        raise ValueError(f"{name} must be (B, T), got shape {tuple(values.shape)}")
    if values.shape != response_mask.shape:
        axis = 0 if values.shape[0] != response_mask.shape[0] else 1
        first = min(values.shape[axis], response_mask.shape[axis])
        where = f"row {first} (position 0)" if axis == 0 else f"position {first} (from row 0 on)"
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and response_mask {tuple(response_mask.shape)}: {where} has no "
            "partner"
        )
    if values.device != response_mask.device:
        raise ValueError(f"{name} is on {values.device} and response_mask on {response_mask.device}")


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def response_lengths(response_mask: torch.Tensor) -> torch.Tensor:
    """(B,) int64 number of valid tokens of each row of a (B, T) mask of any type; `mask.sum(1)` at a fraction of its
    time and memory.
    """
    with one_thread(response_mask.device):
        return torch.tensor(_extents_and_lengths(response_mask)[1], dtype=torch.int64, device=response_mask.device)


def read_layout(response_mask: torch.Tensor, group: torch.Tensor, correct: torch.Tensor) -> Layout:
    """Find groups, extents and lengths.

    response_mask: (B, T), bool or any type whose zeros mean padding. group: (B,) integers. correct: (B,) bool.
    """
    extents, lengths = _extents_and_lengths(response_mask)
    # Two stable sorts: by group, and inside a group the correct rows first.
    order = (~correct).to(torch.uint8).argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    right = correct.tolist()
    groups: list[Group] = []
    start = 0
    sizes = group[order].unique_consecutive(return_counts=True)[1].tolist()
    rows = order.tolist()
    for size in sizes:
        members = [row for row in rows[start : start + size] if extents[row]]
        start += size
        if members:
            groups.append(Group(members, sum(right[row] for row in members), max(extents[row] for row in members)))
    return Layout(groups, extents, lengths)


def check_penalty(length_penalty: torch.Tensor | None, groups: Iterable[Group]) -> None:
    """Refuse a length penalty that is not finite on a correct response; on other rows it is ignored."""
    if length_penalty is None:
        return
    finite = length_penalty.isfinite().tolist()
    bad = [row for group in groups for row in group.rows[: group.n] if not finite[row]]
    if bad:
        raise ValueError(f"length_penalty of row {min(bad)} is {length_penalty[min(bad)].item()}, it must be finite")


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Work on the CPU in the calling thread alone; the number of threads is put back afterwards.

    An operation on one group takes some 30 µs. To share it between threads gains little on an idle machine, and on a
    busy one every operation waits until the system has given each thread its turn: measured ten times slower than
    alone.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros` that costs time and memory only where it is written to.

    On the CPU, pages fresh from the system are already zero. To fill a [B, T] with zeros, of which two thirds stay
    padding, would be the most expensive step of all.
    """
    size = shape.numel() * dtype.itemsize
    if device.type != "cpu" or not size or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def broadcast_rows(
    values: list[float], layout: Layout, response_mask: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(B, T) with the value of a row in all its valid tokens, 0 elsewhere."""
    out = zeros(response_mask.shape, dtype, response_mask.device)
    for row, (value, end, out_row) in enumerate(zip(values, layout.extents, out.unbind(0), strict=True)):
        if not value:
            continue
        if layout.lengths[row] == end:
            out_row[:end].fill_(value)
        else:
            out_row[:end].copy_(response_mask[row, :end] != 0).mul_(value)
    return out


def _extents_and_lengths(response_mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """One past the last valid column, and the number of valid columns, of each row.

    A bool is a byte of 0 or 1. Eight of them are added at once as one integer: no carry leaves a byte as long as fewer
    than 256 are added.
    """
    rows, columns = response_mask.shape
    if rows == 0 or columns == 0:
        return [0] * rows, [0] * rows
    spans = -(-columns // _SPAN)
    aligned = response_mask.storage_offset() % _BYTES_PER_WORD == 0 and response_mask.stride(0) % _BYTES_PER_WORD == 0
    whole = columns == spans * _SPAN and response_mask.is_contiguous()
    direct = response_mask.dtype == torch.bool and whole and aligned
    device = response_mask.device
    padded = torch.zeros(0 if direct else _ROWS_PER_BLOCK, spans * _SPAN, dtype=torch.bool, device=device)
    span_ends = torch.arange(1, spans + 1, device=device, dtype=torch.int32)
    offsets = torch.arange(1, _SPAN + 1, device=device, dtype=torch.int16)
    extents: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    for block in response_mask.split(_ROWS_PER_BLOCK):
        if not direct:
            torch.ne(block, 0, out=padded[: len(block), :columns])
            block = padded[: len(block)]
        words = block.view(torch.int64).view(len(block), spans, _WORDS_PER_SPAN)
        counts = (
            words.sum(dim=2).view(torch.uint8).view(len(block), spans, _BYTES_PER_WORD).sum(dim=2, dtype=torch.int32)
        )
        last_span = (span_ends * (counts > 0)).amax(dim=1)  # 1-based, 0 for an empty row
        span = (last_span - 1).clamp(min=0).to(torch.int64)
        tail = block.view(len(block), spans, _SPAN)[torch.arange(len(block), device=device), span]
        extents.append(span * _SPAN + (tail * offsets).amax(dim=1))
        lengths.append(counts.sum(dim=1))
    return torch.cat(extents).tolist(), torch.cat(lengths).tolist()
