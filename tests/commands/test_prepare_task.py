"""``gtpo-verl prepare-data TASK``: an embedded task, and overrides that train on it."""

import shlex
from pathlib import Path

import pytest

from gtpo_verl.cli import main
from gtpo_verl.commands import prepare_data
from gtpo_verl.config import compose_config, prepare
from gtpo_verl.problems import errors_of
from gtpo_verl.rules import stages
from gtpo_verl.tasks import EmbeddedTask, Task


def printed(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints, where the task is made already."""
    made: list[str] = []

    def prepare_task(task: EmbeddedTask, directory: Path) -> Task:
        made.append(task.name)
        return Task(directory)

    monkeypatch.setattr(prepare_data, "prepare_task", prepare_task)
    assert main(["prepare-data", name, "--output", str(directory)]) == 0
    assert made == [name]
    return capsys.readouterr().out


LAYOUTS = ((1, 4), (2, 1), (16, 8), (2, 8), (8, 8))  # nodes, and GPUs of each


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("sums", LAYOUTS[:3]),
        pytest.param("sums", LAYOUTS[3:], marks=pytest.mark.exhaustive),
        pytest.param("countdown", LAYOUTS, marks=pytest.mark.exhaustive),
    ],
)
def test_the_printed_overrides_are_those_of_the_task(
    name: str,
    layouts: tuple[tuple[int, int], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(tmp_path / "a, b", name, monkeypatch, capsys).splitlines()
    overrides = shlex.split(lines[1])
    config = compose_config(overrides)
    assert config.reward.custom_reward_function.path == f"pkg://gtpo_verl.tasks.{name}.reward"
    assert config.actor_rollout_ref.model.path == str(tmp_path / "a, b" / "model")
    assert config.data.val_files == str(tmp_path / "a, b" / "val.parquet")
    more = shlex.split(lines[3])
    for nodes, gpus in layouts:
        devices = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}"]
        for backend in ("fsdp", "megatron"):
            chosen = [*overrides, *more, *devices, f"backend={backend}"]
            config = compose_config(chosen)
            prepare(config, chosen)
            assert errors_of(stages.problems(config)) == []


def test_options_of_data_sets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare-data", "sums", "--style", "boxed"]) == 2
    assert "--style is for data sets" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["prepare-data", "sums", "--output", str(tmp_path / "file" / "task")]) == 2
    assert "is a file, not a directory" in capsys.readouterr().err
