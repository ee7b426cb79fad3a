"""What a job carries: the user's files without what does not belong on a cluster, and the plugin with its metadata."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import gtpo_verl
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import package
from gtpo_verl.experiments.handover import fingerprint
from gtpo_verl.experiments.package import carried_files, copy_files, copy_plugin
from gtpo_verl.runs.provenance import code_state


def fill(root: Path, *names: str, size: int = 10) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)


def carried(root: Path, *exclude: str) -> list[str]:
    return [str(file) for file in carried_files(root, exclude)]


def test_code_and_configuration_are_carried(tmp_path: Path) -> None:
    fill(tmp_path, "reward.py", "rewards/rule.py", "agents.yaml", "a b/ü.json")
    assert carried(tmp_path) == ["a b/ü.json", "agents.yaml", "reward.py", "rewards/rule.py"]


def test_keys_data_weights_runs_and_environments_are_not(tmp_path: Path) -> None:
    fill(tmp_path, "reward.py")
    fill(tmp_path, ".env", ".netrc", ".ssh/id_rsa", "deep/.token", ".git/config")
    fill(tmp_path, "train.parquet", "model/model.safetensors", "model/pytorch_model.bin", "a/checkpoint.pt")
    fill(tmp_path, "outputs/gtpo/metrics.jsonl", "wandb/run/log", "__pycache__/x.pyc", "lib/__pycache__/x.pyc")
    fill(tmp_path, "env/pyvenv.cfg", "env/lib/numpy.py", "node_modules/x.js")
    fill(tmp_path, "gtpo_verl/__init__.py", "gtpo_verl-0.0.1.dist-info/METADATA", "x.egg-info/PKG-INFO")
    assert carried(tmp_path) == ["reward.py"]


def test_patterns_of_files_and_of_the_command_exclude(tmp_path: Path) -> None:
    fill(tmp_path, "reward.py", "notes/a.md", "figures/a.png", "logs/a.log", "keep/a.log")
    (tmp_path / ".gitignore").write_text("logs/\n!.env\n")
    (tmp_path / ".rayignore").write_text("*.png\n")
    fill(tmp_path, ".env")
    assert carried(tmp_path, "/notes/") == ["keep/a.log", "reward.py"]


def test_patterns_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    fill(tmp_path, "reward.py")
    (tmp_path / ".gitignore").write_bytes(b"donn\xe9es/\n")
    assert carried(tmp_path) == ["reward.py"]
    with pytest.raises(UserError, match=r"^a pattern of .*/\.gitignore, --exclude: "):
        carried(tmp_path, "!")


def test_too_many_files_are_refused_while_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "MAX_FILES", 3)
    fill(tmp_path, *(f"many/{number}.txt" for number in range(5)), size=2**20)
    with pytest.raises(UserError, match=r"more than 3 files .*most of it so far: many 4\.0 MiB.*--exclude PATTERN"):
        carried(tmp_path)


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "MAX_SIZE", 2**20)
    fill(tmp_path, "a.txt", "b.txt", size=2**19)
    assert carried(tmp_path) == ["a.txt", "b.txt"]
    fill(tmp_path, "c.txt", size=1)
    with pytest.raises(UserError, match="or 1 MiB to carry"):
        carried(tmp_path)


def test_a_working_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        carried(tmp_path / "missing")


def test_links_are_carried_as_files_and_not_followed_as_directories(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", "rule.py")
    root = tmp_path / "root"
    root.mkdir()
    (root / "rule.py").symlink_to(tmp_path / "elsewhere" / "rule.py")
    (root / "all").symlink_to(tmp_path / "elsewhere")
    (root / "broken").symlink_to(tmp_path / "nowhere")
    assert carried(root) == ["rule.py"]
    copy_files(root, [Path("rule.py")], tmp_path / "target")
    assert not (tmp_path / "target" / "rule.py").is_symlink()


LOOK = """
import importlib.metadata as m, gtpo_verl.configs.algo
groups = ("verl.plugins", "vllm.general_plugins")
points = {g: [p for p in m.entry_points(group=g) if p.name == "gtpo_verl"] for g in groups}
print(m.version("gtpo-verl"), gtpo_verl.__file__, list(gtpo_verl.configs.algo.__path__)[0])
print({g: [p.value for p in found] for g, found in points.items()})
"""


def test_the_plugin_is_carried_whole_and_wins_over_another_version(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "gtpo_verl").mkdir(parents=True)
    (other / "gtpo_verl" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    metadata = other / "gtpo_verl-0.0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gtpo-verl\nVersion: 0.0.1\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\ngtpo_verl = gtpo_verl.old\n")

    (tmp_path / "a").mkdir()
    plugin, info = copy_plugin(tmp_path / "a")
    assert info.name == f"gtpo_verl-{gtpo_verl.__version__}.dist-info"
    assert code_state(tmp_path / "a") == code_state()
    assert not list(plugin.rglob("__pycache__"))
    for name in ("configs/base.yaml", "configs/algo/ladder/6_dapo.yaml", "audit/cost.txt.j2", "py.typed"):
        assert (plugin / name).exists(), name

    # as Ray does: each directory is unpacked into one of its own, all in front of what is installed
    places = []
    for directory in (plugin, info):
        place = tmp_path / f"unpacked-{directory.name}"
        place.mkdir()
        directory.rename(place / directory.name)
        places.append(str(place))
    environment = {"PYTHONPATH": ":".join([*places, str(other)])}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    first, second = done.stdout.splitlines()
    package_dir = Path(places[0]) / "gtpo_verl"
    assert first == f"{gtpo_verl.__version__} {package_dir / '__init__.py'} {package_dir / 'configs' / 'algo'}"
    assert second == str(
        {
            "verl.plugins": ["gtpo_verl.integrations.plugin"],
            "vllm.general_plugins": ["gtpo_verl.integrations.vllm.plugin:register"],
        }
    )


def test_metadata_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gtpo_verl, "__version__", "9.9")
    with pytest.raises(UserError, match=r"gtpo_verl 9\.9 is imported and .* is installed: install it again"):
        copy_plugin(tmp_path)


def test_a_fingerprint_is_that_of_names_and_contents(tmp_path: Path) -> None:
    fill(tmp_path / "a", "x.py", "sub/y.py")
    fill(tmp_path / "b", "x.py", "sub/y.py", "__pycache__/x.pyc")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    (tmp_path / "b" / "x.py").write_text("changed")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")
    (tmp_path / "b" / "x.py").unlink()
    fill(tmp_path / "b", "z.py")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_the_carried_metadata_names_the_requirements(tmp_path: Path) -> None:
    _, info = copy_plugin(tmp_path)
    carried_requirements = importlib.metadata.PathDistribution(info).requires
    assert carried_requirements == importlib.metadata.requires("gtpo-verl")
