"""A training submitted to a Ray cluster by the command, from a directory of the user's, stopped by it, and tried again
after its engine was killed.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_head import Head, ray_head
from waiting import wait_until

from gtpo_verl.cli import main
from gtpo_verl.experiments.jobs import Jobs
from gtpo_verl.files import read_json
from gtpo_verl.runs.directory import PHASE_FILE, read_record
from gtpo_verl.tasks import Task

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head({}, "--num-gpus=1") as found:
        yield found


def test_a_submitted_training_stops_with_a_checkpoint_and_goes_on(
    head: Head, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", head.token)
    user, run_dir = tmp_path / "user", tmp_path / "run"
    user.mkdir()
    (user / "mine.py").write_text("from gtpo_verl.tasks.sums.reward import compute_score\n")
    monkeypatch.chdir(user)
    words = [
        *("setting=quickstart", "hardware=cpu", f"actor_rollout_ref.model.path={task.model_path}"),
        *(f"data.train_files={task.train_file}", f"data.val_files={task.val_file}", f"trainer.run_dir={run_dir}"),
        *("reward.custom_reward_function.path=mine.py", "trainer.val_before_train=False", "trainer.test_freq=-1"),
    ]
    submit = ["submit", "--address", head.address]
    assert main([*submit, "--detach", "--id", "first", "--", *words, "trainer.total_training_steps=100000"]) == 0
    metrics = run_dir / "metrics.jsonl"

    def has_stepped() -> bool:
        assert Jobs(head.address).status("first") in ("PENDING", "RUNNING")
        return metrics.exists()

    wait_until(has_stepped, seconds=600, every=1)
    assert main([*submit, "--stop", "first"]) == 0
    assert Jobs(head.address).status("first") == "SUCCEEDED"
    record = read_record(run_dir)
    assert record is not None
    assert record["status"] == "interrupted"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert (run_dir / "checkpoints" / f"global_step_{steps[-1]}").is_dir()

    before, goal = steps[-1], steps[-1] + 2
    capsys.readouterr()
    again = [*submit, "--detach", "--retries", "1", "--id", "second", "--", *words]
    assert main([*again, f"trainer.total_training_steps={goal}"]) == 0
    kill_the_engine(run_dir, step=before + 1)
    capsys.readouterr()
    assert main([*submit, "--logs", "second"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Plugin gtpo_verl") < printed.index("This run is valid: 1 rank on CPUs.")
    assert f"Resuming from global_step_{before} of {goal} steps." in printed
    assert f"Trying again after step {before}: " in printed
    assert printed.endswith("Job second: SUCCEEDED\n")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, goal + 1))


def kill_the_engine(run_dir: Path, step: int) -> None:
    """Kill vLLM's engine when the training generates for a step."""
    phase = {"step": step, "phase": "generating"}
    wait_until(lambda: phase.items() <= (read_json(run_dir / PHASE_FILE) or {}).items(), seconds=600)
    processes = psutil.process_iter(["cmdline"])
    (engine,) = [one for one in processes if "VLLM::EngineCore" in " ".join(one.info["cmdline"] or [])]
    engine.kill()
