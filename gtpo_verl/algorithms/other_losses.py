"""Methods that train with verl's `grpo` estimator and another loss than DAPO's: verl's own, or one of losses.py.

`compute` is the advantage outside a training. kl_cov and clip_cov rank tokens within a micro-batch and choose at least
one of each, so the share that they change grows as micro-batches get smaller; clip_cov chooses at random. A loss of its
own has no rule for rows of a guide. Where it is DAPO's at ratios of 1, a method needs several updates a step.
"""

from dataclasses import replace

import torch

from gtpo_verl.algorithms.base import penalised_reward
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.groups import group_rows
from gtpo_verl.algorithms.grpo import DAPO, GRPOConfig

ACTOR = "actor_rollout_ref.actor."
CLIP_RANGE = (f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio_high")


def _dr_grpo(batch: Batch, config: GRPOConfig) -> AdvantageOutput:
    """A = R - mean of the group, arXiv 2503.20783; the loss is the sum over tokens by a constant."""
    mask, R = batch.response_mask != 0, penalised_reward(batch)
    A = torch.zeros_like(R)
    for rows in group_rows(batch.group):
        rows = rows[mask[rows].any(1)]
        A[rows] = R[rows] - R[rows].mean()
    return AdvantageOutput(A[:, None] * mask, None, {})


DR_GRPO = replace(
    DAPO,
    name="dr_grpo",
    label="Dr. GRPO",
    compute=_dr_grpo,
    aggregation="seq-mean-token-sum-norm",
    advantage_ns=19.0,
    changes=("algorithm.norm_adv_by_std_in_grpo", f"{ACTOR}loss_scale_factor"),
    style=None,
)

_OTHER_LOSS = replace(DAPO, guide=None, style=None)
_OFF_POLICY = replace(_OTHER_LOSS, needs_several_updates=True)

KL_COV = replace(
    _OFF_POLICY,
    name="kl_cov",
    label="KL-Cov",
    loss="kl_cov",
    changes=(f"{ACTOR}policy_loss.kl_cov_ratio", f"{ACTOR}policy_loss.ppo_kl_coef"),
)

CLIP_COV = replace(
    _OTHER_LOSS,
    name="clip_cov",
    label="Clip-Cov",
    loss="clip_cov",
    changes=(*(f"{ACTOR}policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub")), *CLIP_RANGE),
)

GSPO = replace(
    _OFF_POLICY,
    name="gspo",
    label="GSPO",
    level="sequence",
    loss="gspo",
    aggregation="seq-mean-token-mean",
    changes=CLIP_RANGE,
)

CE_GPPO = replace(
    _OFF_POLICY,
    name="ce_gppo",
    label="CE-GPPO",
    loss="ce_gppo",
    changes=(CLIP_RANGE[1], f"{ACTOR}policy_loss.beta1", f"{ACTOR}policy_loss.beta2"),
)

ASPO = replace(_OFF_POLICY, name="aspo", label="ASPO", loss="aspo", changes=(CLIP_RANGE[1], f"{ACTOR}clip_ratio_c"))

DCPO_CLIP = replace(_OFF_POLICY, name="dcpo_clip", label="DCPO clip", loss="dcpo_clip", changes=CLIP_RANGE)
