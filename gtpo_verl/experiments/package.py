"""What travels to the cluster with a job: this package as it is installed, and the user's own files.

The package is carried as plain directories, together with its metadata: a wheel would be installed with its
dependencies, whose numpy then shadows the cluster's, and without metadata verl and vLLM find no entry points.
"""

import importlib.metadata
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pathspec import PathSpec

import gtpo_verl
from gtpo_verl.errors import UserError, first_line
from gtpo_verl.runs.provenance import keep_code_state

MAX_FILES = 2000
MAX_SIZE = 50 * 2**20  # bytes; Ray keeps it in the memory of the head and copies it to every node
IGNORE_FILES = (".gitignore", ".rayignore")  # in the working directory itself
# Patterns as in .gitignore. Hidden files hold settings and keys of the submitting machine; data and weights lie on the
# file system that the nodes share.
EXCLUDED = (
    *(".*", "__pycache__/", "*.egg-info/", "*.dist-info/", "/gtpo_verl/", "build/", "dist/", "venv/", "node_modules/"),
    *("outputs/", "runs/", "checkpoints/", "wandb/", "mlruns/"),
    *("*.parquet", "*.arrow", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth"),
)


def carried_files(directory: Path, exclude: Sequence[str] = ()) -> list[Path]:
    """The user's files to carry, relative to a directory, sorted.

    They are all below it that no pattern excludes: those of ``exclude``, as in .gitignore, of ``EXCLUDED`` and of
    ``IGNORE_FILES``. UserError: there is no such directory, or more below it than ``MAX_FILES`` or ``MAX_SIZE``.
    """
    if not directory.is_dir():
        raise UserError(f"--working-dir {directory}: no such directory.")
    ignored = [directory / name for name in IGNORE_FILES if (directory / name).is_file()]
    lines = [line for file in ignored for line in file.read_text("utf-8", "surrogateescape").splitlines()]
    try:  # ours behind them, so that a `!` of theirs does not bring a hidden file back
        excluded = PathSpec.from_lines("gitignore", [*lines, *EXCLUDED, *exclude])
    except ValueError as error:
        raise UserError(f"a pattern of {', '.join((*map(str, ignored), '--exclude'))}: {first_line(error)}") from error
    found: list[Path] = []
    sizes: Counter[str] = Counter()
    for file in _walk(directory, excluded):
        found.append(file)
        sizes[file.parts[0]] += (directory / file).stat().st_size
        if len(found) > MAX_FILES or sizes.total() > MAX_SIZE:
            largest = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.most_common(3))
            raise UserError(
                f"{directory} holds more than {MAX_FILES} files or {MAX_SIZE // 2**20} MiB to carry (most of it so "
                f"far: {largest}): leave some out with a .rayignore, or of `submit` --exclude PATTERN, or choose its "
                "--working-dir. "
                "Data and models belong on a file system that all nodes share."
            )
    return sorted(found)


def _walk(directory: Path, excluded: PathSpec) -> Iterator[Path]:
    for place, directories, names in os.walk(directory):
        here = Path(place).relative_to(directory)
        directories[:] = [
            name
            for name in sorted(directories)
            if not excluded.match_file(f"{here / name}/") and not (Path(place) / name / "pyvenv.cfg").exists()
        ]
        for name in names:
            if not excluded.match_file(str(here / name)) and (Path(place) / name).is_file():
                yield here / name


def copy_files(root: Path, files: Sequence[Path], target: Path) -> None:
    """Copy ``files``, relative to ``root``, to the same places below ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, target / file)


def copy_plugin(target: Path) -> list[Path]:
    """Copy this package, its YAML files and its metadata into ``target``; returns the directories made there.

    The copy of a checkout says of which commit it is. UserError: it is not installed, or in another version.
    """
    package = target / "gtpo_verl"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(next(iter(gtpo_verl.__path__)), package, ignore=ignore)
    configs = importlib.import_module("gtpo_verl.configs")  # elsewhere in an editable installation
    shutil.copytree(next(iter(configs.__path__)), package / "configs", ignore=ignore, dirs_exist_ok=True)
    keep_code_state(package)
    try:
        installed = importlib.metadata.distribution("gtpo-verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError("gtpo-verl is not installed in this Python: run `pip install .` in its repository.") from error
    if installed.version != gtpo_verl.__version__:
        raise UserError(
            f"gtpo_verl {gtpo_verl.__version__} is imported and {installed.version} is installed: install it again."
        )
    directory = target / f"gtpo_verl-{installed.version}.dist-info"
    directory.mkdir()
    for name, other in (("METADATA", "PKG-INFO"), ("entry_points.txt", "entry_points.txt")):
        if not (text := installed.read_text(name) or installed.read_text(other)):
            raise UserError(f"the installed gtpo-verl has no {name}: install it again.")
        (directory / name).write_text(text, encoding="utf-8")
    return [package, directory]
