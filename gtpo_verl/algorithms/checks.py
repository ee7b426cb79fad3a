"""What a batch must be: shapes and types that agree, and numbers that can be. Every error names the argument, and the
first row and position.
"""

from collections.abc import Sequence

import torch

LOWEST_ENTROPY = -1e-3  # nats; bf16 round-off reaches about this far below zero
HIGHEST_ENTROPY = 1e6  # nats; of a uniform choice from a million tokens it is 14, and sums of these stay in float32
LARGEST_REWARD = 1e30  # sums of squares stay in the range of float64, sums in that of float32
VERDICTS = {"correct": "the verdict of the verifier (acc >= threshold)", "guide": "the rows of a guiding policy"}


def check_batch(response_mask: torch.Tensor, group: torch.Tensor, **rows: torch.Tensor | None) -> None:
    """Refuse a batch whose shapes or types disagree; `rows` are further tensors with one value per response."""
    if not isinstance(response_mask, torch.Tensor) or response_mask.dim() != 2 or response_mask.is_complex():
        raise ValueError(f"response_mask must be (B, T), a tensor of 0 and 1, got {_described(response_mask)}")
    check_group_type(group)
    size = len(response_mask)
    for name, values in {"group": group, **rows}.items():
        if values is None and name != "correct":
            continue
        if not isinstance(values, torch.Tensor) or values.is_complex() or values.dim() != 1:
            raise ValueError(
                f"{name} must be a tensor of shape ({size},), one real number per response, got {_described(values)}"
            )
        if len(values) != size:
            raise ValueError(
                f"{name} has {len(values)} rows and response_mask has {size}: row {min(len(values), size)} has no "
                "partner"
            )
        _check_device(name, values, response_mask)
        if name in VERDICTS:
            check_bool(name, values)


def check_bool(name: str, values: torch.Tensor) -> None:
    """Refuse verdicts that are not bool, such as rewards."""
    if values.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, {VERDICTS[name]}, got {values.dtype}")


def check_group_type(group: torch.Tensor) -> None:
    """Refuse group ids that are not an integer tensor."""
    if not isinstance(group, torch.Tensor):
        raise ValueError(f"group must be an integer tensor (B,), got {_described(group)}")
    if group.is_floating_point() or group.is_complex() or group.dtype == torch.bool:
        where = f": row 0 holds {group.flatten()[0].item()!r}" if group.numel() else ""
        raise ValueError(f"group ids must be integers (int64), got {group.dtype}{where}")


def check_tokens(values: torch.Tensor, response_mask: torch.Tensor, name: str = "entropy") -> None:
    """Refuse numbers of tokens, such as entropies, that are not floating point or do not have the mask's shape."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point() or values.dim() != 2:
        raise ValueError(f"{name} must be (B, T), floating point (nats), got {_described(values)}")
    if values.shape != response_mask.shape:
        axis = 0 if values.shape[0] != response_mask.shape[0] else 1
        first = min(values.shape[axis], response_mask.shape[axis])
        where = f"row {first} (position 0)" if axis == 0 else f"position {first} (from row 0 on)"
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and response_mask {tuple(response_mask.shape)}: {where} has no "
            "partner"
        )
    _check_device(name, values, response_mask)


def check_entropies(H: torch.Tensor, rows: Sequence[int] | torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse entropies H (G, T) of some rows, given in a dtype, that are not finite, clearly negative or absurd."""
    lowest = torch.tensor(LOWEST_ENTROPY, dtype=dtype).item()  # -0.001 rounds downwards in float32
    possible = (lowest <= H) & (H <= HIGHEST_ENTROPY)  # NaN is not
    if bool(possible.all()):
        return
    place, position = (~possible).nonzero()[0].tolist()
    raise ValueError(
        f"entropy of row {rows[place]}, position {position} is {H[place, position].item()}: entropies inside "
        f"the mask must be finite, at least {LOWEST_ENTROPY} and at most {HIGHEST_ENTROPY:g} nats; check how the "
        "rollout or the actor computes them"
    )


def check_finite(name: str, values: torch.Tensor, rows: torch.Tensor) -> None:
    """Refuse values (B,) that are not finite, or whose squares leave the range of numbers, in these rows (n,)."""
    for row, value in zip(rows.tolist(), values[rows].tolist(), strict=True):
        if not abs(value) <= LARGEST_REWARD:  # nor NaN
            raise ValueError(f"{name} of row {row} is {value}, it must be finite, at most {LARGEST_REWARD:g} in size")


def _check_device(name: str, values: torch.Tensor, response_mask: torch.Tensor) -> None:
    if values.device != response_mask.device:
        raise ValueError(f"{name} is on {values.device} and response_mask on {response_mask.device}")


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
