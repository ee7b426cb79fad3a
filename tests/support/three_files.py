"""The package with one method more, added as CONTRIBUTING.md says: its file, its line in the registry, its preset."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "leave_one_out"


def block(language: str) -> str:
    """The one code block of CONTRIBUTING.md in this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    return found


def add_method(site: Path) -> Path:
    """Copy the package into ``site`` as a wheel lays it out, and add the method; returns ``site``, for PYTHONPATH."""
    package = site / "gtpo_verl"
    shutil.copytree(ROOT / "gtpo_verl", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", package / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "algorithms" / f"{NAME}.py").write_text(block("python"))
    registry = package / "algorithms" / "registry.py"
    listed = '    "gtpo_verl.algorithms.grpo:GRPO",\n'
    text = registry.read_text()
    assert listed in text
    registry.write_text(text.replace(listed, f'{listed}    "gtpo_verl.algorithms.{NAME}:LEAVE_ONE_OUT",\n'))
    (package / "configs" / "algo" / f"{NAME}.yaml").write_text(block("yaml"))
    return site
