"""Obstacle: this project refuses ``backend=megatron`` without a GPU, as users should be told."""

from types import ModuleType


def admit_cpu(module: ModuleType) -> None:
    """Leave out the rule of the backend, in which this is all that is asked."""
    module.RULES = tuple(rule for rule in module.RULES if rule is not module.backend)
