"""The report of a sweep: what is said over seeds, what is left out, and what stays apart."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.paired import crossed_interval
from gtpo_verl.report.design import design
from gtpo_verl.report.page import Report, write_report
from gtpo_verl.report.samples import credit_samples
from gtpo_verl.report.seeds import finals, over_seeds, seed_comparisons, unfinished_comparisons
from gtpo_verl.report.tables import entropy_table, unfinished_table
from gtpo_verl.report.words import notes, points, seed_verdict, status_text
from gtpo_verl.runs.reader import read_runs
from gtpo_verl.runs.sweep import load, write

BARE = {"bare": True, "prompts": 40, "every": 30}


@pytest.fixture(scope="module")
def written(tmp_path_factory, run_writer) -> Report:
    """The report of two arms on five seeds, one of them failed and one missing."""
    writer = run_writer(tmp_path_factory.mktemp("outputs"), seed=1)
    statuses = {"algo=gtpo,seed=3": "failed", "algo=dapo,seed=4": "missing"}
    path = writer.sweep(arms=["dapo", "gtpo"], seeds=range(5), statuses=statuses, prompts=60, samples=4, every=20)
    return write_report([path], path)


def analysed(*paths: Path):
    runs = read_runs(list(paths))
    compared = design(runs)
    return runs, compared, compared.arms


def set_final(path: Path, accuracies: dict[str, float]) -> None:
    """Make the logged accuracy of the last step of each run what it should be, without samples."""
    for run, accuracy in accuracies.items():
        shutil.rmtree(path / run / "validation")
        lines = (path / run / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        last["data"] = {"val-core/arithmetic/acc/mean@2": accuracy}
        (path / run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")


def test_final_accuracies_and_differences_on_a_hand_made_sweep(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(4), **BARE)
    ours, theirs = [0.62, 0.64, 0.63, 0.70], [0.60, 0.61, 0.59, 0.65]
    named = {f"algo=gtpo,seed={seed}": value for seed, value in enumerate(ours)}
    set_final(path, named | {f"algo=dapo,seed={seed}": value for seed, value in enumerate(theirs)})
    _, compared, arms = analysed(path)
    baseline, arm = finals(arms, "last")
    assert (baseline.mean, arm.mean) == (pytest.approx(0.6125), pytest.approx(0.6475))
    assert baseline.interquartile_mean == pytest.approx(0.605)
    (comparison,) = seed_comparisons(compared.pairs, arms, "last")
    assert (comparison.steps, comparison.seeds) == ((60,), ("0", "1", "2", "3"))
    assert comparison.crossed is None  # no samples
    assert unfinished_comparisons(compared.pairs, arms) == []
    found = comparison.paired
    differences = np.subtract(ours, theirs)
    assert found.mean == pytest.approx(0.035)
    half = 3.182446 * differences.std(ddof=1) / 2
    assert (found.interval.low, found.interval.high) == pytest.approx((0.035 - half, 0.035 + half), abs=1e-6)
    assert (found.better, found.sign_flip_p) == (1.0, 0.125)
    assert seed_verdict(comparison) == "GTPO is 3.5 points above DAPO (95 % interval +1.4 to +5.6, p = 0.012)."


def test_the_default_endpoint_is_the_mean_over_the_validations_after_the_first(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(3), **BARE)
    _, compared, arms = analysed(path)
    curves = {result.name: result.accuracies["arithmetic"].curve for arm in arms for result in arm.trainings}
    means = {
        name: np.mean([point.accuracy for point in curve if point.step in (30, 60)]) for name, curve in curves.items()
    }
    (comparison,) = seed_comparisons(compared.pairs, arms)
    assert comparison.steps == (30, 60)
    expected = [means[f"GTPO, seed {seed}"] - means[f"DAPO, seed {seed}"] for seed in range(3)]
    assert comparison.paired.differences == pytest.approx(expected)
    assert [final.mean for final in finals(arms)] == [
        pytest.approx(np.mean([means[f"{arm}, seed {seed}"] for seed in range(3)])) for arm in ("DAPO", "GTPO")
    ]
    (last,) = seed_comparisons(compared.pairs, arms, "last")
    assert last.paired.differences != pytest.approx(expected)


def test_a_training_that_failed_counts_with_its_last_validation_beside(runs):
    statuses = {"algo=gtpo,seed=2": "failed"}  # after step 30 of 60
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(4), statuses=statuses, **BARE)
    _, compared, arms = analysed(path)
    (comparison,) = seed_comparisons(compared.pairs, arms)
    assert comparison.seeds == ("0", "1", "3")
    failed, partner = (arm.trainings[2].accuracies["arithmetic"].curve for arm in reversed(arms))
    assert failed[-1].step == 30
    theirs = np.mean([point.accuracy for point in partner if point.step in comparison.steps])
    (unfinished,) = unfinished_comparisons(compared.pairs, arms)
    found = unfinished.paired
    assert found.seeds == 4
    assert found.differences[2] == pytest.approx(failed[-1].accuracy - theirs)
    (row,) = unfinished_table([unfinished], ["arithmetic"]).rows
    assert row[:3] == ("GTPO − DAPO", "4", points(found.mean))


def test_where_no_training_of_an_arm_finished_they_are_compared_all_the_same_but_not_while_they_run(runs):
    failed = {f"algo=gtpo,seed={seed}": "failed" for seed in range(2)}
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(3), statuses=failed | {"algo=gtpo,seed=2": "running"}, **BARE)
    _, compared, arms = analysed(path)
    assert seed_comparisons(compared.pairs, arms) == []
    (unfinished,) = unfinished_comparisons(compared.pairs, arms)
    assert unfinished.paired.seeds == 2


def test_in_the_interval_over_seeds_and_prompts_every_prompt_counts_once(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(4), prompts=43, samples=2, every=30, per_cluster=5)
    _, compared, arms = analysed(path)
    (comparison,) = seed_comparisons(compared.pairs, arms)
    (low, high), mean = (comparison.crossed.low, comparison.crossed.high), comparison.paired.mean
    assert (low + high) / 2 == pytest.approx(mean)  # the last of the clusters has three prompts


def test_an_interval_over_seeds_and_prompts_needs_the_samples(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(3), prompts=40, samples=4, every=30)
    _, compared, arms = analysed(path)
    (comparison,) = seed_comparisons(compared.pairs, arms)
    of_pairs = []
    for ours, theirs in zip(arms[1].trainings, arms[0].trainings, strict=True):
        after = [[one for one in each.training.validations["arithmetic"] if one.step > 0] for each in (ours, theirs)]
        of_pairs.append(np.mean([mine.accuracy - other.accuracy for mine, other in zip(*after, strict=True)], axis=0))
    assert comparison.crossed == crossed_interval(np.array(of_pairs))
    assert comparison.crossed.low < comparison.paired.mean < comparison.crossed.high


def test_no_difference_is_said_with_what_would_have_been_shown(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(8), **BARE)
    differences = [0.02, -0.02, 0.03, -0.03, 0.01, -0.01, 0.02, -0.01]
    named = {f"algo=dapo,seed={seed}": 0.6 for seed in range(8)}
    set_final(path, named | {f"algo=gtpo,seed={seed}": 0.6 + one for seed, one in enumerate(differences)})
    _, compared, arms = analysed(path)
    (comparison,) = seed_comparisons(compared.pairs, arms, "last")
    assert not comparison.paired.shown
    assert seed_verdict(comparison) == (
        "No difference between GTPO and DAPO shown: +0.1 points (95 % interval −1.7 to +1.9, p = 0.875). One of "
        f"{100 * comparison.paired.detectable:.1f} points would have been, with a probability of 80 % "
        f"({100 * comparison.paired.detectable_at_most:.1f} at the upper bound of the spread)."
    )
    assert 0.02 < comparison.paired.detectable < 0.03
    wide = replace(comparison, paired=replace(comparison.paired, detectable=1.1, detectable_at_most=1.3))
    assert "None of any size would have been, with a probability of 80 % (none at the upper" in seed_verdict(wide)


@pytest.mark.parametrize(("seeds", "can"), [(5, "0.062: at 5 % it cannot reject"), (8, "0.0078: at 5 % it can reject")])
def test_the_report_says_which_tests_can_reject(runs, seeds: int, can: str):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(seeds), **BARE)
    read, compared, arms = analysed(path)
    text = " ".join(notes(read, compared, seed_comparisons(compared.pairs, arms)))
    assert (
        f"With {seeds} pairs the exact sign-flip test, which assumes only that differences are symmetric, has p of at "
        in text
    )
    assert can in text


def test_more_pairs_than_the_sign_flip_test_enumerates(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(21), **BARE)
    read, compared, arms = analysed(path)
    text = " ".join(notes(read, compared, seed_comparisons(compared.pairs, arms)))
    assert "With 21 pairs the sign-flip test, exact for up to 20, is not computed." in text


def test_skewed_differences_are_warned_about(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(6), **BARE)
    named = {f"algo=dapo,seed={seed}": 0.5 for seed in range(6)}
    values = (0.51, 0.515, 0.51, 0.52, 0.505, 0.7)
    set_final(path, named | {f"algo=gtpo,seed={seed}": value for seed, value in enumerate(values)})
    read, compared, arms = analysed(path)
    text = " ".join(notes(read, compared, seed_comparisons(compared.pairs, arms, "last")))
    assert "GTPO − DAPO: the differences are skewed (+1.8), where Student's interval covers less than it says" in text


@pytest.mark.slow
def test_failed_and_missing_runs_are_stated_and_left_out_with_their_pair(written: Report):
    assert written.status == (
        "Not complete: algo=dapo,seed=4 logged no step; algo=gtpo,seed=3 failed after step 30 of 60 (UserError: vLLM "
        "died (server 0)); left out of everything over seeds, but for the table "
        "of unfinished trainings."
    )
    (comparison,) = written.over_seeds
    assert comparison.seeds == ("0", "1", "2")
    assert [(final.arm, list(final.values)) for final in written.finals] == [
        ("DAPO", ["0", "1", "2", "3"]),
        ("GTPO", ["0", "1", "2", "4"]),
    ]
    page = written.html.read_text()
    assert "2 arms · 5 seeds · 8 of 10 trainings complete" in page
    assert "algo=dapo,seed=4 logged no step" in page


@pytest.mark.slow
def test_trainings_of_different_seeds_are_never_compared(written: Report):
    pairs = [(one.arm, one.baseline) for one in written.comparisons]
    assert pairs == [(f"GTPO, seed {seed}", f"DAPO, seed {seed}") for seed in range(4)]


@pytest.mark.slow
def test_intervals_over_seeds_and_over_prompts_are_named_and_apart(written: Report):
    page = written.html.read_text()
    seeds, prompts = (
        page.index("Accuracy over seeds"),
        page.index("Each training by itself: intervals over prompts"),
    )
    assert seeds < prompts
    assert "95 % interval over seeds" in page
    summary = json.loads(written.summary.read_text())
    assert [one["arm"] for one in summary["over_seeds"]["final"]] == ["DAPO", "GTPO"]
    assert len(summary["over_prompts"]) == 4
    assert "bands: 95 % Student&#39;s t intervals over seeds" in page
    assert not any("mean over the arms" in key for key in summary)


@pytest.mark.slow
def test_curves_are_drawn_against_cost_and_pass_at_k_over_seeds(written: Report):
    drawn = {figure.name: figure for figure in written.figures}
    assert {"accuracy", "cost", "pass_at_k", "entropy"} <= set(drawn)
    assert "Means over 4 trainings" in drawn["pass_at_k"].caption
    assert [panel.title for panel in drawn["cost"].panels] == ["by responses generated", "by time of training"]


@pytest.mark.slow
def test_credit_is_coloured_by_advantage(written: Report):
    gtpo = [sample for sample in written.samples if sample.arm == "GTPO"]
    assert [(sample.correct, sample.tokens[0].advantage > 0) for sample in gtpo] == [(True, True), (False, False)]
    shades = [token.shade for token in gtpo[0].tokens]
    assert (min(shades), max(shades)) == (pytest.approx(0.15), pytest.approx(1))
    dapo = written.samples[0]
    assert {token.shade for token in dapo.tokens} == {0.5}
    assert f'title="advantage +{gtpo[0].tokens[0].advantage:.3f}, entropy' in written.html.read_text()


def test_credit_is_shown_on_a_prompt_of_all_arms_with_two_of_each_verdict(runs):
    """The last step has a response alone with its verdict, on which GTPO's credit is DAPO's."""
    path = runs.run(arms=["dapo", "gtpo"], prompts=4)
    for arm, only in (("dapo", "seen by dapo"), ("gtpo", "seen by gtpo")):
        file = path / arm / "credit_samples.jsonl"
        (pair,) = (json.loads(line)["samples"] for line in file.read_text().splitlines())
        kinds = {"common": (20, [4, 4]), only: (30, [4, 4]), "alone": (60, [7, 1])}
        lines = [
            {"step": step, "samples": [one | {"prompt": prompt, "group": group} for one in pair]}
            for prompt, (step, group) in kinds.items()
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, _, arms = analysed(path)
    shown = credit_samples(arms)
    assert [(one.arm, one.prompt, one.step) for one in shown] == [
        (name, "common", 20) for name in ("DAPO", "DAPO", "GTPO", "GTPO")
    ]
    assert max(token.entropy_shade for token in shown[0].tokens) == 1


def test_seeds_that_were_added_to_a_planned_sweep_are_said(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(3), **BARE)
    first = load(path)
    assert not any("added later" in note for note in notes(*analysed(path)[:2], []))
    write(replace(first, axes=first.axes | {"seed": ("0", "1")}))
    facts = json.loads((path / "sweep.json").read_text())
    assert (facts["planned_seeds"], facts["axes"]["seed"]) == (3, ["0", "1", "2"])
    (path / "sweep.json").write_text(json.dumps(facts | {"planned_seeds": 2}))
    assert any("2 seeds were planned and 1 added later." in note for note in notes(*analysed(path)[:2], []))


def test_rebound_is_measured_from_the_lowest_point(runs):
    runs.arm(runs.root / "gtpo")
    lines = []
    for step in range(1, 11):
        wrong = 1.0 - 0.1 * step if step <= 6 else 0.4 + 0.05 * (step - 6)
        lines.append(json.dumps({"step": step, "data": {"credit/entropy_wrong": wrong}}))
    (runs.root / "gtpo" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    _, _, arms = analysed(runs.root / "gtpo")
    assert entropy_table(arms).rows == (("GTPO", "wrong", "0.900", "0.400", "6", "0.600", "+0.200"),)


def test_a_metric_that_no_two_seeds_logged_at_the_same_step_has_no_row(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(2), **BARE)
    for seed in range(2):
        line = {"step": seed + 1, "data": {"credit/entropy_correct": 0.5}}
        with (path / f"algo=gtpo,seed={seed}" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    _, _, arms = analysed(path)
    assert not [row for row in entropy_table(arms).rows if row[:2] == ("GTPO", "correct")]
    write_report([path], path)


def test_bands_need_three_seeds_and_common_steps():
    curves = [{0.0: 0.1, 5.0: 0.4, 9.0: 0.9}, {0.0: 0.3, 5.0: 0.6}]
    steps, means, low, high = over_seeds(curves)
    assert (steps.tolist(), means.tolist(), low, high) == ([0, 5], pytest.approx([0.2, 0.5]), None, None)
    *_, low, high = over_seeds([*curves, {0.0: 0.2, 5.0: 0.5}])
    assert (low[0], high[0]) == pytest.approx((0.2 - 4.302653 * 0.1 / 3**0.5, 0.2 + 4.302653 * 0.1 / 3**0.5), abs=1e-6)


@pytest.mark.slow
def test_what_was_allowed_is_printed(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(2), **BARE)
    record = json.loads((path / "algo=gtpo,seed=1" / "run.json").read_text())
    (path / "algo=gtpo,seed=1" / "run.json").write_text(json.dumps(record | {"hardware": "8 × NVIDIA H100"}))
    with pytest.raises(UserError, match="--allow hardware"):
        write_report([path], path)
    result = write_report([path], path, allow=["hardware"])
    page = result.html.read_text()
    assert "Allowed to differ: hardware (2 CPU cores, x86_64, Python 3.11.7 in 3, 8 × NVIDIA H100 in 1)" in page
    assert json.loads(result.summary.read_text())["allowed"]["hardware"]["8 × NVIDIA H100"] == 1


def test_seeds_of_which_none_is_complete_are_shown_as_far_as_they_came(runs):
    statuses = {f"algo=gtpo,seed={seed}": "running" for seed in range(2)}
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(2), statuses=statuses, **BARE)
    page = write_report([path], path).html.read_text()
    assert "No training of this arm is complete yet, so nothing can be said over seeds." in page
    assert "No validation accuracy was logged" not in page


def test_complete_trainings_that_were_validated_before_alone_are_not_called_incomplete(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=range(2), bare=True, prompts=40, every=1000)
    page = write_report([path], path).html.read_text()
    assert "The complete trainings have no validation after step 0 in common" in page
    assert "No training of this arm is complete yet" not in page


def test_a_single_unfinished_run_is_shown_as_far_as_it_came(runs):
    path = runs.arm(runs.root / "gtpo", seed=0, record="running", **BARE)
    read, _, arms = analysed(path)
    assert "gtpo has not finished after step 60 of 60" in status_text(read, arms)
    assert arms[0].counted == arms[0].trainings
