"""Axes in Hydra's sweep syntax, the names of the runs, and what a sweep refuses."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_verl.config import choices, compose_config, prepare
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import package
from gtpo_verl.experiments.axes import combinations, parse, split
from gtpo_verl.experiments.run import Where, cost_of, plan
from gtpo_verl.experiments.sweep import (
    check_directory,
    compose_runs,
    define,
    embedded_task,
    idle_axes,
    untestable,
)
from gtpo_verl.files import write_text
from gtpo_verl.runs.lock import sweep_lock
from gtpo_verl.runs.sweep import load, write

CPU = ("setting=quickstart", "hardware=cpu")
SOME_ALPHAS = ("sweep=alpha", "algorithm.gtpo.alpha2=0.1,0.2")  # without that of its baseline


def names(*overrides: str) -> list[str]:
    return list(combinations(split(parse(overrides), 1000)[0]))


def test_hydras_parser_reads_the_axes_and_the_seed_varies_slowest() -> None:
    assert names("algo=dapo,gtpo", "seed=range(2)", "setting=small_gpu") == [
        "algo=dapo,seed=0",
        "algo=gtpo,seed=0",
        "algo=dapo,seed=1",
        "algo=gtpo,seed=1",
    ]
    assert names("data.train_batch_size=choice(8,16)") == ["train_batch_size=8", "train_batch_size=16"]
    assert len(names("algo=glob(*)")) == len(choices("algo"))


def test_names_are_short_safe_and_depend_on_the_axes_alone() -> None:
    assert names("algo=ladder/3_clip_higher,ladder/6_dapo")[0] == "algo=ladder-3_clip_higher"
    assert names("+a.b='x y',z", "c.b=1,2")[0] == "+a.b=x-y,c.b=1"
    long = names("data.train_files=" + ",".join(f"/data/{'x' * 200}/{number}.parquet" for number in range(2)))
    assert len(set(long)) == 2
    assert all(len(name) <= 160 for name in long)


def test_every_run_has_its_values_and_what_is_common() -> None:
    sweep = define(["algo=dapo,gtpo", "trainer.nnodes=2", "hardware=cpu"], Path("/runs/mine, all"))
    assert (sweep.name, sweep.axes) == ("mine, all", {"algo": ("dapo", "gtpo")})
    assert sweep.overrides("algo=gtpo") == [
        *("trainer.nnodes=2", "hardware=cpu", "algo=gtpo"),
        'trainer.run_dir="/runs/mine, all/algo=gtpo"',
        'trainer.experiment_name="mine, all-algo=gtpo"',
    ]
    assert sweep.baseline == {"algo": "dapo"}
    own = define(["algo=dapo,gtpo", "trainer.experiment_name=mine"])
    assert own.overrides("algo=dapo")[-1].startswith("trainer.run_dir=")
    assert own.directory == Path("outputs/sweep-algo").resolve()


def test_a_file_gives_axes_that_the_command_line_replaces() -> None:
    sweep = define(["sweep=alpha", "setting=small_gpu"])
    assert (sweep.name, len(sweep.runs), sweep.retries) == ("alpha-small_gpu", 30, 2)
    sweep = define(["sweep=alpha", "algorithm.gtpo.alpha2=0.1,0.3", "seed=7", "sweep.retries=0"])
    assert list(sweep.axes) == ["algo", "algorithm.gtpo.alpha2"]
    assert ("seed=7" in sweep.common, sweep.retries, sweep.baseline) == (True, 0, None)
    assert list(define(["sweep=alpha", "++seed=7"]).axes) == list(define(["sweep=alpha", "seed=7"]).axes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1,1"], "seed=1,1: the axis has the value 1 more than once"),
        (["data.train_batch_size=8,8.0"], "more than once"),
        (["seed=1,2", "seed=3"], "seed is given 2 times"),
        (["seed=1,2", "++seed=3"], "seed is given 2 times"),
        (["algo=gtpo"], "a sweep needs an axis"),
        (["seed=interval(0,1)"], "an interval has no end of values"),
        (["seed=range(0,10,0)"], "the step of a range must not be 0"),
        (["algo=dapo,gtpo", "sweep.baseline.algo=gtop"], "sweep.baseline.algo=gtop: the baseline is not on the axes"),
        (["+x='a b',a-b"], "would both be the run"),
        (["seed=1,2", "trainer.run_dir=x"], "which --output names"),
        (["sweep=alpa"], "did you mean alpha? Choose one of: alpha, axis,"),
        (["sweep=alpha", "sweep.retrys=1"], "a sweep has no key retrys; did you mean retries?"),
        (["sweep=alpha", "sweep.retries=no"], "could not be converted to Integer"),
        (["seed=1,2", "sweep.retries=-1"], "must be 0 or more"),
        (["sweep=alpha", "sweep.baseline={seed:9}"], "seed=9 is not on an axis"),
        (["seed=range(3"], "does not parse"),
        (["seed=range(1000000000)"], "1,000,000,000 runs, and at most sweep.max_runs=1,000 are begun"),
        (["algo=dapo,gtpo", "seed=range(501)"], "1,002 runs, and at most"),
        (["seed=1,2,3", "sweep.max_runs=2"], "3 runs, and at most sweep.max_runs=2"),
        (["algorithm.gtpo.alpha2=range(0,1,1e-9)"], "runs, and at most"),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        define(overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_the_users_is_found_and_its_unknown_key_is_named(tmp_path: Path) -> None:
    write_text(tmp_path / "sweep" / "mine.yaml", "axes: {seed: '1,2'}\nretries: 5\n")
    write_text(tmp_path / "sweep" / "wrong.yaml", "axes: {seed: '1,2'}\nretry: 5\n")
    path = f"hydra.searchpath=[file://{tmp_path}]"
    sweep = define(["sweep=mine", path])
    assert (sweep.retries, sweep.common[0]) == (5, path)
    with pytest.raises(UserError, match=r"^sweep=wrong: a sweep has no key retry; did you mean retries\?"):
        define(["sweep=wrong", path])


# -------------------------------------------------------------------- runs


@pytest.mark.slow
def test_runs_that_would_be_equal_or_unknown_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="algo=ladder-6_dapo and algo=dapo would be the same run"):
        compose_runs(define(["algo=dapo,ladder/6_dapo", *CPU], tmp_path))
    with pytest.raises(UserError, match=r"^alpa2=0: algorithm.gtpo.alpa2: no such key; did you mean"):
        compose_runs(define(["algorithm.gtpo.alpa2=0,1", *CPU], tmp_path))


@pytest.mark.slow
def test_a_run_with_another_configuration_is_refused_by_name_and_more_seeds_are_not(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    sweep = define(["seed=1,2", *CPU], tmp_path)
    configs = compose_runs(sweep)
    write(sweep)
    for name, config in configs.items():
        config.trainer.device = "cuda"  # as verl sets it
        write_text(tmp_path / name / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    more = define(["seed=1,2,3", *CPU], tmp_path)
    check_directory(more)
    compose_runs(more)
    write(more)
    write(sweep)
    assert (load(tmp_path).runs, load(tmp_path).axes) == (more.runs, {"seed": ("1", "2", "3")})
    changed = define(["seed=2,3", *CPU, "data.train_batch_size=48"], tmp_path)
    with pytest.raises(UserError, match=r"^seed=2 in .*: it was trained with .*data.train_batch_size was 24, is 48"):
        compose_runs(changed)
    compose_runs(define(["seed=2,3", *CPU, "trainer.save_freq=1", "trainer.total_training_steps=99"], tmp_path))
    write_text(tmp_path / "seed=2" / "run.json", '{"status": "complete"}')
    with pytest.raises(UserError, match=r"seed=2: trainer.total_training_steps was 24, is 99, and it is finished in"):
        compose_runs(define(["seed=2,3", *CPU, "trainer.total_training_steps=99"], tmp_path))
    with pytest.raises(UserError, match="is a sweep over seed, not over algo: choose another --output"):
        check_directory(define(["algo=dapo,gtpo", *CPU], tmp_path))
    with pytest.raises(UserError, match="is not empty and not a sweep"):
        check_directory(define(["seed=1,2", *CPU], tmp_path / "seed=1"))


def test_a_sweep_that_was_killed_before_its_plan_was_written_goes_on(tmp_path: Path) -> None:
    """As while the embedded task is prepared, which takes minutes."""
    holder = (
        "import os, pathlib, sys\n"
        "from gtpo_verl.runs.lock import sweep_lock\n"
        "with sweep_lock(pathlib.Path(sys.argv[1])): os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", holder, tmp_path], check=False).returncode == 9
    assert sorted(file.name for file in tmp_path.iterdir()) == ["LOCK", "LOCK.json"]
    check_directory(define(["seed=1,2", *CPU], tmp_path))
    with sweep_lock(tmp_path):
        pass


@pytest.mark.slow
def test_the_embedded_task_is_used_where_its_setting_names_no_other(tmp_path: Path) -> None:
    sweep, task = embedded_task(define(["seed=1,2", *CPU], tmp_path / "sweep"))
    assert task is not None
    assert f'data.train_files="{tmp_path / "task-sums" / "train.parquet"}"' in sweep.common
    sweep, task = embedded_task(define(["seed=1,2", *CPU, "task=countdown"], tmp_path / "sweep"))
    assert task is not None
    assert task.name == "countdown"
    assert f'data.train_files="{tmp_path / "task-countdown" / "train.parquet"}"' in sweep.common
    own = define(["seed=1,2", *CPU, "actor_rollout_ref.model.path=x"], tmp_path)
    assert embedded_task(own) == (own, None)
    other = define(["seed=1,2", "setting=small_gpu"], tmp_path)
    assert embedded_task(other) == (other, None)
    with pytest.raises(UserError, match="task= is no axis of a sweep"):
        embedded_task(define(["task=sums,countdown", *CPU], tmp_path))


def test_the_hardware_of_this_machine_is_for_runs_of_this_machine() -> None:
    assert "hardware=cpu" in define(["seed=1,2"], local=True).common
    assert "hardware=cpu" not in define(["seed=1,2"]).common


@pytest.mark.parametrize(("seeds", "said"), [("1", "1 seed for"), ("range(5)", "5 seeds for"), ("range(6)", None)])
def test_too_few_seeds_for_a_test_are_said(seeds: str, said: str | None) -> None:
    lines = untestable(define(["algo=dapo,gtpo", f"seed={seeds}"]))
    assert [line.startswith(said) for line in lines] == ([True] if said else [])
    assert untestable(define(["seed=1,2"])) == []  # one arm: nothing is compared
    starts = "actor_rollout_ref.model.path=a,b,c"
    assert untestable(define(["algo=dapo,gtpo", "seed=1,2", starts])) == []  # six pairs
    assert untestable(define(["algo=dapo,gtpo", starts]))[0].startswith("1 seed from 3 starts for each arm: ")


def test_a_sweep_whose_report_will_compare_nothing_is_told_so(tmp_path: Path) -> None:
    sixes = "seed=range(6)"
    without = define([*SOME_ALPHAS, sixes], tmp_path)
    (line,) = untestable(without)
    assert line.startswith("no arm is the baseline, so the report will compare none: ")
    assert untestable(define([*SOME_ALPHAS, sixes, "sweep.baseline={algorithm.gtpo.alpha2:0.1}"])) == []
    assert untestable(define(["algo=gtpo,grpo_s", sixes, "sweep.baseline={algo:gtpo}"])) == []
    write(define(["sweep=alpha", sixes], tmp_path))
    assert untestable(without) == []  # the baseline of the sweep that it extends


def test_a_directory_that_is_too_large_for_jobs_is_refused_by_their_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(package, "MAX_FILES", 0)
    (tmp_path / "file").touch()
    overrides = ["algo=dapo,gtpo", *CPU]
    with pytest.raises(UserError, match=r"holds more than 0 files or 50 MiB to carry"):
        plan(overrides, None, Where(), gpu="h100", measured=None)
    assert plan(overrides, None, Where(local=True), gpu="h100", measured=None) == 0
    with pytest.raises(UserError, match=r"it must be the directory of a run"):
        plan(overrides, None, Where(local=True), gpu="h100", measured=tmp_path)


def test_the_cost_of_a_run_is_that_of_the_plan() -> None:
    overrides = ["setting=paper_gtpo_7b", "hardware=gpu"]
    config = compose_config(overrides)
    prepare(config, overrides)
    cost = cost_of(config, "h100", None)
    assert (cost.devices, cost.steps) == (64, 210)
    assert cost.hours is not None
    assert str(cost) == f"64 GPUs, 210 steps, {cost.hours:,.1f} h"


SEVEN_B, THIRTY_TWO_B = (("setting=" + name, "hardware=gpu") for name in ("paper_gtpo_7b", "paper_gtpo_32b"))


@pytest.mark.slow
@pytest.mark.parametrize("name", choices("sweep"))
def test_the_first_and_the_last_run_of_a_shipped_sweep_compose(name: str, tmp_path: Path) -> None:
    sweep = define([f"sweep={name}", "seed=3", *SEVEN_B], tmp_path)
    assert sweep.baseline is not None
    names = list(sweep.runs)
    few = replace(sweep, runs={name: sweep.runs[name] for name in (names[0], names[-1])})
    configs = compose_runs(few)
    assert idle_axes(few, configs) == []
    assert {config.seed for config in configs.values()} == {3}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", [CPU, SEVEN_B, THIRTY_TWO_B], ids=lambda setting: setting[0])
@pytest.mark.parametrize("name", choices("sweep"))
def test_every_run_of_a_shipped_sweep_composes(name: str, setting: tuple[str, ...], tmp_path: Path) -> None:
    sweep = define([f"sweep={name}", "seed=3", *setting], tmp_path)
    configs = compose_runs(sweep)
    assert len(configs) == len(sweep.runs) > 1
    assert idle_axes(sweep, configs) == []
