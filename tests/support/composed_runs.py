"""Runs are composed once in a process of tests, which gets a copy each time: Hydra takes a quarter of a second."""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl import config as composing
from gtpo_verl.algorithms import algorithms
from gtpo_verl.config import compose_config, prepare

Run = Callable[..., DictConfig]

_hydras = composing.compose


@cache
def _pickled(name: str, overrides: tuple[str, ...], methods: tuple[str, ...]) -> bytes:
    """The methods decide which keys there are."""
    return pickle.dumps(_hydras(name, overrides=list(overrides)))


def _compose(name: str, overrides: list[str]) -> Any:
    return pickle.loads(_pickled(name, tuple(overrides), tuple(algorithms())))


composing.compose = _compose  # type: ignore[assignment]


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
