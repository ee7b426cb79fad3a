"""``gtpo-verl plan`` as a person and as a program call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_verl.cli import main


@pytest.mark.slow
def test_the_paper_run_as_a_new_user_plans_it(tmp_path: Path) -> None:
    """From an empty folder, in a process of its own: exact parameters, the step, and nothing that torch or verl
    print."""
    command = [sys.executable, "-m", "gtpo_verl.cli", "plan", "setting=paper_gtpo_32b", "backend=megatron", "algo=gtpo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "32,763,876,352 parameters",
        "Megatron: 8 data × 8 tensor",
        "128 prompts × 16",
        "840 in 210 steps",
        "KV cache",
    ):
        assert text in done.stdout
    assert list(tmp_path.iterdir()) == [], "a plan leaves nothing behind"


def test_json_is_all_that_is_printed_and_holds_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "setting=paper_dapo_32b", "--json", "--yield", "0.25", "--response-length", "3000"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["parameters"] == 32_763_876_352
    assert plan["step"]["updates"] == 16
    assert plan["step"]["generated_prompts"] == 2048
    assert plan["step"]["generated_tokens"] == 2048 * 16 * 3000
    assert plan["assumptions"]["response_length"] == {"value": 3000.0, "unit": "tokens, mean", "origin": "given"}
    assert sum(plan["memory"]["phases_gib"]["update"].values()) == pytest.approx(plan["memory"]["totals_gib"]["update"])


def test_a_run_that_would_stop_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "setting=small_gpu",
                "actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-1.5B",
                "data.max_response_length=3073",
            ]
        )
        == 1
    )
    assert "exceeds the 4096 positions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor_rollout_ref.rollout.max_model_len=6000",
            "error: actor_rollout_ref.rollout.max_model_len=6000 is shorter",
        ),
        ("algorithm.rollout_correction.bypass_mode=true", "error: algorithm.rollout_correction.bypass_mode=true skips"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "averages over sequences"),
    ],
)
def test_what_a_training_would_refuse_is_in_its_plan(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "setting=paper_gtpo_7b", "algo=grpo_s", override]) == 1
    assert message in capsys.readouterr().out


def test_what_a_training_would_remark_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "setting=paper_gtpo_7b", "algorithm.filter_groups.carry_over.max_age=1", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [finding for finding in findings if "algorithm.filter_groups.carry_over" in finding["message"]]
    assert found["level"] == "note"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["setting=paper_gtpo_9b"], "did you mean paper_gtpo_7b?"),
        (["setting=small_gpu", "trainer.n_gpus_per_node=7"], "does not divide over 7 data-parallel ranks"),
        (["setting=small_gpu", "--assume", "yield=high"], "write NAME=NUMBER"),
        ([], "no model"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_cpu_has_arithmetic_and_the_memory_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "setting=small_gpu", "hardware=cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["memory"], plan["time_s"]) == (None, None)
    assert {arm["pass_seconds"] for arm in plan["arms"]} == {None}, "a GPU's seconds"
    assert plan["host_memory_gib"]["trainer"]["optimizer"] == pytest.approx(2 * 4 * plan["model"]["parameters"] / 2**30)
    assert plan["step"]["updates"] == 4
