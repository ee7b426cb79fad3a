"""How many runs fit at once, which GPUs each of them gets, and the ids of Ray jobs."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.experiments import launchers
from gtpo_verl.experiments.launchers import gpus_of, job_id, local_slots
from gtpo_verl.experiments.run import Where


def config(device: str = "cuda", gpus: int = 2, mode: str = "sync") -> DictConfig:
    trainer = {"device": device, "nnodes": 1, "n_gpus_per_node": gpus, "v1": {"trainer_mode": mode}}
    return OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 3}}})


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


def test_the_id_of_a_job_is_its_run_directory_and_its_attempt() -> None:
    ids = {job_id(Path(f"/{place}/algo=dapo,seed=0"), attempt) for place in ("a", "b") for attempt in (1, 2)}
    assert len(ids) == 4
    assert all(name.startswith("algo-dapo-seed-0-") for name in ids)


def test_runs_at_once_are_at_least_one() -> None:
    with pytest.raises(UserError, match="--parallel 0: it must be at least 1"):
        Where(local=True, parallel=0)
