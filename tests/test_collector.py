"""The garbage collector at the start of a process, which imports torch, transformers, verl and vLLM."""

import gc
import importlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gtpo_verl import collector
from gtpo_verl.config import compose_config


@pytest.fixture
def enabled() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_rests_for_a_while(enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "REST", 0.2)
    collector.rest_at_start()
    assert not gc.isenabled()
    deadline = time.monotonic() + 30
    while not gc.isenabled() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000  # what is loaded


def test_a_command_does_not_wait_for_the_end_of_the_rest() -> None:
    program = "from gtpo_verl.collector import rest_at_start; rest_at_start(); import gc; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "False\n"


def test_rays_workers_begin_with_the_rest() -> None:
    """Ray calls what the configuration names in every worker of a training, and a worker without it does not start."""
    ray_init = compose_config(["algo=gtpo", "hardware=cpu"]).ray_kwargs.ray_init
    module, name = ray_init.runtime_env.worker_process_setup_hook.rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is collector.rest_at_start


def test_what_is_loaded_is_not_collected(enabled: None) -> None:
    collector.never_collect_what_is_loaded()
    assert gc.get_freeze_count() > 10_000


@pytest.mark.slow
def test_nothing_is_reported_as_leaked_at_the_end() -> None:
    imports = "import torch._inductor.runtime.triton_heuristics, gtpo_verl.collector"  # the former imports Triton
    program = f"{imports}; gtpo_verl.collector.never_collect_what_is_loaded()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_an_agent_loop_does_not_import_vllm() -> None:
    """verl would, for an engine of NPUs."""
    program = "import sys, gtpo_verl.integrations.agent_loops; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "False"
