"""``gtpo-verl recipes``: the named experiments and the launchers, which come with the package, to list and to copy."""

import argparse
import shutil
from pathlib import Path

from gtpo_verl.errors import UserError

# In a checkout they are beside the package; setup puts them inside it, as it does with configs/.
DIRECTORIES = ("recipe", "scripts")
EPILOG = "Without an action, lists the recipes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", help="`copy` or `path`")
    copy = actions.add_parser("copy", help="copy recipe/ and scripts/ into a directory, to read and to adapt")
    copy.add_argument("directory", type=Path, metavar="DIR")
    actions.add_parser("path", help="print the directory that holds recipe/ and scripts/")


def run(args: argparse.Namespace) -> int:
    """List, copy, or say where they are; returns the exit code. Raises UserError: the directory has a recipe/ or
    scripts/ already, which may have been adapted.
    """
    if args.action == "path":
        print(root())
    elif args.action == "copy":
        _copy_to(args.directory)
    else:
        for script in sorted((root() / "recipe").glob("*_*.sh")):
            print(f"{script.stem:22}{script.read_text().splitlines()[1].removeprefix('# ')}")
        print("\n`gtpo-verl recipes copy DIR` copies them with their launchers; recipe/README.md says how to run one.")
    return 0


def root() -> Path:
    """The directory that holds recipe/ and scripts/: the package's own if it was installed, else the checkout."""
    package = Path(__file__).parents[1]
    return package if (package / DIRECTORIES[0]).is_dir() else package.parent


def _copy_to(directory: Path) -> None:
    for name in DIRECTORIES:
        if (directory / name).exists():
            raise UserError(f"{directory / name} is there already: name another directory, or remove it first.")
    for name in DIRECTORIES:
        shutil.copytree(root() / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        for script in (directory / name).glob("*.sh"):
            script.chmod(0o755)  # an installer may drop the bit
    print(f"Copied recipe/ and scripts/ into {directory}: start with {directory / 'recipe' / 'README.md'}")
