"""Reading runs: what is read, what is repaired, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.runs.directory import record_metrics
from gtpo_verl.runs.reader import logged_accuracies, read_metrics, read_run, read_runs


def write_metrics(path: Path, *entries: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))
    return path


def step(number: int, **data: float | None) -> dict:
    return {"step": number, "data": data}


def test_metrics_by_step(tmp_path: Path):
    file = write_metrics(tmp_path / "metrics.jsonl", step(0, val=0.4), step(1, loss=2), step(2, loss=1, flag=True))
    assert read_metrics(file) == ({0: {"val": 0.4}, 1: {"loss": 2.0}, 2: {"loss": 1.0, "flag": 1.0}}, [])


def test_last_value_wins_when_a_resume_logs_its_first_step_again(tmp_path: Path):
    file = write_metrics(tmp_path / "metrics.jsonl", step(1, loss=3), step(2, loss=2, val=0.5), step(2, val=0.6))
    assert read_metrics(file) == ({1: {"loss": 3.0}, 2: {"loss": 2.0, "val": 0.6}}, [])


def test_steps_of_an_abandoned_attempt_are_dropped(tmp_path: Path):
    file = write_metrics(
        tmp_path / "metrics.jsonl", step(1, x=1), step(2, x=2), step(3, x=3), step(4, x=4), step(2, x=5), step(3, x=6)
    )
    metrics, notes = read_metrics(file)
    assert metrics == {1: {"x": 1.0}, 2: {"x": 5.0}, 3: {"x": 6.0}}
    assert notes == ["2 steps logged before a resume from an earlier checkpoint left out"]


def test_torn_last_line_is_counted(tmp_path: Path):
    file = write_metrics(tmp_path / "metrics.jsonl", step(1, x=1), '{"step": 2, "da')
    metrics, notes = read_metrics(file)
    assert metrics == {1: {"x": 1.0}}
    assert notes == ["1 line of metrics.jsonl could not be read (torn by a crash) and left out"]


def test_values_that_are_no_finite_numbers_are_left_out(tmp_path: Path):
    file = write_metrics(tmp_path / "metrics.jsonl", '{"step": 1, "data": {"a": NaN, "b": null, "c": "text", "d": 1}}')
    metrics, notes = read_metrics(file)
    assert metrics == {1: {"d": 1.0}}
    assert notes == ["1 metric value not finite (NaN, infinite or beyond 1e100) and left out"]


@pytest.mark.parametrize("line", ['{"loss": 1}', "[1, 2]", '{"step": "1", "data": {}}', '{"step": 1, "data": 3}'])
def test_json_of_another_form_is_refused(tmp_path: Path, line: str):
    file = write_metrics(tmp_path / "metrics.jsonl", step(1, x=1), line)
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: expected"):
        read_metrics(file)


def test_series_skips_steps_without_the_key(tmp_path: Path):
    write_metrics(tmp_path / "a" / "metrics.jsonl", step(0, val=0.1), step(1, x=1), step(5, val=0.2))
    steps, values = read_run(tmp_path / "a").trainings[0].series("val")
    assert steps.tolist() == [0, 5]
    assert values.tolist() == [0.1, 0.2]
    assert read_run(tmp_path / "a").trainings[0].series("nothing")[0].size == 0


def test_run_directory_with_its_record(runs):
    run = read_run(runs.run())
    assert [arm.name for arm in run.trainings] == ["dapo", "gtpo", "grpo_s"]
    assert (run.name, run.record["status"]) == ("quickstart", "complete")
    arm = run.trainings[1]
    assert (arm.seed, arm.record["versions"]["verl"]) == ("7", "0.9.1")
    assert arm.last_step == 60
    validations = arm.validations["arithmetic"]
    assert [validation.step for validation in validations] == [0, 10, 20, 30, 40, 50, 60]
    assert validations[0].counts.sum() == 1_000
    assert len(validations[0].prompts) == 500
    assert arm.config["actor_rollout_ref.actor.policy_loss.loss_mode"] == "vanilla"


def test_validation_samples_average_to_the_logged_accuracy(runs):
    arm = read_run(runs.run()).trainings[0]
    _, logged = arm.series("val-core/arithmetic/acc/mean@2")
    np.testing.assert_allclose([v.accuracy.mean() for v in arm.validations["arithmetic"]], logged, atol=1e-12)


def test_a_directory_without_a_sweep_is_read_as_the_trainings_in_it(runs):
    for name, algorithm in (("a", "grpo_s"), ("b", "gtpo"), ("c", "dapo")):
        runs.arm(runs.root / name, algorithm=algorithm, bare=True, prompts=4)
    run = read_run(runs.root)
    assert [training.name for training in run.trainings] == ["a", "b", "c"]
    assert (run.name, run.record) == ("outputs", {})


def test_an_arm_that_did_not_log_a_step_is_missing_not_broken(runs):
    path = runs.run(arms=["dapo"], planned=["dapo", "gtpo", "grpo_s"], status="interrupted")
    write_metrics(path / "gtpo" / "metrics.jsonl", '{"step": 0')
    run = read_run(path)
    assert [arm.name for arm in run.trainings] == ["dapo"]
    assert run.missing == ("gtpo", "grpo_s")


def test_one_training_of_a_sweep_has_its_own_record(runs):
    path = runs.run()
    (path / "gtpo" / "run.json").write_text(
        json.dumps({"name": "gtpo", "command": "gtpo-verl train", "status": "failed"})
    )
    run = read_run(path / "gtpo")
    assert (run.name, run.record["command"], run.record["status"]) == ("gtpo", "gtpo-verl train", "failed")
    assert [training.name for training in run.trainings] == ["gtpo"]
    assert read_run(path).record["status"] is None


def test_a_sweep_lists_its_runs_and_names_those_that_are_missing(runs):
    path = runs.sweep(
        arms=["dapo", "gtpo"], seeds=[0, 10], statuses={"algo=gtpo,seed=0": "missing"}, bare=True, prompts=4
    )
    run = read_run(path)
    assert run.name == "sweep"
    assert [(one.axes["algo"], one.seed, one.status) for one in run.trainings] == [
        ("dapo", "0", "complete"),
        ("dapo", "10", "complete"),
        ("gtpo", "10", "complete"),
    ]
    assert run.missing == ("algo=gtpo,seed=0",)
    assert run.sweep.baseline == {"algo": "dapo"}
    (path / "sweep.json").write_text('{"runs": []}')
    with pytest.raises(UserError, match="was written by another version"):
        read_run(path)


def test_a_training_whose_process_is_dead_was_interrupted_whatever_its_record_says(runs):
    path = runs.arm(runs.root / "run")
    (path / "run.json").write_text(json.dumps({"name": "run", "status": "running"}))
    assert read_run(path).record["status"] == "running"
    owner = {"host": "node7", "pid": 1, "heartbeat": 0.0, "token": "theirs"}
    (path / "LOCK.json").write_text(json.dumps(owner))
    assert read_run(path).record["status"] == "interrupted"


def test_single_arm_of_a_users_own_run(runs):
    runs.arm(runs.root / "mine")
    run = read_run(runs.root / "mine")
    assert (run.name, run.record.get("command")) == ("mine", None)


def test_file_of_verls_own_logger(tmp_path: Path):
    file = write_metrics(tmp_path / "project" / "experiment.jsonl", step(0, val=1), step(1, x=1))
    run = read_run(file)
    assert run.name == "experiment"
    assert run.trainings[0].last_step == 1


def test_same_prompt_with_another_ground_truth_is_another_prompt(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1))
    write_metrics(
        tmp_path / "validation" / "0.jsonl",
        {"input": "p", "gts": "1", "acc": True},
        {"input": "p", "gts": "2", "acc": 0},
        {"input": "p", "gts": "2", "acc": 1.0},
    )
    (validation,) = read_run(tmp_path).trainings[0].validations["unknown"]
    assert sorted(validation.accuracy.tolist()) == [0.5, 1.0]
    assert validation.counts.sum() == 3


def test_samples_without_verdict_count_as_wrong_as_in_verl(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1))
    write_metrics(tmp_path / "validation" / "0.jsonl", {"input": "p", "acc": 1}, {"input": "p", "acc": None}, '{"inp')
    arm = read_run(tmp_path).trainings[0]
    assert arm.validations["unknown"][0].accuracy.tolist() == [0.5]
    assert arm.notes == (
        "1 sample of the validation of step 0 could not be read and left out",
        "1 sample of the validation of step 0 without a verdict counted as wrong",
    )


VAL_SAMPLES = "actor_rollout_ref: {rollout: {val_kwargs: {n: 2}}}"


def test_samples_that_never_came_count_as_wrong(tmp_path: Path):
    """verl writes no line of them; how many there were is in the metrics."""
    (tmp_path / "config.yaml").write_text(VAL_SAMPLES)
    logged = [step(number, **{"val/math/failed_samples": failed}) for number, failed in ((0, 0), (1, 3), (2, 3))]
    write_metrics(tmp_path / "metrics.jsonl", *logged)
    p, q, twice = ({"input": name, "acc": 1, "data_source": "math"} for name in ("p", "q", "twice"))
    write_metrics(tmp_path / "validation" / "0.jsonl", p, p, q, q, twice, twice, twice, twice)
    write_metrics(
        tmp_path / "validation" / "1.jsonl", p, p, twice, twice, twice
    )  # all of q, one of the repeated prompt
    write_metrics(tmp_path / "validation" / "2.jsonl", p, p, q, q, twice, twice)  # which were lost is not known
    arm = read_run(tmp_path).trainings[0]
    accuracies = [sorted(each.accuracy.tolist()) for each in arm.validations["math"]]
    assert accuracies == [[1, 1, 1], [0, 0.75, 1], [1, 1, 1]]
    assert [sorted(each.counts.tolist()) for each in arm.validations["math"]] == [[2, 2, 4], [2, 2, 4], [2, 2, 2]]
    assert arm.notes == (
        "3 samples of the validation of step 1 that failed counted as wrong",
        "3 samples of the validation of step 2 that failed left out",
    )


def test_a_session_is_one_sample_whatever_its_outputs(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1))
    prompts = {"a_0_0": "p", "a_0_1": "p and more", "a_0_2": "p and still more", "a_1_0": "p"}
    lines = [{"input": text, "acc": int(key == "a_1_0"), "uid": key} for key, text in prompts.items()]
    write_metrics(tmp_path / "validation" / "0.jsonl", *lines)
    (validation,) = read_run(tmp_path).trainings[0].validations["unknown"]
    assert (validation.accuracy.tolist(), validation.counts.tolist()) == ([0.5], [2])


def test_validation_without_any_verdict_is_left_out(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1))
    write_metrics(tmp_path / "validation" / "0.jsonl", {"input": "p", "score": 0.3})
    arm = read_run(tmp_path).trainings[0]
    assert arm.validations == {}
    assert arm.notes == ("validation of step 0 left out: its samples have no verdict (acc)",)


def test_validation_beyond_the_last_step_belongs_to_an_abandoned_attempt(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1), step(5, x=1))
    for number in (0, 10):
        write_metrics(tmp_path / "validation" / f"{number}.jsonl", {"input": "p", "acc": 1})
    arm = read_run(tmp_path).trainings[0]
    assert [validation.step for validation in arm.validations["unknown"]] == [0]
    assert arm.notes == ("validation of step 10 left out: the metrics end at step 5",)


def test_a_sample_is_correct_from_the_threshold_of_the_runs_own_configuration(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1))
    samples = [{"input": str(n), "acc": acc} for n, acc in enumerate((0, 0.4, 0.5, 1))]
    write_metrics(tmp_path / "validation" / "0.jsonl", *samples)
    strict = read_run(tmp_path).trainings[0]
    (tmp_path / "config.yaml").write_text("algorithm: {correct_threshold: 0.5}\n")
    lenient = read_run(tmp_path).trainings[0]
    assert [arm.validations["unknown"][0].accuracy.sum() for arm in (strict, lenient)] == [1, 2]
    assert lenient.validations["unknown"][0].mean_acc == pytest.approx(1.9 / 4)
    (note,) = lenient.notes
    assert note.startswith("2 validation samples with an acc other than 0 and 1: correct from 0.5 on")


def test_samples_belong_to_the_source_that_they_name(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1))
    write_metrics(
        tmp_path / "validation" / "0.jsonl",
        {"input": "p", "acc": 1, "data_source": "aime", "cluster": None},
        {"input": "p", "acc": 0, "data_source": "math", "cluster": "c"},
        {"input": "q", "acc": 1, "data_source": "math", "cluster": "c"},
    )
    validations = read_run(tmp_path).trainings[0].validations
    assert {source: v.accuracy.mean() for source, (v,) in validations.items()} == {"aime": 1.0, "math": 0.5}
    (aime,), (math,) = validations.values()
    assert aime.clusters == aime.prompts
    assert math.clusters == ("c", "c")


def test_samples_without_a_source_are_those_of_the_only_one_that_was_logged(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, **{"val-core/org/aime/acc/mean@4": 1}))
    write_metrics(tmp_path / "validation" / "0.jsonl", {"input": "p", "acc": 1})
    assert list(read_run(tmp_path).trainings[0].validations) == ["org/aime"]


def test_samples_without_a_source_are_left_out_where_several_were_logged(tmp_path: Path):
    write_metrics(
        tmp_path / "metrics.jsonl",
        step(0, **{"val-core/aime/acc/mean@4": 1, "val-core/math/acc/mean@4": 0}),
        step(5, **{"val-core/aime/acc/mean@4": 1, "val-core/math/acc/mean@4": 0}),
    )
    write_metrics(tmp_path / "validation" / "0.jsonl", {"input": "p", "acc": 1})
    write_metrics(tmp_path / "validation" / "5.jsonl", {"input": "p", "acc": 1, "data_source": "aime"})
    arm = read_run(tmp_path).trainings[0]
    assert {source: [v.step for v in found] for source, found in arm.validations.items()} == {"aime": [5]}
    assert arm.sources == ["aime", "math"]
    (note,) = arm.notes
    assert note.startswith("the validation samples of step 0 do not name their data source, and several were logged")


def test_logged_accuracy_is_the_share_of_correct_samples_else_verls_with_most_samples():
    keys = {"val-core/maths/acc/mean@1", "val-core/maths/acc/mean@32", "val-core/maths/acc/best@32/mean"}
    assert logged_accuracies(keys) == {"maths": "val-core/maths/acc/mean@32"}
    assert logged_accuracies({*keys, "val/maths/mean@8"}) == {"maths": "val/maths/mean@8"}


def test_a_method_is_known_by_the_configuration_alone(runs):
    runs.arm(runs.root / "mine", algorithm="gtpo", bare=True)
    runs.arm(runs.root / "dapo", algorithm="gtpo", bare=True)
    runs.arm(runs.root / "grpo_s", config=False, bare=True)
    methods = [read_run(runs.root / name).trainings[0].method for name in ("mine", "dapo", "grpo_s")]
    assert [method and method.name for method in methods] == ["gtpo", "gtpo", None]


def test_verdict_that_is_no_number_is_refused(tmp_path: Path):
    write_metrics(tmp_path / "metrics.jsonl", step(0, x=1))
    write_metrics(tmp_path / "validation" / "0.jsonl", {"input": "p", "acc": "yes"})
    with pytest.raises(UserError, match=r"0.jsonl, line 1: acc is 'yes', expected the verifier's verdict, a number"):
        read_run(tmp_path)


def test_errors_say_what_to_do(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    broken = write_metrics(tmp_path / "broken" / "metrics.jsonl", step(1, x=1)).parent
    (broken / "run.json").write_text("{")
    bad_config = write_metrics(tmp_path / "config" / "metrics.jsonl", step(1, x=1)).parent
    (bad_config / "config.yaml").write_text("a: [")
    expected = {
        "nowhere": "does not exist: give the directory of a run",
        "empty": "no metrics.jsonl with a readable line in .*empty or in a directory of it: has a training logged",
        "started": "holds no readable line: has the training logged its first step yet",
        "notes.txt": "is not a run: give a run's directory, or a .jsonl file",
        "broken": "run.json is damaged .*: repair it, or remove it",
        "config": "config.yaml is damaged .*: repair it, or remove it",
    }
    for name, message in expected.items():
        with pytest.raises(UserError, match=message) as caught:
            read_run(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_no_run_and_the_same_run_twice_are_refused(runs):
    path = runs.run(arms=["dapo"])
    with pytest.raises(UserError, match="no run is given"):
        read_runs([])
    with pytest.raises(UserError, match="given more than once"):
        read_runs([path, path / ".." / path.name])


@pytest.mark.slow
def test_files_that_verl_itself_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """verl's file logger and verl's validation dump, with the types that a training hands to them."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    logger = FileLogger("project", "experiment")
    logger.log({"val-core/x/acc/mean@2": np.float64(0.5)}, step=0)
    logger.log({"actor/entropy": np.float32(0.25), "actor/grad_norm": float("nan")}, step=1)
    logger.finish()
    verdicts = {"acc": [np.bool_(True), False], "reward": [np.float32(1), 0.0], "num_turns": [np.int64(2), 2]}
    PPOTrainer._write_generations(
        ["1 + 1 =", "1 + 1 ="], ["2", "3"], ["2", "2"], [1.0, 0.0], verdicts, str(tmp_path / "validation"), 0
    )
    arm = read_run(tmp_path).trainings[0]
    assert arm.metrics == {0: {"val-core/x/acc/mean@2": 0.5}, 1: {"actor/entropy": 0.25}}
    (validation,) = arm.validations["x"]  # verl's lines name no source: it is the only one in the metrics
    assert (validation.accuracy.tolist(), validation.counts.sum()) == ([0.5], 2)


# -------------------------------------------------------------------- files that nobody wrote by intention


STEP = '{"step": 1, "data": {"val/sums/mean@1": 0.5}}\n'
BIG = "1" + "0" * 400


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", f'{{"step": {BIG}, "data": {{}}}}\n'.encode(), "line 1: expected"),
        ("metrics.jsonl", b'{"step": -1, "data": {}}\n', "line 1: expected"),
        ("config.yaml", b"\x00\xff\xfe", "config.yaml is damaged"),
        ("config.yaml", b"&a\nx: *a\n", "config.yaml is damaged"),
        ("config.yaml", b"x: &a\n  y: *a\n", "config.yaml is damaged"),
        ("config.yaml", b"x: " + b"[" * 100_000, "config.yaml is damaged"),
        ("config.yaml", b"x: &a [*a]\n", "config.yaml is damaged"),
        ("run.json", b"[" * 100_000, "run.json is damaged"),
        ("run.json", b'{"versions": [1]}', r"run.json: versions is \[1\]"),
        ("run.json", b'{"notes": 5}', "run.json: notes is 5"),
        ("run.json", b'{"attempts": [1]}', r"run.json: attempts is \[1\]"),
        ("run.json", b'{"status": 5, "name": {"a": 1}}', "run.json: (status|name) is"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(STEP)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)


def test_values_that_a_run_named_as_not_finite_are_counted(tmp_path: Path) -> None:
    for step in (1, 2):
        record_metrics(tmp_path, step, {"a": 1.0, "actor/grad_norm": float("nan"), "b": float("inf")})
    _, notes = read_metrics(tmp_path / "metrics.jsonl")
    assert notes == ["4 metric values not finite (NaN, infinite or beyond 1e100) and left out"]


def test_absurd_values_and_nested_lines_are_left_out(tmp_path: Path) -> None:
    nested = '{"step": 1, "data": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}\n"
    line = f'{{"step": 1, "data": {{"a": {BIG}, "b": 1e308, "c": -1e308, "d": 2}}}}\n'
    (tmp_path / "metrics.jsonl").write_text(nested + line + STEP)
    (tmp_path / "validation" / "1.jsonl").mkdir(parents=True)
    [training] = read_run(tmp_path).trainings
    assert training.metrics == {1: {"d": 2.0, "val/sums/mean@1": 0.5}}
    assert "3 metric values not finite (NaN, infinite or beyond 1e100) and left out" in training.notes
