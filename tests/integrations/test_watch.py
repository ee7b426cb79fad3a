"""A program that waits for ever is interrupted with the reason: in a system call, in ``ray.get``, in an asyncio
loop.
"""

import asyncio
import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import ray
import transfer_queue
from local_ray import start_ray
from omegaconf import OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.integrations import task_runner, trainer
from gtpo_verl.integrations.health import SIGNAL, watched


def gone() -> None:
    raise UserError("server 1 is gone")


WAITS: dict[str, Callable[[], object]] = {
    "system call": lambda: time.sleep(60),
    "lock": lambda: threading.Event().wait(60),
    "event loop": lambda: asyncio.run(asyncio.sleep(60)),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_ends_with_what_the_check_raised(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match="server 1 is gone"), watched(gone, interval=0.1):
        WAITS[name]()
    assert time.monotonic() - started < 30


def test_a_check_that_finds_nothing_disturbs_nothing() -> None:
    calls = []
    before = signal.getsignal(SIGNAL)
    with watched(lambda: calls.append(1), interval=0.01):
        while len(calls) < 3:
            time.sleep(0.01)
    assert signal.getsignal(SIGNAL) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_what_the_block_itself_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), watched(lambda: None, interval=0.01):
        raise ZeroDivisionError


def test_an_interruption_that_somebody_swallows_is_repeated() -> None:
    def deaf() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(60)
        time.sleep(60)

    with pytest.raises(UserError, match="gone"), watched(gone, interval=0.1):
        deaf()


def test_a_job_is_watched_from_the_first_weights_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent at the end of the trainer's ``init``, to engines that may die of memory just then. TransferQueue is
    there by then: the limit of its start is no limit of theirs.
    """
    happened: list[str] = []

    class Trainer:
        def __init__(self, config: object) -> None:
            happened.append("trainer")
            self.health = SimpleNamespace(check=gone)

        def init(self) -> None:
            time.sleep(60)

    monkeypatch.setattr(trainer, "trainer_class", lambda mode: Trainer)
    monkeypatch.setattr(task_runner, "fit_to_model", lambda config: None)
    monkeypatch.setattr(task_runner, "training_bundles", lambda config: [])
    monkeypatch.setattr(task_runner, "Placement", lambda bundles: SimpleNamespace(check=lambda: None))
    monkeypatch.setattr(task_runner, "watched", functools.partial(watched, interval=0.1))
    monkeypatch.setattr(transfer_queue, "init", lambda config: happened.append("queue"))
    monkeypatch.setattr(transfer_queue, "close", lambda: None)
    config = {"algorithm": {"entropy": {"source": "actor"}}, "trainer": {"v1": {"trainer_mode": "sync"}}}
    started = time.monotonic()
    with pytest.raises(UserError, match="server 1 is gone"):
        task_runner.TaskRunner().run(OmegaConf.create(config | {"transfer_queue": {}}))
    assert happened == ["queue", "trainer"]
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_an_actor_that_waits_in_ray_get_ends_with_the_reason() -> None:
    """As the task runner does, with a worker that never answers, the way a sender of weights to a dead engine does
    not.
    """

    class Runner:
        def run(self) -> None:
            never = ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()
            with watched(gone, interval=0.5):
                ray.get(never)

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import the tests
    start_ray(num_cpus=1)
    try:
        runner = ray.remote(Runner).remote()
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(runner.run.remote(), timeout=300)
        assert isinstance(caught.value.cause, UserError)
    finally:
        ray.shutdown()
