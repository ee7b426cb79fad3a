"""Which arm and seed a training is, and which trainings are refused."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gtpo_verl.config import compose_config, prepare
from gtpo_verl.errors import UserError
from gtpo_verl.report.design import Design, design
from gtpo_verl.report.seeds import seed_comparisons
from gtpo_verl.report.words import counts_text, notes
from gtpo_verl.runs.directory import record_metrics
from gtpo_verl.runs.reader import read_runs
from gtpo_verl.runs.session import training_session

SMALL = {"bare": True, "prompts": 4, "every": 30}


def designed(*paths: Path, allow: tuple[str, ...] = ()) -> Design:
    return design(read_runs(list(paths)), allow)


def edit(directory: Path, key: str, value: object, file: str = "config.yaml") -> None:
    """Change one dotted key of a run's configuration or record."""
    content = yaml.safe_load((directory / file).read_text())
    *sections, last = key.split(".") if file == "config.yaml" else key.split(".", 1)
    node = content
    for section in sections:
        node = node[section]
    node[last] = value
    (directory / file).write_text(json.dumps(content))


@pytest.fixture
def sweep(runs) -> Path:
    return runs.sweep(arms=["dapo", "gtpo"], seeds=[0, 1, 10], **SMALL)


def trained(runs, name: str, algorithm: str, seed: int | None) -> Path:
    return runs.arm(runs.root / name, algorithm=algorithm, seed=seed, record="complete", **SMALL)


def test_a_sweep_has_arms_seeds_and_a_baseline(sweep: Path):
    found = designed(sweep)
    assert [(arm.name, [one.seed for one in arm.trainings]) for arm in found.arms] == [
        ("DAPO", ["0", "1", "10"]),
        ("GTPO", ["0", "1", "10"]),
    ]
    assert [(arm.name, baseline.name) for arm, baseline in found.pairs] == [("GTPO", "DAPO")]
    assert (found.allowed, found.unknown) == ({}, ())


def test_runs_are_sorted_by_their_configuration_whatever_their_directories_are_called(runs):
    paths = [trained(runs, "b/dapo", "gtpo", 1), trained(runs, "x", "gtpo", 0), trained(runs, "gtpo", "dapo", 0)]
    found = designed(*paths)
    assert [(arm.name, [one.training.path for one in arm.trainings]) for arm in found.arms] == [
        ("DAPO", [paths[2]]),
        ("GTPO", [paths[1], paths[0]]),
    ]


def test_the_same_arm_and_seed_twice_is_refused(runs):
    paths = [trained(runs, name, "gtpo", 3) for name in ("first", "second")]
    with pytest.raises(UserError, match=r"first and .*second are both GTPO, seed 3: give one of them"):
        designed(*paths)


@pytest.mark.parametrize(
    ("file", "key", "value", "named"),
    [
        ("config.yaml", "actor_rollout_ref.actor.optim.lr", 1e-6, "actor_rollout_ref.actor.optim.lr"),
        ("config.yaml", "algorithm.gamma", 0.99, "algorithm.gamma"),
        ("config.yaml", "data.new_key", True, "data.new_key"),
        ("config.yaml", "algorithm.adv_estimator", "grpo_s", "algorithm.adv_estimator"),  # of one seed of an arm
        ("config.yaml", "seed", 7, "seed"),
        ("config.yaml", "data.seed", 7, "data.seed"),
        ("run.json", "hardware", "8 × NVIDIA H100", "hardware"),
        ("run.json", "code.commit", "f" * 40, "code.commit"),
        ("run.json", "code.diff", "e" * 64, "code.diff"),
        ("run.json", "versions.vllm", "0.24.0", "versions.vllm"),
        ("run.json", "checksums.data.train_files", "9" * 64, "checksums.data.train_files"),
        ("run.json", "checksums.actor_rollout_ref.model.path", "9" * 64, "checksums.actor_rollout_ref.model.path"),
    ],
)
def test_a_tampered_run_is_refused_with_its_key_named(sweep: Path, file: str, key: str, value: object, named: str):
    edit(sweep / "algo=gtpo,seed=1", key, value, file)
    with pytest.raises(UserError) as caught:
        designed(sweep)
    message = str(caught.value)
    assert message.startswith("these runs differ in more than the arm and the seed: ")
    assert f": {named} (" in message
    assert "algo=gtpo,seed=1" in message
    assert f"--allow {named}" in message
    assert "\n" not in message


def test_paths_may_differ_where_the_content_is_known_to_be_the_same(sweep: Path):
    edit(sweep / "algo=gtpo,seed=1", "data.train_files", "/elsewhere/train.parquet")
    for run in sweep.glob("algo=*"):
        path = "/elsewhere/model" if run.name == "algo=gtpo,seed=1" else "model"
        edit(run, "actor_rollout_ref.model", {"path": path, "tokenizer_path": path})
    designed(sweep)


def test_an_allowed_fact_is_tolerated_and_stated(sweep: Path):
    edit(sweep / "algo=gtpo,seed=1", "hardware", "8 × NVIDIA H100", "run.json")
    found = designed(sweep, allow=("hardware",))
    assert [len(arm.trainings) for arm in found.arms] == [3, 3]
    assert found.allowed == {"hardware": {"2 CPU cores, x86_64, Python 3.11.7": 5, "8 × NVIDIA H100": 1}}
    edit(sweep / "algo=gtpo,seed=1", "versions.vllm", "0.24.0", "run.json")
    assert set(designed(sweep, allow=("hardware", "versions")).allowed) == {"hardware", "versions.vllm"}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("NONSENSE", "name one in which they differ"),
        ("hardwar", r"did you mean hardware\?"),
        ("trainer.experiment", "trainer.experiment_name"),
    ],
)
def test_allowing_a_key_that_no_run_has_is_refused(sweep: Path, key: str, hint: str):
    with pytest.raises(UserError, match=rf"^--allow {key}: no run has such a setting.*{hint}"):
        designed(sweep, allow=(key,))
    designed(sweep, allow=("code", "checksums"))


def test_an_allowed_setting_makes_arms_of_its_own(runs):
    paths = [trained(runs, f"{algorithm}-{seed}", algorithm, seed) for algorithm in ("dapo", "gtpo") for seed in (0, 1)]
    faster = [trained(runs, f"fast-{algorithm}", algorithm, 0) for algorithm in ("dapo", "gtpo")]
    for path in faster:
        edit(path, "actor_rollout_ref.actor.optim.lr", 1e-3)
    with pytest.raises(UserError, match=r"optim\.lr \(0\.0003, but 0\.001 in fast-dapo, fast-gtpo\)"):
        designed(*paths, *faster)
    found = designed(*paths, *faster, allow=("actor_rollout_ref.actor.optim.lr",))
    assert [arm.name for arm in found.arms] == [
        "DAPO, lr=0.0003",
        "DAPO, lr=0.001",
        "GTPO, lr=0.0003",
        "GTPO, lr=0.001",
    ]
    # each is compared with the baseline of its own learning rate
    assert [(arm.name, baseline.name) for arm, baseline in found.pairs] == [
        ("GTPO, lr=0.0003", "DAPO, lr=0.0003"),
        ("GTPO, lr=0.001", "DAPO, lr=0.001"),
    ]


def test_settings_of_a_method_make_arms(runs):
    paths = [trained(runs, name, "gtpo", seed) for name, seed in (("a", 0), ("b", 1), ("c", 0))]
    for path in paths:
        edit(path, "algorithm.gtpo", {"alpha2": 0.1 if path.name != "c" else 0.2, "entropy_floor": 1e-3})
    found = designed(*paths)
    assert [(arm.name, len(arm.trainings)) for arm in found.arms] == [("GTPO, alpha2=0.1", 2), ("GTPO, alpha2=0.2", 1)]
    assert [(arm.name, baseline.name) for arm, baseline in found.pairs] == [("GTPO, alpha2=0.2", "GTPO, alpha2=0.1")]


def test_a_sweeps_axis_may_be_any_setting_or_a_group_of_them(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=[0, 1], **SMALL)
    facts = json.loads((path / "sweep.json").read_text())
    facts["axes"] = {"algo": ["dapo", "gtpo_v1"], "seed": ["0", "1"], "algorithm.gamma": ["1.0", "0.9"]}
    facts["runs"] = {
        f"algo={algo},seed={seed}": {"overrides": [f"algo={preset}", f"seed={seed}", f"algorithm.gamma={gamma}"]}
        for algo, preset, gamma in (("dapo", "dapo", "1.0"), ("gtpo", "gtpo_v1", "0.9"))
        for seed in (0, 1)
    }
    (path / "sweep.json").write_text(json.dumps(facts))
    for seed in (0, 1):
        edit(path / f"algo=gtpo,seed={seed}", "algorithm.gamma", 0.9)
        edit(path / f"algo=gtpo,seed={seed}", "algorithm.gtpo", {"alpha1": 0.9, "negatives": "zero"})
    found = designed(path)
    assert [arm.name for arm in found.arms] == ["DAPO, gamma=1.0", "GTPO, gamma=0.9"]
    assert found.pairs == ()  # no arm has the baseline's algorithm and this gamma


def test_what_follows_from_a_sweeps_axis_may_differ_between_arms_and_not_within_one(runs):
    path = runs.sweep(arms=["dapo", "gtpo"], seeds=[0, 1], **SMALL)
    facts = json.loads((path / "sweep.json").read_text())
    facts["axes"] = {"data.max_response_length": ["32", "64"], "seed": ["0", "1"]}
    facts["baseline"] = None
    facts["runs"] = {
        run: {"overrides": [f"data.max_response_length={64 if 'gtpo' in run else 32}", run[-6:]]}
        for run in facts["runs"]
    }
    (path / "sweep.json").write_text(json.dumps(facts))
    for run in path.glob("algo=gtpo*"):
        edit(run, "data.max_response_length", 64)
        edit(run, "data.limit", 64)  # as an interpolation of the axis
    assert [len(arm.trainings) for arm in designed(path).arms] == [2, 2]
    edit(path / "algo=gtpo,seed=1", "data.limit", 63)
    with pytest.raises(UserError, match=r"data\.limit \("):
        designed(path)


@pytest.mark.slow
def test_real_trainings_of_every_method_are_comparable(tmp_path: Path):
    """Composed and recorded as `train` does it, each in a directory of its own."""
    (tmp_path / "model").mkdir()
    for name in ("train.parquet", "val.parquet", "model/config.json"):
        (tmp_path / name).write_text(name)
    for algo in ("dapo", "grpo", "gtpo", "grpo_s"):
        run_dir = tmp_path / f"run-{algo}"
        overrides = [
            *(f"algo={algo}", "setting=quickstart", "hardware=cpu", f"trainer.run_dir={run_dir}"),
            *(f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/val.parquet"),
            f"actor_rollout_ref.model.path={tmp_path}/model",
        ]
        config = compose_config(overrides)
        prepare(config, overrides)
        resolved = OmegaConf.to_yaml(config, resolve=True)
        with training_session(run_dir, config=resolved, command="gtpo-verl train", overrides=overrides):
            record_metrics(run_dir, 1, {"credit/responses": 1})
    found = designed(*tmp_path.glob("run-*"))
    assert [arm.name for arm in found.arms] == ["DAPO", "GTPO", "GRPO-S", "GRPO"]
    assert {baseline.name for _, baseline in found.pairs} == {"DAPO"}


def test_what_was_not_recorded_is_said(runs):
    paths = [runs.arm(runs.root / algorithm, algorithm=algorithm, **SMALL) for algorithm in ("dapo", "gtpo")]
    assert designed(*paths).unknown == (
        "Not recorded by both runs, so not compared: the commit",
        "Not recorded by both runs, so not compared: versions",
        "Not recorded by both runs, so not compared: checksums of model and data",
    )


START = "actor_rollout_ref.model.path"


def test_models_that_a_sweep_crosses_with_its_arms_are_starts(runs):
    path = runs.root / "starts"
    crossed = {
        f"algo={arm},model={start},seed={seed}": [f"algo={arm}", f"{START}=/{start}/model", f"seed={seed}"]
        for arm in ("dapo", "gtpo")
        for start in ("one", "two")
        for seed in (0, 1)
    }
    for run, (algo, start, seed) in crossed.items():
        options = {"algorithm": algo.removeprefix("algo="), "seed": int(seed.removeprefix("seed="))}
        edit(runs.arm(path / run, record="complete", **options, **SMALL), START, start.removeprefix(f"{START}="))
    axes = {"algo": ["dapo", "gtpo"], START: ["/one/model", "/two/model"], "seed": ["0", "1"]}
    runs._sweep_file(path, crossed, axes)
    read = read_runs([path])
    found = design(read)
    assert [arm.name for arm in found.arms] == ["DAPO", "GTPO"]
    seeds = ["0 from one/model", "1 from one/model", "0 from two/model", "1 from two/model"]
    assert [[one.seed for one in arm.trainings] for arm in found.arms] == [seeds, seeds]
    (comparison,) = seed_comparisons(found.pairs, found.arms)
    assert list(comparison.seeds) == seeds
    halves = [comparison.paired.differences[:2], comparison.paired.differences[2:]]
    assert list(comparison.by_start) == ["one/model", "two/model"]
    assert list(comparison.by_start.values()) == pytest.approx([sum(half) / 2 for half in halves])
    assert "by start: " in " ".join(notes(read, found, [comparison]))
    assert counts_text(read, found.arms) == "2 arms · 2 seeds from each of 2 starts · 8 of 8 trainings complete"
    models = {"baseline": {START: "/one/model"}}  # the sweep compares models
    runs._sweep_file(path, crossed, axes, models)
    names = [(arm.name, baseline.name) for arm, baseline in designed(path).pairs]
    assert names == [
        ("DAPO, path=/two/model", "DAPO, path=/one/model"),
        ("GTPO, path=/two/model", "GTPO, path=/one/model"),
    ]


def test_arms_of_other_seeds_and_models_are_refused(runs):
    paths = [trained(runs, f"{arm}-{seed}", arm, seed) for arm, seed in (("dapo", 0), ("gtpo", 1))]
    for path in paths:
        edit(path, f"checksums.{START}", path.name, "run.json")
    with pytest.raises(UserError, match=f"differ in more than the arm and the seed: checksums.{START}"):
        designed(*paths)


def test_every_seed_may_have_a_start_of_its_own_and_arms_may_not(runs):
    paths = [trained(runs, f"{arm}-{seed}", arm, seed) for arm in ("dapo", "gtpo") for seed in (0, 1)]
    for path in paths:
        edit(path, f"checksums.{START}", f"start {path.name[-1]}", "run.json")
    assert [len(arm.trainings) for arm in designed(*paths).arms] == [2, 2]
    assert [len(arm.trainings) for arm in designed(*paths[:3]).arms] == [2, 1], "one is not there yet"
    edit(paths[3], f"checksums.{START}", "another", "run.json")
    with pytest.raises(UserError, match=rf"these runs differ in more than the arm and the seed: checksums.{START}"):
        designed(*paths)
