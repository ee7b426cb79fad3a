"""Who imports whom among the modules of rollout entropies: ``wiring`` names the others, and none of them imports it."""

import ast
from pathlib import Path

import gtpo_verl.integrations.vllm as package

FOLDER = Path(package.__file__).parent


def imported_siblings(module: str) -> set[str]:
    """The modules of the package that ``module`` imports, at its head or inside a function."""
    prefix = f"{package.__name__}"
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == prefix:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{prefix}."):
            found.add(node.module.removeprefix(f"{prefix}."))
    return found


def test_only_wiring_knows_the_agent_loops_and_the_servers() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert {"agent_loop", "server"} <= imported_siblings("wiring")
    assert [module for module in sorted(modules) if "wiring" in imported_siblings(module)] == []
    assert imported_siblings("__init__") == set()
