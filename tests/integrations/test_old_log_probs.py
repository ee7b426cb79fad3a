"""The rollout's entropies beside the actor's, by hand-made numbers, and when the actor's pass is run for them."""

import pytest
import torch
from omegaconf import OmegaConf

from gtpo_verl.integrations.step.old_log_probs import OldLogProbs, agreement

MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
NOW = torch.ones_like(MASK)  # every token is of the actor's present weights
ACTOR = torch.tensor([[0.5, 1.5, 3.0, 9.0], [2.0, 0.25, -9.0, 9.0]])


def test_equal_entropies_agree_exactly_whatever_stands_outside_the_mask():
    rollout = torch.where(MASK, ACTOR, torch.nan)
    assert agreement(rollout, ACTOR, MASK, NOW) == pytest.approx(
        {
            "rollout_entropy/abs_diff_mean": 0.0,
            "rollout_entropy/abs_diff_max": 0.0,
            "rollout_entropy/correlation": 1.0,
            "rollout_entropy/stale_share": 0.0,
        }
    )


def test_a_perturbed_token_moves_every_figure():
    rollout = ACTOR.clone()
    rollout[0, 1] += 0.25
    figures = agreement(rollout, ACTOR, MASK, NOW)
    assert figures["rollout_entropy/abs_diff_max"] == 0.25
    assert figures["rollout_entropy/abs_diff_mean"] == 0.25 / 5
    assert 0.9 < figures["rollout_entropy/correlation"] < 1 - 1e-3


def test_a_shift_shows_in_the_difference_and_a_shuffle_in_the_correlation():
    shifted = agreement(ACTOR + 0.125, ACTOR, MASK, NOW)
    assert shifted["rollout_entropy/abs_diff_mean"] == shifted["rollout_entropy/abs_diff_max"] == 0.125
    assert shifted["rollout_entropy/correlation"] == pytest.approx(1.0)
    one_off = agreement(ACTOR.roll(1, dims=1), ACTOR, MASK, NOW)  # an off-by-one in the alignment
    assert one_off["rollout_entropy/correlation"] < 0.5


def test_tokens_of_older_weights_are_counted_apart():
    current = NOW.clone()
    current[1, 0] = False
    rollout = ACTOR.clone()
    rollout[1, 0] += 0.75  # the policy has moved since
    assert agreement(rollout, ACTOR, MASK, current) == pytest.approx(
        {
            "rollout_entropy/abs_diff_mean": 0.0,
            "rollout_entropy/abs_diff_max": 0.0,
            "rollout_entropy/correlation": 1.0,
            "rollout_entropy/stale_share": 0.2,
            "rollout_entropy/stale_abs_diff_mean": 0.75,
        }
    )


def test_a_batch_of_older_weights_alone_says_nothing_about_agreement():
    assert agreement(ACTOR + 0.5, ACTOR, MASK, ~NOW) == {
        "rollout_entropy/stale_share": 1.0,
        "rollout_entropy/stale_abs_diff_mean": 0.5,
    }


def passes(every: int) -> OldLogProbs:
    return OldLogProbs(OmegaConf.create({"algorithm": {"entropy": {"source": "rollout", "check_every": every}}}))


def test_the_actors_pass_runs_twice_at_first_and_then_every_so_many_steps():
    actor_pass = passes(every=4)
    due = []
    for step in range(1, 14):
        if actor_pass.is_due(step):
            due.append(step)
            actor_pass.ran(1.0, tokens=100)
    assert due == [1, 2, 5, 9, 13]


def test_after_a_resume_it_runs_twice_again():
    actor_pass = passes(every=4)
    assert actor_pass.is_due(7)
    actor_pass.ran(1.0, 100)
    assert actor_pass.is_due(8)
    actor_pass.ran(1.0, 100)
    assert [step for step in range(9, 18) if actor_pass.is_due(step)] == [9, 13, 17]


def test_never_is_never():
    assert not any(passes(every=0).is_due(step) for step in range(1, 50))


def test_time_saved_follows_the_last_pass_that_was_warm():
    actor_pass = passes(every=4)
    assert actor_pass.ran(60.0, tokens=100) == {"rollout_entropy/check_s": 60.0, "rollout_entropy/time_saved_s": 0.0}
    assert actor_pass.skipped(100) == {}, "the first pass compiles"
    actor_pass.ran(2.0, tokens=100)
    assert actor_pass.skipped(150) == {"rollout_entropy/time_saved_s": 3.0}
    actor_pass.ran(1.0, tokens=200)
    assert actor_pass.skipped(150) == {"rollout_entropy/time_saved_s": 0.75}
