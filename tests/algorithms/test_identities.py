"""The identities of the method, over the whole grid of settings within the scope in which each holds."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig, grpo_advantages, grpo_s_advantages, gtpo_advantages

TIGHT = {"rtol": 0, "atol": 1e-9}


def test_1_without_entropy_gtpo_is_token_weighted_grpo(batches, gtpo_settings):
    @given(st.data())
    def check(data):
        batch = data.draw(batches(mixed=True))
        settings = data.draw(
            gtpo_settings(
                alpha1=1.0, alpha2=0.0, normalization="all", norm_scope="group", clip_kappa=None, preserve_sign=False
            )
        )
        assume(settings["negatives"] != "inverse")
        out = batch.call(gtpo_advantages, GTPOConfig(**settings)).advantages
        for ident in batch.group.unique():
            member = (batch.group == ident) & (batch.lengths > 0)
            rewards = batch.correct.double()[:, None].expand(batch.mask.shape)[batch.mask & member[:, None]]
            if rewards.unique().numel() < 2:
                continue  # a row of the group is empty and what is left has one polarity
            expected = (batch.correct.double() - rewards.mean()) / (rewards.std() + 1e-6)
            torch.testing.assert_close(out[member], expected[member, None] * batch.mask[member], **TIGHT)

    check()


def test_2_without_entropy_grpo_s_is_verls_grpo(batches, grpo_s_settings):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    @given(st.data())
    def check(data):
        batch = data.draw(batches(empty=False, smallest_group=2))
        settings = data.draw(
            grpo_s_settings(beta1=1.0, beta2=0.0, normalization="all", norm_scope="group", preserve_sign=False)
        )
        assume(settings["negatives"] != "inverse")
        assume(bool((batch.lengths > 0).all()))
        rewards = batch.correct.double()[:, None] * torch.nn.functional.one_hot(
            torch.zeros(len(batch.mask)).long(), batch.mask.shape[1]
        )
        index = np.array([str(ident) for ident in batch.group.tolist()], dtype=object)
        expected, _ = compute_grpo_outcome_advantage(rewards, batch.mask, index)
        out = batch.call(grpo_s_advantages, GRPOSConfig(**settings)).advantages
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
        ours = grpo_advantages(batch.correct.double(), batch.mask, batch.group).advantages
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)

    check()


def test_3_equal_entropies_weigh_one(batches, gtpo_settings):
    @given(st.data(), st.floats(1e-5, 10))
    def check(data, entropy):
        batch = data.draw(batches())
        batch = replace(batch, entropy=torch.full_like(batch.entropy, entropy))
        settings = data.draw(gtpo_settings(degenerate="shape", negatives="based_inverse", clip_kappa=None))
        shaped = batch.call(gtpo_advantages, GTPOConfig(**settings)).shaped_rewards
        sign = torch.where(batch.correct, 1.0, -1.0).double()[:, None]
        expected = sign * (settings["alpha1"] + settings["alpha2"]) * batch.mask
        torch.testing.assert_close(shaped, expected, **TIGHT)

    check()


def test_4_the_total_reward_at_a_position_is_conserved(batches, gtpo_settings):
    @given(st.data())
    def check(data):
        batch = data.draw(batches())
        settings = data.draw(
            gtpo_settings(axis="position", mean="arithmetic", scope="group", clip_kappa=None, degenerate="shape")
        )
        shaped = batch.call(gtpo_advantages, GTPOConfig(**settings)).shaped_rewards
        for ident in batch.group.unique():
            right = (batch.group == ident) & batch.correct
            alive = batch.mask[right].sum(0)
            total = (settings["alpha1"] + settings["alpha2"]) * alive.double()
            torch.testing.assert_close(shaped[right].sum(0), total, **TIGHT)

    check()


def test_4_grpo_s_conserves_the_total_reward_of_the_correct_responses(batches, grpo_s_settings):
    @given(st.data())
    def check(data):
        batch = data.draw(batches())
        settings = data.draw(grpo_s_settings(mean="arithmetic", scope="group", degenerate="shape"))
        shaped = batch.call(grpo_s_advantages, GRPOSConfig(**settings)).shaped_rewards
        for ident in batch.group.unique():
            right = (batch.group == ident) & batch.correct & (batch.lengths > 0)
            total = (settings["beta1"] + settings["beta2"]) * right.sum().item()
            assert abs(shaped[right].sum().item() - total) < 1e-9

    check()


def test_5_on_responses_of_one_token_gtpo_is_grpo_s(batches, gtpo_settings):
    @given(st.data())
    def check(data):
        batch = data.draw(batches(tokens=1))
        settings = data.draw(gtpo_settings(clip_kappa=None))
        assume(settings["axis"] != "response")
        token = batch.call(gtpo_advantages, GTPOConfig(**settings))
        renamed = {k: v for k, v in settings.items() if k not in ("axis", "clip_kappa", "alpha1", "alpha2")}
        config = GRPOSConfig(beta1=settings["alpha1"], beta2=settings["alpha2"], **renamed)
        sequence = batch.call(grpo_s_advantages, config)
        torch.testing.assert_close(token.shaped_rewards[:, 0], sequence.shaped_rewards, **TIGHT)
        torch.testing.assert_close(token.advantages, sequence.advantages, **TIGHT)

    check()


def test_6_rows_in_another_order(batches, gtpo_settings, grpo_s_settings):
    @given(st.data())
    def check(data):
        batch = data.draw(batches())
        order = torch.tensor(data.draw(st.permutations(range(len(batch.group)))))
        shuffled = replace(
            batch,
            entropy=batch.entropy[order],
            correct=batch.correct[order],
            mask=batch.mask[order],
            group=batch.group[order],
        )
        for function, config in (
            (gtpo_advantages, GTPOConfig(**data.draw(gtpo_settings()))),
            (grpo_s_advantages, GRPOSConfig(**data.draw(grpo_s_settings()))),
        ):
            plain, moved = batch.call(function, config), shuffled.call(function, config)
            torch.testing.assert_close(moved.advantages, plain.advantages[order], **TIGHT)
            torch.testing.assert_close(moved.shaped_rewards, plain.shaped_rewards[order], **TIGHT)

    check()


def test_6_groups_with_other_names(batches, gtpo_settings, grpo_s_settings):
    @given(st.data())
    def check(data):
        batch = data.draw(batches())
        names, inverse = batch.group.unique(return_inverse=True)
        others = data.draw(st.lists(st.integers(-99, 99), min_size=len(names), max_size=len(names), unique=True))
        renamed = replace(batch, group=torch.tensor(others)[inverse])
        for function, config in (
            (gtpo_advantages, GTPOConfig(**data.draw(gtpo_settings()))),
            (grpo_s_advantages, GRPOSConfig(**data.draw(grpo_s_settings()))),
        ):
            plain, other = batch.call(function, config), renamed.call(function, config)
            torch.testing.assert_close(other.advantages, plain.advantages, **TIGHT)

    check()


def test_6_more_padding(batches, gtpo_settings, grpo_s_settings):
    @given(st.data(), st.integers(0, 5), st.integers(0, 3), st.sampled_from([float("nan"), float("inf"), -5.0, 0.0]))
    def check(data, columns, rows, filling):
        batch = data.draw(batches())
        size, width = batch.mask.shape
        entropy = torch.full((size + rows, width + columns), filling, dtype=torch.float64)
        entropy[:size, :width] = batch.entropy
        mask = torch.zeros(entropy.shape, dtype=torch.bool)
        mask[:size, :width] = batch.mask
        # An empty row may claim to be a correct member of a group that exists.
        padded = replace(
            batch,
            entropy=entropy,
            mask=mask,
            correct=torch.cat([batch.correct, torch.ones(rows, dtype=torch.bool)]),
            group=torch.cat([batch.group, batch.group[:1].expand(rows)]),
        )
        for function, config in (
            (gtpo_advantages, GTPOConfig(**data.draw(gtpo_settings()))),
            (grpo_s_advantages, GRPOSConfig(**data.draw(grpo_s_settings()))),
        ):
            plain, more = batch.call(function, config), padded.call(function, config)
            torch.testing.assert_close(more.advantages[:size, :width], plain.advantages, **TIGHT)
            assert not more.advantages[~mask].any()
            assert not more.shaped_rewards[size:].any()
            assert more.metrics == plain.metrics

    check()


def test_7_within_is_blind_to_the_size_of_the_reward(gtpo_settings):
    @given(st.data(), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0.1, 1.0, 7.0]))
    def check(data, seed, alpha1, alpha2):
        generator = torch.Generator().manual_seed(seed)
        # Entropies that differ well: the +1e-6 in the denominator would be seen where rewards hardly do.
        entropy = 0.1 + 3 * torch.rand(8, 30, generator=generator, dtype=torch.float64)
        correct, group = torch.tensor([True, True, False, False] * 2), torch.tensor([0] * 4 + [1] * 4)
        mask = torch.ones(8, 30, dtype=torch.bool)
        settings = data.draw(gtpo_settings(normalization="within", clip_kappa=None, entropy_clip=None))

        def advantages(**changed):
            return gtpo_advantages(entropy, correct, mask, group, GTPOConfig(**(settings | changed))).advantages

        torch.testing.assert_close(advantages(alpha1=alpha1, alpha2=alpha2), advantages(), rtol=0, atol=1e-4)

    check()


def test_8_no_gradient_reaches_the_entropies(batches, gtpo_settings, grpo_s_settings):
    @given(st.data())
    def check(data):
        batch = data.draw(batches())
        batch.entropy.requires_grad_()
        for function, config in (
            (gtpo_advantages, GTPOConfig(**data.draw(gtpo_settings()))),
            (grpo_s_advantages, GRPOSConfig(**data.draw(grpo_s_settings()))),
        ):
            out = batch.call(function, config)
            assert not out.advantages.requires_grad
            assert not out.shaped_rewards.requires_grad

    check()
