"""What we use of verl, vLLM, TransferQueue and Ray, and which of it another release has moved.

``contract.yaml`` has a line for every symbol of theirs that the plugin calls, overrides or subclasses. Another release
is read as source, so it needs neither its dependencies nor our trust (`make upstream VERL=/path/to/verl`).
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from gtpo_verl.integrations.source import PACKAGES, Expected, Source
from gtpo_verl.versions import VERL_TESTED, VLLM_TESTED, installed_version, is_newer, tested_range

Contract = dict[str, dict[str, Expected]]


def contract_of(*packages: str) -> Contract:
    """The lines of ``contract.yaml`` about these packages: by module and name, what the symbol is."""
    contract: Contract = yaml.safe_load(Path(__file__).with_name("contract.yaml").read_text())
    return {module: names for module, names in contract.items() if module.split(".")[0] in packages}


@dataclass(frozen=True)
class Moved:
    """A symbol that is not as the contract says. ``gone``: something we need is missing, or needs more than we give."""

    symbol: str
    text: str
    gone: bool

    def __str__(self) -> str:
        return f"{'gone ' if self.gone else 'more '} {self.symbol} {self.text}"


def moved(contract: Contract, source: Source) -> list[Moved]:
    """Every symbol of a contract that the source has in another form, in the contract's order."""
    found = []
    for module, names in contract.items():
        for name, expected in names.items():
            symbol = f"{module}.{name}"
            actual = source.describe(module, name, expected)
            if actual is None:
                found.append(Moved(symbol, f"is not there (was {_text(expected)})", gone=True))
            elif actual != expected:
                text = f"was {_text(expected)} and is {_text(actual)}"
                found.append(Moved(symbol, text, gone=not _only_more(expected, actual)))
    return found


def _text(value: Expected) -> str:
    return value if isinstance(value, str) else ", ".join(value) or "nothing"


def _only_more(expected: Expected, actual: Expected) -> bool:
    """Whether a signature is the expected one with further parameters that a caller need not give."""
    if not (isinstance(expected, str) and isinstance(actual, str) and expected.startswith("(") and actual[0] == "("):
        return False
    wanted, there = expected.strip("()").split(", "), actual.strip("()").split(", ")
    kept = [part for part in there if part in wanted]
    new = [part for part in there if part not in wanted]
    return kept == [part for part in wanted if part] and all(part.endswith("=") or part.startswith("*") for part in new)


@dataclass(frozen=True)
class Newer:
    """An installed package that is newer than what was tested. gone: symbols of it that we use and that it lacks."""

    gone: list[Moved]
    message: str


def newer(name: str, tested: tuple[str, str]) -> Newer | None:
    """What a newer verl or vLLM than those tested has moved; None where the installed one was tested or there is none.

    name: the package, ``verl`` or ``vllm``.
    tested: its oldest and newest tested release (``gtpo_verl/versions.py``).
    """
    version = installed_version(name)
    if version is None or not is_newer(version, tested):
        return None
    contract = contract_of(name)
    gone = [one for one in moved(contract, Source.installed()) if one.gone]
    used = sum(map(len, contract.values()))
    result = f"all {used} symbols of it that gtpo_verl uses are there"
    if gone:
        named = ", ".join(one.symbol for one in gone[:3]) + f" and {len(gone) - 3} more" * (len(gone) > 3)
        result = f"of the {used} symbols that gtpo_verl uses, {len(gone)} moved: {named}"
    return Newer(gone, f"{name} {version} is newer than what was tested ({tested_range(tested)}): {result}.")


def warnings() -> list[str]:
    """A line each for an installed verl and vLLM that are newer than what was tested."""
    found = (newer("verl", VERL_TESTED), newer("vllm", VLLM_TESTED))
    return [each.message for each in found if each is not None]


def main(arguments: list[str] | None = None) -> int:
    """Print what moved in the packages of one directory; returns 1 if something we need is gone, else 0."""
    parser = argparse.ArgumentParser(prog="make upstream", description="what another verl or vLLM has moved")
    parser.add_argument("path", type=Path, help="a source tree or a directory of installed packages")
    root = parser.parse_args(arguments).path.resolve()
    if root.name in PACKAGES and (root / "__init__.py").is_file():
        root = root.parent
    there = [package for package in PACKAGES if (root / package / "__init__.py").is_file()]
    if not there:
        parser.error(f"{root} holds none of {', '.join(PACKAGES)}")
    contract = contract_of(*there)
    differing = moved(contract, Source(root, *Source.installed().roots))
    for one in differing:
        print(one)
    gone = sum(one.gone for one in differing)
    symbols = sum(map(len, contract.values()))
    print(f"{', '.join(there)} in {root}: {symbols} symbols, {gone} gone, {len(differing) - gone} with more")
    return int(gone > 0)


if __name__ == "__main__":
    sys.exit(main())
