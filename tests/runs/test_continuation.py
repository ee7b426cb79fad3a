"""A run directory is not trained on as another training without being asked."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_writer import write_fsdp

from gtpo_verl.commands.train import launch
from gtpo_verl.config import compose_config, prepare
from gtpo_verl.errors import UserError
from gtpo_verl.integrations import launch as launching
from gtpo_verl.problems import errors_of, evaluate
from gtpo_verl.rules.start import checkpoint
from gtpo_verl.runs.continuation import changes, decides
from gtpo_verl.runs.directory import read_record, record_metrics
from gtpo_verl.runs.reader import read_run

Train = Callable[..., None]
BASE = ("algo=dapo", "setting=quickstart", "hardware=cpu", "seed=0", "trainer.total_training_steps=12")


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., list[str]]:
    """What `gtpo-verl train` and its --check say against a command, before anything starts."""

    def ask(*overrides: str) -> list[str]:
        given = [*BASE, *overrides, f"trainer.run_dir={tmp_path}"]
        config = compose_config(given)
        prepare(config, given)
        return errors_of(evaluate([checkpoint], config))

    return ask


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train steps that are logged and saved, and nothing else."""
    for step in ("export_environment", "validate"):
        monkeypatch.setattr(launching, step, lambda *_, **__: None)

    def run(*overrides: str, step: int) -> None:
        given = [*BASE, *overrides, f"trainer.run_dir={tmp_path}"]
        config = compose_config(given)
        prepare(config, given)

        def trained(*_: object, **__: object) -> None:
            record_metrics(tmp_path, step, {"val/sums/mean@1": 0.5})
            write_fsdp(tmp_path / "checkpoints", step)

        monkeypatch.setattr(launching, "run_job", trained)
        assert launch(config, argparse.Namespace(overrides=given, wait=False, verbose=False)) == 0

    return run


def test_the_same_command_goes_on_and_another_training_is_refused_with_the_difference(
    train: Train, refused: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert refused("seed=1") == [], "nothing was trained yet"
    train(step=3)
    assert refused() == []
    (message,) = refused("seed=1")
    assert message.startswith(f"trainer.run_dir={tmp_path}: it was trained with other settings (seed was 0, is 1), and")
    assert "add --allow-changes seed, which" in message, "keys that follow from it are not named"
    for override, named in {
        "algo=gtpo": "(algorithm.adv_estimator was ",
        "data.train_batch_size=48": "data.train_batch_size was 24, is 48",
        "actor_rollout_ref.rollout.n=4": "actor_rollout_ref.rollout.n was 8, is 4",
        "actor_rollout_ref.model.path=other": "actor_rollout_ref.model.path was None, is other",
        "data.train_files=other.parquet": "data.train_files was None, is",
    }.items():
        (message,) = refused(override)
        assert named in message
        assert "\n" not in message
    assert refused("algo=gtpo", "trainer.allow_changes=[algorithm,actor_rollout_ref]") == []
    for allowed in ("[]", "[actor_rollout_ref]"):  # it would be accepted, and change nothing
        (message,) = refused("actor_rollout_ref.actor.optim.lr=1e-5", f"trainer.allow_changes={allowed}")
        assert "actor_rollout_ref.actor.optim.lr was 0.0003, is 1e-05: verl restores optimizer" in message


LAYOUT = ("trainer.n_gpus_per_node=2", "trainer.nnodes=2")
FREE = (
    *("trainer.total_training_steps=48", "trainer.save_freq=1", "trainer.test_freq=1", "trainer.logger=[console]"),
    *("trainer.experiment_name=other", "guards.stall_timeout=60", "guards.bounds.entropy_low=null"),
    *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=12", "ray_kwargs.ray_init.num_cpus=8"),
    *("trainer.max_actor_ckpt_to_keep=5", "trainer.val_before_train=false"),
)


def test_what_decides_nothing_is_free(train: Train, refused: Callable[..., list[str]]) -> None:
    train(step=3)
    assert refused(*FREE) == []
    for one in LAYOUT:
        assert all("ranks" in message for message in refused(one))


def test_fewer_steps_than_are_saved_leave_nothing_to_do(train: Train, refused: Callable[..., list[str]]) -> None:
    train(step=3)
    (message,) = refused("trainer.total_training_steps=2")
    assert message.startswith("trainer.total_training_steps=2: there is nothing to do, ")
    assert refused("trainer.total_training_steps=3") == [], "it may have been killed at its end"


def test_the_content_of_data_decides_and_not_its_place(
    train: Train, refused: Callable[..., list[str]], tmp_path: Path
) -> None:
    for name, text in {"a": "1", "same": "1", "other": "2"}.items():
        (tmp_path / f"{name}.parquet").write_text(text)
    train(f"data.train_files={tmp_path}/a.parquet", step=3)
    assert refused(f"data.train_files={tmp_path}/same.parquet") == []
    assert "data.train_files was" in refused(f"data.train_files={tmp_path}/other.parquet")[0]
    (tmp_path / "a.parquet").write_text("22")
    assert "a.parquet with other content" in refused(f"data.train_files={tmp_path}/a.parquet")[0]


def test_the_record_keeps_the_difference_of_each_attempt_and_a_report_says_so(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(step=3)
    train("trainer.save_freq=2", step=5)
    assert read_run(tmp_path).trainings[0].notes == ()
    train("trainer.save_freq=2", "seed=1", "trainer.allow_changes=[seed]", step=7)
    record = read_record(tmp_path)
    assert record is not None
    assert [(one.get("from_step"), one.get("changes")) for one in record["attempts"]] == [
        (None, None),
        (3, {"trainer.save_freq": [6, 2]}),
        (5, {"seed": [0, 1]}),
    ]
    assert "note: this run goes on with other settings: seed was 0, is 1" in capsys.readouterr().out
    (note,) = read_run(tmp_path).trainings[0].notes
    assert note == "from step 6 on it was trained with other settings: seed was 0, is 1"


def test_a_damaged_configuration_is_named(train: Train, tmp_path: Path) -> None:
    train(step=3)
    (tmp_path / "config.yaml").write_text("a: [")
    config = compose_config(BASE)
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        changes(tmp_path, config)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("seed", True),
        ("algorithm.gtpo.alpha2", True),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", True),
        ("actor_rollout_ref.rollout.temperature", True),
        ("data.max_response_length", True),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", False),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", False),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.attention_dropout", True),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method", False),
        ("actor_rollout_ref.actor.checkpoint.load_contents", True),
        ("actor_rollout_ref.actor.checkpoint.save_contents", False),
        ("trainer.run_dir", False),
    ],
)
def test_which_keys_decide(key: str, expected: bool) -> None:
    assert decides(key) is expected
