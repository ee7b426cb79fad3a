"""A job's training after a failure: when it is tried again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gtpo_verl import job
from gtpo_verl.experiments.handover import HandOver
from gtpo_verl.files import append_json_line
from gtpo_verl.runs.directory import METRICS_FILE, record_phase

Attempt = tuple[int, int | None]  # exit code, and the step that was logged; None: refused before it began


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[list[str]]]]:
    def run(attempts: list[Attempt], retries: int) -> tuple[int, list[list[str]]]:
        """Exit code, and the commands that were run, where each attempt does what is said."""
        left, commands = list(attempts), []

        def main(command: list[str]) -> int:
            commands.append(command)
            code, step = left.pop(0)
            if step is not None:
                record_phase(tmp_path, step, f"generating, attempt {len(commands)}")
                append_json_line(tmp_path / METRICS_FILE, {"step": step, "data": {}})
            return code

        monkeypatch.setattr(job, "main", main)
        return job.train(HandOver(action="train", run_dir=str(tmp_path), overrides=("a=1",), retries=retries)), commands

    return run


@pytest.mark.parametrize(
    ("attempts", "retries", "code", "made"),
    [
        ([(2, 1)], 0, 2, 1),  # not asked for
        ([(2, None)], 3, 2, 1),  # refused before it began: it would be again
        ([(0, 1)], 3, 0, 1),  # finished, or stopped with a checkpoint
        ([(130, 1)], 3, 130, 1),  # interrupted at once
        ([(2, 1), (0, 3)], 1, 0, 2),
        ([(2, 1), (2, 1), (2, 1)], 1, 2, 3),  # the first brought step 1, the others nothing
        ([(2, 1), (2, 1), (2, 2), (2, 2), (0, 9)], 1, 0, 5),  # a new step: the count begins again
        ([(2, 0), (2, 0), (2, 0), (0, 1)], 2, 2, 3),
    ],
)
def test_attempts_without_a_new_step_are_counted(
    trained: Callable[..., tuple[int, list[list[str]]]], attempts: list[Attempt], retries: int, code: int, made: int
) -> None:
    ended, commands = trained(attempts, retries)
    assert (ended, len(commands)) == (code, made)
    assert commands[0] == ["train", "a=1"]
    assert all(command == ["train", "--wait", "a=1"] for command in commands[1:])


def test_the_log_says_so(
    trained: Callable[..., tuple[int, list[list[str]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    trained([(2, 4), (2, 4), (2, 4)], 1)
    assert capsys.readouterr().out.splitlines() == [
        "Trying again after step 4: 0 of 1 retries without a new step.",
        "Trying again after step 4: 1 of 1 retries without a new step.",
        "Not tried again: 2 attempts in a row have brought no step after 4.",
    ]
