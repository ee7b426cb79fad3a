"""The mathematics of arXiv 2508.04349 (GTPO and GRPO-S) and of its baselines, in torch alone; a file a method."""

from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.groups import response_lengths
from gtpo_verl.algorithms.grpo import grpo_advantages
from gtpo_verl.algorithms.grpo_s import GRPOSConfig, grpo_s_advantages
from gtpo_verl.algorithms.gtpo import GTPOConfig, gtpo_advantages
from gtpo_verl.algorithms.metrics import credit_metrics
from gtpo_verl.algorithms.penalties import (
    group_relative_overlong_penalty,
    length_penalty_for,
    soft_overlong_penalty,
)
from gtpo_verl.algorithms.registry import Algorithm, Style, algorithm, algorithm_of, algorithms

__all__ = [
    "AdvantageOutput",
    "Algorithm",
    "Batch",
    "GRPOSConfig",
    "GTPOConfig",
    "Style",
    "algorithm",
    "algorithm_of",
    "algorithms",
    "credit_metrics",
    "group_relative_overlong_penalty",
    "grpo_advantages",
    "grpo_s_advantages",
    "gtpo_advantages",
    "length_penalty_for",
    "response_lengths",
    "soft_overlong_penalty",
]
