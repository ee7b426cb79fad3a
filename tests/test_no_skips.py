"""tests/support/no_skips.py, in a test run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).with_name("support")
SKIPPED_TEST = (
    "import pytest\ndef test_it(): pytest.importorskip('a_component_that_is_not_here')\ndef test_other(): pass\n"
)
SKIPPED_FILE = "import pytest\npytest.importorskip('a_component_that_is_not_here')\ndef test_it(): pass\n"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", [SKIPPED_TEST, SKIPPED_FILE])
def test_a_skip_fails_the_run_under_ci_alone(source: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text(source)
    (tmp_path / "test_passed.py").write_text("def test_it(): pass\n")

    def run(ci: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"CI": ci, "PYTHONPATH": str(SUPPORT)}
        command = [sys.executable, "-m", "pytest", "-p", "no_skips", "-p", "no:cacheprovider", f"-n{workers}", tmp_path]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    failed = run("true")
    assert failed.returncode == 1, failed.stdout
    assert "test_skipped.py" in failed.stdout.partition("fails the run under CI")[2]
    assert run("").returncode == 0
