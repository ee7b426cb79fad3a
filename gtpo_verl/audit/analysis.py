"""From values and credits to the figures of an audit, with intervals over prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gtpo_verl.audit.metrics import Credit, components, figures, reliability, reliability_figures
from gtpo_verl.audit.references import oracle_credit
from gtpo_verl.audit.values import Bools, Values
from gtpo_verl.evaluation.paired import holm
from gtpo_verl.runs.statistics import Floats, resampled_means

DRAWS = 2000
FEWEST_PROMPTS = 20  # below, no interval: a percentile bootstrap over few prompts is too narrow
BASELINE = "dapo"
ORACLE = "oracle"
RANDOM = "random"


class Figure(NamedTuple):
    """A figure with its 95 % interval over prompts; None where it is not defined, or has no interval."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def contains(self, value: float) -> bool | None:
        """Whether the interval does; None without one."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.contains(0.0) is False


@dataclass(frozen=True)
class Analysis:
    """The figures of an audit, as it records them.

    methods: by the name of a method or a reference: ``figures`` by stratum and name; ``minus``, the same less those of
    another row, by its name; ``p_holm`` by stratum, of alignment against DAPO's, two-sided, adjusted for the number of
    methods. reliability: of the measurement, by stratum. mean_advantage_by_step: the weighted mean of A over all
    responses, 0 in expectation where V is a martingale. kinds: of `kinds.kind_shares`.
    """

    methods: Mapping[str, Mapping[str, Any]]
    reliability: Mapping[str, Mapping[str, Figure]]
    mean_advantage_by_step: tuple[Figure, ...]
    kinds: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)


def analyse(
    values: Values, scored: Mapping[str, Credit], random: Sequence[Credit] = (), *, draws: int = DRAWS
) -> Analysis:
    """Score the credits by name, `BASELINE` among them; the oracle made of the first half is added.

    random: of several seeds; scored one by one and shown as one row, the mean over them. draws: of the bootstrap.
    """
    intervals = enough_prompts(values)
    terms = {name: components(values, credit) for name, credit in scored.items()}
    oracle = oracle_credit(values, scored[BASELINE].tokens)
    terms[ORACLE] = components(values, oracle, truth=values.advantages[1], energy=values.energy_of_second)
    seeds = [components(values, credit) for credit in random]
    names = [*scored, *([RANDOM] if seeds else []), ORACLE]
    drawn: dict[str, dict[str, dict[str, Floats]]] = {name: {} for name in names}
    measured: dict[str, dict[str, Floats]] = {}
    strata = {"all": np.ones_like(values.correct), "correct": values.correct, "wrong": ~values.correct}
    for stratum, within in strata.items():
        if not within.any():
            continue
        for name, each in terms.items():
            drawn[name][stratum] = figures(resampled(each, within, values, draws))
        if seeds:
            drawn[RANDOM][stratum] = _pooled([figures(resampled(each, within, values, draws)) for each in seeds])
        measured[stratum] = reliability_figures(resampled(reliability(values), within, values, draws))
    methods = [name for name in scored if name != BASELINE]
    p_values = {
        stratum: dict(zip(methods, holm([_p(drawn[name][stratum]["alignment"]) for name in methods]), strict=True))
        for stratum in measured
        if methods and intervals
    }
    rows = {}
    for name in names:
        others = [other for other in (BASELINE, "gtpo") if name in methods and other in drawn and other != name]
        rows[name] = {
            "figures": _figures(drawn[name], intervals),
            "minus": {other: _figures(_less(drawn[name], drawn[other]), intervals) for other in others},
            "p_holm": {stratum: float(p[name]) for stratum, p in p_values.items() if name in p},
        }
    A = values.weight[:, None] * values.advantages.mean(axis=0)
    by_step = {f"step {step}": column for step, column in enumerate(A.T)}
    sums = resampled(by_step | {"weight": values.weight}, strata["all"], values, draws)
    drift = [as_figure(sums[step] / sums["weight"], intervals) for step in by_step]
    return Analysis(rows, _figures(measured, intervals), tuple(drift))


def enough_prompts(values: Values) -> bool:
    """Whether there are enough prompts for intervals."""
    return len(set(values.prompt)) >= FEWEST_PROMPTS


def resampled(terms: Mapping[str, Floats], rows: Bools, values: Values, draws: int) -> dict[str, Floats]:
    """Means of the terms over the responses in a stratum, then over those of its resampled prompts: (1 + D,) each."""
    columns = np.stack([term[rows] for term in terms.values()], axis=1)
    prompts = [name for name, keep in zip(values.prompt, rows, strict=True) if keep]
    drawn = resampled_means(columns, clusters=prompts, draws=draws)
    means = np.concatenate([columns.mean(axis=0, keepdims=True), drawn])
    return dict(zip(terms, means.T, strict=True))


def _pooled(seeds: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """Of several seeds the mean of each figure where it is defined, then the draws of all."""
    pooled = {}
    for name in seeds[0]:
        every = np.stack([seed[name] for seed in seeds])
        known = every[np.isfinite(every[:, 0]), 0]
        pooled[name] = np.concatenate([[known.mean() if len(known) else np.nan], every[:, 1:].ravel()])
    return pooled


def _less(drawn: Mapping[str, Mapping[str, Floats]], other: Mapping[str, Mapping[str, Floats]]) -> Any:
    """A method's figures less those of another, on the same draws."""
    return {stratum: {key: mine - other[stratum][key] for key, mine in of.items()} for stratum, of in drawn.items()}


def _figures(drawn: Mapping[str, Mapping[str, Floats]], intervals: bool) -> dict[str, dict[str, Figure]]:
    return {
        stratum: {name: as_figure(values, intervals) for name, values in of.items()} for stratum, of in drawn.items()
    }


def as_figure(drawn: Floats, intervals: bool) -> Figure:
    """Of a value and its draws; a figure that more than a fortieth of the draws do not define has no interval."""
    value, draws = float(drawn[0]), drawn[1:]
    if not np.isfinite(value):
        return Figure(None)
    defined = np.isfinite(draws)
    if not intervals or defined.mean() < 0.975 or np.ptp(draws[defined]) < 1e-9:
        return Figure(value)
    return Figure(value, *np.quantile(draws[defined], [0.025, 0.975]).tolist())


def _p(drawn: Floats) -> float:
    """Two-sided p of a figure whose draws are compared with 0; 1 where it is not defined."""
    draws = drawn[1:][np.isfinite(drawn[1:])]
    if not len(draws) or not np.isfinite(drawn[0]) or np.ptp(draws) < 1e-9:
        return 1.0
    below, above = (draws <= 0).mean(), (draws >= 0).mean()
    return float(min(1.0, max(2 * min(below, above), 2 / (len(draws) + 1))))
