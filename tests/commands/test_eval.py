"""``gtpo-verl eval`` up to the point where Ray would start: what MODEL means, the settings, what is refused, the
printed table.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_files import write_model
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.cli import main
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.records import ProblemRecord, changes_since, open_evaluation
from gtpo_verl.evaluation.render import print_changes, print_summary
from gtpo_verl.evaluation.settings import settings_of
from gtpo_verl.evaluation.subject import configuration, find_subject
from gtpo_verl.evaluation.summary import summarize
from gtpo_verl.report.pass_at_k import pass_at_k_png
from gtpo_verl.runs.directory import changed, differences
from gtpo_verl.tasks import Task, prepare, task


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Looks like a model in Hugging Face format, as far as this needs it."""
    return write_model(tmp_path / "model")


@pytest.fixture
def val_file(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"data_source": "sums", "prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "val.parquet")
    return tmp_path / "val.parquet"


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return compose_config(["setting=quickstart", "hardware=cpu"])


@pytest.fixture
def run_dir(tmp_path: Path, composed: DictConfig, model: Path, val_file: Path) -> Path:
    """What a training of one step leaves, without the training."""
    run = tmp_path / "run"
    weights = run / "checkpoints" / "global_step_1" / "actor" / "huggingface"
    weights.mkdir(parents=True)
    for file in model.iterdir():
        (weights / file.name).write_bytes(file.read_bytes())
    (run / "model").symlink_to(weights)
    (run / "run.json").write_text("{}")
    config = composed.copy()
    config.actor_rollout_ref.model.path, config.trainer.run_dir = str(model), str(run)
    config.data.train_files = config.data.val_files = str(val_file)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    return run


# -------------------------------------------------------------------- MODEL


def test_a_run_is_its_trained_model_with_its_own_settings(run_dir: Path) -> None:
    subject = find_subject(str(run_dir))
    assert subject.output == run_dir / "evaluation" / "global_step_1"
    config = configuration(subject, ["actor_rollout_ref.rollout.val_kwargs.n=32", "+data.extra=1"])
    assert config.actor_rollout_ref.model.path == str((run_dir / "model").resolve())
    assert config.data.max_response_length == 32  # setting=quickstart, from the run
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 32
    assert config.data.extra == 1


def test_weights_of_an_earlier_checkpoint_are_not_taken_for_the_runs(run_dir: Path) -> None:
    """Exported, then trained further without weights in Hugging Face format."""
    (run_dir / "checkpoints" / "global_step_2").mkdir()
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(
        UserError, match=r"global_step_2 has no weights .* `gtpo-verl export .*global_step_2`, then rep"
    ):
        find_subject(str(run_dir))
    shutil.copytree(run_dir / "model", run_dir / "checkpoints" / "global_step_2" / "actor" / "huggingface")
    assert find_subject(str(run_dir)).output.name == "global_step_2"
    assert find_subject(str(run_dir / "checkpoints" / "global_step_1")).output.name == "global_step_1"
    (run_dir / "checkpoints").rename(run_dir.parent / "big-disk")
    (run_dir / "checkpoints").symlink_to(run_dir.parent / "big-disk")
    elsewhere = find_subject(str(run_dir))
    assert elsewhere.output == run_dir / "evaluation" / "global_step_2"
    assert elsewhere.config_file == run_dir / "config.yaml"


def test_before_is_the_model_the_run_started_from(run_dir: Path, model: Path) -> None:
    subject = find_subject(str(run_dir), before=True)
    assert (subject.path, subject.output) == (str(model), run_dir / "evaluation" / "before")


def test_a_checkpoint_belongs_to_its_run(run_dir: Path) -> None:
    subject = find_subject(str(run_dir / "checkpoints" / "global_step_1"))
    assert subject == find_subject(str(run_dir))


def test_megatrons_weights_are_a_level_deeper(run_dir: Path) -> None:
    actor = run_dir / "checkpoints" / "global_step_1" / "actor"
    (actor / "model").mkdir()
    (actor / "huggingface").rename(actor / "model" / "huggingface")
    subject = find_subject(str(run_dir / "checkpoints" / "global_step_1"))
    assert subject.path == str(actor / "model" / "huggingface")
    assert subject.output == run_dir / "evaluation" / "global_step_1"


@pytest.mark.parametrize(
    ("backend", "how"),
    [("fsdp", r"gtpo-verl export .* then repeat this command"), ("megatron", r"model_merger merge --backend megatron")],
)
def test_a_checkpoint_without_weights_says_how_to_merge_them(run_dir: Path, backend: str, how: str) -> None:
    (run_dir / "model" / "model.safetensors").unlink()
    checkpoint = run_dir / "checkpoints" / "global_step_1"
    if backend == "megatron":
        (checkpoint / "actor" / "model" / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(UserError, match=how):
        find_subject(str(checkpoint))


def test_a_model_directory_takes_settings_like_train(model: Path, val_file: Path) -> None:
    subject = find_subject(str(model))
    assert (subject.config_file, subject.output) == (None, Path("outputs/eval-model"))
    config = configuration(subject, ["setting=quickstart", "hardware=cpu", f"data.val_files={val_file}"])
    assert config.actor_rollout_ref.model.path == str(model)
    assert config.data.max_response_length == 32


@pytest.mark.slow
def test_an_embedded_task_has_its_own_prompts(model: Path, val_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is not made here, which takes minutes."""
    asked = []
    monkeypatch.setattr(prepare, "prepare_task", lambda *task: asked.append(task) or Task(task[1].absolute()))
    subject, own = find_subject(str(model)), f"data.val_files={val_file}"
    for name in ("sums", "countdown"):
        config = configuration(subject, ["setting=quickstart", "hardware=cpu", f"task={name}"])
        prepare.use_embedded_prompts(config)
        assert config.data.val_files == str(Path(f"outputs/task-{name}/val.parquet").absolute())
    assert asked == [(task(name), Path(f"outputs/task-{name}")) for name in ("sums", "countdown")]
    for overrides in (["setting=quickstart", own], ["setting=small_gpu", own]):
        config = configuration(subject, ["hardware=cpu", *overrides])
        prepare.use_embedded_prompts(config)
        assert config.data.val_files == str(val_file)
    assert len(asked) == 2


def test_a_path_may_have_any_letter(model: Path, tmp_path: Path) -> None:
    moved = shutil.move(model, tmp_path / "modèle, a=b (1)")
    config = configuration(find_subject(str(moved)), ["hardware=cpu"])
    assert config.actor_rollout_ref.model.path == str(moved)


def test_a_run_without_a_model_a_quickstart_and_before_without_a_run(run_dir: Path, model: Path) -> None:
    (run_dir / "model").unlink()
    with pytest.raises(UserError, match="no trained model in Hugging Face format: `gtpo-verl export"):
        find_subject(str(run_dir))
    (run_dir / "config.yaml").unlink()
    with pytest.raises(UserError, match="holds several runs"):
        find_subject(str(run_dir))
    with pytest.raises(UserError, match="--before"):
        find_subject(str(model), before=True)


def test_an_override_may_add_a_key_as_hydra_does(run_dir: Path) -> None:
    subject = find_subject(str(run_dir))
    for word in ("+", "++"):
        config = configuration(subject, [f"{word}ray_kwargs.ray_init.address=local"])
        assert config.ray_kwargs.ray_init.address == "local"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware=gpu", "hardware=: the settings are those of the run"),
        ("data.max_respons_length=3", "the run has no such key"),
        ("~data.seed", "takes KEY=VALUE"),
        ("data.seed=1,2", "takes KEY=VALUE"),
        ("data.seed", "does not parse"),
    ],
)
def test_overrides_of_a_run_that_do_not_fit(run_dir: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        configuration(find_subject(str(run_dir)), [override])


@pytest.mark.parametrize("key", ["seed", "transfer_queue"])
def test_a_configuration_that_lacks_a_key_is_one_line(run_dir: Path, key: str) -> None:
    file = run_dir / "config.yaml"
    file.write_text(OmegaConf.to_yaml({name: value for name, value in OmegaConf.load(file).items() if name != key}))
    with pytest.raises(UserError, match=rf"config\.yaml is damaged, or another version's: .*{key}"):
        configuration(find_subject(str(run_dir)), [])


# -------------------------------------------------------------------- settings


def test_settings_that_change_answers_are_told_from_those_that_change_speed(run_dir: Path) -> None:
    def settings(*overrides: str) -> dict:
        return settings_of(configuration(find_subject(str(run_dir)), overrides))

    before = settings()
    assert differences(before, settings()) == ""
    rollout = "actor_rollout_ref.rollout"
    faster = (f"{rollout}.max_num_seqs=7", "trainer.n_gpus_per_node=4", f"{rollout}.gpu_memory_utilization=0.3")
    assert differences(before, settings(*faster, f"{rollout}.agent.num_workers=5")) == ""
    other = settings(f"{rollout}.val_kwargs.top_p=0.7", "data.max_response_length=16")
    assert differences(before, other) == (
        f"{rollout}.val_kwargs.top_p was 1.0, is 0.7; data.max_response_length was 32, is 16"
    )
    assert changed(before, settings("algorithm.correct_threshold=0.5")).keys() == {"algorithm.correct_threshold"}
    assert differences(before, settings("reward.custom_reward_function.name=random_verdict"))


def test_other_weights_and_other_data_are_other_settings(run_dir: Path, val_file: Path) -> None:
    def settings() -> dict:
        return settings_of(configuration(find_subject(str(run_dir)), []))

    before = settings()
    (run_dir / "model" / "model.safetensors").write_bytes(b"Weights")
    assert changed(before, settings()).keys() == {"model"}
    before = settings()
    val_file.write_bytes(val_file.read_bytes() + b" ")
    assert changed(before, settings()).keys() == {"data.val_files"}


@pytest.mark.slow
def test_what_is_missing_is_said_before_anything_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["hardware=cpu", "--output", str(tmp_path / "out")]
    assert main(["eval", str(model), *common]) == 2
    assert "no data: set data.val_files" in capsys.readouterr().err
    assert main(["eval", str(model), "data.val_files=missing.parquet", *common]) == 2
    assert "missing.parquet: no such file" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nothing"), *common]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------- what is shown


def test_the_table_and_the_figure(record: Callable[..., ProblemRecord], capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(row, [float(row % 3 == 0), 0.0, 1.0, 0.0], failed=row == 5) for row in range(12)]
    summaries = summarize(sample for each in records for sample in each.samples(limit=30, threshold=1.0))
    print_summary(summaries)
    printed = capsys.readouterr().out
    assert "sums: 12 problems, 4 samples each" in printed
    assert all(name in printed for name in ("mean@4", "pass@2", "pass@4", "maj@2", "response length", "truncated"))
    assert "failed samples, counted as wrong" in printed
    assert pass_at_k_png(summaries).startswith(b"\x89PNG")


def test_the_summary_is_json(record: Callable[..., ProblemRecord]) -> None:
    from dataclasses import asdict

    (summary,) = summarize(record(0, [1.0, 0.0]).samples(limit=30, threshold=1.0))
    facts = json.loads(json.dumps(asdict(summary)))
    assert facts["pass_at"]["2"] == {"value": 1.0, "low": None, "high": None}


def test_the_change_since_before_needs_the_same_settings(
    record: Callable[..., ProblemRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: dict[str, Any] = {"limit": 30, "threshold": 1.0}
    settings = {"model": "new", "n": 2, "stops": ("a", "b")}
    samples = [sample for row in range(4) for sample in record(row, [1.0, float(row % 2)]).samples(**limits)]
    assert changes_since(tmp_path / "before", settings, samples, **limits) == {}
    before = open_evaluation(tmp_path / "before", {"settings": settings | {"model": "old"}}, fresh=False)
    for row in range(4):
        before.add(record(row, [0.0, 1.0]))
    changes = changes_since(tmp_path / "before", settings, samples, **limits)
    assert changes["sums"].value == pytest.approx(0.25)
    print_changes(changes)
    assert capsys.readouterr().out.startswith("sums: +25.0 points since before the training, 95 % interval ")
    assert changes_since(tmp_path / "before", settings | {"n": 3}, samples, **limits) == {}
    more = [*samples, *record(4, [1.0]).samples(**limits)]
    assert changes_since(tmp_path / "before", settings, more, **limits) == {}
    assert "before lacks 1 of these problems" in capsys.readouterr().out


def test_an_evaluation_keeps_what_its_earlier_problems_were_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("0.1", "0.1", "0.2"):
        file = open_evaluation(
            tmp_path, {"settings": {}, "versions": {"vllm": version}, "created": version}, fresh=False
        )
        file.file.touch()
    recorded = json.loads((tmp_path / "evaluation.json").read_text())
    assert [each["versions"]["vllm"] for each in (*recorded["earlier"], recorded)] == ["0.1", "0.1", "0.2"]
    assert capsys.readouterr().out.count("goes on with other versions (vllm was 0.1, is 0.2)") == 1


def test_a_model_that_cannot_be_loaded_is_refused_before_the_task_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An embedded task's prompts come with a warm start of its model, which takes minutes."""
    monkeypatch.setattr(prepare, "prepare_task", lambda *_: pytest.fail("the task was prepared"))
    broken = write_model(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    chosen = ["setting=quickstart", "hardware=cpu"]
    assert main(["eval", str(broken), *chosen]) == 2
    assert "config.json is not readable" in capsys.readouterr().err
    model = write_model(tmp_path / "model")
    assert main(["eval", str(model), *chosen, "actor_rollout_ref.rollout.val_kwargs.n=0"]) == 2
    assert "val_kwargs.n=0: it must be from 1 to 65,536" in capsys.readouterr().err
    assert main(["eval", str(model), *chosen, "--output", str(model / "config.json" / "below")]) == 2
    assert "is a file, not a directory" in capsys.readouterr().err
    (model / "tokenizer.json").write_text("{}")
    assert main(["eval", str(model), *chosen]) == 2
    assert "transformers cannot read the tokenizer" in capsys.readouterr().err
