"""Signal and noise of each method's gradient, from dot products of the gradients of groups.

Notation: g is the gradient of a method's objective on one group at ratios of 1, h the leave-one-out policy gradient of
the accuracy on the same group, E h = G the truth. Estimates are sums over pairs of different groups: unbiased, but in
Adam's metric, whose weights are of the same groups, and G never contains the noise of its g. Intervals are a delete-one
jackknife over groups, because a bootstrap would draw pairs of equal groups.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from gtpo_verl.audit.analysis import BASELINE, Figure
from gtpo_verl.audit.plan import FEWEST_GROUPS
from gtpo_verl.audit.values import Bools
from gtpo_verl.files import write_bytes
from gtpo_verl.runs.statistics import Floats

METRICS = ("sgd", "adam")
RELATIVE_TO = (BASELINE, "gtpo")
DECILES = 10
FEWEST_STEPS = 8  # of groups, for Adam's metric: without signal its SNR of a step is -0.10 with three, -0.02 with eight


@dataclass(frozen=True, eq=False)
class Products:
    """Dot products over K groups of M methods; the first axis is the metric, Σ is over all groups.

    names: (M,). audited: (K,) bool, the groups that methods have credit on; the others have g = 0 and are in G alone.
    gg, gG, gh, gH, hG: (2, M, K), g·g, g·Σg, g·h, g·Σh, h·Σg. hh, hH: (2, K).
    noise, signal: (M, K, 2, 10), of the tokens of a group by verdict (wrong, correct) and by decile of the entropy:
    Σ c² ‖∇_logits log π‖², and Σ c ∇log π·G of other groups, whose sum is g·G. tokens, norms, entropies: (2, 10), how
    many there are, their mean ‖∇_logits log π‖² and their mean entropy.
    """

    names: Any
    audited: Bools
    gg: Floats
    gG: Floats  # noqa: N815
    gh: Floats
    gH: Floats  # noqa: N815
    hG: Floats  # noqa: N815
    hh: Floats
    hH: Floats  # noqa: N815
    noise: Floats
    signal: Floats
    tokens: Floats
    norms: Floats
    entropies: Floats

    def write(self, file: Path) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **vars(self))
        write_bytes(file, buffer.getvalue())

    @classmethod
    def read(cls, file: Path) -> "Products":
        with np.load(file) as arrays:
            return cls(**arrays)


class Moments(NamedTuple):
    """Estimates from all groups, and from all but one: (M, 1 + K), those of G (1 + K,).

    signal: |E g|². second: E |g|². along: E g·G. truth: |G|².
    """

    signal: Floats
    second: Floats
    along: Floats
    truth: Floats


def moments(products: Products, metric: int) -> Moments:
    """The estimates in one metric."""
    p, count = products, len(products.audited)
    n = without(p.audited.sum(), p.audited.astype(np.float64))
    k = without(np.array(count), np.ones(count))
    gg, gh = p.gg[metric], p.gh[metric]
    size = without(gg.sum(-1), gg)
    of_sum = without(p.gG[metric].sum(-1), 2 * p.gG[metric] - gg)  # |Σg - g|² = |Σg|² - 2 g·Σg + |g|²
    pairs = without(p.gH[metric].sum(-1), p.gH[metric] + p.hG[metric] - gh) - without(gh.sum(-1), gh)
    of_truth = without(p.hH[metric].sum(-1), 2 * p.hH[metric] - p.hh[metric])
    return Moments(
        signal=(of_sum - size) / (n * (n - 1)),
        second=size / n,
        along=pairs / (n * (k - 1)),
        truth=(of_truth - without(p.hh[metric].sum(-1), p.hh[metric])) / (k * (k - 1)),
    )


def without(total: Any, each: Floats) -> Floats:
    """(..., 1 + K): a total, and what is left of it without each of its K parts."""
    total = np.asarray(total)[..., None]
    return np.concatenate([total, total - each], axis=-1)


def jackknife(estimates: Floats, audited: Bools, *, logarithm: bool = False) -> Figure:
    """An estimate (1 + K,) with its 95 % interval, by the spread of those without one group.

    logarithm: of a positive quantity, whose interval is symmetric in its logarithm. No value where one is not finite.
    """
    values = np.log(np.where(estimates > 0, estimates, np.nan)) if logarithm else estimates
    if not np.isfinite(values).all():
        return Figure(None)
    left = values[1:]
    strata = [left[audited], left[~audited]] if (~audited).sum() > 1 else [left[audited]]
    variance = sum((len(each) - 1) * each.var() for each in strata)
    half = stats.t.ppf(0.975, audited.sum() - 1) * np.sqrt(variance)
    ends = values[0], values[0] - half, values[0] + half
    return Figure(*(float(np.exp(end) if logarithm else end) for end in ends))


def figures(products: Products, step: int) -> dict[str, Any]:
    """The figures as [value, low, high], null where they are not resolved; step: groups of a step of the run.

    By method and metric: `signal` |E g|², `noise` tr Σ, `snr` of a step, `cosine` with G, `gain` g·G/|G|², and relative
    to each of `RELATIVE_TO`, the groups needed: `own`, tr Σ/|E g|², in the method's own direction; `along`, E|g|²/(E
    g·G)² with the sign of E g·G, along the truth. Not resolved: the interval of |E g|², of |G|² or of E g·G, whichever
    is divided by, includes 0. Nothing is resolved with fewer than `FEWEST_GROUPS` groups, nor in Adam's metric with
    those of fewer than `FEWEST_STEPS` steps. By token (`tokens`): shares of noise and signal, those of E g·G.
    """
    methods: dict[str, Any] = {name: {} for name in products.names.tolist()}
    truth = {}
    for number, metric in enumerate(METRICS):
        found = moments(products, number)
        truth[metric] = jackknife(found.truth, products.audited)
        for row, name in enumerate(methods):
            methods[name][metric] = figures_of(row, found, products, step, truth[metric].resolved)
    for metric, fewest in (("sgd", FEWEST_GROUPS), ("adam", max(FEWEST_GROUPS, FEWEST_STEPS * step))):
        if products.audited.sum() < fewest:
            truth[metric] = Figure(None)
            for metrics in methods.values():
                metrics[metric] = dict.fromkeys(metrics[metric], Figure(None))
    known = {name: metrics["sgd"]["along_truth"].resolved for name, metrics in methods.items()}
    return {"truth": truth, "methods": methods, "tokens": _by_token(products, known)}


def figures_of(row: int, found: Moments, products: Products, step: int, truth: bool) -> dict[str, Figure]:
    """The figures of one method in one metric; truth: whether |G|² is resolved."""

    def figure(estimates: Floats, known: bool = True, **options: Any) -> Figure:
        return jackknife(estimates, products.audited, **options) if known else Figure(None)

    signal, along = found.signal[row], found.along[row]
    noise = found.second[row] - signal
    strong = jackknife(signal, products.audited).resolved
    sided = truth and jackknife(along, products.audited).resolved
    listed = {
        "signal": figure(signal),
        "noise": figure(noise, logarithm=True),
        "snr": figure(step * signal / noise, strong, logarithm=True),
        "along_truth": figure(along),
        "cosine": figure(along / np.sqrt(np.abs(signal * found.truth)), strong and truth),
        "gain": figure(along / found.truth, truth),
    }
    for other in RELATIVE_TO:
        if other not in products.names:
            continue
        place = products.names.tolist().index(other)
        other_signal, other_along = found.signal[place], found.along[place]
        other_strong = strong and jackknife(other_signal, products.audited).resolved
        other_sided = sided and jackknife(other_along, products.audited).resolved
        own = (noise / signal) / ((found.second[place] - other_signal) / other_signal)
        needed = (found.second[row] / along**2) / (found.second[place] / other_along**2)
        listed[f"own/{other}"] = figure(own, other_strong, logarithm=True)
        size = figure(needed, other_sided, logarithm=True)
        if along[0] * other_along[0] < 0 and size.value and size.low and size.high:
            size = Figure(-size.value, -size.high, -size.low)
        listed[f"along/{other}"] = size
    return listed


def _by_token(products: Products, known: dict[str, bool]) -> dict[str, Any]:
    """Where noise and signal are: shares of a method by verdict (wrong, correct) and decile of the entropy, given G.

    known: by method, whether the sum that its shares of the signal are of is resolved.
    """
    audited = products.audited

    def shares(each: Floats, resolved: bool = True) -> list[Any]:
        if not resolved or audited.sum() < FEWEST_GROUPS:
            return [[Figure(None)] * DECILES] * 2
        left = without(each.sum(0), np.moveaxis(each, 0, -1))  # (2, 10, 1 + K)
        share = left / left.sum((0, 1))
        return [[jackknife(cell, np.ones(len(each), bool)) for cell in line] for line in share]

    return {
        "tokens": products.tokens.tolist(),
        "norm": products.norms.tolist(),
        "entropy": products.entropies.tolist(),
        "shares": {
            name: {
                "noise": shares(products.noise[row, audited]),
                "signal": shares(products.signal[row, audited], known[name]),
            }
            for row, name in enumerate(products.names.tolist())
        },
    }
