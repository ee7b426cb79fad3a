"""The summary of an evaluation: weights, repeated problems, failed samples, and the coverage of its intervals."""

import numpy as np
import pytest

from gtpo_verl.evaluation.summary import Figure, Sample, logged, paired_changes, summarize
from gtpo_verl.runs.statistics import estimates


def samples(problem: str, verdicts: str, *, source: str = "sums", length: int = 10) -> list[Sample]:
    """``verdicts``: one letter a sample, 1 right, 0 wrong, x failed."""
    return [
        Sample(problem, source, verdict == "1", f"{problem}-{verdict}", length, length >= 30, failed=verdict == "x")
        for verdict in verdicts
    ]


def test_figures_are_means_over_problems() -> None:
    (summary,) = summarize([*samples("a", "1100"), *samples("b", "0001"), *samples("c", "0000")])
    assert (summary.problems, summary.samples, summary.failed) == (3, 4, 0)
    assert summary.mean.value == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert list(summary.pass_at) == [1, 2, 4]
    assert summary.pass_at[1].value == pytest.approx(summary.mean.value)
    assert summary.pass_at[2].value == pytest.approx((1 - 1 / 6 + 0.5) / 3)
    assert summary.pass_at[4].value == pytest.approx(2 / 3)
    assert summary.majority_at[4].value == pytest.approx((0.5 + 0 + 0) / 3)
    assert summary.mean.low is not None
    assert summary.mean.low < summary.mean.value < summary.mean.high  # type: ignore[operator]


def test_order_and_names_of_problems_do_not_matter() -> None:
    rows = [*samples("a", "1100"), *samples("b", "0001"), *samples("c", "0000")]
    assert summarize(rows) == summarize(rows[::-1])


def test_a_problem_that_a_file_repeats_is_one_problem() -> None:
    repeated = summarize([*samples("a", "10"), *samples("b", "11"), *samples("a", "00"), *samples("b", "10")])
    assert repeated == summarize([*samples("a", "1000"), *samples("b", "1110")])
    assert repeated[0].problems == 2


def test_a_problem_with_more_samples_than_a_vote_is_counted_over() -> None:
    """DAPO's AIME file has each problem 32 times, and 32 samples of each row are 1,024."""
    (summary,) = summarize(samples("a", "10" * 512))
    assert (summary.mean.value, summary.samples) == (0.5, 1024)
    assert summary.pass_at[1024].value == 1
    assert summary.majority_at == {}


def test_a_failed_sample_is_wrong_and_has_no_length() -> None:
    (summary,) = summarize([*samples("a", "1x", length=30), *samples("b", "11")])
    assert summary.failed == 1
    assert summary.mean.value == pytest.approx(0.75)
    assert summary.response_length is not None
    assert summary.response_length.value == 20
    assert summary.truncated_share is not None
    assert summary.truncated_share.value == 0.5


def test_nothing_but_failures_has_no_length() -> None:
    (summary,) = summarize(samples("a", "xx"))
    assert summary.mean == Figure(0.0, None, None)
    assert summary.response_length is None
    assert "val/sums/response_length" not in logged([summary])


def test_data_sources_are_apart() -> None:
    first, second = summarize([*samples("a", "11", source="sums"), *samples("a", "00", source="aime")])
    assert (first.data_source, second.data_source) == ("aime", "sums")
    assert (first.mean.value, second.mean.value) == (0.0, 1.0)


def test_without_answers_there_is_no_vote() -> None:
    (summary,) = summarize([Sample("a", "sums", True), Sample("b", "sums", False)])
    assert summary.majority_at == {}
    assert not any("maj@" in name for name in logged([summary]))


def test_problems_with_more_samples_do_not_weigh_more() -> None:
    (summary,) = summarize([*samples("a", "1111"), *samples("b", "00")])
    assert summary.mean.value == 0.5
    assert summary.samples == 2
    assert list(summary.pass_at) == [1, 2]


def test_no_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sample"):
        summarize([])


def test_logged_names() -> None:
    metrics = logged(summarize([*samples("a", "10"), *samples("b", "11"), *samples("c", "00")]))
    assert metrics["val/sums/problems"] == 3
    assert metrics["val/sums/mean@2"] == 0.5
    assert metrics["val/sums/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val/sums/maj@2"] == pytest.approx(0.5)
    assert metrics["val/sums/response_length"] == 10
    assert metrics["val/sums/truncated_share"] == 0
    assert metrics["val/sums/mean@2/ci_low"] < 0.5 < metrics["val/sums/mean@2/ci_high"]
    assert "val/sums/truncated_share/ci_low" not in metrics  # no spread, no interval


def test_a_change_is_paired_by_problem() -> None:
    """Problems of very different difficulty, each a little better: the interval of the change is far narrower than
    theirs.
    """
    difficult = {f"p{i}": i for i in range(9)}
    before = [sample for name, right in difficult.items() for sample in samples(name, "1" * right + "0" * (10 - right))]
    after = [
        sample
        for name, right in difficult.items()
        for sample in samples(name, "1" * (right + 1 + right % 2) + "0" * (9 - right - right % 2))
    ]
    changes = paired_changes(before, after)
    assert changes["sums"].value == pytest.approx((5 * 0.1 + 4 * 0.2) / 9)
    assert changes["sums"].low is not None
    assert 0.1 <= changes["sums"].low < changes["sums"].high <= 0.2  # type: ignore[operator]
    only_there = [*after, *samples("q", "11"), *samples("p0", "11", source="aime")]
    assert paired_changes(before, only_there) == changes


def coverage(problems: int, a: float, b: float, simulations: int = 1500) -> float:
    """Share of simulated evaluations whose interval holds the truth: difficulties from Beta(a, b), 8 samples a problem.

    All evaluations are columns of one matrix, so they share the bootstrap's draws of problems.
    """
    rng = np.random.default_rng(7)
    difficulty = rng.beta(a, b, size=(problems, simulations))
    means = rng.binomial(8, difficulty) / 8
    intervals = [estimate.interval for estimate in estimates(means, draws=1500)]
    truth = a / (a + b)
    return float(np.mean([interval is not None and interval.low <= truth <= interval.high for interval in intervals]))


@pytest.mark.parametrize(("a", "b"), [(0.6, 0.9), (0.3, 1.5), (0.2, 4.0)])
def test_intervals_cover_the_truth_as_often_as_they_say(a: float, b: float) -> None:
    assert 0.93 <= coverage(200, a, b) <= 0.97


def test_thirty_hard_problems_are_too_few_for_the_interval() -> None:
    """The documentation warns of this: at an accuracy of 5 % and 30 problems the interval holds the truth less
    often.
    """
    assert coverage(30, 0.2, 4.0) < 0.92
