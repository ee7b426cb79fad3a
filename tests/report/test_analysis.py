"""From runs to what the report says: exact numbers on small hand-made runs, words by kind of result."""

import json
from pathlib import Path

import numpy as np
import pytest

from gtpo_verl.report import analysis
from gtpo_verl.report.analysis import arm_results, comparisons, config_differences, mean_change, notes, status_text
from gtpo_verl.runs.reader import read_run, read_runs
from gtpo_verl.runs.statistics import Interval


def write_arm(path: Path, validations: dict[int, dict[str, list[int]]], **last: float) -> Path:
    """An arm with these verdicts, {step: {prompt: verdicts}}."""
    (path / "validation").mkdir(parents=True)
    lines = [json.dumps({"step": step, "data": last}) for step in sorted(validations)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step, prompts in validations.items():
        samples = [json.dumps({"input": p, "gts": "", "acc": v}) for p, verdicts in prompts.items() for v in verdicts]
        (path / "validation" / f"{step}.jsonl").write_text("\n".join(samples) + "\n")
    return path


def results_of(*paths: Path):
    return arm_results(read_runs(list(paths)))


def test_change_is_the_mean_over_prompts_not_over_samples(tmp_path: Path):
    arm = write_arm(tmp_path / "gtpo", {0: {"a": [0, 0, 0, 1], "b": [0]}, 9: {"a": [1, 1, 0, 1], "b": [1]}})
    change = results_of(arm)[0].change
    assert change is not None
    assert (change.before, change.after) == (0.125, 0.875)
    assert change.difference.value == 0.75
    assert (change.samples, change.prompts) == ((5, 5), 2)
    # two prompts with gains 1/2 and 1: a bootstrap mean is one of 1/2, 3/4, 1, the outer ones with chance 1/4
    assert change.difference.interval == Interval(0.5, 1.0)


def test_change_is_on_the_prompts_of_both_validations(tmp_path: Path):
    arm = write_arm(tmp_path / "gtpo", {0: {"a": [0], "b": [1], "c": [1, 1]}, 9: {"a": [1], "b": [1]}})
    (result,) = results_of(arm)
    assert result.change is not None
    assert (result.change.before, result.change.after) == (0.5, 1.0)
    assert (result.change.samples, result.change.prompts) == ((2, 2), 2)
    assert result.curve[0].accuracy == pytest.approx(2 / 3)  # the curve shows all there is
    assert "GTPO: 1 prompts are missing in the first or the last validation" in " ".join(
        notes([read_run(arm)], [result])
    )


def test_true_gains_are_inside_their_intervals_and_ordered(runs):
    dapo, gtpo, grpo_s = results_of(runs.run())
    gains = {"dapo": 1.15, "gtpo": 1.75, "grpo_s": 1.45}
    difficulty = np.random.default_rng(99).normal(-0.2, 1.4, 500)  # as the runs were written
    chance = lambda progress: 1 / (1 + np.exp(-(difficulty + progress)))  # noqa: E731
    for result in (dapo, gtpo, grpo_s):
        truth = float(np.mean(chance(gains[result.label]) - chance(0)))
        interval = result.change.difference.interval
        assert interval.low <= truth <= interval.high
        assert 0.02 < interval.high - interval.low < 0.1
    assert dapo.change.after < grpo_s.change.after < gtpo.change.after


def test_mean_and_comparisons_are_paired(tmp_path: Path):
    one = write_arm(tmp_path / "dapo", {0: {"a": [0], "b": [0], "c": [0]}, 9: {"a": [0], "b": [1], "c": [0]}})
    two = write_arm(tmp_path / "gtpo", {0: {"a": [0], "b": [1], "c": [0]}, 9: {"a": [1], "b": [1], "c": [0]}})
    arms = results_of(one, two)
    mean = mean_change(arms)
    assert mean is not None
    assert (mean.before, mean.after) == (pytest.approx(1 / 6), pytest.approx(1 / 2))
    assert mean.difference.value == pytest.approx(1 / 3)
    (comparison,) = comparisons(arms)
    assert (comparison.arm.label, comparison.baseline.label, comparison.prompts) == ("gtpo", "dapo", 3)
    assert comparison.after.value == pytest.approx(1 / 3)
    assert comparison.gain.value == 0


def test_arms_of_different_length_are_compared_at_the_last_common_step(tmp_path: Path):
    one = write_arm(tmp_path / "dapo", {0: {"a": [0], "b": [0]}, 5: {"a": [0], "b": [1]}, 9: {"a": [1], "b": [1]}})
    two = write_arm(tmp_path / "gtpo", {0: {"a": [0], "b": [0]}, 5: {"a": [1], "b": [1]}})
    arms = results_of(one, two)
    (comparison,) = comparisons(arms)
    assert (comparison.step, comparison.after.value, comparison.gain.value) == (5, 0.5, 0.5)
    assert mean_change(arms) is None


def test_arms_with_other_prompts_are_not_compared(tmp_path: Path):
    one = write_arm(tmp_path / "dapo", {0: {"a": [0]}, 9: {"a": [1]}})
    two = write_arm(tmp_path / "gtpo", {0: {"z": [0]}, 9: {"z": [1]}})
    arms = results_of(one, two)
    assert comparisons(arms) == ()
    assert mean_change(arms) is None


def test_without_samples_the_logged_mean_stands_alone(runs):
    runs.arm(runs.root / "mine", dumps=False, samples=4)
    (result,) = results_of(runs.root / "mine")
    _, logged = result.arm.series("val-core/arithmetic/acc/mean@4")
    assert [point.accuracy for point in result.curve] == logged.tolist()
    assert result.change.difference.interval is None
    assert result.change.samples is None
    assert "the validation samples were not kept" in result.verdict


def test_of_several_logged_accuracies_the_one_with_most_samples_counts(tmp_path: Path):
    data = {"val-core/maths/acc/mean@1": 0.1, "val-core/maths/acc/mean@32": 0.2, "val-core/maths/acc/best@32/mean": 0.9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "data": data}) + "\n")
    (result,) = results_of(tmp_path)
    assert analysis.logged_accuracies(result.arm) == {"maths": "val-core/maths/acc/mean@32"}
    assert [point.accuracy for point in result.curve] == [0.2]


def test_several_data_sources_have_no_common_mean_without_samples(runs):
    runs.arm(runs.root / "mine", dumps=False, sources=("aime", "amc"))
    (result,) = results_of(runs.root / "mine")
    assert result.curve == ()
    assert result.verdict.startswith("No overall validation accuracy was logged")
    assert [row[:2] for row in analysis.source_rows([result])] == [["mine", "aime"], ["mine", "amc"]]


@pytest.mark.parametrize(
    ("validations", "verdict"),
    [
        ({0: {"a": [0]}}, "Validated only once (0.0 % at step 0), so there is no before and after to compare."),
        ({0: {"a": [0]}, 5: {"b": [1]}}, "The first and the last validation share no prompt"),
        ({0: {"a": [0], "b": [0]}, 5: {"a": [1], "b": [1]}}, "by the same amount for every prompt"),
        (
            {0: {str(n): [n % 2] for n in range(50)}, 5: {str(n): [n % 3 % 2] for n in range(50)}},
            "too small a change to tell from chance on 50 prompts",
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
def test_verdicts(tmp_path: Path, validations: dict, verdict: str):
    assert verdict in results_of(write_arm(tmp_path / "arm", validations))[0].verdict


def test_notes_name_what_the_interval_does_not_cover_and_what_is_odd(tmp_path: Path):
    path = write_arm(
        tmp_path / "arm", {5: {"a": [0], "b": [1]}, 9: {"a": [1], "b": [1]}}, **{"val-core/x/acc/mean@1": 0.7}
    )
    text = " ".join(notes([read_run(path)], results_of(path)))
    assert "They do not cover the seed of the training" in text
    assert "With fewer than 30 prompts the intervals are too narrow" in text
    assert "its first validation is that of step 5: “before” is not before training" in text
    assert "at step 5 the validation samples average to 50.0 %, but 70.0 % was logged" in text


def test_a_healthy_run_has_only_the_general_note_and_its_own(runs):
    run = read_run(runs.run(prompts=40))
    general, own = notes([run], arm_results([run]))
    assert general.startswith("The intervals come from drawing the prompts anew 10,000 times")
    assert own == run.notes[0]


def test_status_of_an_interrupted_run_says_how_far_it_came(runs):
    path = runs.run(arms=["dapo", "gtpo"], planned=["dapo", "gtpo", "grpo_s"], status="interrupted", prompts=20)
    run = read_run(path)
    assert status_text([run], arm_results([run])) == (
        "quickstart was interrupted: what follows is partial (DAPO at step 60 of 60, GTPO at step 60 of 60, grpo_s not started)."
    )
    single = read_run(path / "gtpo")
    assert status_text([single], arm_results([single])) == (
        "quickstart/gtpo was interrupted: what follows is partial (GTPO at step 60 of 60)."
    )
    complete = read_run(runs.run("other", prompts=20))
    assert status_text([complete], arm_results([complete])) is None


def test_step_seconds_add_up_to_the_step_and_the_validation(runs):
    (result,) = results_of(runs.arm(runs.root / "gtpo"))
    _, step = result.arm.series("timing_s/step")
    _, testing = result.arm.series("timing_s/testing")
    assert list(result.step_seconds)[:2] == ["rollout", "old log-probs"]
    assert sum(result.step_seconds.values()) == pytest.approx(step.mean() + testing.sum() / len(step))
    assert result.step_seconds["other"] == pytest.approx(0.15)
    assert result.step_seconds["checkpoint"] == pytest.approx(1.4 / 20)


def test_labels_are_the_shortest_that_differ(runs):
    for name in ("first", "second"):
        runs.run(name, arms=["dapo", "gtpo"], prompts=20, bare=True)
    first, second = runs.root / "first", runs.root / "second"
    assert [r.label for r in results_of(first)] == ["dapo", "gtpo"]
    assert [r.label for r in results_of(first / "gtpo", second / "dapo")] == ["gtpo", "dapo"]
    assert [r.label for r in results_of(first, second)] == ["first/dapo", "first/gtpo", "second/dapo", "second/gtpo"]


def test_config_differences_are_those_of_the_algorithm(runs):
    found = config_differences(results_of(runs.run(prompts=20, bare=True)))
    assert found is not None
    settings, bookkeeping = found
    assert settings == {
        "actor_rollout_ref.actor.policy_loss.loss_mode": ["vanilla", "gtpo", "grpo_s"],
        "algorithm.adv_estimator": ["grpo", "gtpo", "grpo_s"],
    }
    assert list(bookkeeping) == [
        "ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR",
        "trainer.default_local_dir",
        "trainer.experiment_name",
    ]


def test_config_differences_need_two_configurations(runs):
    runs.arm(runs.root / "with")
    runs.arm(runs.root / "without", config=False)
    arms = results_of(runs.root / "with", runs.root / "without")
    assert config_differences(arms) is None
    runs.arm(runs.root / "dapo", algorithm="dapo")
    settings, _ = config_differences(results_of(runs.root / "with", runs.root / "without", runs.root / "dapo"))
    assert settings["algorithm.adv_estimator"] == ["gtpo", "not known", "grpo"]


@pytest.mark.parametrize(("share", "text"), [(0.0415, "+4.2"), (-0.0415, "−4.2"), (0.0, "+0.0")])
def test_points(share: float, text: str):
    assert analysis.points(share) == text
