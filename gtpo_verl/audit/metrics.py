"""The figures of an audit: how well a credit agrees with the true advantages, and what that is worth.

Every figure is a ratio of sums over responses. `components` gives the terms of a response, `figures` the ratios of
their means, so that an interval needs no more than resampled means (`gtpo_verl.runs.statistics`). Terms are linear in
the
advantages, or products of independent halves: sampling noise widens the intervals and does not attenuate the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from gtpo_verl.audit.values import Bools, Ints, Values, centred, centred_noise
from gtpo_verl.runs.statistics import Floats

SHARES = (0.05, 0.1, 0.2)  # of a response's tokens, where captured energy is asked
CERTAIN = 1.64  # standard errors: a step whose |A| is above is taken to have a known sign
LOST = 1 / 64  # largest share of correct continuations from which a response counts as lost
NO_STEP = -1


@dataclass(frozen=True, eq=False)
class Credit:
    """The credit of one method on N responses of M steps; sums are over the tokens of a step.

    mean: (N, M) mean credit of a token. square: (N, M) sum of squares. negative, absolute: (N, M) sums of max(-c, 0)
    and |c|. flips: (N, M) tokens whose credit contradicts the verdict. tokens: (N, M) how many the policy wrote.
    """

    mean: Floats
    square: Floats
    negative: Floats
    absolute: Floats
    flips: Floats
    tokens: Ints

    @classmethod
    def of_tokens(cls, credit: Floats, mask: Bools, points: Ints, correct: Bools) -> "Credit":
        """From a credit for each token.

        credit: (N, T). mask: (N, T) bool, tokens that the policy wrote. points: (N, M + 1) ascending, where the steps
        begin and end. correct: (N,) bool.
        """
        credit = np.where(mask, credit, 0.0)
        against = np.where(correct[:, None], credit < 0, credit > 0)
        tokens = _by_step(mask, points)
        return cls(
            mean=_by_step(credit, points) / np.maximum(tokens, 1),
            square=_by_step(credit**2, points),
            negative=_by_step(np.maximum(-credit, 0), points),
            absolute=_by_step(np.abs(credit), points),
            flips=_by_step(against, points),
            tokens=tokens.astype(np.int64),
        )

    @classmethod
    def of_steps(cls, credit: Floats, tokens: Ints, correct: Bools) -> "Credit":
        """From a credit for each step, (N, M), which all its tokens get."""
        against = np.where(correct[:, None], credit < 0, credit > 0)
        return cls(
            mean=credit,
            square=tokens * credit**2,
            negative=tokens * np.maximum(-credit, 0),
            absolute=tokens * np.abs(credit),
            flips=(tokens * against).astype(np.float64),
            tokens=tokens,
        )


def _by_step(values: Floats | Bools, points: Ints) -> Floats:
    """Sums of values (N, T) between points (N, M + 1): (N, M)."""
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1, dtype=np.float64)], axis=1)
    return np.diff(np.take_along_axis(sums, points, axis=1), axis=1)


@dataclass(frozen=True, eq=False)
class Losses:
    """Where wrong responses were lost.

    step: (N,) the step behind which V is at most `LOST` for good; `NO_STEP` for correct responses and where there is no
    such step before the last. never: (N,) bool, wrong with V(0) at most `LOST` already. at_the_end: (N,) bool, wrong
    and not lost before the last step.
    """

    step: Ints
    never: Bools
    at_the_end: Bools


def first_losses(V: Floats, correct: Bools) -> Losses:
    """Find the first irrecoverable step of each wrong response. V: (N, M + 1)."""
    steps = V.shape[1] - 1
    lost_since = np.flip(np.cumprod(np.flip(V <= LOST + 1e-12, axis=1), axis=1), axis=1).astype(bool)
    point = np.where(lost_since.any(axis=1), lost_since.argmax(axis=1), steps)
    never, at_the_end = ~correct & (point == 0), ~correct & (point == steps)
    return Losses(np.where(correct | never | at_the_end, NO_STEP, point - 1), never, at_the_end)


def components(
    values: Values, credit: Credit, losses: Losses, truth: Floats | None = None, energy: Floats | None = None
) -> dict[str, Floats]:
    """The terms of every figure, (N,) by name.

    truth, energy: (N, M), A and the estimate of A², for a credit that was made of a part of the values; else the mean
    of the halves and their product. Such a credit has no figures for which steps are chosen by all values.
    """
    apart = truth is None
    A = values.advantages.mean(axis=0) if truth is None else truth
    energy = values.energy if energy is None else energy
    c, first, second = centred(credit.mean), *centred(values.advantages)
    c = np.where(np.ptp(rounded(credit.mean), axis=1, keepdims=True) > 0, c, 0.0)  # of equal credits, round-off is left
    inside = c - _mean_at_position(c, values)
    certain = np.abs(values.advantages.mean(axis=0)) > np.maximum(CERTAIN * values.standard_error, 1e-9)
    judged = certain & (credit.mean != 0) & apart
    found = {
        "cA": (c * centred(A)).sum(1),
        "cc": (c**2).sum(1),
        "AA": (first * second).sum(1),
        "pA": (inside * centred(A)).sum(1),
        "pp": (inside**2).sum(1),
        "g": (credit.mean * A).sum(1),
        "q": credit.square.sum(1),
        "c2": (credit.mean**2).sum(1),
        "flips": credit.flips.sum(1),
        "tokens": credit.tokens.sum(1).astype(np.float64),
        "direction": (np.sign(credit.mean) * A).sum(1),
        "steps": np.full(len(A), float(A.shape[1])),
        "agree": ((np.sign(credit.mean) == np.sign(A)) & judged).sum(1).astype(np.float64),
        "judged": judged.sum(1).astype(np.float64),
        "energy": energy.sum(1),
    }
    for share in SHARES:
        found[f"energy@{share:g}"] = (chosen(np.abs(credit.mean), credit.tokens, share) * energy).sum(1)
    of_all = _critical(values, credit) | _blame(values, credit, losses, certain)
    found |= _rank_correlations(rounded(credit.mean), rounded(A)) | {
        name: term * apart for name, term in of_all.items()
    }
    return {name: values.weight * term for name, term in found.items()}


def chosen(size: Floats, tokens: Ints, share: float) -> Floats:
    """(N, M) in [0, 1]: how much of each step is taken when the largest are taken until `share` of the tokens are.

    The last step is taken in part, and equal ones in equal parts: the mean over all orders of steps of one length.
    """
    size = rounded(size)
    larger = (tokens[:, None, :] * (size[:, None, :] > size[:, :, None])).sum(2)
    equal = (tokens[:, None, :] * (size[:, None, :] == size[:, :, None])).sum(2)
    left = share * tokens.sum(1, keepdims=True) - larger
    return np.clip(left / np.maximum(equal, 1), 0.0, 1.0)


def rounded(values: Floats) -> Floats:
    """values (N, M) without the round-off by which equal ones differ: to 1e-9 of the largest of a row."""
    unit = 1e-9 * np.abs(values).max(axis=1, keepdims=True)
    return np.round(values / np.where(unit > 0, unit, 1.0)) * unit


def _mean_at_position(values: Floats, of: Values) -> Floats:
    """(N, M) the weighted mean over the responses of the same verdict at each step."""
    found = np.zeros_like(values)
    for rows in (of.correct, ~of.correct):
        if rows.any():
            found[rows] = np.average(values[rows], axis=0, weights=of.weight[rows])
    return found


def _critical(values: Values, credit: Credit, share: float = 0.2) -> dict[str, Floats]:
    """The share of |credit| on the steps with the largest |A| by the first half, and how much of A² is there by the
    second.
    """
    taken = chosen(np.abs(values.advantages[0]), credit.tokens, share)
    absolute, used = credit.absolute.sum(1), credit.absolute.sum(1) > 0
    there = (taken * credit.absolute).sum(1) / np.where(used, absolute, 1.0)
    tokens = (taken * credit.tokens).sum(1) / credit.tokens.sum(1)
    return {"critical": np.where(used, there, 0.0), "critical_tokens": np.where(used, tokens, 0.0)}


def _rank_correlations(credit: Floats, A: Floats) -> dict[str, Floats]:
    """Spearman with mid-ranks and Kendall τ-b of each response, 0 and not counted where either is constant."""
    ranks = [centred(rankdata(values, axis=1)) for values in (credit, A)]
    signs = [np.sign(values[:, :, None] - values[:, None, :]) for values in (credit, A)]
    found = {}
    for name, (x, y) in {"spearman": ranks, "kendall": [sign.reshape(len(A), -1) for sign in signs]}.items():
        size = np.sqrt((x**2).sum(1) * (y**2).sum(1))
        varies = size > 1e-12
        found[name] = np.where(varies, (x * y).sum(1) / np.where(varies, size, 1.0), 0.0)
        found[f"{name}_counted"] = varies.astype(np.float64)
    return found


def _blame(values: Values, credit: Credit, losses: Losses, certain: Bools) -> dict[str, Floats]:
    """Shares of the negative credit of a wrong response, and of its tokens: on the step that lost it, on it and its
    neighbours, behind it, and before it on steps after which V had certainly risen.
    """
    total = credit.negative.sum(1)
    judged = (losses.step >= 0) & (total > 0)
    place = np.arange(credit.mean.shape[1])[None, :] - losses.step[:, None]
    rose = certain & (values.advantages.mean(axis=0) > 0)
    found: dict[str, Floats] = {"lost": judged.astype(np.float64)}
    for name, where in {
        "on": place == 0,
        "near": np.abs(place) <= 1,
        "after": place > 0,
        "rising": (place < 0) & rose,
    }.items():
        share = (credit.negative * where).sum(1) / np.where(judged, total, 1.0)
        tokens = (credit.tokens * where).sum(1) / credit.tokens.sum(1)
        found[f"blame_{name}"] = np.where(judged, share, 0.0)
        found[f"tokens_{name}"] = np.where(judged, tokens, 0.0)
    return found


def figures(sums: Mapping[str, Floats], dapo: Mapping[str, Floats]) -> dict[str, Floats]:
    """The figures of a method from means or sums of its components, each () or (D,); NaN where one is not defined.

    alignment: cosine of centred credit and centred true advantages, in [-1, 1]; 0 for a credit that is the same in all
    steps of a response. alignment_inside: the same beyond what the relative position explains, 0 where that is all.
    spearman, kendall: mean rank correlation over the responses in which the credit varies, attenuated by noise.
    energy@q: share of Σ A² on the steps with the largest |credit|, q of the tokens. critical_lift: the share of
    |credit| on the fifth of the tokens with the largest |A|, over the share of the tokens.
    blame_lift, blame_near: the share of negative credit on the step that lost a wrong response, without and with its
    neighbours, over their share of the tokens. wasted: the share behind it. wasted_tokens: the tokens there. rising:
    the share before it where the value rose.
    rollouts: needed relative to DAPO for the same signal in the gradient, below 1 is better. bias: 1 - squared cosine
    of credit and advantages, not centred. flips: share of tokens whose credit contradicts the verdict. direction:
    mean true advantage of a step in the direction of its credit. sign: share of steps of certain sign that the credit
    agrees with.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "alignment": _cosine(sums["cA"], sums["cc"], sums["AA"], sums["cc"] == 0),
            "alignment_inside": _cosine(sums["pA"], sums["pp"], sums["AA"], sums["pp"] <= 0.01 * sums["cc"]),
            "spearman": sums["spearman"] / sums["spearman_counted"],
            "kendall": sums["kendall"] / sums["kendall_counted"],
            "critical_lift": sums["critical"] / sums["critical_tokens"],
            "blame_lift": sums["blame_on"] / sums["tokens_on"],
            "blame_near": sums["blame_near"] / sums["tokens_near"],
            "wasted": sums["blame_after"] / sums["lost"],
            "wasted_tokens": sums["tokens_after"] / sums["lost"],
            "rising": sums["blame_rising"] / sums["lost"],
            "rollouts": (sums["q"] / sums["g"] ** 2) / (dapo["q"] / dapo["g"] ** 2),
            "bias": 1 - sums["g"] ** 2 / (sums["c2"] * sums["energy"]),
            "flips": sums["flips"] / sums["tokens"],
            "direction": sums["direction"] / sums["steps"],
            "sign": sums["agree"] / sums["judged"],
        }
        for share in SHARES:
            found[f"energy@{share:g}"] = sums[f"energy@{share:g}"] / sums["energy"]
    return {name: np.where(np.isfinite(value), value, np.nan) for name, value in found.items()}


def _cosine(product: Floats, square: Floats, signal: Floats, constant: Bools) -> Floats:
    cosine = product / np.sqrt(np.where(signal > 0, square * signal, np.nan))
    return np.where(constant, np.where(signal > 0, 0.0, np.nan), cosine)


def reliability(values: Values) -> dict[str, Floats]:
    """The terms, (N,) by name, of how much of the variance of centred A is signal.

    AA: the product of the halves; A1, A2: their squares; noise: the squared sampling error that binomial counts have,
    of either half; V0: V(0)(1 - V(0)), to which the squares of the true advantages add up in expectation.
    """
    first, second = centred(values.advantages)
    v1, v2 = values.halves[:, :, 0]
    found = {
        "AA": (first * second).sum(1),
        "A1": (first**2).sum(1),
        "A2": (second**2).sum(1),
        "noise": centred_noise(values).mean(axis=0),
        "energy": values.energy.sum(1),
        "V0": (v1 + v2) / 2 - v1 * v2,
        "drift": values.advantages.mean(axis=0).sum(1),
    } | _rank_correlations(values.advantages[0], values.advantages[1])
    return {name: values.weight * term for name, term in found.items()}


def reliability_figures(sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """λ, the share of signal in the variance of centred A, from means of `reliability`.

    half: of one half, from the correlation of the two. half_binomial: the same from the variance of binomial counts
    alone; the two agree where the halves are independent. all: of both halves together (Spearman-Brown). ranks: of
    both, for rank correlations. oracle: the alignment of the first half scored by the second, √λ of a half.
    released: Σ A² over V(0)(1 - V(0)), 1 in expectation.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        half = sums["AA"] / np.sqrt(sums["A1"] * sums["A2"])
        ranks = sums["spearman"] / sums["spearman_counted"]
        found = {
            "half": half,
            "half_binomial": 1 - 2 * sums["noise"] / (sums["A1"] + sums["A2"]),
            "all": 2 * half / (1 + half),
            "ranks": 2 * ranks / (1 + ranks),
            "oracle": np.sqrt(np.where(sums["AA"] > 0, sums["AA"] / sums["A1"], np.nan)),
            "released": sums["energy"] / sums["V0"],
        }
    return {name: np.where(np.isfinite(value), value, np.nan) for name, value in found.items()}
