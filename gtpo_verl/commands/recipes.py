"""``gtpo-verl recipes``: named experiments, launchers and documentation, which come with the package."""

import argparse
import itertools
import shutil
from pathlib import Path

from gtpo_verl.errors import UserError

# In a checkout they are beside the package; setup puts them inside it, as it does with configs/.
DIRECTORIES = ("recipe", "scripts", "docs")
NOT_READ = shutil.ignore_patterns("__pycache__", "data", "_static", "*.py")  # what makes the site
EPILOG = "Without an action, lists the recipes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", help="`copy` or `path`")
    copy = actions.add_parser("copy", help="copy recipe/, scripts/ and docs/ into a directory, to read and to adapt")
    copy.add_argument("directory", type=Path, metavar="DIR")
    actions.add_parser("path", help="print the directory that holds recipe/, scripts/ and docs/")


def run(args: argparse.Namespace) -> int:
    """List, copy, or say where they are; returns the exit code. Raises UserError: the directory to copy into has one of
    them, which may have been adapted.
    """
    if args.action == "path":
        print(root())
    elif args.action == "copy":
        _copy_to(args.directory)
    else:
        for script in sorted((root() / "recipe").glob("*_*.sh")):
            comment = itertools.takewhile(lambda line: line.startswith("# "), script.read_text().splitlines()[1:])
            text = " ".join(line.removeprefix("# ") for line in comment)
            print(f"{script.stem:22}{text.split('. ')[0].rstrip('.:')}")
        print(
            "\n`gtpo-verl recipes copy DIR` copies them with launchers and documentation; recipe/README.md says how to "
            "run one."
        )
    return 0


def root() -> Path:
    """The directory that holds them: the package's own if it was installed, else the checkout."""
    package = Path(__file__).parents[1]
    return package if (package / DIRECTORIES[0]).is_dir() else package.parent


def _copy_to(directory: Path) -> None:
    for name in DIRECTORIES:
        if (directory / name).exists():
            raise UserError(f"{directory / name} is there already: name another directory, or remove it first.")
    for name in DIRECTORIES:
        shutil.copytree(root() / name, directory / name, ignore=NOT_READ)
        for script in (directory / name).glob("*.sh"):
            script.chmod(0o755)  # an installer may drop the bit
    print(f"Copied recipe/, scripts/ and docs/ into {directory}: start with {directory / 'recipe' / 'README.md'}")
