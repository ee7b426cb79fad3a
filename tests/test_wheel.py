"""The wheel holds all that an editable install finds in the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from a copy, because setuptools would leave its `build/` in the checkout and read an old one."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for name in ("gtpo_verl", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(source / "dist"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (source / "dist").glob("*.whl")
    return zipfile.Path(file)


@pytest.mark.slow
def test_every_module_configuration_and_data_file_is_inside(wheel: zipfile.Path) -> None:
    held = set(wheel.root.namelist())
    files = [path for path in (ROOT / "gtpo_verl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in files}
    wanted |= {f"gtpo_verl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(wanted) > 100
    assert sorted(wanted - held) == []


def test_verl_and_vllm_find_their_plugins_by_the_wheel(wheel: zipfile.Path) -> None:
    (entry_points,) = [name for name in wheel.root.namelist() if name.endswith("entry_points.txt")]
    text = (wheel / entry_points).read_text()
    for group, target in {
        "verl.plugins": "gtpo_verl = gtpo_verl.integrations.plugin",
        "vllm.general_plugins": "gtpo_verl = gtpo_verl.integrations.vllm.plugin:register",
        "console_scripts": "gtpo-verl = gtpo_verl.cli:main",
    }.items():
        assert f"[{group}]\n{target}\n" in text
