"""DAPO's advantage under another treatment of clipped tokens: `ce_gppo`, `aspo`, `dcpo_clip`.

The losses are in losses.py. At ratios of 1 each is DAPO's, so they need several updates a step.
"""

from dataclasses import replace

from gtpo_verl.algorithms.grpo import DAPO
from gtpo_verl.algorithms.of_verl import ACTOR, CLIP_RANGE

CE_GPPO = replace(
    DAPO,
    name="ce_gppo",
    label="CE-GPPO",
    loss="ce_gppo",
    guide=None,
    changes=(CLIP_RANGE[1], f"{ACTOR}policy_loss.beta1", f"{ACTOR}policy_loss.beta2"),
    needs_several_updates=True,
    style=None,
)

ASPO = replace(
    DAPO,
    name="aspo",
    label="ASPO",
    loss="aspo",
    guide=None,
    changes=(CLIP_RANGE[1], f"{ACTOR}clip_ratio_c"),
    needs_several_updates=True,
    style=None,
)

DCPO_CLIP = replace(
    DAPO,
    name="dcpo_clip",
    label="DCPO clip",
    loss="dcpo_clip",
    guide=None,
    changes=CLIP_RANGE,
    needs_several_updates=True,
    style=None,
)
