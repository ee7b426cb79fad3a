"""The presets `algo=` against the table of the published versions."""

import pytest
from omegaconf import OmegaConf

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig
from gtpo_verl.algorithms.config import config_from
from gtpo_verl.config import compose_config

TABLE = {
    "gtpo_v1": (GTPOConfig, {"alpha1": 0.9, "alpha2": 0.1, "negatives": "zero"}),
    "gtpo_v1_clip": (
        GTPOConfig,
        {"alpha1": 0.9, "alpha2": 0.1, "negatives": "zero", "clip_kappa": 2.0, "length_penalty": "soft"},
    ),
    "gtpo_v2": (GTPOConfig, {"alpha1": 0.9, "alpha2": 0.1, "negatives": "inverse"}),
    "gtpo_v6": (GTPOConfig, {"alpha1": 1.0, "alpha2": 0.1, "negatives": "based_inverse"}),
    "gtpo": (GTPOConfig, {"entropy_floor": 1e-3}),  # deviates from the text: docs/reference/equations.md, 5
    "grpo_s_v1": (GRPOSConfig, {"beta1": 0.9, "beta2": 0.1, "negatives": "zero"}),
    "grpo_s_v2": (GRPOSConfig, {"beta1": 0.9, "beta2": 0.1, "negatives": "inverse"}),
    "grpo_s": (GRPOSConfig, {"beta1": 1.0, "beta2": 0.1, "negatives": "based_inverse"}),
}


def composed(name: str):
    """The preset on top of the default setting, which punishes overlong responses in every arm alike."""
    return compose_config([f"algo={name}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_preset_is_the_published_version(name: str):
    config, (kind, settings) = composed(name), TABLE[name]
    estimator, loss_mode, aggregation = (
        ("gtpo", "vanilla", "token-mean") if kind is GTPOConfig else ("grpo_s", "grpo_s", "seq-mean-token-mean")
    )
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.adv_estimator == estimator
    assert actor.policy_loss.loss_mode == loss_mode
    assert actor.loss_agg_mode == aggregation
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (actor.policy_loss.seq_clip_ratio_low, actor.policy_loss.seq_clip_ratio_high) == (0.2, 0.28)
    # All other settings are the defaults of the configuration class.
    expected = kind(**{"length_penalty": "soft"} | settings)
    assert config_from(kind, OmegaConf.to_container(config.algorithm[estimator])) == expected


@pytest.mark.parametrize(("name", "aggregation"), [("grpo", "seq-mean-token-mean"), ("dapo", "token-mean")])
def test_baselines(name: str, aggregation: str):
    config = composed(name)
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"
    assert config.actor_rollout_ref.actor.loss_agg_mode == aggregation
