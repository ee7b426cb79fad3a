"""What is done about a job that does not start."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from ray._common.utils import get_ray_address_file
from ray.exceptions import NodeDiedError, RayActorError, RayTaskError

from gtpo_verl.errors import StepGivenUpError, UserError
from gtpo_verl.integrations import evaluate, launch, plugin
from gtpo_verl.integrations.admission import DevicesTakenError
from gtpo_verl.rules.start import ray

RUN = OmegaConf.create(
    {"ray_kwargs": {"ray_init": {"address": "local"}}, "trainer": {"run_dir": "outputs/run", "device": "cuda"}}
)
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
    launch.run_job(RUN)
    assert jobs == []
    assert "starting again" in capsys.readouterr().out


@pytest.mark.parametrize(("ends", "left"), [([TAKEN, TAKEN], 0), (["CUDA out of memory", TAKEN], 1)])
def test_nothing_is_started_three_times_or_for_another_reason(
    jobs: list[BaseException | None], ends: list[str], left: int
) -> None:
    jobs += [failed(text) for text in ends]
    with pytest.raises(
        UserError, match=r"^RuntimeError: in a worker\. The stack trace is at the end of outputs/run/train"
    ):
        launch.run_job(RUN)
    assert len(jobs) == left


def test_a_process_that_died_is_one_line_and_its_trace_goes_to_the_log(
    jobs: list[BaseException | None], capsys: pytest.CaptureFixture[str]
) -> None:
    inside = RayTaskError("update", "Traceback of forty lines\nValueError: of a worker", ValueError("of a worker"))
    jobs += [RayActorError(), RayTaskError("run", "", inside)]
    with pytest.raises(UserError, match=r"^a process of the run died; .*resumes from the last checkpoint\.$"):
        launch.run_job(RUN)
    with pytest.raises(UserError, match=r"^ValueError: of a worker\. The stack trace"):
        launch.run_job(RUN)
    assert "Traceback of forty lines" in capsys.readouterr().err


def test_a_node_that_is_lost_while_an_evaluation_starts_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever Ray says of it, and in whatever part of the start."""
    inside = RayTaskError(
        "look", "Traceback of forty lines\nConnectionError: lost", UserError("the verifier is missing")
    )
    for error, message in (
        (
            RayActorError(),
            r"^a process of the run died; .* or its node is gone\. The stack trace is at the end of the log",
        ),
        (NodeDiedError("node 10.0.0.2 died"), r"^NodeDiedError: node 10\.0\.0\.2 died\. The stack trace"),
        (inside.as_instanceof_cause(), "^the verifier is missing$"),
        (UserError("no room"), "^no room$"),
    ):
        monkeypatch.setattr(evaluate, "leave_to_cluster", lambda _, error=error: _raise(error))
        with pytest.raises(UserError, match=message) as caught, evaluate.serving(RUN, wait=False):
            pass
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(evaluate, "leave_to_cluster", lambda _: _raise(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"), evaluate.serving(RUN, wait=False):
        pass
    with pytest.raises(UserError, match=r"^KeyError: 'x'\. The stack trace"), launch.in_one_line("The stack trace."):
        raise KeyError("x")


def test_a_checkpoint_that_does_not_fit_is_said_to_be_so() -> None:
    """PyTorch's writer fails on a full disk, and its message does not say why."""
    full = Path("/dev/full")
    with (
        pytest.raises(UserError, match=r"^a file was not written to its end, as where a disk is full .*unexpected pos"),
        launch.in_one_line("Free some space."),
    ):
        torch.save({"weights": torch.zeros(2**20)}, full)


def _raise(error: Exception) -> None:
    raise error


def test_a_ray_that_does_not_start_is_one_line(jobs: list[BaseException | None]) -> None:
    """On a machine that is too busy, as Ray's node says it: by a plain exception."""
    jobs += [Exception("The current node timed out during startup.")]
    with pytest.raises(UserError, match=r"^Exception: The current node timed out during startup\. The stack trace"):
        launch.run_job(RUN)


def test_a_step_that_was_given_up_on_request_is_no_failure(
    jobs: list[BaseException | None], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs += [RayTaskError("run", "", StepGivenUpError("the run was asked to stop: the step was given up."))]
    launch.run_job(RUN)
    assert "the step was given up" in capsys.readouterr().out


def taken() -> RayTaskError:
    return RayTaskError("run", "", DevicesTakenError("another job took devices"))


def test_a_job_that_waits_goes_back_when_its_devices_were_taken(
    jobs: list[BaseException | None], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs += [taken(), taken(), None]
    launch.run_job(RUN, wait=True)
    assert capsys.readouterr().out.count("waiting again") == 2
    jobs += [taken()]
    with pytest.raises(UserError, match="another job took devices"):
        launch.run_job(RUN)


def run_with(**ray_init: Any) -> DictConfig:
    return OmegaConf.create({"ray_kwargs": {"ray_init": ray_init}})


@pytest.mark.parametrize("address", ["ray_kwargs", "environment"])
def test_a_cluster_keeps_its_own_numbers_of_cpus_and_devices(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    sizes: dict[str, Any] = {"num_cpus": 32, "num_gpus": 1}  # as hardware=cpu has them
    if address == "ray_kwargs":
        sizes["address"] = "ray://head:10001"
    else:
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    joins = run_with(**sizes)
    assert list(ray(joins, ["hardware=cpu"])) == []
    assert joins.ray_kwargs.ray_init.num_cpus == 32  # recorded as it was composed
    launch.leave_to_cluster(joins)
    assert joins.ray_kwargs.ray_init.num_cpus is joins.ray_kwargs.ray_init.num_gpus is None

    override = "ray_kwargs.ray_init.num_cpus=32"
    (problem,) = ray(run_with(**sizes), [override])
    assert re.search(rf"{override} is for a Ray of this run's own.*address=local", problem.message)
    without = run_with(num_cpus=None)
    OmegaConf.set_struct(without, True)  # as hardware=gpu is composed
    launch.leave_to_cluster(without)

    own = run_with(**sizes | {"address": "local"})
    assert list(ray(own, [override])) == []
    launch.leave_to_cluster(own)
    assert own.ray_kwargs.ray_init.num_cpus == 32


@pytest.mark.parametrize("place", ["RAY_TMPDIR", "TMPDIR"])
@pytest.mark.parametrize(
    ("address", "variable", "joins"),
    [(None, None, True), (None, "", True), (None, "local", False), ("local", "head:1", False)],
)
def test_a_cluster_of_this_machine_is_joined_where_ray_would_join_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None, variable: str | None, joins: bool, place: str
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(place, str(tmp_path))
    file = Path(get_ray_address_file(None))
    file.parent.mkdir()
    file.touch()  # as `ray start` writes it
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert (launch.joined_cluster(run_with(address=address)) is not None) is joins


def test_a_namespace_that_runs_would_share_is_refused() -> None:
    (problem,) = ray(run_with(namespace="mine"))
    assert "namespace=mine: two runs in one namespace" in problem.message


@pytest.mark.parametrize(
    ("variables", "joined", "ours"),
    [
        ({}, False, True),
        ({"RAY_AUTH_TOKEN": "theirs"}, False, False),
        ({"RAY_AUTH_TOKEN_PATH": "/x"}, False, False),
        ({}, True, False),
    ],
)
def test_a_ray_of_the_runs_own_gets_a_token_of_its_own(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], joined: bool, ours: bool
) -> None:
    for name in launch.RAY_TOKENS:
        monkeypatch.setenv(name, "")  # a variable that was not there is restored only if it was set here
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "head:6379" if joined else "local")
    config = run_with(address=None if joined else "local", runtime_env={})
    model = {"path": None, "use_remove_padding": True}
    bucket = {"checkpoint_engine": {"update_weights_bucket_megabytes": 64}}
    sections = {"trainer": {"device": "cuda"}, "actor_rollout_ref": {"model": model, "rollout": bucket}}
    launch.export_environment(OmegaConf.merge(config, sections))
    token = os.environ.get("RAY_AUTH_TOKEN")
    assert (token is not None and token != "theirs") is ours


@pytest.mark.parametrize("killed", [True, False])
def test_a_process_that_ray_ends_has_a_last_word(killed: bool) -> None:
    """Ray leaves by `_exit` when its node daemon dies."""
    end = "[child.kill() for child in psutil.Process().children()]; os._exit(1)"  # as Ray does
    script = (
        "import os, time\nimport psutil\nfrom gtpo_verl.integrations.launch import with_last_word\n"
        f"with with_last_word('Go on.'):\n    time.sleep(0.5)\n    {end if killed else 'pass'}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("error: ")) == ((1, 1) if killed else (0, 0))
    assert done.stderr.strip().endswith("Ray's node daemon died. Go on." if killed else "")


def test_a_warning_is_shown_whatever_another_package_makes_of_the_root_logger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, root = logging.getLogger("gtpo_verl"), logging.getLogger()
    for logger, names in ((ours, ("handlers", "level", "propagate")), (root, ("level",))):
        for name in names:
            monkeypatch.setattr(logger, name, getattr(logger, name))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    plugin.log_by_name()
    root.setLevel(logging.ERROR)
    logging.getLogger("gtpo_verl.integrations.sampling").warning("1 of 16 responses failed")
    assert "gtpo_verl WARNING: 1 of 16 responses failed" in capsys.readouterr().err
