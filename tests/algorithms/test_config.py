"""Settings: the defaults are the presets of the late text, and impossible values are refused with the rule they
break.
"""

from dataclasses import FrozenInstanceError, asdict

import pytest
import torch

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig, length_penalty_for, soft_overlong_penalty
from gtpo_verl.algorithms.config import config_from

SHARED = {
    "negatives": "based_inverse",
    "mean": "arithmetic",
    "scope": "group",
    "normalization": "all",
    "norm_scope": "group",
    "entropy_clip": None,
    "entropy_floor": 1e-6,
    "degenerate": "zero",
    "preserve_sign": False,
    "length_penalty": "none",
    "length_denominator": "cache",
    "gamma": 0.75,
}


def test_defaults_are_the_presets():
    token = {"alpha1": 1.0, "alpha2": 0.1, "axis": "position", "clip_kappa": None}
    sequence = {"beta1": 1.0, "beta2": 0.1, "entropy_mean": "arithmetic"}
    assert asdict(GTPOConfig()) == SHARED | token
    assert asdict(GRPOSConfig()) == SHARED | sequence


def test_settings_cannot_change():
    with pytest.raises(FrozenInstanceError):
        GTPOConfig().alpha1 = 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"negatives": "inverted"}, "negatives must be one of .*did you mean inverse"),
        ({"mean": "harmonic"}, "mean must be one of arithmetic, geometric"),
        ({"axis": "positions"}, "did you mean position"),
        ({"scope": "world"}, "scope must be one of"),
        ({"norm_scope": "token"}, "norm_scope must be one of"),
        ({"normalization": "std"}, "normalization must be one of"),
        ({"degenerate": "drop"}, "degenerate must be one of"),
        ({"length_penalty": "hard"}, "length_penalty must be one of"),
        ({"length_denominator": "L1"}, "length_denominator must be one of"),
        ({"clip_kappa": 1.0}, "clip_kappa must be above 1"),
        ({"alpha1": 0.5, "clip_kappa": 2.0}, r"alpha1 \* \(1 \+ 1/kappa\) >= 1.*0\.75"),
        ({"alpha1": -1.0}, r"alpha1 must be in \[0, inf\]"),
        ({"alpha2": float("nan")}, "alpha2 must be a finite number"),
        ({"alpha1": "1.0"}, "alpha1 must be a finite number"),
        ({"alpha1": 0.0, "alpha2": 0.0}, "must not both be 0"),
        ({"entropy_floor": 0.0}, "entropy_floor must be above 0"),
        ({"entropy_clip": (0.28, 0.2)}, "entropy_clip needs 0 <= lo <= hi"),
        ({"entropy_clip": (-1, 0.2)}, "entropy_clip needs 0 <= lo <= hi"),
        ({"entropy_clip": 0.2}, "entropy_clip must be two numbers"),
        ({"entropy_clip": "ab"}, "entropy_clip must be two numbers"),
        ({"entropy_clip": (0.2, 0.25, 0.3)}, "entropy_clip must be two numbers"),
        ({"preserve_sign": "yes"}, "preserve_sign must be true or false"),
        ({"gamma": 0.5}, r"gamma must be in \(0.5, 1\]"),
        ({"gamma": 1.1}, r"gamma must be in \(0.5, 1\]"),
    ],
)
def test_impossible_values(changes, message):
    with pytest.raises(ValueError, match=message):
        GTPOConfig(**changes)


def test_bounds_that_meet_are_possible():
    GTPOConfig(alpha1=0.9, alpha2=0.1, clip_kappa=9.0)  # 0.9 * (1 + 1/9) is 1 but for its last bit
    GTPOConfig(gamma=1.0)


def test_from_a_mapping():
    assert config_from(GTPOConfig, {"alpha1": 0.9, "entropy_clip": [0, 1]}) == GTPOConfig(
        alpha1=0.9, entropy_clip=(0.0, 1.0)
    )
    with pytest.raises(ValueError, match="there is no setting 'alpha_1'; did you mean alpha1"):
        config_from(GTPOConfig, {"alpha_1": 0.9})
    with pytest.raises(ValueError, match="there is no setting 'clip_kappa'"):
        config_from(GRPOSConfig, {"clip_kappa": 2.0})
    with pytest.raises(ValueError, match="there is no setting 'max_length'"):  # of the run, not of the method
        config_from(GTPOConfig, {"max_length": 100})
    with pytest.raises(ValueError, match="negatives must be one of"):
        config_from(GTPOConfig, {"negatives": None})


def test_from_a_hydra_node():
    from omegaconf import OmegaConf

    node = OmegaConf.create({"beta2": 0.2, "entropy_clip": [0.2, 0.28]})
    assert config_from(GRPOSConfig, node) == GRPOSConfig(beta2=0.2, entropy_clip=(0.2, 0.28))


def test_the_length_penalty_a_config_names():
    lengths = torch.tensor([10, 90, 95, 0])
    correct, group = torch.tensor([True, True, True, False]), torch.zeros(4, dtype=torch.int64)
    assert length_penalty_for(GTPOConfig(), lengths, correct, group) is None
    soft = GTPOConfig(length_penalty="soft", length_denominator="max")
    expected = soft_overlong_penalty(lengths, 100, 20, "max")
    torch.testing.assert_close(length_penalty_for(soft, lengths, correct, group, 100, 20), expected)
    # K = max((10 + 95) / 2, 65) = 65.
    grop = GRPOSConfig(length_penalty="grop", gamma=0.9)
    expected = torch.tensor([0, -12.5 / 65, -15 / 65, 0], dtype=torch.float64)
    torch.testing.assert_close(length_penalty_for(grop, lengths, correct, group), expected)


@pytest.mark.parametrize(("maximum", "cache"), [(100, 0), (0, 10), (10, 11), (100, -1), (100, 4.5)])
def test_penalty_lengths_that_make_no_ramp(maximum, cache):
    with pytest.raises(ValueError, match="length"):
        soft_overlong_penalty(torch.tensor([1]), maximum, cache)
