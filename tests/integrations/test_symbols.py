"""Where verl and vLLM are touched, and where their versions are written: in one place each."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gtpo_verl
from gtpo_verl import versions

PACKAGE = Path(gtpo_verl.__file__).parent
INTEGRATIONS = PACKAGE / "integrations"
# Ray may be imported anywhere: a command may start a cluster and stop it. What verl and vLLM do with it stays in
# integrations.
FOREIGN = ("verl", "vllm", "transfer_queue")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, at its head or inside its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, str(node.module)


def trespasses(source: str) -> list[int]:
    return [line for line, name in imports(ast.parse(source)) if name.split(".")[0] in FOREIGN]


def test_only_integrations_import_verl_vllm_and_transfer_queue() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if INTEGRATIONS not in path.parents
        for line in trespasses(path.read_text())
    ]
    assert found == []


def test_an_import_inside_a_function_is_found() -> None:
    assert trespasses("import json\ndef f():\n    from verl.utils import config\n    import vllm.inputs as v\n") == [
        3,
        4,
    ]
    assert trespasses("from gtpo_verl.integrations.vllm import codec\nfrom .vllm import codec\n") == []


def test_no_other_module_writes_a_version_of_verl_or_vllm() -> None:
    """A string that holds a version in a message or a comparison goes stale; docstrings may name what history needs."""
    written = re.compile(r"0\.(24|28|32|9\.1|10)(\.\d+)?\b")
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "versions.py":
            continue
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        found += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and written.search(node.value)
        ]
    assert found == []


def test_the_packaging_repeats_the_declared_versions() -> None:
    """pyproject.toml and the pins of the CPU stack cannot import versions.py, so they are compared with it."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines if line.startswith("verl")]
    assert extras
    assert all(line.endswith(versions.VERL_SUPPORTED) for line in extras)
    assert f"\nvllm-cpu=={versions.VLLM_ON_CPU}." in (PACKAGE / "cpu_requirements.txt").read_text()
    assert versions.VLLM_ON_CPU in versions.VLLM_SUPPORTED


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.24.0", True), ("0.28", True), ("0.28.0+cpu", True), ("0.2", False), ("0.285.1", False)],
)
def test_a_patch_release_of_a_supported_vllm_is_supported(version: str, supported: bool) -> None:
    assert versions.supports_vllm(version) is supported


def test_a_verl_outside_the_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gtpo_verl.errors import UserError

    monkeypatch.setattr(versions, "installed_version", lambda name: "0.10.0")
    with pytest.raises(UserError, match=r"verl 0\.10\.0 is installed, and gtpo_verl supports"):
        versions.check_verl()


def test_the_supported_range_admits_what_is_installed() -> None:
    assert versions.check_verl().startswith("0.9.")
