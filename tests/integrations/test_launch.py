"""What is done about a job that does not start."""

from typing import Any

import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError

from gtpo_verl.errors import UserError
from gtpo_verl.integrations import launch

TAKEN = "torch.distributed.DistNetworkError: port: 35003, code: -98, name: EADDRINUSE, message: address already in use"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """How each start of verl's job ends, in turn."""
    ends: list[BaseException | None] = []

    def run_ppo(config: Any, task_runner_class: Any) -> None:
        end = ends.pop(0)
        if end is not None:
            raise end

    monkeypatch.setattr("verl.trainer.main_ppo.run_ppo", run_ppo)
    return ends


def failed(text: str) -> RayTaskError:
    return RayTaskError("run", text, RuntimeError("in a worker"))


def test_a_port_that_was_taken_meanwhile_is_chosen_again(
    jobs: list[BaseException | None], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs += [failed(TAKEN), None]
    launch.run_job(OmegaConf.create({}))
    assert jobs == []
    assert "starting again" in capsys.readouterr().out


@pytest.mark.parametrize(("ends", "left"), [([TAKEN, TAKEN], 0), (["CUDA out of memory", TAKEN], 1)])
def test_nothing_is_started_three_times_or_for_another_reason(
    jobs: list[BaseException | None], ends: list[str], left: int
) -> None:
    jobs += [failed(text) for text in ends]
    with pytest.raises(RayTaskError):
        launch.run_job(OmegaConf.create({}))
    assert len(jobs) == left


@pytest.mark.parametrize("address", ["ray_kwargs", "environment"])
def test_a_run_with_cpus_of_its_own_does_not_join_a_cluster(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    ray_init: dict[str, Any] = {"num_cpus": 32, "num_gpus": 1}
    if address == "ray_kwargs":
        ray_init["address"] = "ray://head:10001"
    else:
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(UserError, match=r"names a Ray cluster.*address=local.*num_cpus=null"):
        launch.check_ray(OmegaConf.create({"ray_kwargs": {"ray_init": ray_init}}))
    launch.check_ray(OmegaConf.create({"ray_kwargs": {"ray_init": ray_init | {"address": "local"}}}))
    joins = ray_init | {"num_cpus": None, "num_gpus": None}
    launch.check_ray(OmegaConf.create({"ray_kwargs": {"ray_init": joins}}))
