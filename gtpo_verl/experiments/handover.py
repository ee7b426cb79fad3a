"""What a submission hands to its job: overrides and environment variables, in a file that travels with the plugin.

Ray's entry point is a shell command, and its runtime environment and metadata are shown by ``ray job list`` and the
dashboard. A file needs no quoting and is shown by neither. Every worker of a job imports this module, when it starts:
the standard library is enough for it.
"""

import hashlib
import importlib.util
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gtpo_verl.errors import UserError

DIRECTORY = "gtpo_verl_handover"  # on the job's sys.path
FILE = "handover.json"
HOOK = f"{__name__}.export_environment"  # Ray's name for "when a worker starts"


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """What a job is to do: ``train``, ``check`` (everything up to it), or ``stop`` the training in ``run_dir``."""

    action: str
    run_dir: str  # absolute
    overrides: tuple[str, ...] = ()  # Hydra's
    environment: dict[str, str] = field(default_factory=dict)  # of the job and all its workers; secrets are among them
    wait: bool = False  # whether a training waits for devices that other jobs hold
    retries: int = 0  # attempts in a row at a training that has failed, without a new step
    plugin: str = ""  # `fingerprint` of the package that was carried; known when it is packed

    def write(self, directory: Path) -> None:
        """Write it into ``directory``, readable by its owner only; Ray keeps the mode on every node."""
        directory.mkdir(parents=True)
        file = directory / FILE
        file.touch(mode=0o600)
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read() -> HandOver:
    """The hand-over of the job that this process belongs to. UserError: it belongs to none."""
    spec = importlib.util.find_spec(DIRECTORY)
    if spec is None or not spec.submodule_search_locations:
        raise UserError("this process is not part of a job of `gtpo-verl submit`: use `gtpo-verl train`.")
    file = Path(next(iter(spec.submodule_search_locations))) / FILE
    values = json.loads(file.read_text(encoding="utf-8"))
    return HandOver(**values | {"overrides": tuple(values["overrides"])})


def export_environment() -> None:
    """Set the job's variables in this process; they win over the node's and the run's own."""
    os.environ.update(read().environment)


def fingerprint(package: Path) -> str:
    """SHA-256 of the files below a directory, by name and content, without byte code; 12 hexadecimal digits."""
    total = hashlib.sha256()
    for file in sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        total.update(file.relative_to(package).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:12]
