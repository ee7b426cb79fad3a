"""GRPO-S: sequence-level reward shaping by policy entropy (arXiv 2508.04349).

One number per response, in this order: mean entropies Ĥ -> values V (Ĥ, or 1/Ĥ in wrong responses) -> weights w ->
shaped rewards r̂ -> advantages Â. β1, β2 are `config.beta1`, `config.beta2`; P are the n correct responses to a prompt,
N the m wrong ones. "early" is arXiv v1 to v4, "late" is v5 and v6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, geometric_mean

import torch

from gtpo_verl.algorithms._packed.flat import FlatRows, fill_rows, split_rows
from gtpo_verl.algorithms._packed.layout import (
    Group,
    Layout,
    broadcast_rows,
    check_batch,
    check_penalty,
    check_tokens,
    one_thread,
)
from gtpo_verl.algorithms._packed.moments import Moments
from gtpo_verl.algorithms._packed.recorder import Recorder
from gtpo_verl.algorithms._packed.tokens import Tokens, Workspace, check_entropies, clamp_entropies
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import ShapingConfig, check_shares
from gtpo_verl.algorithms.normalization import Normalizer, normalizers
from gtpo_verl.algorithms.penalties import named_penalty
from gtpo_verl.algorithms.registry import Algorithm, Style


@dataclass(frozen=True, kw_only=True)
class GRPOSConfig(ShapingConfig):
    """Settings of GRPO-S; the defaults are the preset `grpo_s` (late text of arXiv 2508.04349).

    beta1, beta2: base reward and weight of the entropy term.
    entropy_mean: how the entropies of a response become one number, `arithmetic` or `geometric`.
    """

    beta1: float = 1.0
    beta2: float = 0.1
    entropy_mean: str = "arithmetic"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares("beta1", self.beta1, "beta2", self.beta2)


# ---------------------------------------------------------------------------------------------------- the formulas


def mean_entropies(H: Tokens, config: GRPOSConfig) -> list[float]:
    """Ĥ of each response of a group, the correct ones first: the arithmetic or geometric mean of H over its tokens."""
    geometric = config.entropy_mean == "geometric"
    means = [side.total("response", logarithm=geometric).mean(logarithm=geometric) for side in (H.correct, H.wrong)]
    return torch.cat(means).tolist()


def weights(V: Sequence[float], config: GRPOSConfig) -> list[float]:
    """w = V / mean of V, arithmetic or geometric: it averages 1 over the responses that are compared."""
    if not V:
        return []
    mean = fmean(V) if config.mean == "arithmetic" else geometric_mean(V)
    return [value / mean for value in V]


def rewards_of_correct(H: Sequence[float], config: GRPOSConfig) -> list[float]:
    """r̂ = β1 + β2 w, w = Ĥ[i] / mean_{k∈P} Ĥ[k]: early section 3.4, late section on GRPO-S."""
    return [config.beta1 + config.beta2 * w for w in weights(H, config)]


def rewards_of_wrong(H: Sequence[float], config: GRPOSConfig) -> list[float]:
    """r̂ from w = (1/Ĥ[j]) / mean_{k∈N} (1/Ĥ[k]): early sections 3.4 and 4.6, late section on GRPO-S."""
    W = weights([1 / h for h in H], config)
    if config.negatives == "zero":  # early 3.4
        return [0.0 for _ in W]
    if config.negatives == "inverse":  # early 4.6
        return [-w for w in W]
    return [-config.beta1 - config.beta2 * w for w in W]  # late


def flat_rewards(config: GRPOSConfig) -> tuple[float, float]:
    """The rewards of a correct and of a wrong response without the entropy term: those of weight 1, the average one."""
    wrong = {"zero": 0.0, "inverse": -1.0, "based_inverse": -config.beta1 - config.beta2}
    return config.beta1 + config.beta2, wrong[config.negatives]


def advantage(R: float, by: Normalizer) -> float:
    """Â = (r̂ - mean) / (std + 1e-6): as for tokens, early (4), (16), (17), late (6); `normalizers` has the sets."""
    return (R - by.mean) * by.scale


# ---------------------------------------------------------------------------------------------------- over a batch


def grpo_s_advantages(
    entropy: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    config: GRPOSConfig,
    length_penalty: torch.Tensor | None = None,
    return_shaped: bool = True,
    guide: torch.Tensor | None = None,
) -> AdvantageOutput:
    """Shape the reward of every response by its mean entropy, normalise it to an advantage and give it to all its
    tokens.

    Arguments, types and errors as in `gtpo_advantages`; guide rows have this method's `flat_rewards`.
    Returns advantages (B, T), shaped rewards (B,), float64 for float64 entropies and else float32, and the metrics of
    `Recorder`.
    Source: arXiv 2508.04349, early sections 3.4 and 4.6, late section on GRPO-S; normalisation as in GTPO, over
    responses.
    """
    check_batch(response_mask, group, correct=correct, length_penalty=length_penalty, guide=guide)
    check_tokens(entropy, response_mask)
    with torch.no_grad(), one_thread(entropy.device):
        penalty = None if length_penalty is None else length_penalty.tolist()
        layout, flat = split_rows(response_mask, group, correct, guide, flat_rewards(config), penalty, per_token=False)
        check_penalty(length_penalty, [*layout.groups, *flat.groups.values()])
        recorder = Recorder(layout)
        # Rewards of one polarity alone, or with a penalty that cancels their base, may differ by little: float32 would
        # lose that.
        fine = config.normalization == "within" or config.degenerate == "shape" or length_penalty is not None
        dtype = torch.float64 if entropy.dtype == torch.float64 else torch.float32
        workspace = Workspace(layout, response_mask, torch.float64 if fine else dtype)
        H = _mean_entropies(entropy.detach(), response_mask, layout, config, workspace, recorder)
        R = _shaped_rewards(H, layout, flat, config, penalty)
        A, of_guide = _advantages(R, layout, flat, config, torch.finfo(dtype).eps, recorder)
        out = broadcast_rows(A, layout, response_mask, dtype)
        fill_rows(out, of_guide, response_mask)
        return AdvantageOutput(
            out,
            torch.tensor(R, dtype=dtype, device=entropy.device) if return_shaped else None,
            recorder.metrics(),
        )


def _mean_entropies(
    entropy: torch.Tensor,
    response_mask: torch.Tensor,
    layout: Layout,
    config: GRPOSConfig,
    workspace: Workspace,
    recorder: Recorder,
) -> list[float]:
    """Ĥ of each row of the batch; 0 for an empty row."""
    rows = entropy.unbind(0)
    found = [0.0] * len(entropy)
    for group in layout.groups:
        H = workspace.load(group, rows)
        sums = check_entropies(H, entropy, response_mask)
        recorder.entropies(group, sums, clamp_entropies(H, config.entropy_clip, config.entropy_floor))
        for row, mean in zip(group.rows, mean_entropies(H, config), strict=True):
            found[row] = mean
    return found


def _taking_part(layout: Layout, flat: FlatRows, config: GRPOSConfig) -> list[Group]:
    return [group for group in layout.groups if config.degenerate == "shape" or flat.contrast(group)]


def _shaped_rewards(
    H: list[float], layout: Layout, flat: FlatRows, config: GRPOSConfig, penalty: list[float] | None
) -> list[float]:
    """r̂ of each row of the batch, its length penalty included; 0 for rows that take no part."""
    groups = _taking_part(layout, flat, config)
    correct = [group.rows[: group.n] for group in groups]
    wrong = [group.rows[group.n :] for group in groups]
    if config.scope == "batch":
        correct, wrong = [list(chain(*correct))], [list(chain(*wrong))]
    found = [0.0] * len(H)
    for rows in correct:
        for row, reward in zip(rows, rewards_of_correct([H[row] for row in rows], config), strict=True):
            found[row] = reward if penalty is None else reward + penalty[row]  # early (14), late appendix D
    for rows in wrong:
        for row, reward in zip(rows, rewards_of_wrong([H[row] for row in rows], config), strict=True):
            found[row] = reward
    for group in groups:
        for row in flat.beside(group).rows:
            found[row] = flat.rewards[row]
    return found


def _advantages(
    R: list[float], layout: Layout, flat: FlatRows, config: GRPOSConfig, eps: float, recorder: Recorder
) -> tuple[list[float], dict[int, float]]:
    """Â of each row of the batch, 0 for rows that take no part and for the guide's; and Â of the guide's rows."""
    groups = _taking_part(layout, flat, config)
    batch = Moments.constant(0.0, 0.0), Moments.constant(0.0, 0.0)
    for group in groups:
        own = _moments(R, group)
        recorder.rewards(*own)
        over = flat.joined(group, *own)
        batch = batch[0].join(over[0]), batch[1].join(over[1])
    found = [0.0] * len(R)
    of_guide: dict[int, float] = {}
    for group in groups:
        scope = batch if config.norm_scope == "batch" else flat.joined(group, *_moments(R, group))
        by_plus, by_minus = normalizers(*scope, config.normalization, config.negatives, eps)
        of_guide |= flat.advantages(group, (by_plus, by_minus), config.preserve_sign)
        for place, row in enumerate(group.rows):
            right = place < group.n
            A = advantage(R[row], by_plus if right else by_minus)
            recorder.correct_flips += right and A < 0
            recorder.wrong_flips += not right and A > 0
            if config.preserve_sign:
                A = max(A, 0.0) if right else min(A, 0.0)
            found[row] = A
    return found, of_guide


def _moments(R: list[float], group: Group) -> tuple[Moments, Moments]:
    """Of the rewards of a group, those of the correct and those of the wrong responses."""
    plus, minus = group.rows[: group.n], group.rows[group.n :]
    return Moments.of([R[row] for row in plus]), Moments.of([R[row] for row in minus])


def _compute(batch: Batch, config: GRPOSConfig) -> AdvantageOutput:
    assert batch.entropy is not None
    penalty = named_penalty(batch, config)
    return grpo_s_advantages(
        batch.entropy, batch.correct, batch.response_mask, batch.group, config, penalty, guide=batch.guide
    )


GRPO_S = Algorithm(
    name="grpo_s",
    label="GRPO-S",
    level="sequence",
    needs=frozenset({"entropy"}),
    config=GRPOSConfig,
    compute=_compute,
    loss="grpo_s",
    aggregation="seq-mean-token-mean",
    changes=(
        "actor_rollout_ref.actor.policy_loss.seq_ratio",
        "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_low",
        "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_high",
    ),
    guide="flat",
    advantage_ns=10.0,
    style=Style(light="#d55e00", dark="#ff9448", marker="D"),
)
