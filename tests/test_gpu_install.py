"""The installation of machines with GPUs: extras resolve under the committed constraints; the image is well formed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "gtpo_verl" / "gpu_constraints.txt"
DOCKERFILE = ROOT / "scripts" / "Dockerfile"


def pins(text: str) -> dict[str, str]:
    return dict(line.split("==") for line in text.splitlines())


def test_constraints_are_plain_pins_of_the_supported_versions() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][a-z0-9.+]*", line) for line in lines)
    versions = pins(CONSTRAINTS.read_text())
    assert (versions["verl"], versions["vllm"], versions["torch"]) == ("0.9.1", "0.24.0", "2.11.0")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_both_extras_resolve_to_the_constraints(python: str) -> None:
    """By a resolver that reads metadata for another platform; what it would install is the committed list."""
    assert resolved(python, "gpu", "megatron") == pins(CONSTRAINTS.read_text())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_examples_resolve_beside_the_extra_for_gpus() -> None:
    """docs/start/real-model.md trains on one GPU with both."""
    constraints = pins(CONSTRAINTS.read_text())
    found = resolved("3.12", "gpu", "examples")
    assert found["reasoning-gym"] == "0.1.25"
    assert {name: version for name, version in found.items() if constraints.get(name, version) != version} == {}


def resolved(python: str, *extras: str) -> dict[str, str]:
    """What extras install on a machine with GPUs, under the committed constraints."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml"]
    command += [part for extra in extras for part in ("--extra", extra)]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_34"]
    command += ["--no-header", "--no-annotate", "--quiet", "--constraints", str(CONSTRAINTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return pins(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    linted = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_packages_of_the_image_are_those_documented_for_nodes_without_one() -> None:
    installed = re.search(r"--no-install-recommends \\\n\s+(.*) \\", DOCKERFILE.read_text())
    documented = re.search(
        r"^apt-get install (.*)$", (ROOT / "docs" / "guides" / "cluster-environment.md").read_text(), re.MULTILINE
    )
    assert installed is not None
    assert documented is not None
    # the image's base has a compiler, and KubeRay's probes call wget
    assert {*installed[1].split(), "build-essential"} == {*documented[1].split(), "wget"}


def test_the_dockerfile_copies_and_installs_what_exists() -> None:
    text = DOCKERFILE.read_text()
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()
    extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"gpu", "megatron"} <= set(extras)
    assert "gtpo-verl[" not in text  # the name is not this project's on an index
