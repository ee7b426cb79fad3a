"""The wheel holds all that an editable install finds in the checkout."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import gtpo_verl

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from a copy, because setuptools would leave its `build/` in the checkout and read an old one."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for name in ("gtpo_verl", "configs", "recipe", "scripts", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
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
    for directory in ("recipe", "scripts"):
        there = [path for path in (ROOT / directory).iterdir() if path.is_file()]
        wanted |= {f"gtpo_verl/{path.relative_to(ROOT).as_posix()}" for path in there}
    pages = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb", ".png", ".svg")]
    wanted |= {f"gtpo_verl/{path.relative_to(ROOT).as_posix()}" for path in pages}
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


@pytest.mark.slow
def test_recipes_and_launchers_come_out_of_the_wheel_as_they_are(wheel: zipfile.Path, tmp_path: Path) -> None:
    wheel.root.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "gtpo_verl.cli", "recipes"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    copied = tmp_path / "copied"
    done = subprocess.run([*command, "copy", copied], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("recipe", "scripts"):
        for path in (ROOT / name).iterdir():
            if path.is_file():
                assert (copied / name / path.name).read_bytes() == path.read_bytes()
    assert (copied / "docs" / "guides" / "sweeps.md").is_file()
    where = subprocess.run([*command, "path"], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert where.stdout.strip() == str(tmp_path / "site" / "gtpo_verl")


def metadata(wheel: zipfile.Path) -> Message:
    (name,) = [name for name in wheel.root.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_string((wheel / name).read_text())


def test_the_metadata_say_what_a_package_index_shows(wheel: zipfile.Path) -> None:
    found = metadata(wheel)
    assert found["Version"] == gtpo_verl.__version__
    assert found["Author"] == "gtpo_verl contributors"
    assert found["License-Expression"] == "Apache-2.0"
    classifiers = found.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert [line for line in classifiers if line.startswith("License ::")] == []  # refused beside an expression
    assert found["Keywords"]


def test_the_description_has_no_link_or_picture_that_an_index_cannot_show(wheel: zipfile.Path) -> None:
    found = metadata(wheel)
    assert found["Description-Content-Type"] == "text/markdown"
    text = str(found.get_payload())
    assert text.startswith("# gtpo_verl")
    assert len(text) > 0.8 * len((ROOT / "README.md").read_text())
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|srcset|href)=\"([^\"]*)", prose)
    assert [target for pair in targets for target in pair if target and not target.startswith("https://")] == []
