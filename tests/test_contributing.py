"""The worked example of CONTRIBUTING.md is a complete method: it runs, and its advantages are those worked out by
hand.
"""

import math
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from three_files import block

from gtpo_verl.algorithms import Algorithm, Batch


@pytest.fixture(scope="module")
def entry() -> Algorithm:
    module: Any = types.ModuleType("leave_one_out")
    exec(compile(block("python"), "CONTRIBUTING.md", "exec"), vars(module))
    return module.LEAVE_ONE_OUT


def test_advantages_of_the_example(entry: Algorithm) -> None:
    """Group 7 has the rewards 1, 1, -1, a punishment of a half on the second, and an empty one; group 9 has one."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    rewards = torch.tensor([1.0, 1.0, -1.0, 1.0, 5.0])
    penalty = torch.tensor([0.0, -0.5, 0.0, 0.0, 0.0])
    batch = Batch(mask, torch.tensor([7, 7, 7, 9, 7]), rewards > 0, rewards=rewards, length_penalty=penalty)
    each = torch.tensor([1 - (0.5 - 1) / 2, 0.5 - (1 - 1) / 2, -1 - (1 + 0.5) / 2, 0.0, 0.0])
    torch.testing.assert_close(entry.advantages(batch).advantages, each[:, None] * mask)
    doubled = entry.advantages(batch, entry.config(scale=2.0)).advantages
    torch.testing.assert_close(doubled, 2 * each[:, None] * mask)
    with pytest.raises(ValueError, match="reward of row 1 is nan"):
        entry.advantages(replace(batch, rewards=torch.tensor([0, math.nan, 0, 0, 0])))


def test_the_preset_of_the_example_is_that_of_its_entry(entry: Algorithm) -> None:
    preset = yaml.safe_load(block("yaml"))
    actor = preset["actor_rollout_ref"]["actor"]
    assert preset["algorithm"]["adv_estimator"] == entry.estimator == entry.name
    assert (actor["policy_loss"]["loss_mode"], actor["loss_agg_mode"]) == (entry.loss, entry.aggregation)
    assert entry.name in block("toml")
