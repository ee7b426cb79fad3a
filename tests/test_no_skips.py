"""tests/support/no_skips.py, in a test run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).with_name("support")
SKIPPED_TEST = """
import pytest
def test_it(): pytest.importorskip('a_component_that_is_not_here')
def test_other(): pass
"""
SKIPPED_FILE = """
import pytest
pytest.importorskip('a_component_that_is_not_here')
def test_it(): pass
"""


@pytest.mark.parametrize(("source", "workers"), [(SKIPPED_TEST, 0), (SKIPPED_FILE, 0), (SKIPPED_FILE, 1)])
@pytest.mark.slow  # starts pytest three times
def test_a_skip_fails_the_run_under_ci_alone(source: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text(source)
    (tmp_path / "test_passed.py").write_text("def test_it(): pass\n")

    def run(ci: str) -> subprocess.CompletedProcess[str]:
        # no other plugins: importing those that are installed takes seconds
        environment = os.environ | {"CI": ci, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        plugins = ["-p", "no_skips", "-p", "no:cacheprovider", *(["-p", "xdist", f"-n{workers}"] if workers else [])]
        command = [sys.executable, "-m", "pytest", *plugins, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    failed = run("true")
    assert failed.returncode == 1, failed.stdout
    assert "test_skipped.py" in failed.stdout.partition("fails the run under CI")[2]
    assert run("").returncode == 0
