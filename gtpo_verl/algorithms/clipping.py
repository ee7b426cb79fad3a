"""DAPO's advantage under another treatment of clipped tokens: `ce_gppo`, `aspo`, `dcpo_clip`.

The losses are in losses.py. At ratios of 1 each is DAPO's, so they need several updates a step.
"""

from dataclasses import replace

from gtpo_verl.algorithms.grpo import DAPO
from gtpo_verl.algorithms.of_verl import ACTOR, CLIP_RANGE

_CLIPPED = replace(DAPO, guide=None, needs_several_updates=True, style=None)

CE_GPPO = replace(
    _CLIPPED,
    name="ce_gppo",
    label="CE-GPPO",
    loss="ce_gppo",
    changes=(CLIP_RANGE[1], f"{ACTOR}policy_loss.beta1", f"{ACTOR}policy_loss.beta2"),
)

ASPO = replace(_CLIPPED, name="aspo", label="ASPO", loss="aspo", changes=(CLIP_RANGE[1], f"{ACTOR}clip_ratio_c"))

DCPO_CLIP = replace(_CLIPPED, name="dcpo_clip", label="DCPO clip", loss="dcpo_clip", changes=CLIP_RANGE)
