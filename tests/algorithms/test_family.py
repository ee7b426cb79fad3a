"""The family of credit methods: published numbers, loops in float64 (tests/support/family_loops.py), identities,
invariances, and batches at the edge.
"""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_loops as loops
import pytest
import torch
from pairwise import pairwise

from gtpo_verl.algorithms import AdvantageOutput, Batch, algorithm, algorithms

TOLERANCE = 1e-8
REPOSITORY = Path(__file__).parents[2]


def name_of(value: Any) -> str:
    """The identifier of a parameter in the name of a test."""
    return value if isinstance(value, str) else ""


A = 2 / 3 / (3**-0.5 + 1e-6)  # 1.154699, of the one correct response of fixture F; -A / 2 of the wrong ones


def fixture_f() -> Batch:
    """One group: a is correct, b and c are wrong."""
    H = [[2, 1, 0.5, 0.5], [1, 3, 0.5, math.nan], [0.5, 1.5, math.nan, math.nan]]
    probabilities = [[0.2, 0.5, 0.8, 0.9], [0.4, 0.1, 0.8, math.nan], [0.9, 0.3, math.nan, math.nan]]
    rewards = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    entropy = torch.tensor(H, dtype=torch.float64)
    log_probs = torch.tensor(probabilities, dtype=torch.float64).log()
    return Batch(~entropy.isnan(), torch.zeros(3, dtype=torch.int64), rewards > 0, entropy, rewards, log_probs)


def only(batch: Batch, *rows: int) -> Batch:
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, **{name: value[list(rows)] for name, value in tensors.items()})


def advantages(name: str, batch: Batch, **settings: Any) -> torch.Tensor:
    method = algorithm(name)
    return method.advantages(batch, method.config(**settings)).advantages


KEPT = [[9 / 2 * A, 0, 0, 0], [0, -9 / 4 * A, 0], [0, 0]]
F: list[tuple[str, dict[str, Any], list[list[float]]]] = [
    ("dr_grpo", {}, [[2 / 3] * 4, [-1 / 3] * 3, [-1 / 3] * 2]),
    ("fork20", {}, KEPT),
    ("fork20", {"rule": "topk"}, KEPT),
    ("fork20", {"normalizer": "all"}, [[A, 0, 0, 0], [0, -A / 2, 0], [0, 0]]),
    (
        "entropy_bonus",
        {},
        [[1.732048, 1.554699, 1.354699, 1.354699], [-0.288675, -0.288675, -0.377349], [-0.377349, -0.288675]],
    ),
    (
        "eapo",
        {},
        [[1.270168, 1.113874, 1.039229, 1.039229], [-0.536524, -0.635084, -0.519614], [-0.519614, -0.635084]],
    ),
    (
        "polarity_entropy",
        {"lambda_correct": 0.5, "lambda_wrong": -0.5},
        [[1.567091, 1.072220, 0.824785, 0.824785], [-0.618589, -0.123718, -0.742306], [-0.742306, -0.494871]],
    ),
    ("eda", {}, [[1.347148] * 4, [-0.449049] * 3, [-0.673574] * 2]),
    ("empg", {}, [[1.308826] * 4, [-0.423222] * 3, [-0.885603] * 2]),
    (
        "ar",
        {"alpha": 0.3},
        [
            [weight * A for weight in (0.76, 0.85, 0.94, 0.97)],
            [weight * -A / 2 for weight in (0.82, 0.73, 0.94)],
            [weight * -A / 2 for weight in (0.97, 0.79)],
        ],
    ),
    ("prob_mask", {}, [[A, A, A, 0], [-A / 2] * 3, [0, -A / 2]]),
    ("stare_o1", {}, [[A] * 4, [-A / 2] * 3, [-A / 2] * 2]),  # the entropy is above the target
    ("stare_o1", {"target_entropy": None}, [[1.270168, A, A, A], [-A / 2] * 3, [-A / 2] * 2]),
    ("stare_c2", {"target_entropy": 2.0}, [[1.270168, A, A, A], [-A / 2, -0.519614, -A / 2], [-A / 2] * 2]),
    ("w_reinforce", {}, [[0.1] * 4, [-1] * 3, [-1] * 2]),
    ("psr", {}, [[1] * 4, [0] * 3, [0] * 2]),
    ("nsr", {}, [[0] * 4, [-1] * 3, [-1] * 2]),
    ("qae", {}, [[1.732048] * 4, [0] * 3, [0] * 2]),
    ("kl_cov", {}, [[A] * 4, [-A / 2] * 3, [-A / 2] * 2]),
    ("dapo_blame", {}, [[A] * 4, [-A / 4] * 3, [-A / 4] * 2]),
    ("dapo_blame", {"kappa": 0.0}, [[A] * 4, [0] * 3, [0] * 2]),
]


@pytest.mark.parametrize(("name", "settings", "expected"), F, ids=name_of)
def test_published_numbers(name: str, settings: dict[str, Any], expected: list[list[float]]) -> None:
    found = advantages(name, fixture_f(), **settings)
    assert found.dtype == torch.float64
    for row, values in zip(found, expected, strict=True):
        assert row.tolist() == pytest.approx([*values, *[0] * (4 - len(values))], abs=1.5e-6)


def test_groups_without_contrast_of_rl_zvp() -> None:
    wrong = advantages("rl_zvp", only(fixture_f(), 1, 2))
    torch.testing.assert_close(wrong, torch.tensor([[-0.2, 0, -0.25, 0], [-0.1, 0, 0, 0]], dtype=torch.float64))
    right = advantages("rl_zvp", only(fixture_f(), 0))
    torch.testing.assert_close(right, torch.tensor([[0.2, 0.1, 0.05, 0.05]], dtype=torch.float64))


def test_two_of_three_correct_of_qae() -> None:
    flipped = replace(fixture_f(), rewards=1 - fixture_f().rewards, correct=~fixture_f().correct)
    assert advantages("qae", flipped)[:, 0].tolist() == pytest.approx([-1.732048, 0, 0], abs=1e-6)


def test_losses_of_the_forking_tokens_at_ratio_one() -> None:
    """Averaged over all tokens, the kept normaliser gives the mean over kept ones."""
    for settings, loss in (({}, -0.288675), ({"normalizer": "all"}, -0.064150), ({"ratio": 1.0}, -0.192450)):
        assert -advantages("fork20", fixture_f(), **settings).sum().item() / 9 == pytest.approx(loss, abs=1e-6)


# ------------------------------------------------------------------------------------------------ against the loops


def random_batch(seed: int, penalty: bool = False, kind: str = "usual") -> Batch:
    """Ragged groups of one to six rows, shuffled; holes, an empty row, groups of one polarity, NaN as padding."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    sizes = torch.tensor([6, 5, 4, 3, 2, 1])
    rows, columns = int(sizes.sum()), 11
    group = torch.tensor([40, -3, 7, 2**40, 0, 5]).repeat_interleave(sizes)
    correct = uniform(rows) < 0.4
    correct[:2], correct[6:11] = torch.tensor([True, False]), bool(seed % 2)
    mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows, 1), generator=generator)
    mask &= uniform(rows, columns) < 0.85
    mask[3] = False
    entropy = {"usual": 3 * uniform(rows, columns), "equal": torch.full((rows, columns), 0.2).double()}
    entropy["zero"] = 0 * entropy["equal"]
    order = torch.randperm(rows, generator=generator)
    batch = Batch(
        mask,
        group,
        correct,
        torch.where(mask, entropy[kind], math.nan),
        2.0 * correct - 1,
        torch.where(mask, (0.02 + 0.98 * uniform(rows, columns)).log(), math.nan),
        -uniform(rows) * (uniform(rows) < 0.5) if penalty else None,
    )
    batch = replace(batch, rewards=batch.rewards.double())
    return only(batch, *order.tolist())


def as_rows(batch: Batch) -> loops.Rows:
    penalty = [0.0] * len(batch.group) if batch.length_penalty is None else batch.length_penalty.tolist()
    lists = (batch.response_mask, batch.group, batch.correct, batch.entropy, batch.old_log_probs, batch.rewards)
    return loops.Rows(*(values.tolist() for values in lists), penalty)


SCOPES = ("batch", "group", "response")
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "dr_grpo": {},
    "kl_cov": {},
    "fork20": {
        "ratio": (0.2, 0.5, 1.0),
        "scope": SCOPES,
        "rule": ("threshold", "topk"),
        "select": ("top", "bottom"),
        "polarity": ("both", "correct", "wrong"),
        "normalizer": ("kept", "all"),
    },
    "entropy_bonus": {"alpha": (0.4, 0.0, 5.0), "kappa": (2.0, 1.2)},
    "eapo": {"alpha": (0.2, 0.0, 1.0), "phi": (2.0, 5.0), "scope": SCOPES},
    "polarity_entropy": {"lambda_correct": (0.5, -0.3, 0.0, 2.5), "lambda_wrong": (-0.5, 0.7, 3.0), "scope": SCOPES},
    "eda": {"scope": ("group", "batch"), "clamp": (None, (0.1, 10.0), (0.9, 1.1))},
    "empg": {"k": (1.0, 0.0, 3.0)},
    "ar": {"alpha": (0.2, 0.0, 1.0)},
    "prob_mask": {"threshold": (0.9, 0.3, 2.0)},
    "stare_o1": {"top_ratio": (0.1, 0.0, 1.0), "w": (1.1, 1.5), "m": (1.0, 0.9), "target_entropy": (0.3, None, 9.0)},
    "w_reinforce": {"correct": (0.1, 0.0, 1.0), "wrong": (1.0, 0.3)},
    "qae": {"K": (0.4, 0.05, 0.5, 0.95)},
    "dapo_blame": {"kappa": (0.5, 0.0, 1.0)},
    "rl_zvp": {"alpha": (0.1, 0.0, 1.0), "max_scope": ("response", "group")},
}
LOOPS = {"kl_cov": loops.dapo}
POINTS = [
    (name, point)
    for name, axes in OPTIONS.items()
    for point in pairwise({"penalty": (False, True), "kind": ("usual", "equal", "zero"), **axes})
]


@pytest.mark.parametrize(("name", "point"), POINTS, ids=name_of)
def test_every_pair_of_options_against_the_loops(name: str, point: dict[str, Any]) -> None:
    settings = {key: value for key, value in point.items() if key not in ("penalty", "kind")}
    batch = random_batch(POINTS.index((name, point)), point["penalty"], point["kind"])
    found = advantages(name, batch, **settings)
    expected = torch.zeros_like(found)
    for token, value in LOOPS.get(name, getattr(loops, name, None))(as_rows(batch), **settings).items():
        expected[token] = value
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


# ------------------------------------------------------------------------------------------------------- identities

NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("fork20", {"ratio": 1.0}),
    ("random20", {"ratio": 1.0}),
    ("entropy_bonus", {"alpha": 0.0}),
    ("eapo", {"alpha": 0.0}),
    ("polarity_entropy", {"lambda_correct": 0.0, "lambda_wrong": 0.0}),
    ("ar", {"alpha": 0.0}),
    ("dapo_blame", {"kappa": 1.0}),
    ("prob_mask", {"threshold": 1.01}),
    ("stare_o1", {"w": 1.0}),
    ("stare_c2", {"w": 1.0, "m": 1.0, "target_entropy": None}),
    ("stare_c2", {"target_entropy": 0.0}),
]


@pytest.mark.parametrize(("name", "settings"), NEUTRAL)
def test_the_neutral_setting_is_dapo(name: str, settings: dict[str, Any]) -> None:
    batch = random_batch(1, penalty=True)
    torch.testing.assert_close(advantages(name, batch, **settings), advantages("dapo", batch), atol=1e-12, rtol=0)
    assert (advantages(name, batch) - advantages("dapo", batch)).abs().max() > 1e-3 or name.startswith("stare")


@pytest.mark.parametrize("name", ["eapo", "eda", "polarity_entropy"])
def test_equal_entropies_leave_dapo(name: str) -> None:
    batch = random_batch(2, kind="equal")
    torch.testing.assert_close(advantages(name, batch), advantages("dapo", batch), atol=1e-12, rtol=0)


def test_rl_zvp_is_dapo_where_every_group_has_contrast() -> None:
    batch = only(random_batch(3), *random_batch(3).group.eq(40).nonzero().squeeze(1).tolist())
    torch.testing.assert_close(advantages("rl_zvp", batch), advantages("dapo", batch), atol=0, rtol=0)


def test_equal_entropies_are_equal_for_empg_in_responses_of_any_length() -> None:
    """The rounding of their means is not stretched to [0, 1]."""
    mask = torch.arange(40) < torch.tensor([3, 7, 13, 40])[:, None]
    correct = torch.tensor([True, True, True, False])
    batch = Batch(
        mask, torch.zeros(4, dtype=torch.int64), correct, torch.full((4, 40), 0.1), torch.where(correct, 1.0, -1.0)
    )
    A = advantages("empg", batch)[:, 0]
    assert A[:3].max() - A[:3].min() < 1e-6
    assert A[0] - A[3] > 1


def test_empg_without_k_is_dapo_less_its_mean() -> None:
    batch = fixture_f()
    base = advantages("dapo", batch)
    expected = (base - base[:, 0].mean()) * batch.response_mask
    torch.testing.assert_close(advantages("empg", batch, k=0.0), expected)


def test_w_reinforce_is_psr_and_nsr_together() -> None:
    batch = random_batch(4)
    both = advantages("psr", batch) + advantages("nsr", batch)
    torch.testing.assert_close(advantages("w_reinforce", batch, correct=1.0), both, atol=0, rtol=0)


def test_qae_trains_on_one_polarity_of_a_group_with_grpos_scale() -> None:
    batch = random_batch(5)
    found, base = advantages("qae", batch), advantages("dapo", batch)
    for group in batch.group.unique():
        rows = (batch.group == group) & batch.response_mask.any(1)
        share = batch.correct[rows].double().mean().item()
        silent = rows & (~batch.correct if share <= 0.6 + 1e-9 else batch.correct)
        assert (found[silent] == 0).all()
        if 0 < share < 1:
            trained = found[rows & ~silent].abs().max()
            scale = base[rows & batch.correct].max() - base[rows & ~batch.correct].min()
            assert trained.item() == pytest.approx(scale.item())


@pytest.mark.parametrize(("name", "settings"), [("fork20", {}), ("fork20", {"rule": "topk", "scope": "group"})])
def test_top_and_bottom_are_all_tokens(name: str, settings: dict[str, Any]) -> None:
    batch = random_batch(6)
    top, bottom = (advantages(name, batch, normalizer="all", select=select, **settings) for select in ("top", "bottom"))
    torch.testing.assert_close(top + bottom, advantages("dapo", batch), atol=0, rtol=0)
    assert not ((top != 0) & (bottom != 0)).any()


def test_forking_tokens_depend_on_the_order_of_entropies_alone() -> None:
    batch = random_batch(7)
    bent = replace(batch, entropy=batch.entropy.exp() ** 2)
    torch.testing.assert_close(advantages("fork20", batch), advantages("fork20", bent), atol=0, rtol=0)


def test_exactly_a_fifth_is_kept_by_topk() -> None:
    for name, seed in itertools.product(("fork20", "random20"), range(4)):
        batch = random_batch(seed, kind="equal" if seed == 3 else "usual")
        method = algorithm(name)
        out = method.advantages(batch, method.config(rule="topk"))
        tokens = int(batch.response_mask.sum())
        assert round(out.metrics["kept_share"] * tokens) == math.ceil(tokens / 5)


def test_random_tokens_are_those_of_the_seed() -> None:
    batch = random_batch(8)
    same, other = (advantages("random20", replace(batch, seed=seed)) for seed in (0, 1))
    torch.testing.assert_close(same, advantages("random20", batch), atol=0, rtol=0)
    assert ((same != 0) != (other != 0)).any()
    wider = replace(batch, response_mask=torch.nn.functional.pad(batch.response_mask, (0, 3)), entropy=None)
    torch.testing.assert_close(advantages("random20", wider)[:, :-3], same, atol=0, rtol=0)


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("side", ["wrong", "both"])
def test_shuffled_advantages_are_gtpos_in_another_place(side: str, scope: str) -> None:
    for seed in range(3):
        batch = random_batch(seed)
        gtpo, found = (
            advantages("gtpo", batch, entropy_floor=1e-3),
            advantages("gtpo_shuffled", batch, side=side, scope=scope),
        )
        regions = (
            [batch.group == group for group in batch.group.unique()]
            if scope == "group"
            else [batch.group == batch.group]
        )
        for region, verdict in itertools.product(regions, (True, False)):
            tokens = batch.response_mask & (region & (batch.correct == verdict))[:, None]
            assert torch.equal(found[tokens].sort().values, gtpo[tokens].sort().values)
        assert torch.equal(found[batch.correct], gtpo[batch.correct]) == (side == "wrong")
        assert not torch.equal(found[~batch.correct], gtpo[~batch.correct])


def test_shuffled_advantages_are_those_of_the_seed() -> None:
    batch = random_batch(8)
    same, other = (advantages("gtpo_shuffled", replace(batch, seed=seed)) for seed in (0, 1))
    assert torch.equal(same, advantages("gtpo_shuffled", batch))
    assert not torch.equal(same, other)


KEEP_SIGNS = (
    "dapo_blame",
    "fork20",
    "random20",
    "entropy_bonus",
    "eapo",
    "polarity_entropy",
    "eda",
    "ar",
    "prob_mask",
    "stare_c2",
)


@pytest.mark.parametrize("name", KEEP_SIGNS)
def test_no_sign_is_turned(name: str) -> None:
    for seed in range(3):
        batch = random_batch(seed, penalty=True)
        assert (advantages(name, batch) * advantages("dapo", batch) >= 0).all()


# ----------------------------------------------------------------------------------- all methods: edges, invariances

FAMILY = [name for name, entry in algorithms().items() if name not in ("dapo", "grpo", "gtpo", "grpo_s")]
AT_RANDOM = ("random20", "gtpo_shuffled")  # the order of rows decides what they draw


def out_of(name: str, batch: Batch) -> AdvantageOutput:
    return algorithm(name).advantages(batch)


@pytest.mark.parametrize("name", FAMILY)
def test_rows_groups_and_padding_change_nothing(name: str) -> None:
    batch = random_batch(9, penalty=True)
    plain = out_of(name, batch).advantages
    assert (plain[~batch.response_mask] == 0).all()
    relabelled = replace(batch, group=batch.group * 3 + 1)
    torch.testing.assert_close(out_of(name, relabelled).advantages, plain, atol=0, rtol=0)
    pad = torch.nn.functional.pad
    wider = replace(
        batch,
        response_mask=pad(batch.response_mask, (0, 3)),
        entropy=pad(batch.entropy, (0, 3), value=math.inf),
        old_log_probs=pad(batch.old_log_probs, (0, 3), value=math.nan),
    )
    torch.testing.assert_close(out_of(name, wider).advantages[:, :-3], plain, atol=1e-12, rtol=0)
    if name not in AT_RANDOM:
        order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(0))
        turned = out_of(name, only(batch, *order.tolist())).advantages
        torch.testing.assert_close(turned, plain[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", FAMILY)
def test_no_gradient_comes_back(name: str) -> None:
    batch = random_batch(10)
    leaves = [tensor.clone().requires_grad_() for tensor in (batch.entropy, batch.old_log_probs, batch.rewards)]
    found = out_of(name, replace(batch, entropy=leaves[0], old_log_probs=leaves[1], rewards=leaves[2])).advantages
    assert not found.requires_grad


def edge_batches() -> dict[str, Batch]:
    batch = random_batch(11)
    n = len(batch.group)
    ones, zeros = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    nothing = 0 * batch.entropy
    single = {name: getattr(batch, name).float() for name in ("entropy", "rewards", "old_log_probs")}
    return {
        "all correct": replace(batch, correct=ones, rewards=ones.double()),
        "all wrong": replace(batch, correct=zeros, rewards=zeros.double()),
        "one response": only(batch, int(batch.response_mask.sum(1).argmax())),
        "one token": only(replace(fixture_f(), response_mask=torch.arange(4) < torch.ones(3, 1)), 1),
        "empty rows": replace(batch, response_mask=torch.zeros_like(batch.response_mask)),
        "no entropy": random_batch(12, kind="zero"),
        "round-off below zero": replace(batch, entropy=nothing - 5e-4, old_log_probs=nothing + 1e-7),
        "float32": replace(batch, **single),
    }


@pytest.mark.parametrize("name", FAMILY)
def test_batches_at_the_edge(name: str) -> None:
    for edge, batch in edge_batches().items():
        out = out_of(name, batch)
        assert out.advantages.isfinite().all(), edge
        assert out.advantages.shape == batch.response_mask.shape, edge
        assert out.advantages.dtype == (torch.float32 if edge == "float32" else torch.float64), edge
        assert all(math.isfinite(value) for value in out.metrics.values()), edge
        if edge in ("all correct", "all wrong", "one response") and not algorithm(name).trains_without_contrast:
            assert (out.advantages == 0).all(), edge


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "random20"])
def test_float32_is_close_to_float64(name: str) -> None:
    single, exact = edge_batches()["float32"], random_batch(11)
    torch.testing.assert_close(
        out_of(name, single).advantages.double(), out_of(name, exact).advantages, atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("name", [name for name in FAMILY if "entropy" in algorithm(name).needs])
def test_an_entropy_that_cannot_be_names_its_place(name: str) -> None:
    batch = fixture_f()
    batch.entropy[1, 2] = math.nan
    with pytest.raises(ValueError, match="row 1, position 2"):
        out_of(name, batch)


@pytest.mark.parametrize("name", ["ar", "prob_mask"])
def test_a_log_probability_that_cannot_be_names_its_place(name: str) -> None:
    batch = fixture_f()
    batch.old_log_probs[1, 2] = math.inf
    with pytest.raises(ValueError, match="row 1, position 2"):
        out_of(name, batch)
    with pytest.raises(ValueError, match=r"old_log_probs has shape .* position 3 .* has no partner"):
        out_of(name, replace(batch, old_log_probs=batch.old_log_probs[:, 1:]))


IMPOSSIBLE = [
    ("fork20", {"ratio": 0.0}, "ratio"),
    ("fork20", {"ratio": 1.1}, "ratio"),
    ("fork20", {"scope": "micro_batch"}, "scope"),
    ("fork20", {"rule": "top"}, "did you mean topk"),
    ("entropy_bonus", {"kappa": 1.0}, "kappa must be above 1"),
    ("entropy_bonus", {"alpha": -1}, "alpha"),
    ("eapo", {"alpha": 2.0}, "alpha / phi"),
    ("polarity_entropy", {"lambda_wrong": math.nan}, "lambda_wrong"),
    ("eda", {"scope": "response"}, "scope"),
    ("eda", {"clamp": (2, 1)}, "clamp"),
    ("empg", {"k": -1}, "k must be in"),
    ("ar", {"alpha": 1.5}, "alpha must be in"),
    ("prob_mask", {"threshold": -1}, "threshold"),
    ("stare_o1", {"w": 0}, "w must be above 0"),
    ("stare_o1", {"top_ratio": 2}, "top_ratio"),
    ("w_reinforce", {"correct": -0.1}, "correct"),
    ("qae", {"K": 1}, "K must be in"),
    ("rl_zvp", {"max_scope": "batch"}, "scope"),
    ("dapo_blame", {"kappa": 1.5}, "kappa must be in"),
    ("gtpo_shuffled", {"side": "correct"}, "side must be one of wrong, both"),
    ("gtpo_shuffled", {"scope": "response"}, "scope"),
]


@pytest.mark.parametrize(("name", "settings", "message"), IMPOSSIBLE)
def test_impossible_settings_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm(name).config(**settings)


def test_what_a_method_changed_is_counted() -> None:
    metrics = algorithm("stare_c2").advantages(fixture_f()).metrics
    assert metrics["changed_share"] == 0  # the mean entropy is above the target
    metrics = out_of("fork20", fixture_f()).metrics
    assert metrics["kept_share"] == pytest.approx(2 / 9)
    assert metrics["changed_share"] == 1
    assert metrics["factor_correct"] == pytest.approx(9 / 2 / 4)
    assert metrics["factor_wrong"] == pytest.approx(9 / 2 / 5)


# ----------------------------------------------------------------------------------------------------- documentation

OF_THE_PAPER = {"dapo", "grpo", "gtpo", "grpo_s"}
WITH_A_GUIDE = {"dapo_mixed", "luffy"}  # which the README names


@pytest.mark.parametrize("name", sorted(algorithms().keys() - OF_THE_PAPER))
def test_a_method_has_a_row_in_the_docs(name: str) -> None:
    table = (REPOSITORY / "docs" / "reference" / "methods.md").read_text()
    assert re.search(rf"^\| .*`{name}`", table, re.MULTILINE), f"docs/reference/methods.md has no row of {name}"


def test_the_readme_counts_the_methods() -> None:
    others = algorithms().keys() - OF_THE_PAPER - WITH_A_GUIDE
    assert f"one of {len(others)} other methods" in (REPOSITORY / "README.md").read_text()


def error_of(name: str, batch: Batch) -> str:
    """The error of a method on a batch, with its type."""
    try:
        out_of(name, batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


ONE = torch.tensor([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "spoilt",
    [
        {"response_mask": None},
        {"response_mask": [[1, 1]]},
        {"group": None},
        {"group": torch.tensor([0, 0])},
        {"correct": None},
        {"correct": torch.tensor([1, 0, 1])},
        {"rewards": ONE[:2]},
        {"rewards": ONE.to(torch.complex64)},
        {"length_penalty": [0.0, 0.0, 0.0]},
        {"length_penalty": ONE[None]},
    ],
    ids=lambda spoilt: " ".join(f"{key} {type(value).__name__}" for key, value in spoilt.items()),
)
def test_a_batch_that_does_not_fit_is_one_line_for_every_method(spoilt: dict[str, Any]) -> None:
    for name in algorithms():
        error = error_of(name, replace(fixture_f(), **spoilt))
        assert re.fullmatch(rf"ValueError: .*{next(iter(spoilt))}.*", error), f"{name}: {error}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_reward_that_cannot_be_names_its_row(bad: float) -> None:
    rewards = fixture_f().rewards.double()
    rewards[1] = bad
    for name in (name for name, entry in algorithms().items() if "rewards" in entry.needs):
        error = error_of(name, replace(fixture_f(), rewards=rewards))
        assert re.match(r"ValueError: reward of row 1 is .*, it must be finite", error), f"{name}: {error}"


@pytest.mark.parametrize("name", [name for name, entry in algorithms().items() if "entropy" in entry.needs])
def test_an_entropy_beyond_every_vocabulary_names_its_place(name: str) -> None:
    entropy = fixture_f().entropy.double()
    entropy[1, 2] = 1e300
    with pytest.raises(ValueError, match="entropy of row 1, position 2 is 1e\\+300"):
        out_of(name, replace(fixture_f(), entropy=entropy))


@pytest.mark.parametrize("name", FAMILY)
def test_entropies_in_half_precision_do_not_overflow(name: str) -> None:
    """Sums of three of them are beyond 65,504, the largest number of float16."""
    for dtype in (torch.float16, torch.bfloat16):
        entropy = torch.full_like(fixture_f().entropy, 3e4).to(dtype)
        assert out_of(name, replace(fixture_f(), entropy=entropy)).advantages.isfinite().all(), dtype


def test_a_clamp_beyond_half_precision() -> None:
    batch = fixture_f()
    config = algorithm("eda").config(clamp=(1e-6, 1e6))
    half = algorithm("eda").advantages(replace(batch, entropy=batch.entropy.half()), config).advantages
    exact = algorithm("eda").advantages(replace(batch, entropy=batch.entropy.half().float()), config).advantages
    assert torch.equal(half, exact)


def test_rewards_that_are_whole_numbers_keep_the_fractions_of_a_penalty() -> None:
    batch = replace(fixture_f(), length_penalty=torch.tensor([-0.5, 0.0, -0.25]))
    whole = replace(batch, rewards=torch.tensor([1, -1, 1]))
    same = replace(batch, rewards=torch.tensor([1.0, -1.0, 1.0]))
    assert torch.equal(out_of("dapo", whole).advantages, out_of("dapo", same).advantages)
