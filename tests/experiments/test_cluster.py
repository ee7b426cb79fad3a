"""What a worker finds of the plugin that its job carries; in processes whose path is a worker's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gtpo_verl
from gtpo_verl.experiments.handover import fingerprint
from gtpo_verl.experiments.package import copy_plugin

LOOK = """
import sys
from gtpo_verl.errors import UserError
from gtpo_verl.experiments.cluster import check_node
try:
    print(check_node(sys.argv[1]))
except UserError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package, _ = copy_plugin(tmp_path_factory.mktemp("plugin"))
    return package


def seen(plugin: Path, *first: Path, expected: str | None = None) -> str:
    """What a worker finds, or what it refuses."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, expected or fingerprint(plugin)],
        capture_output=True,
        text=True,
        cwd=plugin.parents[1],
        env={"PYTHONPATH": ":".join(map(str, [*first, plugin.parent]))},
        check=True,
    )
    return done.stdout.strip()


def distribution(place: Path, name: str, version: str) -> Path:
    """Metadata of a package, as pip leaves them."""
    directory = place / f"{name}-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return directory


def test_the_carried_plugin_is_proven(plugin: Path) -> None:
    assert re.fullmatch(r"Python 3\.\d+\.\d+, verl 0\.9\.\d+", seen(plugin))


def test_other_code_is_not_ours(plugin: Path) -> None:
    assert seen(plugin, expected="0" * 12).startswith(
        f"gtpo_verl is imported from {plugin}, which is not what was submitted"
    )


def test_metadata_of_another_version_in_front_are_refused(plugin: Path, tmp_path: Path) -> None:
    distribution(tmp_path, "gtpo_verl", "0.0.1")
    problem = seen(plugin, tmp_path)
    assert problem == f"gtpo_verl {gtpo_verl.__version__} was submitted, and metadata of 0.0.1 is found first."


def test_another_verl_is_refused(plugin: Path, tmp_path: Path) -> None:
    distribution(tmp_path, "verl", "0.8.0")
    assert seen(plugin, tmp_path).startswith("verl 0.8.0 is installed, and gtpo_verl needs at least 0.9.1")


def test_requirements_that_are_not_met_are_named(plugin: Path, tmp_path: Path) -> None:
    distribution(tmp_path, "math_verify", "0.1")
    problem = seen(plugin, tmp_path)
    assert problem.startswith("gtpo-verl's requirements are not met there: pip install 'math-verify<0.10,>=0.9' ")


def test_a_python_without_ray_is_one_line() -> None:
    root = Path(gtpo_verl.__path__[0]).parent
    command = [sys.executable, "-S", "-m", "gtpo_verl.job"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={})
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: `python` on the head node is ")
