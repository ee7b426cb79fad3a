"""The six rows of DAPO's Table 1: each differs from the one above in what the paper adds there, and the last one is
DAPO.
"""

import itertools

import pytest
from dotted import dotted

from gtpo_verl.config import choices, compose_config

ROWS = (
    "1_naive_grpo",
    "2_overlong_filtering",
    "3_clip_higher",
    "4_soft_overlong",
    "5_token_level_loss",
    "6_dapo",
)
FILTERING = "algorithm.overlong_filtering"
SOFT = "reward.reward_kwargs.overlong_buffer_cfg.enable"
STEPS = [  # from row to row: {key: (before, after)}
    {FILTERING: (False, True)},
    {"actor_rollout_ref.actor.clip_ratio_high": (0.2, 0.28)},
    {FILTERING: (True, False), SOFT: (False, True)},
    {"actor_rollout_ref.actor.loss_agg_mode": ("seq-mean-token-mean", "token-mean")},
    {"algorithm.filter_groups.enable": (False, True)},
]


@pytest.mark.parametrize("setting", ["default", pytest.param("paper_dapo_32b", marks=pytest.mark.exhaustive)])
@pytest.mark.slow  # fourteen compositions
def test_each_row_differs_from_the_one_above_in_one_thing(setting: str) -> None:
    rows = [dotted(compose_config([f"algo=ladder/{row}", f"setting={setting}"])) for row in ROWS]
    for (above, row), expected in zip(itertools.pairwise(rows), STEPS, strict=True):
        missing = object()
        differing = {
            key: (above.get(key, missing), row.get(key, missing))
            for key in above.keys() | row.keys()
            if above.get(key, missing) != row.get(key, missing)
        }
        assert differing == expected
    assert rows[-1] == dotted(compose_config(["algo=dapo", f"setting={setting}"]))


def test_the_first_row_has_nothing_of_dapo() -> None:
    config = compose_config([f"algo=ladder/{ROWS[0]}"])
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.adv_estimator == "grpo"
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode) == ("vanilla", "seq-mean-token-mean")
    assert actor.clip_ratio_low == actor.clip_ratio_high == 0.2
    assert not config.algorithm.filter_groups.enable
    assert not config.algorithm.overlong_filtering
    assert not config.reward.reward_kwargs.overlong_buffer_cfg.enable


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in ("setting", "algo") for name in choices(group)])
@pytest.mark.slow
@pytest.mark.exhaustive  # forty compositions
def test_surplus_is_thrown_away_as_in_the_paper_unless_asked_for(choice: str) -> None:
    config = compose_config([choice])
    assert config.algorithm.filter_groups.carry_over.max_age == 0
    assert not config.algorithm.overlong_filtering
