"""The versions of verl and vLLM that this release was tested with, in one place: errors, doctor and tests read them.

An older version is refused. A newer one is warned of, with what it changed of the symbols that we use
(`gtpo_verl/integrations/contract.py`).
"""

import importlib.metadata

from packaging.version import Version

from gtpo_verl.errors import UserError

# Oldest and newest release that was tested; a patch release of the newest counts as tested.
VERL_TESTED = ("0.9.1", "0.9")
VLLM_TESTED = ("0.24", "0.32")
VLLM_ON_CPU = "0.28"  # the one whose CPU build whole trainings were run with; gtpo_verl/cpu_requirements.txt pins it


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_older(version: str, tested: tuple[str, str]) -> bool:
    """Whether a version is older than all that were tested, and so not supported."""
    return Version(version).release < Version(tested[0]).release


def is_newer(version: str, tested: tuple[str, str]) -> bool:
    """Whether a version is of a later minor release than all that were tested."""
    return Version(version).release[:2] > Version(tested[1]).release


def tested_range(tested: tuple[str, str]) -> str:
    """The range for people: `0.24 to 0.32`."""
    oldest, newest = tested
    return oldest if oldest.startswith(newest) else f"{oldest} to {newest}"


def check_vllm(version: str) -> None:
    """Check that this version of vLLM may have rollout entropies. Raises UserError: it is older than all that were
    tested.
    """
    if is_older(version, VLLM_TESTED):
        raise UserError(
            f"vLLM {version} is installed, and rollout entropies need at least {VLLM_TESTED[0]} "
            f"(tested: {tested_range(VLLM_TESTED)}): install a newer one, or set algorithm.entropy.source=actor."
        )


def check_verl() -> str:
    """Return verl's installed version. Raises UserError: verl is missing, or older than all that were tested."""
    version = installed_version("verl")
    if version is None:
        raise UserError("verl is not installed: run `gtpo-verl setup --cpu`, or install the `gpu` extra.")
    if is_older(version, VERL_TESTED):
        raise UserError(
            f"verl {version} is installed, and gtpo_verl needs at least {VERL_TESTED[0]}: "
            f"pip install 'verl=={VERL_TESTED[0]}'."
        )
    return version
