"""From runs to what the report says: exact numbers on small hand-made runs, words by kind of result."""

import json
from pathlib import Path

import numpy as np
import pytest

from gtpo_verl.algorithms.registry import algorithms
from gtpo_verl.report import tables
from gtpo_verl.report.design import design, setting_differences
from gtpo_verl.report.results import Accuracy, Arm, TrainingResult, cost_until, data_sources, trainings_of
from gtpo_verl.report.results import comparisons as compare
from gtpo_verl.report.words import notes, points, status_text, verdict
from gtpo_verl.runs.reader import read_run, read_runs
from gtpo_verl.runs.statistics import Interval


def write_arm(path: Path, validations: dict[int, dict[str, list[int]]], **last: float) -> Path:
    """A training with these verdicts, {step: {prompt: verdicts}}, of the algorithm that its directory is named for."""
    (path / "validation").mkdir(parents=True)
    entry = algorithms().get(path.name)
    if entry:
        actor = {"loss_agg_mode": entry.aggregation, "policy_loss": {"loss_mode": entry.loss}}
        config = {"algorithm": {"adv_estimator": entry.estimator}, "actor_rollout_ref": {"actor": actor}}
        (path / "config.yaml").write_text(json.dumps(config))
    lines = [json.dumps({"step": step, "data": last}) for step in sorted(validations)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step, prompts in validations.items():
        samples = [json.dumps({"input": p, "gts": "", "acc": v}) for p, verdicts in prompts.items() for v in verdicts]
        (path / "validation" / f"{step}.jsonl").write_text("\n".join(samples) + "\n")
    return path


def arms_of(*paths: Path) -> tuple[Arm, ...]:
    return design(read_runs(list(paths))).arms


def results_of(*paths: Path) -> list[TrainingResult]:
    return trainings_of(arms_of(*paths))


def status_of(*paths: Path) -> str | None:
    runs = read_runs(list(paths))
    return status_text(runs, design(runs).arms)


def comparisons(*paths: Path):
    return compare(design(read_runs(list(paths))).pairs)


def notes_of(*paths: Path) -> list[str]:
    runs = read_runs(list(paths))
    return notes(runs, design(runs), [])


def cells_of(table: tables.Table, *columns: str) -> list[list[str]]:
    return [[row[table.columns.index(column)] for column in columns] for row in table.rows]


def only(result: TrainingResult) -> Accuracy:
    """The accuracy of a training with a single data source."""
    (accuracy,) = result.accuracies.values()
    return accuracy


def write_samples(arm: Path, step: int, *samples: dict) -> None:
    (arm / "validation" / f"{step}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def test_change_is_the_mean_over_prompts_not_over_samples(tmp_path: Path):
    arm = write_arm(tmp_path / "gtpo", {0: {"a": [0, 0, 0, 1], "b": [0]}, 9: {"a": [1, 1, 0, 1], "b": [1]}})
    change = only(results_of(arm)[0]).change
    assert change is not None
    assert (change.before, change.after) == (0.125, 0.875)
    assert change.difference.value == 0.75
    assert (change.samples, change.prompts, change.clusters) == ((5, 5), 2, 2)
    # two prompts with gains 1/2 and 1: a bootstrap mean is one of 1/2, 3/4, 1, the outer ones with chance 1/4
    assert change.difference.interval == Interval(0.5, 1.0)


def test_change_is_on_the_prompts_of_both_validations(tmp_path: Path):
    arm = write_arm(tmp_path / "gtpo", {0: {"a": [0], "b": [1], "c": [1, 1]}, 9: {"a": [1], "b": [1]}})
    (result,) = results_of(arm)
    accuracy = only(result)
    assert accuracy.change is not None
    assert (accuracy.change.before, accuracy.change.after) == (0.5, 1.0)
    assert (accuracy.change.samples, accuracy.change.prompts) == ((2, 2), 2)
    assert accuracy.curve[0].accuracy == pytest.approx(2 / 3)  # the curve shows all there is
    text = " ".join(notes_of(arm))
    assert "GTPO: 1 prompts are only in the first or only in the last validation: left out of the change" in text


def test_true_gains_are_inside_their_intervals_and_ordered(runs):
    dapo, gtpo, grpo_s = results_of(runs.run())
    gains = {"dapo": 1.15, "gtpo": 1.75, "grpo_s": 1.45}
    difficulty = np.random.default_rng(99).normal(-0.2, 1.4, 500)  # as the runs were written
    chance = lambda progress: 1 / (1 + np.exp(-(difficulty + progress)))  # noqa: E731
    for result in (dapo, gtpo, grpo_s):
        truth = float(np.mean(chance(gains[result.training.name]) - chance(0)))
        interval = only(result).change.difference.interval
        assert interval.low <= truth <= interval.high
        assert 0.02 < interval.high - interval.low < 0.1
    assert only(dapo).change.after < only(grpo_s).change.after < only(gtpo).change.after


def test_comparisons_are_paired(tmp_path: Path):
    one = write_arm(tmp_path / "dapo", {0: {"a": [0], "b": [0], "c": [0]}, 9: {"a": [0], "b": [1], "c": [0]}})
    two = write_arm(tmp_path / "gtpo", {0: {"a": [0], "b": [1], "c": [0]}, 9: {"a": [1], "b": [1], "c": [0]}})
    (comparison,) = comparisons(one, two)
    assert (comparison.arm, comparison.baseline) == ("GTPO", "DAPO")
    assert comparison.prompts == 3
    assert comparison.after.value == pytest.approx(1 / 3)
    assert comparison.gain.value == 0


def test_arms_of_different_length_are_compared_at_the_last_common_step(tmp_path: Path):
    one = write_arm(tmp_path / "dapo", {0: {"a": [0], "b": [0]}, 5: {"a": [0], "b": [1]}, 9: {"a": [1], "b": [1]}})
    two = write_arm(tmp_path / "gtpo", {0: {"a": [0], "b": [0]}, 5: {"a": [1], "b": [1]}})
    (comparison,) = comparisons(one, two)
    found = comparison
    assert (found.step, found.after.value, found.gain.value) == (5, 0.5, 0.5)


def test_arms_with_other_prompts_are_not_compared(tmp_path: Path):
    one = write_arm(tmp_path / "dapo", {0: {"a": [0]}, 9: {"a": [1]}})
    two = write_arm(tmp_path / "gtpo", {0: {"z": [0]}, 9: {"z": [1]}})
    assert comparisons(one, two) == ()


def test_without_samples_the_logged_mean_stands_alone(runs):
    runs.arm(runs.root / "mine", dumps=False, samples=4)
    (result,) = results_of(runs.root / "mine")
    _, logged = result.training.series("val-core/arithmetic/acc/mean@4")
    accuracy = only(result)
    assert [point.accuracy for point in accuracy.curve] == logged.tolist()
    assert accuracy.change.difference.interval is None
    assert accuracy.change.samples is None
    assert "without the validation samples its significance cannot be estimated" in verdict(accuracy)


def test_opposite_changes_of_two_sources_are_not_pooled(tmp_path: Path):
    """30 prompts that fall and 500 that rise: pooled, they would read as one clear gain on 530 prompts."""
    arm = write_arm(tmp_path / "gtpo", {0: {}, 9: {}})
    aime = [{"input": f"a{n}", "gts": "", "data_source": "aime"} for n in range(30)]
    maths = [{"input": f"m{n}", "gts": "", "data_source": "math"} for n in range(500)]
    for step in (0, 9):
        scored = [sample | {"acc": int(step == 0 or n % 3 == 0)} for n, sample in enumerate(aime)]
        scored += [sample | {"acc": int(step == 9 and n % 3 > 0)} for n, sample in enumerate(maths)]
        write_samples(arm, step, *scored)
    (result,) = results_of(arm)
    sentences = {source: verdict(accuracy) for source, accuracy in result.accuracies.items()}
    assert sentences == {
        "aime": "Accuracy fell from 100.0 % to 33.3 % between steps 0 and 9, a clear loss on 30 prompts.",
        "math": "Accuracy rose from 0.0 % to 66.6 % between steps 0 and 9, a clear gain on 500 prompts.",
    }
    text = " ".join(notes_of(arm))
    assert "With 30 or fewer prompts the intervals on aime are too narrow." in text
    assert "on math are too narrow" not in text
    table = tables.change_table([result], data_sources(arms_of(arm)))
    assert cells_of(table, "Arm", "Data source", "Before", "After", "Difference") == [
        ["GTPO", "aime", "100.0 %", "33.3 %", "−66.7"],
        ["GTPO", "math", "0.0 %", "66.6 %", "+66.6"],
    ]


@pytest.mark.parametrize(("step", "cells"), [(0, ["50.0 %", "n/a"]), (4, ["n/a", "50.0 %"])])
def test_a_single_validation_is_before_or_after_training(tmp_path: Path, step: int, cells: list[str]):
    arm = write_arm(tmp_path / "gtpo", {step: {}})
    write_samples(arm, step, *({"input": f"a{n}", "gts": "", "data_source": "aime", "acc": n % 2} for n in range(4)))
    table = tables.change_table(results_of(arm), data_sources(arms_of(arm)))
    assert cells_of(table, "Before", "After", "Difference") == [[*cells, "n/a"]]


@pytest.mark.slow
def test_comparisons_are_per_source(runs):
    path = runs.run(arms=["dapo", "gtpo"], sources=("aime", "math"), gains=(1.5, -0.8), bare=True)
    assert [comparison.source for comparison in comparisons(path)] == ["aime", "math"]
    assert {comparison.prompts for comparison in comparisons(path)} == {250}


def test_samples_that_name_no_source_are_not_pooled_over_several(runs):
    runs.arm(runs.root / "mine", sources=("aime", "amc"), name_sources=False, bare=True)
    (result,) = results_of(runs.root / "mine")
    assert list(result.accuracies) == ["aime", "amc"]
    for source, accuracy in result.accuracies.items():
        _, logged = result.training.series(f"val-core/{source}/acc/mean@2")
        assert [point.accuracy for point in accuracy.curve] == logged.tolist()
        assert accuracy.change.difference.interval is None
    text = " ".join(notes_of(runs.root / "mine"))
    assert "do not name their data source, and several were logged (aime, amc)" in text


@pytest.mark.slow
def test_intervals_are_over_clusters_where_the_data_names_them(runs):
    """Ten prompts of a cluster are equally hard: taken as independent, they give an interval that is too narrow."""
    runs.arm(runs.root / "clustered", per_cluster=10, samples=8, bare=True)
    runs.rng = np.random.default_rng(0)
    runs.arm(runs.root / "independent", per_cluster=10, samples=8, bare=True)
    for file in (runs.root / "independent" / "validation").iterdir():
        file.write_text(file.read_text().replace('"cluster"', '"ignored"'))
    (clustered,) = results_of(runs.root / "clustered")
    (independent,) = results_of(runs.root / "independent")
    first, other = only(clustered).curve[0], only(independent).curve[0]
    assert first.accuracy == other.accuracy
    assert (first.prompts, first.clusters, other.clusters) == (500, 50, 500)
    width = lambda point: point.interval.high - point.interval.low  # noqa: E731
    assert width(first) > 2 * width(other)
    assert "a clear gain on 500 prompts in 50 clusters" in verdict(only(clustered))
    assert "clusters of similar prompts" in " ".join(notes_of(runs.root / "clustered"))


def test_arms_are_named_by_their_configuration_and_logs_without_one_by_their_file(runs):
    runs.arm(runs.root / "mine", algorithm="gtpo", bare=True)
    runs.arm(runs.root / "grpo_s", config=False, bare=True)
    runs.arm(runs.root / "theirs", config=False, bare=True)
    names = [one.name for one in results_of(*map(runs.root.joinpath, ("mine", "grpo_s", "theirs")))]
    assert names == ["GTPO", "grpo_s", "theirs"]


def test_cost_counts_rejected_groups_and_leaves_validation_out(runs):
    runs.arm(runs.root / "gtpo")
    training = read_run(runs.root / "gtpo").trainings[0]
    _, groups = training.series("training/filter_groups/generated_groups")
    _, step = training.series("timing_s/step")
    responses, seconds = (cost_until(training, what) for what in ("responses", "seconds"))
    assert (responses[0], seconds[0]) == (0, 0)
    assert responses[60] == pytest.approx(8 * groups.sum())
    assert seconds[2] == pytest.approx(step[:2].sum())
    runs.arm(runs.root / "bare", bare=True)
    assert cost_until(read_run(runs.root / "bare").trainings[0], "seconds") is None


@pytest.mark.parametrize(
    ("validations", "expected"),
    [
        ({0: {"a": [0]}}, "Validated only once (0.0 % at step 0), so there is no change to report."),
        ({0: {"a": [0]}, 5: {"b": [1]}}, "First and last validation have no prompt in common"),
        (
            {0: {"a": [0], "b": [0]}, 5: {"a": [1], "b": [1]}},
            "by the same amount on every prompt, so no interval can be estimated",
        ),
        (
            {0: {str(n): [n % 2] for n in range(50)}, 5: {str(n): [n % 3 % 2] for n in range(50)}},
            "not a significant change on 50 prompts",
        ),
        (
            {0: {str(n): [0] for n in range(50)}, 5: {str(n): [n % 2] for n in range(50)}},
            "Accuracy rose from 0.0 % to 50.0 % between steps 0 and 5, a clear gain on 50 prompts.",
        ),
        (
            {0: {str(n): [1] for n in range(50)}, 5: {str(n): [n % 2] for n in range(50)}},
            "Accuracy fell from 100.0 % to 50.0 % between steps 0 and 5, a clear loss on 50 prompts.",
        ),
    ],
)
def test_verdicts(tmp_path: Path, validations: dict, expected: str):
    assert expected in verdict(only(results_of(write_arm(tmp_path / "arm", validations))[0]))


def test_notes_name_what_the_interval_does_not_cover_and_what_is_odd(tmp_path: Path):
    path = write_arm(
        tmp_path / "arm", {5: {"a": [0], "b": [1]}, 9: {"a": [1], "b": [1]}}, **{"val-core/x/acc/mean@1": 0.7}
    )
    text = " ".join(notes_of(path))
    assert "not the training seed" in text
    assert "With 30 or fewer prompts the intervals are too narrow" in text
    assert "the first validation is at step 5, so “before” is not before training" in text
    assert "at step 5 the validation samples average to 50.0 %, but 70.0 % was logged" in text


def test_a_healthy_run_has_only_the_general_note_and_its_own(runs):
    path = runs.run(prompts=40)
    general, own = notes_of(path)
    assert general.startswith(
        "Over prompts: intervals come from a paired cluster bootstrap: prompts, drawn with replacement 10,000"
    )
    assert own == read_run(path).record["notes"][0]


def test_status_of_an_interrupted_run_says_how_far_it_came(runs):
    path = runs.run(arms=["dapo", "gtpo"], planned=["dapo", "gtpo", "grpo_s"], status="interrupted", prompts=20)
    of_gtpo = "gtpo was interrupted after step 60 of 60 (stopped after a step, on request)"
    assert status_of(path) == (
        f"Not complete: grpo_s logged no step; {of_gtpo.replace('gtpo', 'dapo')}; {of_gtpo}; shown as far as they came."
    )
    assert status_of(path / "gtpo") == f"Not complete: {of_gtpo}; shown as far as they came."
    assert status_of(runs.run("other", prompts=20)) is None


def test_step_seconds_add_up_to_the_step_and_the_validation(runs):
    (result,) = results_of(runs.arm(runs.root / "gtpo"))
    _, step = result.training.series("timing_s/step")
    _, testing = result.training.series("timing_s/testing")
    assert list(result.step_seconds)[:2] == ["rollout", "old log-probs"]
    assert sum(result.step_seconds.values()) == pytest.approx(step.mean() + testing.sum() / len(step))
    assert result.step_seconds["other"] == pytest.approx(0.15)
    assert result.step_seconds["checkpoint"] == pytest.approx(1.4 / 20)


def trainings(*paths: Path):
    return [training for path in paths for training in read_run(path).trainings]


def test_differing_settings_are_those_of_the_algorithm(runs):
    found = setting_differences(trainings(runs.run(prompts=20, bare=True)))
    assert found is not None
    settings, bookkeeping = found
    assert settings == {
        "actor_rollout_ref.actor.policy_loss.loss_mode": ["vanilla", "vanilla", "grpo_s"],
        "algorithm.adv_estimator": ["grpo", "gtpo", "grpo_s"],
    }
    assert list(bookkeeping) == [
        "ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR",
        "trainer.default_local_dir",
        "trainer.experiment_name",
    ]


def test_differing_settings_need_two_configurations(runs):
    runs.arm(runs.root / "with")
    runs.arm(runs.root / "without", config=False)
    both = trainings(runs.root / "with", runs.root / "without")
    assert setting_differences(both) is None
    runs.arm(runs.root / "dapo", algorithm="dapo")
    settings, _ = setting_differences([*both, *trainings(runs.root / "dapo")])
    assert settings["algorithm.adv_estimator"] == ["gtpo", "not known", "grpo"]


@pytest.mark.parametrize(("share", "text"), [(0.0415, "+4.2"), (-0.0415, "−4.2"), (0.0, "+0.0")])
def test_points(share: float, text: str):
    assert points(share) == text


def test_an_interrupted_run_says_why(runs):
    path = runs.run(arms=["gtpo"], status="complete", prompts=20) / "gtpo"
    record = {"name": "gtpo", "status": "interrupted", "reason": "Ctrl-C"}
    (path / "run.json").write_text(json.dumps(record))
    assert status_of(path) == (
        "Not complete: gtpo was interrupted after step 60 of 60 (Ctrl-C); shown as far as they came."
    )
    (path / "run.json").write_text(json.dumps(record | {"status": "failed", "reason": "vLLM died"}))
    assert status_of(path) == "Not complete: gtpo failed after step 60 of 60 (vLLM died); shown as far as they came."


def test_a_run_whose_disk_was_full_says_that_it_was_killed(runs):
    """Its record could not be written and says running; its process is gone."""
    path = runs.run(arms=["gtpo"], status="complete", prompts=20) / "gtpo"
    (path / "run.json").write_text(json.dumps({"name": "gtpo", "status": "running", "attempts": [{}]}))
    (path / "LOCK.json").write_text(json.dumps({"host": "node7", "pid": 1, "heartbeat": 0.0, "token": "theirs"}))
    assert "was interrupted after step 60 of 60 (it was killed, or its machine is gone)" in status_of(path)
