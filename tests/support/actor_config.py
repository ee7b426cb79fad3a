"""The actor's configuration that tests of the losses share."""

from typing import Any

from verl.workers.config import ActorConfig, PolicyLossConfig

from gtpo_verl.integrations.losses import GTPOPolicyLossConfig


def actor(policy_loss: PolicyLossConfig | None = None, **changes: Any) -> ActorConfig:
    arguments = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "use_dynamic_bsz": True,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 10.0,
        "policy_loss": policy_loss or GTPOPolicyLossConfig(),
    }
    return ActorConfig(**(arguments | changes))
