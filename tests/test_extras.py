"""The extras follow verl's own requirements, read from the installed verl."""

import re
import tomllib
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def verls(extra: str) -> dict[str, Requirement]:
    """What verl's extra asks for, by name."""
    found = [Requirement(line) for line in requires("verl") or ()]
    return {one.name.lower(): one for one in found if one.marker is not None and one.marker.evaluate({"extra": extra})}


@pytest.mark.parametrize("extra", ["gpu", "megatron"])
def test_an_extra_names_extras_that_verl_has(extra: str) -> None:
    verl = next(one for one in map(Requirement, EXTRAS[extra]) if one.name == "verl")
    assert verl.extras
    assert verl.extras <= {name.lower() for name in metadata("verl").get_all("Provides-Extra") or ()}
    assert verl.specifier.contains("0.9.1")


def test_flash_attention_and_torch_come_from_verl() -> None:
    for extra in ("gpu", "megatron"):
        verl = next(one for one in map(Requirement, EXTRAS[extra]) if one.name == "verl")
        named = {name for part in verl.extras for name in verls(part)}
        assert {"torch", "vllm", "transformers", "flash-attn"} <= named


def test_megatron_has_verls_versions() -> None:
    """verl's own extra is not named, for its `apex` is another project on PyPI; what is taken from it has a version
    that verl allows.
    """
    theirs = verls("megatron")
    assert "apex" in theirs
    for one in map(Requirement, EXTRAS["megatron"]):
        if one.name != "verl":
            allowed = theirs[re.sub(r"[-_.]+", "-", one.name)].specifier
            assert all(allowed.contains(pin.version) for pin in one.specifier), one
