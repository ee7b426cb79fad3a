"""One grammar for all commands: an option has one meaning."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from gtpo_verl import cli
from gtpo_verl.cli import as_now, main
from gtpo_verl.commands.options import declare, overrides_of
from gtpo_verl.runs.directory import record_metrics, write_record
from gtpo_verl.runs.sweep import Sweep, write


def declared(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    cli._module(command).add_arguments(parser)
    return parser


def options(command: str) -> dict[str, argparse.Action]:
    return {name: action for action in declared(command)._actions for name in action.option_strings}


def test_every_command_is_in_one_group_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    modules = {file.stem.replace("_", "-") for file in (Path(cli.__file__).parent / "commands").glob("[!_]*.py")}
    assert set(cli.COMMANDS) == modules - {"options"}
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(sum(line.startswith(f"  {name} ") for line in lines) == 1 for name in cli.COMMANDS)


@pytest.mark.parametrize("option", ["--output", "--check", "--json", "--config-dir", "--address", "--wait"])
def test_an_option_takes_the_same_in_every_command(option: str) -> None:
    having = {name: options(name)[option] for name in cli.COMMANDS if option in options(name)}
    shown = {name: action for name, action in having.items() if action.help != argparse.SUPPRESS}
    assert len({(action.nargs, action.metavar, action.type) for action in shown.values()}) == 1


def test_no_help_lists_the_names_of_all_methods() -> None:
    for name in cli.COMMANDS:
        assert "dcpo_clip" not in declared(name).format_help()


def test_methods_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert "grpo_s                  GRPO-S: sequence advantages from" in printed
    assert "\nhardware=\n  cpu gpu\n" in printed


def test_an_option_for_overrides_is_one(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    declare(parser, "overrides", "--config-dir", "--allow-changes")
    args = parser.parse_args(["algo=gtpo", "--config-dir", str(tmp_path), "--allow-changes", "seed,data"])
    assert overrides_of(args) == [
        f'hydra.searchpath=["file://{tmp_path}"]',
        "algo=gtpo",
        "trainer.allow_changes=[seed,data]",
    ]
    assert overrides_of(parser.parse_args(["algo=gtpo"])) == ["algo=gtpo"]


# -------------------------------------------------------------------- status X, stop X

HOLDER = """
import pathlib, sys, time
from gtpo_verl.runs.session import training_session
directory = pathlib.Path(sys.argv[1])
with training_session(directory, config="trainer: {total_training_steps: 9}", command="gtpo-verl train"):
    while not (directory / "STOP").exists():
        time.sleep(0.05)
"""


def test_a_run_that_trains_is_shown_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)])
    wait_until((tmp_path / "run.json").exists)
    assert main(["status", str(tmp_path)]) == 0
    assert "running" in capsys.readouterr().out
    assert main(["stop", str(tmp_path)]) == 0
    assert "it finishes its step and saves a checkpoint" in capsys.readouterr().out
    assert process.wait(timeout=60) == 0
    assert main(["stop", str(tmp_path)]) == 2
    assert "no training runs in" in capsys.readouterr().err


def test_a_sweep_is_shown_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Sweep("s", tmp_path, {"seed": ("1",)}, (), {"seed=1": ("seed=1",)}))
    record_metrics(tmp_path / "seed=1", 3, {"timing_s/step": 1.0})
    write_record(tmp_path / "seed=1", {"status": "complete", "attempts": []})
    assert main(["status", str(tmp_path)]) == 0
    assert "seed=1" in capsys.readouterr().out
    assert main(["stop", str(tmp_path)]) == 0
    assert "1 finished" in capsys.readouterr().out


def test_files_may_stand_behind_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    words = ["prepare-data", "parquet", "--style", "boxed", "--output", str(tmp_path), str(tmp_path / "a.jsonl")]
    assert main(words) == 0
    assert (tmp_path / "a.parquet").is_file()
    with pytest.raises(SystemExit):
        main([*words, "--unknown"])
    assert "unknown argument: " in capsys.readouterr().err
    assert main(["report", "no-run", "--output", str(tmp_path), "no-other"]) == 2


@pytest.mark.parametrize("command", ["status", "stop"])
def test_any_other_name_is_a_job(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "my-job", "--address", "http://127.0.0.1:1"]) == 2
    assert "my-job is no directory here, and as a job: no Ray cluster answers at http" in capsys.readouterr().err


def test_what_neither_is_cannot_be_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", str(tmp_path)]) == 2
    assert "is not the directory of a training or of a sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("sweep --dir=x --dry-run seed=1,2", "sweep --output=x --check seed=1,2"),
        ("sweep status x", "status x"),
        ("submit --stop job --address y", "stop job --address y"),
        ("report --dry-run status", "report --dry-run status"),
        ("sweep --output status seed=1,2", "sweep --output status seed=1,2"),
    ],
)
def test_spellings_of_the_last_release_are_understood(
    before: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_now(before.split()) == now.split()
    assert capsys.readouterr().err.count("note: ") == (before != now) + ("--dir" in before)
