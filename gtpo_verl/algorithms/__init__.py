"""The mathematics of arXiv 2508.04349 (GTPO and GRPO-S) and of its baseline, in torch alone."""

from gtpo_verl.algorithms._packed.layout import response_lengths
from gtpo_verl.algorithms._packed.recorder import AdvantageOutput
from gtpo_verl.algorithms.config import GRPOSConfig, GTPOConfig
from gtpo_verl.algorithms.grpo import grpo_advantages
from gtpo_verl.algorithms.grpo_s import grpo_s_advantages
from gtpo_verl.algorithms.gtpo import gtpo_advantages
from gtpo_verl.algorithms.penalties import (
    group_relative_overlong_penalty,
    length_penalty_for,
    soft_overlong_penalty,
)

__all__ = [
    "AdvantageOutput",
    "GRPOSConfig",
    "GTPOConfig",
    "group_relative_overlong_penalty",
    "grpo_advantages",
    "grpo_s_advantages",
    "gtpo_advantages",
    "length_penalty_for",
    "response_lengths",
    "soft_overlong_penalty",
]
