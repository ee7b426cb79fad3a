"""Methods of credit assignment with rows of a guide in the batch: numbers worked out by hand, and loops over tokens in
float64.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import family_loops as family
import pytest
import reference_loops as reference
import torch
from pairwise import pairwise
from reference_loops import GRID_AXES

from gtpo_verl.algorithms import AdvantageOutput, Batch, algorithm, algorithms, grpo_s_advantages, gtpo_advantages
from gtpo_verl.algorithms.mixed_policy import GuideConfig, guided_advantages, on_only_advantages

MIX = GuideConfig(mode="mix")
ON_ONLY = GuideConfig(mode="mix", adv_scope="on_only")
RESHAPED = [name for name, entry in algorithms().items() if entry.guide == "dapo"]


def guided(
    name: str, batch: Batch, guide: torch.Tensor, settings: GuideConfig = MIX, **of_method: Any
) -> AdvantageOutput:
    method = algorithm(name)
    return guided_advantages(method, batch, guide, settings, method.config(**of_method))


# -------------------------------------------------------------------- by hand

GUIDE = torch.tensor([False, False, True])
SHARES = {"gtpo": {"alpha1": 0.9, "alpha2": 0.1}, "grpo_s": {"beta1": 0.9, "beta2": 0.1}}


def three_rows(correct: list[bool]) -> Batch:
    """Two own responses of two tokens, and one of the guide whose entropies nobody may read."""
    entropy = torch.tensor([[0.1, 0.2], [0.3, 0.1], [math.nan, math.inf]]).double()
    verdicts = torch.tensor(correct)
    rewards = torch.where(verdicts, 1.0, -1.0).double()
    return Batch(torch.ones(3, 2), torch.zeros(3, dtype=torch.long), verdicts, entropy, rewards)


HAND = [
    # Own rows wrong, the guide's correct. GTPO: w⁻ = (1/H) / mean = 1.5, 2/3; 0.5, 4/3, so r⁻ = -0.9 - 0.1 w⁻; the
    # guide's tokens have α1 + α2 = 1. Correct ones and four zeros: mean 1/3, std 0.516398. Wrong ones and two zeros:
    # mean -2/3, std 0.517794.
    ("gtpo", [False, False, True], [[-0.740320, -0.579381], [-0.547193, -0.708132], [1.290992, 1.290992]]),
    # GRPO-S: Ĥ = 0.15, 0.2, w⁻ = 8/7, 6/7, r⁻ = -1.014286, -0.985714. The guide's 1 and two zeros: mean 1/3, std
    # 0.577350.
    ("grpo_s", [False, False, True], [[-0.601909] * 2, [-0.552436] * 2, [1.154699] * 2]),
    # One own row correct, the guide's wrong, so each own token is alone at its position: its weight is 1.
    ("gtpo", [True, False, False], [[1.290992] * 2, [-0.645496] * 2, [-0.645496] * 2]),
    ("grpo_s", [True, False, False], [[1.154699] * 2, [-0.577349] * 2, [-0.577349] * 2]),
    # All correct: a group of one polarity.
    ("gtpo", [True, True, True], [[0, 0]] * 3),
    ("grpo_s", [True, True, True], [[0, 0]] * 3),
]


@pytest.mark.parametrize(("name", "correct", "expected"), HAND)
def test_unshaped_rewards_by_hand(name: str, correct: list[bool], expected: list[list[float]]) -> None:
    found = guided(name, three_rows(correct), GUIDE, **SHARES[name]).advantages
    for row, values in zip(found.tolist(), expected, strict=True):
        assert row == pytest.approx(values, abs=2e-6)


def test_a_guide_without_an_entropy_weighs_as_the_average_own_response() -> None:
    """In every mode of the wrong rewards, with early eq. 13's clip, and with a penalty of length on correct rows."""
    batch = replace(three_rows([True, True, True]), length_penalty=torch.tensor([0.0, 0.0, -0.5]).double())
    for negatives, wrong in (("zero", 0.0), ("inverse", -1.0), ("based_inverse", -1.0)):
        settings = SHARES["gtpo"] | {"negatives": negatives, "degenerate": "shape", "clip_kappa": 2.0}
        assert guided("gtpo", batch, GUIDE, **settings).shaped_rewards[2].tolist() == [0.5, 0.5]
        wrongs = replace(batch, correct=torch.tensor([True, True, False]))
        found = guided("gtpo", wrongs, GUIDE, **settings).shaped_rewards
        assert found[2].tolist() == [wrong, wrong]
        assert found[:2].mean() >= 1
    clipped = guided("gtpo", batch, GUIDE, alpha1=0.8, alpha2=0.1, clip_kappa=1.5, degenerate="shape")
    assert clipped.shaped_rewards[2].tolist() == pytest.approx([0.5, 0.5]), "max(0.9, 1) - 0.5"


# -------------------------------------------------------------------- GTPO and GRPO-S against loops

KINDS = {"kind": ("no penalty", "penalty")}
POINTS = {name: pairwise(axes | KINDS) for name, axes in GRID_AXES.items()}


def random_batch(seed: int, with_penalty: bool) -> tuple[Batch, torch.Tensor]:
    """Ragged groups with holes, empty rows and groups of one polarity; the last rows of a group are the guide's."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 24, 7
    group = torch.arange(rows) // 4
    guide = torch.arange(rows) % 4 >= 4 - torch.randint(0, 3, (rows // 4,), generator=generator)[group]
    correct = torch.rand(rows, generator=generator) < torch.tensor([0.0, 0.3, 0.5, 0.7, 1.0, 0.2])[group]
    mask = torch.arange(columns) < torch.randint(0, columns + 1, (rows, 1), generator=generator)
    mask &= torch.rand(rows, columns, generator=generator) < 0.9
    entropy = 3 * torch.rand(rows, columns, generator=generator).double()
    entropy[guide] = math.nan
    penalty = -torch.rand(rows, generator=generator).double() if with_penalty else None
    order = torch.randperm(rows, generator=generator)
    rewards = torch.where(correct, 1.0, -1.0).double()
    log_probs = -torch.rand(rows, columns, generator=generator).double()
    batch = Batch(mask, group[order], correct[order], entropy[order], rewards[order], log_probs, penalty)
    return batch, guide[order]


def expected_advantages(name: str, batch: Batch, guide: torch.Tensor, options: Any) -> list[list[float]]:
    """By loops: weights of own tokens (or responses) alone, unshaped rewards of the guide's, all normalised."""
    mask, group, correct = batch.response_mask.tolist(), batch.group.tolist(), batch.correct.tolist()
    of_guide = guide.tolist()
    penalty = [0.0] * len(group) if batch.length_penalty is None else batch.length_penalty.tolist()
    tokens = reference.tokens_of(mask)
    whole = {i for i, _ in tokens}
    with_own = {group[i] for i in whole if not of_guide[i]}
    left_out = reference.degenerate_groups(whole, correct, group) if options.degenerate == "zero" else set()
    tokens = [(i, t) for i, t in tokens if group[i] in with_own - left_out]
    H = reference.prepared_entropies(batch.entropy.tolist(), [(i, t) for i, t in tokens if not of_guide[i]], options)
    if name == "gtpo":
        values = {(i, t): h if correct[i] else 1 / h for (i, t), h in H.items()}
        compared = {(i, t): reference.comparison_key(i, t, correct[i], group[i], options) for i, t in values}
        weight = reference.weights(values, compared, options.mean)
        items = tokens
    else:
        of_row = defaultdict(list)
        for (i, _), h in H.items():
            of_row[i].append(h)
        means = {i: reference.MEANS[options.entropy_mean](hs) for i, hs in of_row.items()}
        values = {(i, 0): h if correct[i] else 1 / h for i, h in means.items()}
        compared = {(i, 0): (correct[i], group[i] if options.scope == "group" else "batch") for i, _ in values}
        weight = reference.weights(values, compared, options.mean)
        items = sorted({(i, 0) for i, _ in tokens})
    rewards = {
        item: reference.shaped_reward(
            1.0 if of_guide[item[0]] else weight[item], correct[item[0]], options, penalty[item[0]]
        )
        for item in items
    }
    side = {item: correct[item[0]] for item in items}
    norm_key = {item: group[item[0]] if options.norm_scope == "group" else "batch" for item in items}
    found = reference.normalised(rewards, side, norm_key, options, reference.FLOAT64_EPS)
    found = reference.sign_preserved(found, side, options)
    if name == "grpo_s":
        found = {(i, t): found[i, 0] for i, t in tokens}
    return reference.dense(found, mask)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_unshaped_rewards_against_loops(name: str) -> None:
    scales = ("alpha1", "alpha2") if name == "gtpo" else ("beta1", "beta2")
    for number, point in enumerate(POINTS[name]):
        for seed in (number, 1000 + number):
            settings = {key: value for key, value in point.items() if key != "kind"}
            batch, guide = random_batch(seed, point["kind"] == "penalty")
            found = guided(name, batch, guide, **settings, **dict(zip(scales, (0.9, 0.2), strict=True)))
            expected = expected_advantages(name, batch, guide, reference.Options(scale1=0.9, scale2=0.2, **settings))
            torch.testing.assert_close(
                found.advantages,
                torch.tensor(expected, dtype=torch.float64),
                atol=1e-9,
                rtol=1e-9,
                msg=f"{point}, seed {seed}",
            )


@pytest.mark.parametrize("function", [gtpo_advantages, grpo_s_advantages])
def test_without_guide_rows_nothing_changes_bit_for_bit(function: Any) -> None:
    config = algorithm(function.__name__.removesuffix("_advantages")).config()
    for seed in range(3):
        batch, guide = random_batch(seed, with_penalty=True)
        batch = replace(batch, entropy=torch.where(batch.entropy.isnan(), 0.5, batch.entropy))
        arguments = batch.entropy, batch.correct, batch.response_mask, batch.group, config, batch.length_penalty
        without, none = function(*arguments), function(*arguments, guide=torch.zeros_like(guide))
        assert torch.equal(without.advantages, none.advantages)
        assert torch.equal(without.shaped_rewards, none.shaped_rewards)
        assert without.metrics == none.metrics


def test_weights_of_own_tokens_are_conserved() -> None:
    """Own rewards are those of a batch without the guide's rows, and average α1 + α2 at every position."""
    batch, guide = random_batch(5, with_penalty=False)
    batch = replace(batch, correct=torch.ones_like(guide))
    found = guided("gtpo", batch, guide, degenerate="shape").shaped_rewards
    alone = replace(batch, response_mask=batch.response_mask & ~guide[:, None])
    theirs = algorithm("gtpo").advantages(alone, algorithm("gtpo").config(degenerate="shape")).shaped_rewards
    assert torch.equal(found[~guide], theirs[~guide])
    for ident in batch.group.unique():
        own = (batch.group == ident) & ~guide
        for t in range(batch.response_mask.shape[1]):
            if len(tokens := found[own, t][batch.response_mask[own, t]]):
                assert tokens.mean().item() == pytest.approx(1.1, abs=1e-12)


def test_metrics_are_of_own_rows() -> None:
    batch, guide = random_batch(6, with_penalty=False)
    metrics = guided("gtpo", batch, guide).metrics
    own = batch.response_mask.any(1) & ~guide
    assert metrics["responses"] == own.sum()
    correct = batch.response_mask & (own & batch.correct)[:, None]
    assert metrics["entropy_correct"] == pytest.approx(batch.entropy[correct].mean().item())


# -------------------------------------------------------------------- methods that reshape DAPO's advantage


def rows_of(batch: Batch, mask: torch.Tensor) -> family.Rows:
    penalty = torch.zeros(len(mask)) if batch.length_penalty is None else batch.length_penalty
    columns = mask, batch.group, batch.correct, batch.entropy, batch.old_log_probs, batch.rewards, penalty
    return family.Rows(*(column.tolist() for column in columns))


@pytest.mark.parametrize("settings", [MIX, ON_ONLY], ids=["union", "on_only"])
@pytest.mark.parametrize("name", [name for name in RESHAPED if hasattr(family, name)])
def test_own_rows_are_reshaped_among_themselves(
    name: str, settings: GuideConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(6):
        batch, guide = random_batch(seed, with_penalty=seed % 2 == 1)
        batch.old_log_probs[guide] = math.nan  # nor are its probabilities read
        mask = batch.response_mask
        if settings is ON_ONLY:
            rewards = batch.rewards if batch.length_penalty is None else batch.rewards + batch.length_penalty
            whole = mask.any(1)
            A0 = torch.zeros(len(mask)).double()
            A0[whole] = on_only_advantages(rewards[whole], batch.group[whole], guide[whole])
            base = {(i, t): A0[i].item() for i, t in mask.nonzero().tolist()}
        else:
            base = family.dapo(rows_of(batch, mask))
        own = rows_of(batch, mask & ~guide[:, None])
        with monkeypatch.context() as patch:
            patch.setattr(family, "dapo", lambda rows, base=base: {token: base[token] for token in rows.tokens})
            expected = base | getattr(family, name)(own)
        found = guided(name, batch, guide, settings).advantages
        dense = torch.zeros_like(found)
        for token, value in expected.items():
            dense[token] = value
        torch.testing.assert_close(found, dense, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "qae", "w_reinforce", "psr", "nsr"])
def test_methods_of_rewards_alone_have_rows_of_one_kind(name: str) -> None:
    batch, guide = random_batch(3, with_penalty=True)
    batch = replace(batch, entropy=None)
    assert torch.equal(guided(name, batch, guide).advantages, algorithm(name).advantages(batch).advantages)


def test_guide_rows_may_be_asked_into_the_entropy_statistics() -> None:
    batch, guide = random_batch(4, with_penalty=False)
    batch = replace(batch, entropy=torch.where(guide[:, None], 2.0, batch.entropy))
    asked = GuideConfig(mode="mix", in_entropy_stats=True)
    for name in ("gtpo", "grpo_s", *RESHAPED):
        found = guided(name, batch, guide, asked).advantages
        assert torch.equal(found, algorithm(name).advantages(batch).advantages)
        if name != "random20":
            continue
        assert not torch.equal(found, guided(name, batch, guide).advantages)


@pytest.mark.parametrize("name", [name for name in RESHAPED if "entropy" in algorithm(name).needs])
@pytest.mark.parametrize("value", [math.nan, -5.0])
def test_entropies_of_own_rows_that_cannot_be_are_refused(name: str, value: float) -> None:
    batch = three_rows([True, False, True])
    assert batch.entropy is not None
    batch.entropy[1, 1] = value
    batch = replace(batch, old_log_probs=-torch.ones(3, 2).double())
    with pytest.raises(ValueError, match=rf"entropy of row 1, position 1 is {value}"):
        guided(name, batch, GUIDE)


def test_methods_without_a_rule_are_refused() -> None:
    batch, guide = random_batch(4, with_penalty=False)
    for name in ("rl_zvp", "empg"):
        with pytest.raises(ValueError, match="has no rule for rows of a guide"):
            guided(name, batch, guide)
    for name in ("gtpo", "grpo_s", "qae"):
        with pytest.raises(ValueError, match="has no rule for rows of a guide with adv_scope=on_only"):
            guided(name, batch, guide, ON_ONLY)
    for name in ("dapo", "dr_grpo"):
        with pytest.raises(ValueError, match="which knows no adv_scope"):
            guided(name, three_rows([True, False, True]), GUIDE, ON_ONLY)
    with pytest.raises(ValueError, match="in_entropy_stats=true makes guide rows like any other"):
        GuideConfig(mode="mix", adv_scope="on_only", in_entropy_stats=True)
