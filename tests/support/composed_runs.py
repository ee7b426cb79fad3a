"""Composed runs for the tests of a plan: each is composed once, and tests change copies."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import compose_config, prepare

Run = Callable[..., DictConfig]


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    config = compose_config(overrides)
    prepare(config, overrides)
    return config


@pytest.fixture
def run() -> Run:
    """A prepared run: ``run("setting=small_gpu", {"data.train_batch_size": 32})``; the dict is changed behind the
    composition.
    """

    def get(*items: Any) -> DictConfig:
        overrides = tuple(item for item in items if isinstance(item, str))
        config = copy.deepcopy(_composed(overrides))
        for changes in items:
            if isinstance(changes, dict):
                for key, value in changes.items():
                    OmegaConf.update(config, key, value, force_add=True)
        return config

    return get
