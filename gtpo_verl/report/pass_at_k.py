"""pass@k over k: the figure of an evaluation, with the majority vote, and the values of a training's validation."""

from collections.abc import Mapping, Sequence

import numpy as np

from gtpo_verl.evaluation.metrics import pass_at_k, powers_of_two
from gtpo_verl.evaluation.summary import Figure, SourceSummary
from gtpo_verl.report.charts import Line, Panel, arm_styles, panel_chart, png
from gtpo_verl.runs.reader import Validation


def pass_at_k_png(summaries: Sequence[SourceSummary]) -> bytes:
    """The curves of each data source, of two k or more, with the bands of their intervals; k on a logarithmic axis."""
    styles = arm_styles({"pass@k": "gtpo", "maj@k": "dapo"})
    charts = {}
    for summary in summaries:
        curves = {"pass@k": summary.pass_at, "maj@k": summary.majority_at}
        lines = tuple(_line(label, curve) for label, curve in curves.items() if curve)
        title = f"{summary.data_source}, {summary.problems} problems"
        charts[title] = panel_chart(Panel(title, lines, percent=True, x_label="k", x_scale="log"), styles)
    return png(charts, styles=styles)


def pass_at_ks(validations: Sequence[Validation]) -> dict[float, float]:
    """pass@k of the last validation, mean over prompts, by k; empty where a prompt was sampled only once."""
    if not validations or validations[-1].counts.min() < 2:
        return {}
    counts = validations[-1].counts
    correct = np.rint(validations[-1].accuracy * counts).astype(np.int64)
    ks = powers_of_two(int(counts.min()))
    pairs = zip(counts.tolist(), correct.tolist(), strict=True)
    means = np.array([[pass_at_k(*pair, k) for k in ks] for pair in pairs]).mean(axis=0)
    return {float(k): float(value) for k, value in zip(ks, means, strict=True)}


def _line(label: str, curve: Mapping[int, Figure]) -> Line:
    rows = [(k, one.value, one.low, one.high) for k, one in curve.items()]
    return Line(label, *np.array(rows, dtype=np.float64).T)  # NaN where there is no interval
