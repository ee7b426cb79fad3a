"""From values and credits to the figures of an audit, with intervals over prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
STRATA = ("all", "correct", "wrong")


@dataclass(frozen=True)
class Figure:
    """A figure with its 95 % interval over prompts; None where it is not defined, or has no interval."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def contains(self, value: float) -> bool | None:
        """Whether the interval does; None without one."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high


@dataclass(frozen=True)
class Row:
    """A method or a reference: its figures by stratum and name.

    differences: the same less those of another row, by its name. p_holm: of alignment against DAPO's, two-sided,
    adjusted for the number of methods; by stratum.
    """

    name: str
    figures: Mapping[str, Mapping[str, Figure]]
    differences: Mapping[str, Mapping[str, Mapping[str, Figure]]] = field(default_factory=dict)
    p_holm: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Analysis:
    """All rows, and the reliability of the measurement by stratum."""

    rows: tuple[Row, ...]
    reliability: Mapping[str, Mapping[str, Figure]]
    drift: tuple[Figure, ...]
    intervals: bool

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def analyse(
    values: Values, scored: Mapping[str, Credit], random: Sequence[Credit] = (), *, draws: int = DRAWS
) -> Analysis:
    """Score the credits.

    Args:
        values: of N responses.
        scored: the credits by name, `BASELINE` among them; the oracle made of the first half is added.
        random: of several seeds; scored one by one and shown as one row, the mean over them.
        draws: of the bootstrap.
    """
    terms = {name: components(values, credit) for name, credit in scored.items()}
    oracle = oracle_credit(values, scored[BASELINE].tokens)
    terms[ORACLE] = components(values, oracle, truth=values.advantages[1], energy=values.energy_of_second)
    terms |= {f"{RANDOM}-{seed}": components(values, credit) for seed, credit in enumerate(random)}
    intervals = len(set(values.prompt)) >= FEWEST_PROMPTS
    found: dict[str, dict[str, dict[str, Figure]]] = {name: {} for name in terms}
    drawn: dict[str, dict[str, dict[str, Floats]]] = {name: {} for name in terms}
    measured: dict[str, dict[str, Figure]] = {}
    for stratum in STRATA:
        rows = _rows(values, stratum)
        if not rows.any():
            continue
        for name, each in terms.items():
            drawn[name][stratum] = figures(_resampled(each, rows, values, draws))
            found[name][stratum] = _figures(drawn[name][stratum], intervals)
        measured[stratum] = _figures(
            reliability_figures(_resampled(reliability(values), rows, values, draws)), intervals
        )
    singles = [f"{RANDOM}-{seed}" for seed in range(len(random))]
    methods = [name for name in scored if name != BASELINE]
    p_values = {
        stratum: dict(zip(methods, holm([_p(drawn[name][stratum]["alignment"]) for name in methods]), strict=True))
        for stratum in found[BASELINE]
        if methods and intervals
    }
    result = [
        Row(
            name,
            found[name],
            _differences(name, methods, drawn, intervals),
            {stratum: float(p[name]) for stratum, p in p_values.items() if name in p},
        )
        for name in [*scored, ORACLE]
    ]
    if singles:
        result.insert(-1, _pooled([found[name] for name in singles], [drawn[name] for name in singles], intervals))
    return Analysis(
        tuple(result),
        measured,
        _drift(values, intervals, draws),
        intervals,
    )


def _rows(values: Values, stratum: str) -> Bools:
    return {"all": np.ones_like(values.correct), "correct": values.correct, "wrong": ~values.correct}[stratum]


def _resampled(terms: Mapping[str, Floats], rows: Bools, values: Values, draws: int) -> dict[str, Floats]:
    """Means of the terms over the responses, then over those of resampled prompts: (1 + D,) each.

    A prompt without a response in the stratum is no prompt of it.
    """
    columns = np.stack([term[rows] for term in terms.values()], axis=1)
    prompts = [name for name, keep in zip(values.prompt, rows, strict=True) if keep]
    drawn = resampled_means(columns, clusters=prompts, draws=draws)
    means = np.concatenate([columns.mean(axis=0, keepdims=True), drawn])
    return dict(zip(terms, means.T, strict=True))


def _figures(drawn: Mapping[str, Floats], intervals: bool) -> dict[str, Figure]:
    return {name: _figure(values[0], values[1:], intervals) for name, values in drawn.items()}


def _figure(value: float, draws: Floats, intervals: bool) -> Figure:
    """A figure that more than a fortieth of the draws do not define has no interval."""
    if not np.isfinite(value):
        return Figure(None)
    defined = np.isfinite(draws)
    if not intervals or defined.mean() < 0.975 or np.ptp(draws[defined]) < 1e-9:
        return Figure(float(value))
    low, high = np.quantile(draws[defined], [0.025, 0.975])
    return Figure(float(value), float(low), float(high))


def _p(drawn: Floats) -> float:
    """Two-sided p of a figure whose draws are compared with 0; 1 where it is not defined."""
    draws = drawn[1:][np.isfinite(drawn[1:])]
    if not len(draws) or not np.isfinite(drawn[0]) or np.ptp(draws) < 1e-9:
        return 1.0
    below, above = (draws <= 0).mean(), (draws >= 0).mean()
    return float(min(1.0, max(2 * min(below, above), 2 / (len(draws) + 1))))


def _differences(
    name: str, methods: Sequence[str], drawn: Mapping[str, Mapping[str, Mapping[str, Floats]]], intervals: bool
) -> dict[str, dict[str, dict[str, Figure]]]:
    """A method's figures less those of DAPO and of GTPO, on the same draws."""
    if name not in methods:
        return {}
    others = [other for other in (BASELINE, "gtpo") if other in drawn and other != name]
    return {
        other: {
            stratum: _figures({key: mine - drawn[other][stratum][key] for key, mine in each.items()}, intervals)
            for stratum, each in drawn[name].items()
        }
        for other in others
    }


def _pooled(
    found: Sequence[Mapping[str, Mapping[str, Figure]]],
    drawn: Sequence[Mapping[str, Mapping[str, Floats]]],
    intervals: bool,
) -> Row:
    """One row for several seeds: the mean of each figure, and the interval of the draws of all."""
    pooled: dict[str, dict[str, Figure]] = {}
    for stratum, figures_there in found[0].items():
        pooled[stratum] = {}
        for name in figures_there:
            values = [each[stratum][name].value for each in found]
            known = [value for value in values if value is not None]
            draws = np.concatenate([each[stratum][name][1:] for each in drawn])
            pooled[stratum][name] = _figure(float(np.mean(known)) if known else np.nan, draws, intervals)
    return Row(RANDOM, pooled)


def _drift(values: Values, intervals: bool, draws: int) -> tuple[Figure, ...]:
    """The weighted mean of A over all responses at each step; 0 in expectation where V is a martingale."""
    A = values.advantages.mean(axis=0)
    columns = np.concatenate([values.weight[:, None] * A, values.weight[:, None]], axis=1)
    drawn = resampled_means(columns, clusters=list(values.prompt), draws=draws)
    means = np.concatenate([columns.mean(axis=0, keepdims=True), drawn])
    return tuple(_figure(each[0], each[1:], intervals) for each in (means[:, :-1] / means[:, -1:]).T)


def plain(analysis: Analysis) -> dict[str, Any]:
    """The analysis for JSON: figures as [value, low, high]."""

    def listed(figure: Figure) -> list[float | None]:
        return [figure.value, figure.low, figure.high]

    def tree(node: Any) -> Any:
        return listed(node) if isinstance(node, Figure) else {key: tree(value) for key, value in node.items()}

    return {
        "methods": {
            row.name: {"figures": tree(row.figures), "minus": tree(row.differences), "p_holm": dict(row.p_holm)}
            for row in analysis.rows
        },
        "reliability": tree(analysis.reliability),
        "mean_advantage_by_step": [listed(figure) for figure in analysis.drift],
    }
