"""The public interface of ``gtpo_verl.algorithms`` against ``reference_loops.py``, over the options and random batches.

Every comparison has its own random batch, fixed by its number: ragged lengths, masks with holes, single survivors,
equal and near-zero entropies, groups of one polarity, empty rows, and NaN, infinities and nonsense in the padding. A
failure prints the call of ``make_case`` that brings it back. `make test-fast` covers every pair of values of any two
options, scales, kinds of entropies and kinds of penalties, each pair in several batches; `make test-exhaustive` adds
the whole grid.

The tolerance is 1e-9 in float64, and in float32 2e-4 of the largest advantage or of 1, on the same float32 inputs.
"""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import reference_loops as reference
import torch
from actor_config import actor
from pairwise import pairwise
from reference_loops import GRID_AXES
from verl.trainer.ppo import core_algos

from gtpo_verl.algorithms import (
    GRPOSConfig,
    GTPOConfig,
    group_relative_overlong_penalty,
    grpo_s_advantages,
    gtpo_advantages,
    soft_overlong_penalty,
)
from gtpo_verl.integrations.losses import GTPOPolicyLossConfig

METHODS = {
    "gtpo": (gtpo_advantages, GTPOConfig, reference.gtpo_advantages, ("alpha1", "alpha2")),
    "grpo_s": (grpo_s_advantages, GRPOSConfig, reference.grpo_s_advantages, ("beta1", "beta2")),
}
GRIDS = {
    method: [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    for method, axes in GRID_AXES.items()
}
SCALES = ((1.0, 0.1), (0.9, 0.1), (1.0, 0.0), (0.5, 0.5), (2.0, 1.0))
ENTROPY_KINDS = ("plain", "skewed", "equal", "near zero", "zero or not", "by row")
PENALTY_KINDS = ("none", "some", "all one")
BATCHES = 4  # of each point of the covering array
DRAWN = {"scales": SCALES, "kind": ENTROPY_KINDS, "penalty_kind": PENALTY_KINDS}
PAIRS = {method: pairwise(axes | DRAWN) for method, axes in GRID_AXES.items()}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
EPS = {torch.float64: reference.FLOAT64_EPS, torch.float32: reference.FLOAT32_EPS}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


# ----------------------------------------------------------------------------------------------------- random batches


@dataclass
class Case:
    """A batch, the options it is run with, and how to make it again."""

    method: str
    number: int
    options: dict
    entropy: torch.Tensor  # (B, T) float64
    correct: torch.Tensor  # (B,) bool
    mask: torch.Tensor  # (B, T) bool
    group: torch.Tensor  # (B,) int64
    penalty: torch.Tensor | None  # (B,) float64
    scales: tuple[float, float]
    call: str  # that makes it again

    def __str__(self) -> str:
        return f"{self.call}: {self.options} scales={self.scales}"


def make_case(method: str, number: int, large: bool = False, pairs: bool = False) -> Case:
    """The case of one number, from which all is drawn that its point does not say.

    The point is that of the whole grid at ``number`` modulo its size, or, with ``pairs``, of the covering array.
    """
    rng = random.Random(number if method == "gtpo" else -1 - number)
    points = PAIRS[method] if pairs else GRIDS[method]
    options = dict(points[number % len(points)])
    given = {name: options.pop(name) for name in DRAWN if pairs}
    options["entropy_floor"] = rng.choice((1e-6, 1e-6, 1e-3, 0.1))
    options["entropy_clip"] = rng.choice((None, None, None, (0.2, 0.28), (0.0, 1.5)))
    scales = given.get("scales") or rng.choice(SCALES)
    if method == "gtpo":
        allowed = [kappa for kappa in (1.25, 2.0, 5.0) if scales[0] * (1 + 1 / kappa) >= 1]
        options["clip_kappa"] = rng.choice([None, *allowed]) if allowed else None

    rows = [(g, verdict) for g, verdicts in enumerate(draw_groups(rng, large)) for verdict in verdicts]
    rng.shuffle(rows)
    ids = rng.sample((-(2**62), -7, -1, 0, 1, 2, 3, 41, 2**31 + 5, 2**62, *range(50, 60)), k=20)
    width = 100 if large else rng.choice((1, 2, 3, 5, 8, 12))
    mask = [draw_mask(rng, width) for _ in rows]
    correct = [verdict for _, verdict in rows]
    kind = given.get("kind") or rng.choice(ENTROPY_KINDS)
    penalty_kind = given.get("penalty_kind") or rng.choice(PENALTY_KINDS)
    return Case(
        method=method,
        number=number,
        options=options,
        entropy=torch.tensor(draw_entropies(rng, kind, mask), dtype=torch.float64),
        correct=torch.tensor(correct),
        mask=torch.tensor(mask),
        group=torch.tensor([ids[g] for g, _ in rows]),
        penalty=draw_penalty(rng, penalty_kind, correct, mask),
        scales=scales,
        call=f"make_case({method!r}, {number}, large={large}, pairs={pairs})",
    )


def draw_groups(rng: random.Random, large: bool = False) -> list[list[bool]]:
    """Verdicts by group: lopsided, balanced, of one polarity, or of a single response."""
    groups = []
    for _ in range(20 if large else rng.randint(1, 6)):
        size = 16 if large else rng.choice((1, 2, 4, 6, 8, 8))
        share = rng.choice((0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0))
        groups.append([rng.random() < share for _ in range(size)])
    return groups


def draw_mask(rng: random.Random, width: int) -> list[bool]:
    """One row: empty, full, cut short (so that single survivors abound), or with holes."""
    (kind,) = rng.choices(("empty", "full", "short", "holes"), weights=(1, 3, 5, 5))
    if kind == "empty":
        return [False] * width
    length = width if kind == "full" else rng.randint(1, width)
    return [t < length and (kind != "holes" or rng.random() < 0.7) for t in range(width)]


def draw_entropies(rng: random.Random, kind: str, mask: list[list[bool]]) -> list[list[float]]:
    """Entropies of one kind inside the mask, anything at all outside."""
    level = rng.choice((0.0, 1e-7, 0.3, 11.7))

    def inside(row_level: float) -> float:
        if kind == "equal":
            return level
        if kind == "by row":
            return row_level
        if kind == "near zero":
            return rng.choice((0.0, -9e-4, 1e-9, 1e-6, 3e-6, 2e-5, 1e-4))
        if kind == "zero or not":
            return rng.choice((0.0, rng.uniform(0.05, 6.0)))
        return rng.uniform(0.05, 6.0) if kind == "plain" else rng.expovariate(1.0) ** 3

    outside = (math.nan, math.inf, -math.inf, -5.0, 0.0, 1e30, 1.0)
    return [
        [inside(row_level) if alive else rng.choice(outside) for alive in row]
        for row, row_level in ((row, rng.uniform(0.05, 6.0)) for row in mask)
    ]


def draw_penalty(rng: random.Random, kind: str, correct: list[bool], mask: list[list[bool]]) -> torch.Tensor | None:
    """Penalties of correct rows, and numbers to be ignored, NaN among them, where a row is wrong or empty."""
    if kind == "none":
        return None
    drawn = [
        (-1.0 if kind == "all one" else rng.choice((0.0, 0.0, -1.0, -rng.random())))
        if verdict and any(row)
        else rng.choice((0.0, -0.5, math.nan))
        for verdict, row in zip(correct, mask, strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------- comparing


def run_package(case: Case, dtype: torch.dtype, **kwargs):
    advantages_of, config_of, _, (name1, name2) = METHODS[case.method]
    config = config_of(**{name1: case.scales[0], name2: case.scales[1]}, **case.options)
    penalty = None if case.penalty is None else case.penalty.to(dtype)
    entropy = case.entropy.to(dtype)
    out = advantages_of(entropy, case.correct, case.mask, case.group, config, length_penalty=penalty, **kwargs)
    assert torch.equal(entropy.nan_to_num(nan=77.0), case.entropy.to(dtype).nan_to_num(nan=77.0)), (
        f"{case}: wrote to it"
    )
    return out


def run_reference(case: Case, dtype: torch.dtype):
    loops = METHODS[case.method][2]
    options = reference.Options(scale1=case.scales[0], scale2=case.scales[1], **case.options)
    penalty = None if case.penalty is None else case.penalty.to(dtype)
    entropy = case.entropy.to(dtype)
    eps, sign_tolerance = EPS[dtype], TOLERANCE[dtype]
    return loops(entropy, case.correct, case.mask, case.group, options, penalty, eps, sign_tolerance)


def difference(got: torch.Tensor, want: list) -> tuple[float, float]:
    """Largest difference, and what the tolerance of float32 is relative to: max(1, max|want|)."""
    wanted = torch.tensor(want, dtype=torch.float64)
    assert got.shape == wanted.shape
    assert got.isfinite().all()
    if wanted.numel() == 0:
        return 0.0, 1.0
    return (got.double() - wanted).abs().max().item(), max(1.0, wanted.abs().max().item())


def check(case: Case, dtype: torch.dtype) -> None:
    out, want = run_package(case, dtype, return_shaped=True), run_reference(case, dtype)
    if dtype == torch.float64:
        assert out.advantages.dtype == out.shaped_rewards.dtype == torch.float64
    for name in ("shaped_rewards", "advantages"):
        error, unit = difference(getattr(out, name), getattr(want, name))
        allowed = TOLERANCE[dtype] * (unit if dtype == torch.float32 else 1.0)
        assert error <= allowed, f"{name} differ by {error:.3g}, allowed {allowed:.3g}, in {case}"
    check_sign_flips(case, out.metrics, want.flips)


def check_sign_flips(case: Case, metrics: dict, flips: dict) -> None:
    """The two fractions, within what advantages of 0 give or take by round-off of their sign."""
    keys = {key for key in metrics if "flip" in key}
    assert keys == {"sign_flip_correct", "sign_flip_wrong"}
    for side, key in ((True, "sign_flip_correct"), (False, "sign_flip_wrong")):
        counted, flipped, zeros = flips[side]
        low, high = flipped / max(counted, 1), (flipped + zeros) / max(counted, 1)
        assert low - 1e-6 <= metrics[key] <= high + 1e-6, f"{key} is {metrics[key]}, not in [{low}, {high}], in {case}"


@pytest.fixture
def one_thread():
    """Thousands of operations on a few numbers each: threads would spend the time waiting for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_pair_of_options_agrees_with_the_loops(method, dtype):
    for number in range(BATCHES * len(PAIRS[method])):
        check(make_case(method, number, pairs=True), DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_a_few_large_batches_agree_with_the_loops(method, dtype):
    """Twenty groups of 16, of 100 columns: more than one of anything the package may work in pieces of."""
    size = len(GRIDS[method])
    for number in range(0, size, size // 4 + 1):  # the first option of a point is the normalisation
        check(make_case(method, number, large=True), DTYPES[dtype])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalization", GRID_AXES["gtpo"]["normalization"])
@pytest.mark.parametrize("method", METHODS)
def test_the_whole_grid_agrees_with_the_loops(method, normalization, dtype):
    size = len(GRIDS[method])
    for number, turn in itertools.product(range(size), range(1, 5)):
        if GRIDS[method][number]["normalization"] == normalization:
            check(make_case(method, number + turn * size), DTYPES[dtype])


@pytest.mark.parametrize("parts", [-1000, -20, -1, 1, 20, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_values_that_differ_by_round_off_only_have_no_advantage(method, dtype, parts):
    """Rewards near ±2 that differ by ``parts`` times eps: up to 32 are round-off, from there on they are rewards.

    The eps is that of the entropies given, in whatever precision the package works.
    """
    eps = EPS[DTYPES[dtype]]
    entropy = torch.tensor([[1.0], [1.0 + parts * eps], [1.0]] * 2, dtype=DTYPES[dtype])
    correct = torch.tensor([True] * 3 + [False] * 3)
    batch = (entropy, correct, torch.ones(6, 1, dtype=torch.bool), torch.zeros(6, dtype=torch.int64))
    advantages_of, config_of, loops, (name1, name2) = METHODS[method]
    got = advantages_of(*batch, config_of(**{name1: 1.0, name2: 1.0}, normalization="within")).advantages
    want = loops(*batch, reference.Options(scale1=1.0, scale2=1.0, normalization="within"), eps=eps).advantages
    if abs(parts) <= 32:
        assert want == [[0.0]] * 6
        assert (got == 0).all()
    else:
        assert all(abs(a) > abs(parts) * eps * 1e-2 for (a,) in want)
        assert got.double()[:, 0].tolist() == pytest.approx([a for (a,) in want], rel=2e-2)


@pytest.mark.parametrize("method", METHODS)
def test_without_shaped_rewards_the_advantages_are_the_same(method):
    for number in range(len(PAIRS[method])):
        case = make_case(method, number, pairs=True)
        out = run_package(case, torch.float64, return_shaped=False)
        assert out.shaped_rewards is None
        assert torch.equal(out.advantages, run_package(case, torch.float64, return_shaped=True).advantages), str(case)


# ----------------------------------------------------------------------------------------- the reference on its own


def worked_numbers(advantages_of):
    """Identity 9: two correct answers and two wrong ones of two tokens each, in the late form."""
    entropy = [[3.0, 1.0], [1.0, 3.0], [4.0, 1.0], [1.0, 4.0]]
    return advantages_of(entropy, [True, True, False, False], [[True, True]] * 4, [5, 5, 5, 5])


def test_the_loops_give_the_worked_numbers():
    out = worked_numbers(lambda *batch: reference.gtpo_advantages(*batch, reference.Options()))
    want = [[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]]
    assert [x for row in out.shaped_rewards for x in row] == pytest.approx([x for row in want for x in row], abs=1e-15)


def test_the_loops_give_advantages_worked_by_hand():
    """On the correct side: 1.15, 1.05, 1.05, 1.15 and four zeros, of mean 0.55."""
    out = worked_numbers(lambda *batch: reference.gtpo_advantages(*batch, reference.Options()))
    values = [1.15, 1.05, 1.05, 1.15, 0.0, 0.0, 0.0, 0.0]
    variance = (sum(x * x for x in values) - 8 * 0.55**2) / 7
    assert out.advantages[0][0] == pytest.approx(0.6 / (math.sqrt(variance) + 1e-6), abs=1e-12)
    # GRPO-S: all mean entropies of a side are equal, so its rewards are 1.1 and -1.1: (1.1 - 0.55) / (1.1 / √3 + 1e-6).
    out = worked_numbers(lambda *batch: reference.grpo_s_advantages(*batch, reference.Options()))
    size = 0.55 / (1.1 / math.sqrt(3) + 1e-6)
    for row, sign in enumerate((1, 1, -1, -1)):
        assert out.advantages[row] == pytest.approx([sign * size] * 2, abs=1e-12)


def test_the_loops_agree_with_the_grpo_and_the_dual_clip_of_verl():
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randint(0, 2, (12,), generator=generator).double() - 0.3 * torch.rand(12, generator=generator)
    group = torch.tensor([4, -1, 4, 9, 9, -1, 4, 9, 4, -1, 9, 9])
    mask = torch.ones(12, 1, dtype=torch.float64)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards[:, None].clone(), mask, group.numpy())
    assert theirs[:, 0].tolist() == pytest.approx(reference.dapo_advantages(rewards, group), abs=1e-12)

    batch = draw_loss_batch(2)
    theirs, _ = core_algos.get_policy_loss_fn("vanilla")(*batch, "token-mean", actor())
    assert theirs.item() == pytest.approx(reference.token_level_loss(batch[1], batch[0], *batch[2:], dual_clip=10.0))


# ------------------------------------------------------------------------------------------------------------ losses


def draw_loss_batch(seed: int) -> tuple[torch.Tensor, ...]:
    """Old and new log-probabilities far enough apart for every clip, advantages, and a mask with holes; (16, 9)
    float64.

    The advantages are one number a row, as GRPO-S needs; for the token loss that is a case like any other.
    """
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(16, 9, generator=generator, dtype=torch.float64)
    new = old + torch.randn(16, 9, generator=generator, dtype=torch.float64) * torch.logspace(-2, 0.5, 16)[:, None]
    advantages = torch.randn(16, 1, generator=generator, dtype=torch.float64).expand(16, 9).contiguous()
    mask = torch.rand(16, 9, generator=generator) < 0.7
    mask[3] = False
    new[0, 0], advantages[0], mask[0, 0] = old[0, 0] + 3, -1.0, True  # e^3 is beyond the dual clip
    return old, new, advantages, mask


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["vanilla", "mixed"])
def test_the_registered_token_losses_agree_with_the_loops(name, seed):
    """The one that GTPO trains with, verl's, and ours, which is the same where no row is a guide's."""
    old, new, advantages, mask = draw_loss_batch(seed)
    config = actor(GTPOPolicyLossConfig(loss_mode=name))
    loss, _ = core_algos.get_policy_loss_fn(name)(old, new, advantages, mask, "token-mean", config)
    want = reference.token_level_loss(new, old, advantages, mask, dual_clip=10.0)
    assert want != pytest.approx(reference.token_level_loss(new, old, advantages, mask), rel=1e-3)
    assert loss.item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clip", [(0.2, 0.28), (0.003, 0.004)])
@pytest.mark.parametrize("ratio", ["arithmetic", "geometric"])
def test_the_registered_sequence_loss_agrees_with_the_loops(ratio, clip, seed):
    """To 1e-7: verl's mean over the tokens of a response adds 1e-8 to their number."""
    old, new, advantages, mask = draw_loss_batch(seed)
    low, high = clip
    settings = {"seq_ratio": ratio, "seq_clip_ratio_low": low, "seq_clip_ratio_high": high}
    config = actor(GTPOPolicyLossConfig(loss_mode="grpo_s", **settings))
    loss, _ = core_algos.get_policy_loss_fn("grpo_s")(old, new, advantages, mask, "seq-mean-token-mean", config)
    want = reference.grpo_s_loss(new, old, advantages[:, 0], mask, low, high, ratio=ratio)
    assert loss.item() == pytest.approx(want, rel=1e-7)


# -------------------------------------------------------------------------------------------------- length penalties


@pytest.mark.parametrize("denominator", ["cache", "max"])
@pytest.mark.parametrize(("longest", "cache"), [(20480, 4096), (64, 16), (10, 10), (7, 1)])
def test_the_soft_overlong_penalty_agrees_at_every_length(longest, cache, denominator):
    lengths = torch.arange(0, longest + 20)
    want = torch.tensor(reference.soft_overlong_penalty(lengths, longest, cache, denominator), dtype=torch.float64)
    for given, tolerance in ((lengths, 1e-6), (lengths.double(), 1e-9)):
        got = soft_overlong_penalty(given, max_length=longest, cache_length=cache, denominator=denominator)
        assert got.shape == want.shape
        assert (got.double() - want).abs().max() <= tolerance
    assert torch.equal(
        soft_overlong_penalty(lengths, longest, cache),
        soft_overlong_penalty(lengths, longest, cache, denominator="cache"),
    )


@pytest.mark.parametrize("gamma", [0.75, 0.51, 0.6, 2 / 3, 0.9, 1.0])
def test_the_group_relative_penalty_agrees(gamma):
    """Lengths around the knee in groups of every difficulty, thirds and quarters at the very threshold among them."""
    seen = set()
    for seed in range(60):
        rng = random.Random(seed)
        verdicts = [(g, verdict) for g, group in enumerate(draw_groups(rng) + draw_groups(rng)) for verdict in group]
        rng.shuffle(verdicts)
        longest = rng.choice((1, 3, 10, 2000))
        lengths = torch.tensor([rng.choice((0, rng.randint(1, longest), longest, 9 * longest)) for _ in verdicts])
        correct = torch.tensor([verdict for _, verdict in verdicts])
        group = torch.tensor([3 - 5 * g for g, _ in verdicts])
        want = reference.group_relative_overlong_penalty(lengths, correct, group, gamma)
        seen.update(want)
        for given, tolerance in ((lengths, 1e-6), (lengths.double(), 1e-9)):
            got = group_relative_overlong_penalty(given, correct, group, gamma=gamma)
            assert got.double().tolist() == pytest.approx(want, abs=tolerance), f"seed {seed}"
    assert min(seen) < -0.4  # -0.5 itself cannot be had: the knee is above half of the longest


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0011])
@pytest.mark.parametrize("method", METHODS)
def test_an_impossible_entropy_is_refused_with_its_place(method, value):
    """In a group of one polarity too; the same value in the padding is none of anybody's business."""
    advantages_of, config_of, loops, _ = METHODS[method]
    entropy = torch.ones(47, 31, dtype=torch.float64)
    mask = torch.ones(47, 31, dtype=torch.bool)
    mask[:, 29:] = False
    correct, group = torch.arange(47) % 2 == 0, torch.arange(47) // 8
    correct[40:] = True
    entropy[5, 30] = value
    advantages_of(entropy, correct, mask, group, config_of())
    for row in (13, 43):
        wrong = entropy.clone()
        wrong[row, 23] = value
        with pytest.raises(ValueError, match=rf"(?s)(?=.*\b{row}\b)(?=.*\b23\b)"):
            advantages_of(wrong, correct, mask, group, config_of())
        with pytest.raises(ValueError, match=rf"(?s)(?=.*\b{row}\b)(?=.*\b23\b)"):
            loops(wrong, correct, mask, group, reference.Options())
