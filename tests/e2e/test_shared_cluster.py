"""Trainings that share a Ray cluster of two nodes: real verl, Ray and vLLM, as a user starts them on the head node."""

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray_head import free_ports

from gtpo_verl.runs.reader import read_run

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Training = Any  # tests/e2e/conftest.py
Start = Callable[..., Training]

SMALL = (
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
    *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32", "algorithm.filter_groups.enable=false"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    *("trainer.total_training_steps=100000", "trainer.save_freq=1"),
)
MANY = 15  # lines: more than a terminal shows beside the steps


@dataclass
class Cluster:
    """Its nodes, and the environment of what joins it."""

    nodes: list[psutil.Process]
    environment: dict[str, str]

    def processes(self) -> list[psutil.Process]:
        return [process for node in self.nodes for process in (*node.children(recursive=True), node)]

    def stop(self) -> None:
        family = self.processes()
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
            psutil.wait_procs(family, timeout=20)

    def controllers(self) -> dict[int, psutil.Process]:
        """Those of all TransferQueues."""
        return {
            process.pid: process
            for process in self.processes()
            if "ray::TransferQueueController" in " ".join(process.cmdline() or [process.name()])
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with one logical device each, behind a token."""
    temporary = Path("/tmp") / f"gtpo_verl-{secrets.token_hex(4)}"  # short: Ray's sockets are in it
    host = ray.util.get_node_ip_address()
    (port,) = free_ports(1, host)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    common = ("--num-cpus=12", "--num-gpus=1", "--object-store-memory=200000000", "--disable-usage-stats", "--block")
    head = ("--head", f"--port={port}", f"--temp-dir={temporary}", "--include-dashboard=false")
    cluster = Cluster([], environment | {"RAY_ADDRESS": f"{host}:{port}"})
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host}"]
    try:
        for place in (head, (f"--address={host}:{port}",)):
            log = (tmp_path_factory.mktemp("node") / "log").open("w")
            node = subprocess.Popen([*command, *place, *common], stdout=log, stderr=log, env=os.environ | environment)
            cluster.nodes.append(psutil.Process(node.pid))
            wait_for_port(host, port)
        yield cluster
    finally:
        cluster.stop()


def wait_for_port(host: str, port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex((host, port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("Ray's head did not start")


@pytest.fixture(scope="module")
def pair(start: Start, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Training]:
    """Started together; they would go on for ever."""
    directory = tmp_path_factory.mktemp("pair")
    first, second = (
        start(directory / name, f"algo={name}", *SMALL, environment=cluster.environment) for name in ("gtpo", "grpo_s")
    )
    for training in (first, second):
        training.wait_for_step(3)
    return first, second


def groups(training: Training) -> list[str]:
    """The groups that it was trained on, step by step."""
    lines = [json.loads(line) for line in (training.run_dir / "groups.jsonl").read_text().splitlines()]
    return [uid for line in lines for uid in line["groups"]]


def test_two_trainings_at_once_train_on_groups_of_their_own(cluster: Cluster, pair: tuple[Training, Training]) -> None:
    assert len(cluster.controllers()) == 2
    for training in pair:  # the names are those of step and prompt, the same in both
        trained = groups(training)[:24]
        assert trained == [f"{step:06d}-{prompt:06d}" for step in (1, 2, 3) for prompt in range(8)]


def test_the_terminal_shows_steps_and_the_log_everything(pair: tuple[Training, Training]) -> None:
    for training in pair:
        shown = training.output().splitlines()
        steps = [line for line in shown if re.match(r"step \d+/100000: accuracy \d\.\d\d, entropy", line)]
        assert len(steps) >= 2
        assert len(shown) - len(steps) < MANY, training.output()
        assert "(WorkerDict pid=" in training.log()
        assert training.log().count("target_num_threads") == 0


def test_a_third_is_refused_in_one_line_and_takes_nothing(
    start: Start, cluster: Cluster, pair: tuple[Training, Training]
) -> None:
    third = start(pair[0].run_dir.with_name("dapo"), "algo=dapo", *SMALL, environment=cluster.environment)
    third.wait_for_end(code=2)
    (error,) = [line for line in third.output().splitlines() if line.startswith("error: ")]
    assert "it needs 1 GPUs (0 of 2 in the cluster are free)" in error
    assert "--wait" in error
    assert "TaskRunner" not in third.log()


def test_one_that_is_killed_leaves_the_other_alone_and_its_place_free(
    start: Start, cluster: Cluster, pair: tuple[Training, Training]
) -> None:
    killed, other = pair
    killed.process.kill()
    killed.process.wait()
    assert json.loads((killed.run_dir / "run.json").read_text())["status"] == "running"
    assert read_run(killed.run_dir).record["status"] == "interrupted"
    assert any((killed.run_dir / "model").glob("*.safetensors"))
    other.wait_for_step(max(other.steps()) + 3)

    last, before = max(killed.steps()), set(cluster.controllers())
    resumed = start(killed.run_dir, "algo=gtpo", *SMALL, environment=cluster.environment)
    resumed.wait_for_step(last + 2)
    (controller,) = set(cluster.controllers()) - before
    cluster.controllers()[controller].kill()
    resumed.wait_for_end(code=2, seconds=120)
    last_word, error = (line for line in resumed.output().splitlines() if line.startswith("error: "))
    assert last_word.startswith("error: this process was killed")  # the first command's, on the same terminal
    assert "TransferQueue died (TransferQueueController: its Ray actor has ended)" in error
    other.wait_for_step(max(other.steps()) + 2)


def test_a_stop_ends_a_training_of_a_cluster(pair: tuple[Training, Training]) -> None:
    """Runs last."""
    _, training = pair
    (training.run_dir / "STOP").touch()
    training.wait_for_end()
    record = json.loads((training.run_dir / "run.json").read_text())
    assert (record["status"], record["reason"]) == ("interrupted", "the file STOP")
    assert any((training.run_dir / "model").glob("*.safetensors"))
