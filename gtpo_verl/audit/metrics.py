"""The figures of an audit: how well a credit agrees with the true advantages, and what that is worth.

Every figure is a ratio of sums over responses: `components` gives the terms of a response, `figures` the ratios of
their means, so an interval needs resampled means alone. Terms are linear in the advantages, or products of independent
halves: sampling noise widens the intervals and does not attenuate the figures. No figure chooses steps by their values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gtpo_verl.audit.values import Bools, Ints, Values, centred, centred_noise
from gtpo_verl.runs.statistics import Floats

SHARES = (0.05, 0.1, 0.2)  # of a response's tokens, where captured energy is asked
CERTAIN = 1.64  # standard errors: the picture hatches a step whose |A| is below
LOST = 1 / 64  # largest share of correct continuations from which a response counts as lost
NO_STEP = -1


@dataclass(frozen=True, eq=False)
class Credit:
    """The credit of one method on N responses of M steps, (N, M) each: the mean of a token, the tokens whose credit
    contradicts the verdict, and how many tokens the policy wrote.
    """

    mean: Floats
    flips: Floats
    tokens: Ints

    @classmethod
    def of_tokens(cls, credit: Floats, mask: Bools, points: Ints, correct: Bools) -> "Credit":
        """From a credit (N, T) for each token that the policy wrote, which mask (N, T) marks.

        points: (N, M + 1) ascending, where the steps begin and end. correct: (N,) bool.
        """
        credit = np.where(mask, credit, 0.0)
        against = np.where(correct[:, None], credit < 0, credit > 0)
        tokens = by_step(mask, points)
        mean = by_step(credit, points) / np.maximum(tokens, 1)
        return cls(mean, by_step(against, points), tokens.astype(np.int64))

    @classmethod
    def of_steps(cls, credit: Floats, tokens: Ints, correct: Bools) -> "Credit":
        """From a credit for each step, (N, M), which all its tokens get."""
        against = np.where(correct[:, None], credit < 0, credit > 0)
        return cls(credit, (tokens * against).astype(np.float64), tokens)


def by_step(values: Floats | Bools, points: Ints) -> Floats:
    """Sums of values (N, T) between points (N, M + 1): (N, M)."""
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1, dtype=np.float64)], axis=1)
    return np.diff(np.take_along_axis(sums, points, axis=1), axis=1)


def first_losses(values: Values) -> Ints:
    """(N,) the step behind which V is at most `LOST` for good, for the picture: as far as the continuations tell.

    `NO_STEP` for correct responses, where V(0) is that low already, and where there is none before the last step.
    """
    V, steps = values.mean, values.is_step.sum(axis=1)
    lost_since = np.flip(np.cumprod(np.flip(V <= LOST + 1e-12, axis=1), axis=1), axis=1).astype(bool)
    point = np.where(lost_since.any(axis=1), lost_since.argmax(axis=1), steps)
    return np.where(values.correct | (point == 0) | (point >= steps), NO_STEP, point - 1)


def components(
    values: Values, credit: Credit, truth: Floats | None = None, energy: Floats | None = None
) -> dict[str, Floats]:
    """The terms of every figure, (N,) by name.

    truth, energy: (N, M), A and the estimate of A², where not the mean of the halves and their product.
    """
    A = values.advantages.mean(axis=0) if truth is None else truth
    energy = values.energy if energy is None else energy
    is_step = values.is_step
    c, advantage, first, second = (centred(each, is_step) for each in (credit.mean, A, *values.advantages))
    differ = np.ptp(rounded(np.where(is_step, credit.mean, credit.mean[:, :1])), axis=1, keepdims=True) > 0
    c = np.where(differ, c, 0.0)  # of equal credits, round-off is left
    inside = _beyond_position(c, values)
    found = {
        "cA": (c * advantage).sum(1),
        "cc": (c**2).sum(1),
        "AA": (first * second).sum(1),
        "pA": (inside * advantage).sum(1),
        "pp": (inside**2).sum(1),
        "g": (credit.mean * A).sum(1),
        "c2": (credit.mean**2).sum(1),
        "flips": credit.flips.sum(1),
        "tokens": credit.tokens.sum(1).astype(np.float64),
        "direction": (np.sign(credit.mean) * A).sum(1),
        "steps": is_step.sum(1).astype(np.float64),
        "energy": energy.sum(1),
    }
    for share in SHARES:
        found[f"energy@{share:g}"] = (chosen(np.abs(credit.mean), credit.tokens, share) * energy).sum(1)
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


def _beyond_position(c: Floats, values: Values) -> Floats:
    """(N, M) centred credit less what the number of the step explains: the residuals of the weighted least-squares fit
    of c = (a number for each response) + (a number for each step), for each verdict.
    """
    found = np.zeros_like(c)
    for rows in (values.correct, ~values.correct):
        is_step = values.is_step[rows]
        weight = values.weight[rows, None] * is_step
        normal = np.diag(weight.sum(0)) - weight.T @ (is_step / is_step.sum(1, keepdims=True))
        of_step = np.linalg.pinv(normal, hermitian=True) @ (weight * c[rows]).sum(0)
        found[rows] = centred(c[rows] - of_step, is_step)
    return found


def figures(sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """The figures of a method from means or sums of its components, each () or (D,); NaN where one is not defined.

    alignment: cosine of centred credit and centred true advantages, in [-1, 1]; 0 for a credit that is the same in all
    steps of a response. alignment_inside: the same beyond what the number of the step explains, 0 where that is all.
    energy@q: share of Σ A² on the steps with the largest |credit|, q of the tokens. bias: 1 - squared cosine of credit
    and advantages, not centred. flips: share of tokens whose credit contradicts the verdict. direction: mean true
    advantage of a step in the direction of its credit.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "alignment": _cosine(sums["cA"], sums["cc"], sums["AA"], sums["cc"] == 0),
            "alignment_inside": _cosine(sums["pA"], sums["pp"], sums["AA"], sums["pp"] <= 0.01 * sums["cc"]),
            "bias": 1 - sums["g"] ** 2 / (sums["c2"] * sums["energy"]),
            "flips": sums["flips"] / sums["tokens"],
            "direction": sums["direction"] / sums["steps"],
        }
        for share in SHARES:
            found[f"energy@{share:g}"] = sums[f"energy@{share:g}"] / sums["energy"]
    return {name: np.where(np.isfinite(value), value, np.nan) for name, value in found.items()}


def _cosine(product: Floats, square: Floats, signal: Floats, constant: Bools) -> Floats:
    cosine = product / np.sqrt(np.where(signal > 0, square * signal, np.nan))
    return np.where(constant, np.where(signal > 0, 0.0, np.nan), cosine)


def reliability(values: Values) -> dict[str, Floats]:
    """The terms, (N,) by name, of how much of the variance of centred A is signal.

    AA: the product of the halves. A1, A2: their squares. noise: of a half with binomial counts. V0: V(0)(1 - V(0)),
    which E Σ A² is.
    """
    first, second = centred(values.advantages, values.is_step)
    v1, v2 = values.halves[:, :, 0]
    found = {
        "AA": (first * second).sum(1),
        "A1": (first**2).sum(1),
        "A2": (second**2).sum(1),
        "noise": centred_noise(values).mean(axis=0),
        "energy": values.energy.sum(1),
        "V0": (v1 + v2) / 2 - v1 * v2,
    }
    return {name: values.weight * term for name, term in found.items()}


def reliability_figures(sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """λ, the share of signal in the variance of centred A, from means of `reliability`.

    half: of one half, from the correlation of the two. half_binomial: the same from the variance of binomial counts,
    equal where the halves are independent. all: of both together (Spearman-Brown). oracle: the alignment of the first
    half scored by the second, √λ of a half. released: Σ A² over V(0)(1 - V(0)), 1 in expectation.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        half = sums["AA"] / np.sqrt(sums["A1"] * sums["A2"])
        found = {
            "half": half,
            "half_binomial": 1 - 2 * sums["noise"] / (sums["A1"] + sums["A2"]),
            "all": 2 * half / (1 + half),
            "oracle": np.sqrt(np.where(sums["AA"] > 0, sums["AA"] / sums["A1"], np.nan)),
            "released": sums["energy"] / sums["V0"],
        }
    return {name: np.where(np.isfinite(value), value, np.nan) for name, value in found.items()}
