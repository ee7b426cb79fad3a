"""Reads ``algorithm.gtpo`` and ``algorithm.grpo_s`` of a run's configuration. Needs torch, not verl."""

import warnings
from collections.abc import Mapping
from typing import Any

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig
from gtpo_verl.errors import UserError

CONFIG_CLASSES: dict[str, type[GTPOConfig] | type[GRPOSConfig]] = {"gtpo": GTPOConfig, "grpo_s": GRPOSConfig}


def algorithm_config(
    name: str, algorithm: Mapping[str, Any], **settings: Any
) -> tuple[GTPOConfig | GRPOSConfig, list[str]]:
    """Read the section of one algorithm.

    Args:
        name: ``gtpo`` or ``grpo_s``.
        algorithm: the run's ``algorithm`` section.
        settings: values that the run keeps elsewhere; they win.

    Returns:
        The algorithm's config, and what is unusual about it, a sentence each.

    Raises:
        UserError: an unknown key or an impossible value, with the rule it breaks.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = CONFIG_CLASSES[name].from_mapping({**algorithm[name], **settings})
        except (ValueError, TypeError) as error:
            raise UserError(f"algorithm.{name}: {error}") from error
    return config, [str(warning.message) for warning in caught]
