"""Obstacle: this project refuses ``backend=megatron`` without a GPU, as users should be told."""

from types import ModuleType


def admit_cpu(module: ModuleType) -> None:
    """Leave out the check of the backend, in which this is all that is checked."""
    module._check_backend = lambda config: None
