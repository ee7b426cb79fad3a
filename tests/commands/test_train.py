"""`gtpo-verl train` as a Hydra application: what it prints, and completion of the shell."""

import argparse
from pathlib import Path

import pytest
from checkpoint_writer import write_fsdp
from omegaconf import DictConfig

from gtpo_verl.cli import main
from gtpo_verl.commands.train import launch
from gtpo_verl.config import compose_config, prepare
from gtpo_verl.integrations import launch as launching
from gtpo_verl.runs.directory import record_metrics
from gtpo_verl.runs.reader import read_metrics


@pytest.mark.slow
def test_the_configuration_is_printed_as_hydra_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "algo=gtpo", "-p", "algorithm.gtpo", "hardware=cpu"]) == 0
    assert "alpha2: 0.1" in capsys.readouterr().out
    package = ["-p", "trainer.validation_data_dir"]
    assert main(["train", "hardware=cpu", "trainer.run_dir=/x", "--cfg", "job", "--resolve", *package]) == 0
    assert capsys.readouterr().out == "/x/validation\n"
    assert main(["train", "--resolve"]) == 2
    assert "--resolve goes with --cfg" in capsys.readouterr().err
    assert main(["train", "-p", "algorithm"]) == 2
    assert "--package goes with --cfg" in capsys.readouterr().err


def test_info_shows_the_search_path(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config-dir", str(tmp_path), "--info", "searchpath"]) == 0
    printed = capfd.readouterr().out
    order = [printed.index(name) for name in ("pkg://gtpo_verl.configs", "verl/trainer/config", str(tmp_path))]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gtpo-verl sw", "sweep"),
        ("gtpo-verl train algo=grpo_", "algo=grpo_s"),
        ("gtpo-verl sweep algo=gtpo,dapo --local sweep=al", "sweep=alpha"),
        ("gtpo-verl sweep --parallel 2 algo=gtpo,dapo algorithm.gtpo.alp", "algorithm.gtpo.alpha2="),
    ],
)
def test_the_shell_completes_commands_groups_and_keys(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert expected in capsys.readouterr().out.split()


def test_completion_installs_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/gtpo-verl"])
    monkeypatch.delenv("COMP_LINE", raising=False)
    assert main(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("gtpo-verl")


def test_multirun_is_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--multirun", "algo=gtpo"]) == 2
    assert "a sweep needs an axis" in capsys.readouterr().err


def test_a_resumed_run_says_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["setting=quickstart", "hardware=cpu", f"trainer.run_dir={tmp_path}"]
    config = compose_config(overrides)
    prepare(config, overrides)
    for step in ("export_environment", "validate", "run_job"):
        monkeypatch.setattr(launching, step, lambda *_, **__: None)
    args = argparse.Namespace(overrides=overrides, wait=False, verbose=False)
    assert launch(config, args) == 0
    assert "Resuming" not in capsys.readouterr().out
    write_fsdp(tmp_path / "checkpoints", 6)
    for step in (6, 7, 8):
        record_metrics(tmp_path, step, {"a": 1})
    assert launch(config, args) == 0
    printed = capsys.readouterr().out
    assert "Resuming from global_step_6 of 24 steps.\n" in printed
    assert "what was logged of steps 7 to 8 is in *.replaced.jsonl now.\n" in printed
    assert list(read_metrics(tmp_path / "metrics.jsonl")[0]) == [6]


def test_what_is_recorded_repeats_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    def record(config: DictConfig, args: argparse.Namespace) -> int:
        recorded.extend(args.overrides)
        return 0

    monkeypatch.setattr("gtpo_verl.rules.stages.check", lambda config, given: None)
    monkeypatch.setattr("gtpo_verl.commands.train.launch", record)
    assert main(["train", "algo=gtpo", "--config-dir", str(tmp_path), "--allow-changes", "seed"]) == 0
    assert recorded == [f'hydra.searchpath=["file://{tmp_path}"]', "algo=gtpo", "trainer.allow_changes=[seed]"]
