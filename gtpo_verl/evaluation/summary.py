"""Metrics of an evaluation from its samples, each a mean over problems with a bootstrap interval.

``gtpo-verl eval`` and every validation during training use the same function, so their results agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gtpo_verl.evaluation.metrics import MAX_VOTERS, majority_at_k, pass_at_k, powers_of_two
from gtpo_verl.runs.statistics import Estimate, Floats, estimate, estimates


@dataclass(frozen=True)
class Sample:
    """One response to one problem.

    ``problem`` is a key that equal problems share; ``answer`` what the verifier extracted, or None; ``length`` in
    tokens; ``truncated``: the length reached the limit. A ``failed`` sample was requested and never came: it is wrong,
    as in verl's own metrics, and has no length. Of an ``unjudged`` one the verifier failed: it is wrong as well.
    """

    problem: str
    data_source: str
    correct: bool
    answer: str | None = None
    length: int = 0
    truncated: bool = False
    failed: bool = False
    unjudged: bool = False
    cluster: str | None = None


@dataclass(frozen=True)
class Figure:
    """A mean over problems with its 95 % interval, None where all problems have the same value."""

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, estimate: Estimate) -> "Figure":
        interval = estimate.interval
        return cls(estimate.value, interval.low if interval else None, interval.high if interval else None)


@dataclass(frozen=True)
class SourceSummary:
    """The metrics of one data source.

    ``samples``: n, the smallest number of samples of a problem, and the largest k. ``mean`` is mean@n, avg@n in some
    papers. ``majority_at`` is empty where the verifier reports no answers. ``response_length`` in tokens,
    ``truncated_share`` in [0, 1]; both exclude failed samples, and are None where every sample failed.
    """

    data_source: str
    problems: int
    samples: int
    failed: int
    unjudged: int
    mean: Figure
    pass_at: Mapping[int, Figure]
    majority_at: Mapping[int, Figure] = field(default_factory=dict)
    response_length: Figure | None = None
    truncated_share: Figure | None = None

    @property
    def named(self) -> dict[str, Figure]:
        """The accuracies by the names that papers use: mean@n, pass@k and maj@k."""
        named = {f"mean@{self.samples}": self.mean}
        named |= {f"pass@{k}": figure for k, figure in self.pass_at.items()}
        return named | {f"maj@{k}": figure for k, figure in self.majority_at.items()}


def summarize(samples: Iterable[Sample]) -> list[SourceSummary]:
    """Summarise samples, in any order, by data source, in alphabetical order; at least one, else ValueError.

    The bootstrap resamples problems with all their samples, or whole clusters of problems where the samples name them.
    Problems have equal weight, however many samples they have; rows that repeat one are samples of one problem.
    """
    sources: dict[str, dict[str, list[Sample]]] = {}
    for sample in samples:
        sources.setdefault(sample.data_source, {}).setdefault(sample.problem, []).append(sample)
    if not sources:
        raise ValueError("no samples to summarise")
    return [_summarize_source(name, problems) for name, problems in sorted(sources.items())]


def _summarize_source(name: str, problems: Mapping[str, Sequence[Sample]]) -> SourceSummary:
    rows = [problems[key] for key in sorted(problems)]  # sorted: the bootstrap draws the same problems each time
    fewest = min(map(len, rows))
    ks = powers_of_two(fewest)
    n = np.array([len(row) for row in rows])
    c = np.array([sum(sample.correct for sample in row) for row in rows])
    columns = [c / n, [[pass_at_k(*each, k) for k in ks] for each in zip(n.tolist(), c.tolist(), strict=True)]]
    votes = n.max() <= MAX_VOTERS and any(sample.answer for row in rows for sample in row)
    if votes:
        columns.append([majority_at_k([s.answer for s in row], [s.correct for s in row], ks) for row in rows])
    figures = _estimates(np.column_stack(columns), rows)
    came = [kept for row in rows if (kept := [sample for sample in row if not sample.failed])]
    lengths = [[np.mean([one.length for one in row]), np.mean([one.truncated for one in row])] for row in came]
    length, truncated = _estimates(lengths, came) if came else (None, None)
    return SourceSummary(
        data_source=name,
        problems=len(rows),
        samples=fewest,
        failed=sum(sample.failed for row in rows for sample in row),
        unjudged=sum(sample.unjudged for row in rows for sample in row),
        mean=figures[0],
        pass_at=dict(zip(ks, figures[1 : 1 + len(ks)], strict=True)),
        majority_at=dict(zip(ks, figures[1 + len(ks) :], strict=True)) if votes else {},
        response_length=length,
        truncated_share=truncated,
    )


def _estimates(means: Any, rows: Sequence[Sequence[Sample]]) -> list[Figure]:
    """Of columns of a mean for each problem; resampled are clusters of problems, or a problem that has none."""
    clusters = [row[0].cluster or row[0].problem for row in rows]
    return [Figure.of(one) for one in estimates(np.asarray(means, np.float64), clusters=clusters)]


def paired_changes(before: Iterable[Sample], after: Iterable[Sample]) -> dict[str, Figure]:
    """Mean accuracy after minus before by data source, over problems of both, with an interval paired by problem."""
    after = list(after)
    first, last = _accuracies(before), _accuracies(after)
    clusters = {(sample.data_source, sample.problem): sample.cluster or sample.problem for sample in after}
    changes = {}
    for source in sorted({source for source, _ in first.keys() & last.keys()}):
        common = sorted(key for key in first.keys() & last.keys() if key[0] == source)
        differences: Floats = np.array([last[key] - first[key] for key in common])
        changes[source] = Figure.of(estimate(differences, clusters=[clusters[key] for key in common]))
    return changes


def _accuracies(samples: Iterable[Sample]) -> dict[tuple[str, str], float]:
    """Share of correct samples by data source and problem."""
    verdicts: dict[tuple[str, str], list[bool]] = {}
    for sample in samples:
        verdicts.setdefault((sample.data_source, sample.problem), []).append(sample.correct)
    return {key: float(np.mean(values)) for key, values in verdicts.items()}


def logged(summaries: Iterable[SourceSummary]) -> dict[str, float]:
    """The summaries as metrics: ``val/<data source>/mean@8``, its ``/ci_low`` and ``/ci_high``, and so on."""
    metrics: dict[str, float] = {}
    for summary in summaries:
        prefix = f"val/{summary.data_source}"
        metrics[f"{prefix}/problems"] = summary.problems
        metrics[f"{prefix}/failed_samples"] = summary.failed
        metrics[f"{prefix}/unjudged_samples"] = summary.unjudged
        named = summary.named
        if summary.response_length is not None and summary.truncated_share is not None:
            named |= {"response_length": summary.response_length, "truncated_share": summary.truncated_share}
        for name, figure in named.items():
            metrics[f"{prefix}/{name}"] = figure.value
            if figure.low is not None and figure.high is not None:
                metrics[f"{prefix}/{name}/ci_low"] = figure.low
                metrics[f"{prefix}/{name}/ci_high"] = figure.high
    return metrics
