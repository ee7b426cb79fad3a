"""What a batch must be: shapes and types that agree, and numbers that can be. Every error names the argument, and the
first row and position.
"""

import math

import torch

from gtpo_verl.algorithms.groups import Group

LOWEST_ENTROPY = -1e-3  # nats; bf16 round-off reaches about this far below zero
HIGHEST_ENTROPY = 1e6  # nats; of a uniform choice from a million tokens it is 14, and sums of these stay in float32
LARGEST_REWARD = 1e30  # sums of squares stay in the range of float64, sums in that of float32


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
    if correct is not None:
        check_verdicts(correct)


def check_verdicts(correct: torch.Tensor) -> None:
    """Refuse verdicts that are not bool, such as rewards."""
    if correct.dtype != torch.bool:
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


def check_entropies(H: torch.Tensor, group: Group, dtype: torch.dtype) -> None:
    """Refuse entropies that are not finite, clearly negative or absurd.

    H: (G, T) nats of a group, 0 outside the mask. dtype: in which they were given.
    """
    lowest = torch.tensor(LOWEST_ENTROPY, dtype=dtype).item()  # -0.001 rounds downwards in float32
    low, high = H.aminmax()
    if low >= lowest and high <= HIGHEST_ENTROPY:  # neither holds for NaN
        return
    place, position = (~((lowest <= H) & (H <= HIGHEST_ENTROPY))).nonzero()[0].tolist()
    raise ValueError(
        f"entropy of row {group.rows[place]}, position {position} is {H[place, position].item()}: entropies inside "
        f"the mask must be finite, at least {LOWEST_ENTROPY} and at most {HIGHEST_ENTROPY:g} nats; check how the "
        "rollout or the actor computes them"
    )


def check_rewards(rewards: torch.Tensor, rows: torch.Tensor) -> None:
    """Refuse rewards (B,) that are not finite, or so large that their squares leave the range of numbers, in these
    rows (n,).
    """
    for row, reward in zip(rows.tolist(), rewards[rows].tolist(), strict=True):
        if not abs(reward) <= LARGEST_REWARD:
            most = f" and at most {LARGEST_REWARD:g} in size" if math.isfinite(reward) else ""
            raise ValueError(f"reward of row {row} is {reward}, it must be finite{most}")


def check_penalty(length_penalty: torch.Tensor, rows: torch.Tensor) -> None:
    """Refuse length penalties (B,) that are not finite in these rows (n,)."""
    for row, value in zip(rows.tolist(), length_penalty[rows].tolist(), strict=True):
        if not math.isfinite(value):
            raise ValueError(f"length_penalty of row {row} is {value}, it must be finite")


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
