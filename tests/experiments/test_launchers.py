"""How many runs fit at once, which GPUs each of them gets, runs as child processes, and the ids of Ray jobs."""

import sys
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf
from waiting import wait_until

from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import launchers
from gtpo_verl.experiments.handover import HandOver
from gtpo_verl.experiments.launchers import LocalLauncher, RayLauncher, gpus_of, job_id, local_slots
from gtpo_verl.experiments.run import Where


def config(device: str = "cuda", gpus: int = 2, mode: str = "sync") -> DictConfig:
    trainer = {"device": device, "nnodes": 1, "n_gpus_per_node": gpus, "v1": {"trainer_mode": mode}}
    actor = {"model": {"path": None}, "rollout": {"nnodes": 1, "n_gpus_per_node": 3}}
    return OmegaConf.create({"trainer": trainer, "actor_rollout_ref": actor})


def test_every_run_on_this_machine_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,4,5,7")
    assert local_slots([config(gpus=1), config()], None) == [
        {"CUDA_VISIBLE_DEVICES": "0,3"},
        {"CUDA_VISIBLE_DEVICES": "4,5"},
    ]
    assert len(local_slots([config()], 1)) == 1
    with pytest.raises(UserError, match="3 runs of 2 GPUs do not fit on this machine, which has 5"):
        local_slots([config()], 3)
    assert gpus_of(config(mode="separate_async")) == 5
    guide = {"mode": "mix", "source": "server", "model": "guide", "replicas": 2, "tensor_parallel_size": 3}
    assert gpus_of(OmegaConf.merge(config(), {"algorithm": {"guide": guide}})) == 8


def test_on_a_cpu_cores_and_memory_decide_and_one_run_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "CPU_CORES", 10**6)
    assert local_slots([config("cpu", 1)], None) == [{}]
    assert local_slots([config("cpu", 1)], 3) == [{}, {}, {}]


def test_on_a_cpu_a_larger_model_leaves_room_for_fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = compose_config(["hardware=cpu"])
    large = compose_config(["hardware=cpu", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"])
    monkeypatch.setattr(launchers, "machine_memory", lambda: (512.0 * 2**30, 140.0 * 2**30))
    monkeypatch.setattr(launchers.os, "sched_getaffinity", lambda _: range(64))
    assert len(local_slots([unknown], None)) == 20  # 7 GiB each
    assert len(local_slots([unknown, large], None)) == 2  # 68 GiB where responses reach their limit


def test_a_job_of_a_sweep_finds_the_data_that_lie_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").touch()
    tasks: list[HandOver] = []

    class Jobs:
        address = "http://cluster"

        def submit(self, task: HandOver, *_: object) -> bool:
            tasks.append(task)
            return True

    overrides = ["data.train_files=train.parquet", "algo=gtpo", "data.val_files=[train.parquet]"]
    RayLauncher(cast(Any, Jobs()), 1).start(tmp_path / "run", 1, overrides)
    there = str(tmp_path / "train.parquet")
    assert tasks[0].overrides == (f'data.train_files="{there}"', "algo=gtpo", f'data.val_files=["{there}"]')


# A shell in the background has its children ignore Ctrl-C.
SLEEPS = "import signal, time; signal.signal(signal.SIGINT, {}); print('up', flush=True); time.sleep(60)"


def ended(launcher: LocalLauncher, run_dir: Path) -> None:
    """Wait for the end of a run, which must come within a minute."""
    wait_until(lambda: not launcher.is_running(run_dir, 1))


def sleeping(run_dir: Path, handler: str) -> LocalLauncher:
    """The launcher of a process that sleeps, with its handler of SIGINT."""
    launcher = LocalLauncher([{}], program=[sys.executable, "-c", SLEEPS.format(handler)])
    launcher.start(run_dir, 1, [])
    while "up" not in (run_dir / "train.log").read_text():
        time.sleep(0.05)
    return launcher


def test_a_start_that_fails_leaves_its_slot_free(tmp_path: Path) -> None:
    launcher = LocalLauncher([{}], program=["/nonexistent/python"])
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            launcher.start(tmp_path, 1, [])


@pytest.mark.slow
def test_a_run_that_is_stopping_gets_no_signal_and_one_that_removes_the_file_does(tmp_path: Path) -> None:
    launcher = sleeping(tmp_path, "signal.default_int_handler")
    (tmp_path / "STOP").touch()
    launcher.stop(tmp_path, 1, at_once=False)
    time.sleep(0.5)
    assert launcher.is_running(tmp_path, 1)
    (tmp_path / "STOP").unlink()
    launcher.stop(tmp_path, 1, at_once=False)
    ended(launcher, tmp_path)


@pytest.mark.slow
def test_the_reason_of_a_failed_training_is_the_error_in_its_log(tmp_path: Path) -> None:
    """With the real command, which fails on a wrong override long before it starts Ray."""
    launcher = LocalLauncher([{}])
    launcher.start(tmp_path, 1, ["algo=nonsense"])
    ended(launcher, tmp_path)
    assert launcher.reason(tmp_path, 1).startswith("algo=nonsense: no such algo")


def test_a_training_is_asked_to_stop_and_killed_where_it_does_not(tmp_path: Path) -> None:
    willing = sleeping(tmp_path / "willing", "signal.default_int_handler")
    deaf = sleeping(tmp_path / "deaf", "signal.SIG_IGN")
    process = psutil.Process(deaf._processes[tmp_path / "deaf"][0].pid)
    for launcher, name in ((willing, "willing"), (deaf, "deaf")):
        launcher.stop(tmp_path / name, 1, at_once=False)
    ended(willing, tmp_path / "willing")
    assert deaf.is_running(tmp_path / "deaf", 1)
    deaf.close()
    deaf.close()  # again does no harm
    assert not deaf.is_running(tmp_path / "deaf", 1)
    assert not process.is_running()


def test_the_reason_is_the_last_error_or_the_last_line(tmp_path: Path) -> None:
    log, launcher = tmp_path / "train.log", LocalLauncher([])
    for text, reason in {
        "": "it printed nothing.",
        "error: first\nerror: the reason\nat exit\n": "the reason",
        "Traceback\nKilled\n\n": "it ended without an error of its own; its last line is: Killed",
    }.items():
        log.write_text(text)
        assert launcher.reason(tmp_path, 1) == reason


def test_the_id_of_a_job_is_its_run_directory_and_its_attempt() -> None:
    ids = {job_id(Path(f"/{place}/algo=dapo,seed=0"), attempt) for place in ("a", "b") for attempt in (1, 2)}
    assert len(ids) == 4
    assert all(name.startswith("algo-dapo-seed-0-") for name in ids)


def test_runs_at_once_are_at_least_one() -> None:
    with pytest.raises(UserError, match="--parallel 0: it must be at least 1"):
        Where(local=True, parallel=0)
