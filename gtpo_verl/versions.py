"""The versions of verl and vLLM that this release supports, in one place; errors, doctor and tests read them here."""

import importlib.metadata

from gtpo_verl.errors import UserError

VERL_SUPPORTED = ">=0.9.1,<0.10"
VLLM_SUPPORTED: tuple[str, ...] = ("0.24", "0.28", "0.32")
VLLM_ON_CPU = "0.28"  # the one whose CPU build whole trainings were run with; gtpo_verl/cpu_requirements.txt pins it


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def supports_vllm(version: str) -> bool:
    """Whether a version of vLLM is one of ``VLLM_SUPPORTED``, whatever its patch level."""
    return ".".join(version.split(".")[:2]) in VLLM_SUPPORTED


def check_vllm(version: str) -> None:
    """Check that rollout entropies were made for this version of vLLM.

    Raises:
        UserError: they were not.
    """
    if not supports_vllm(version):
        raise UserError(
            f"vLLM {version} is installed, and rollout entropies were made for {', '.join(VLLM_SUPPORTED)}: "
            "install one of these, or set algorithm.entropy.source=actor."
        )


def check_verl() -> str:
    """Return verl's installed version.

    Raises:
        UserError: verl is missing or outside ``VERL_SUPPORTED``.
    """
    from packaging.specifiers import SpecifierSet

    version = installed_version("verl")
    if version is None:
        raise UserError("verl is not installed: run `gtpo-verl setup --cpu`, or install the `gpu` extra.")
    if version not in SpecifierSet(VERL_SUPPORTED):
        raise UserError(
            f"verl {version} is installed, and gtpo_verl supports verl{VERL_SUPPORTED}: pip install "
            f"'verl{VERL_SUPPORTED}'."
        )
    return version
