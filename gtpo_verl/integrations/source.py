"""Reads what a symbol of a package is from source, without importing anything."""

import ast
import copy
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("verl", "vllm", "transfer_queue", "ray")

Expected = str | list[str]  # a line of `contract.yaml`
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """What a name stands for: a module, a class, a function, or the value that is assigned; and the module it is in."""

    module: str
    node: ast.AST


class Source:
    """Packages as text.

    roots: directories that hold packages, in the order of ``sys.path``.
    """

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self._trees: dict[str, tuple[ast.Module, bool] | None] = {}

    @classmethod
    def installed(cls) -> "Source":
        """What this Python would import."""
        specs = (importlib.util.find_spec(package) for package in PACKAGES)
        places = [Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin is not None]
        return cls(*dict.fromkeys([*places, *map(Path, sys.path)]))

    def describe(self, module: str, name: str, expected: Expected) -> Expected | None:
        """What stands in the place of a line of the contract, written as the line is; None if nothing does."""
        if expected == "attribute":
            owner, _, attribute = name.rpartition(".")
            cls = self._find(module, owner)
            return "attribute" if cls is not None and self._is_set(cls, attribute) else None
        found = self._find(module, name)
        if found is None or expected == "anything":
            return None if found is None else "anything"
        node = found.node
        if isinstance(expected, list):
            return [name for name in expected if name in self._fields(found)]
        if isinstance(node, ast.ClassDef):
            if expected == "class":
                return "class"
            created = self._member(found, "__init__")
            return _signature(created.node, bound=True) if created and isinstance(created.node, Function) else "()"
        if isinstance(node, Function):
            return "property" if _decorated(node, "property", "cached_property") else _signature(node)
        if isinstance(node, ast.Module):
            return "module"
        if isinstance(node, ast.Call):
            return ast.unparse(node.func)
        # the type of an assigned value: ast.Dict, ast.List, ast.Set, ast.Tuple
        return type(node.value).__name__ if isinstance(node, ast.Constant) else type(node).__name__.lower()

    def _find(self, module: str, name: str) -> Definition | None:
        found = self._as_module(module)
        for part in name.split("."):
            found = found and self._member(found, part)
        return found

    def _member(self, owner: Definition, name: str) -> Definition | None:
        if isinstance(owner.node, ast.Module):
            return self._lookup(owner.module, name)
        if isinstance(owner.node, ast.AnnAssign):  # an object that is only declared
            cls = self._evaluate(owner.module, owner.node.annotation)
            return cls and self._member(cls, name)
        if name == "__ray_actor_class__" and isinstance(owner.node, ast.ClassDef) and _decorated(owner.node, "remote"):
            return owner
        for cls, body in self._with_bases(owner).items():
            inside = _bindings(body.body)
            node = inside.get(name)
            if isinstance(node, ast.Name) and node.id != name:  # another name of a method
                node = inside.get(node.id, node)
            if node is not None:
                return self._follow(cls.module, name, node)
        return None

    def _lookup(self, module: str, name: str) -> Definition | None:
        """What a name stands for in a module, wherever it was imported from."""
        parsed = self._parse(module)
        if parsed is None:
            return None
        tree, _ = parsed
        node = _bindings(tree.body).get(name)
        if node is not None:
            return self._follow(module, name, node)
        for star in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"):
            found = self._lookup(self._origin(module, star), name)
            if found is not None:
                return found
        return self._as_module(f"{module}.{name}")

    def _follow(self, module: str, name: str, node: ast.AST) -> Definition | None:
        """From an import or an assignment of another name to what it stands for."""
        if isinstance(node, ast.Import):
            alias = next(alias for alias in node.names if name in (alias.asname, alias.name.split(".")[0]))
            return self._as_module(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom):
            origin = self._origin(module, node)
            imported = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
            if (origin, imported) == (module, name):
                return self._as_module(f"{module}.{name}")
            return self._lookup(origin, imported)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._evaluate(module, node) or Definition(module, node)
        return Definition(module, node)

    def _evaluate(self, module: str, node: ast.AST) -> Definition | None:
        if isinstance(node, ast.Name):
            return self._lookup(module, node.id)
        if isinstance(node, ast.Subscript):  # Generic[T]
            return self._evaluate(module, node.value)
        if isinstance(node, ast.Attribute):
            owner = self._evaluate(module, node.value)
            return owner and self._member(owner, node.attr)
        return None

    def _with_bases(self, found: Definition | None) -> dict[Definition, ast.ClassDef]:
        """A class and the classes that it derives from, as far as their source is at hand; empty for anything else."""
        if found is None or not isinstance(found.node, ast.ClassDef):
            return {}
        classes = {found: found.node}
        for base in found.node.bases:
            classes |= self._with_bases(self._evaluate(found.module, base))
        return classes

    def _is_set(self, cls: Definition, attribute: str) -> bool:
        """Whether a class or a base sets an attribute on ``self`` in any of its methods."""
        return any(
            isinstance(node, ast.Attribute)
            and node.attr == attribute
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            for each in self._with_bases(cls).values()
            for node in ast.walk(each)
        )

    def _fields(self, found: Definition) -> set[str]:
        """Parameters of a function, or the names that one may construct a class with and read from it."""
        if isinstance(found.node, Function):
            return {argument.arg for argument in _arguments(found.node.args)}
        classes = self._with_bases(found).values()
        annotated = (part.target for cls in classes for part in cls.body if isinstance(part, ast.AnnAssign))
        names = {target.id for target in annotated if isinstance(target, ast.Name)}
        created = self._member(found, "__init__")
        if created is not None and isinstance(created.node, Function):
            names |= {argument.arg for argument in _arguments(created.node.args)} - {"self"}
        return names

    def _as_module(self, name: str) -> Definition | None:
        parsed = self._parse(name)
        return parsed and Definition(name, parsed[0])

    def _parse(self, module: str) -> tuple[ast.Module, bool] | None:
        """The tree of a module, and whether it is a package; None if it is not there.

        A package is read from the first root that has it and from no other: what it has lost must not be found in an
        older one.
        """
        if module not in self._trees:
            path = Path(*module.split("."))
            root = next((root for root in self.roots if _file(root / path.parts[0])), None)
            file = root and _file(root / path)
            self._trees[module] = (ast.parse(file.read_bytes()), file.name == "__init__.py") if file else None
        return self._trees[module]

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a ``from ... import`` in a module names."""
        parsed = self._parse(module)
        package = module if parsed and parsed[1] else module.rpartition(".")[0]
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)


def _file(path: Path) -> Path | None:
    """The file of the package or module at a path without a suffix."""
    return next((file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None)


def _bindings(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """What the names of a module or class are bound to where all goes well: in the first branch, without exceptions."""
    names: dict[str, ast.AST] = {}
    for node in body:
        names |= dict(_bound(node))
    return names


def _bound(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name.split(".")[0], node) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, node) for alias in node.names if alias.name != "*")
    elif isinstance(node, ast.Assign):
        yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value or node
    elif isinstance(node, ast.If):
        yield from {**_bindings(node.orelse), **_bindings(node.body)}.items()
    elif isinstance(node, ast.Try):
        handled = [part for handler in node.handlers for part in handler.body]
        yield from {**_bindings(handled), **_bindings([*node.body, *node.orelse, *node.finalbody])}.items()


def _decorated(node: Function | ast.ClassDef, *names: str) -> bool:
    return any(ast.unparse(each).split("(")[0].split(".")[-1] in names for each in node.decorator_list)


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    star = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *star]


def _signature(node: Function, bound: bool = False) -> str:
    """A signature without annotations and the values of defaults, which may change without harm."""
    given = copy.deepcopy(node.args)
    for argument in _arguments(given):
        argument.annotation = None
    given.args, given.posonlyargs = [*given.posonlyargs, *given.args][bound:], []
    given.defaults = [ast.Name("") for _ in given.defaults]
    given.kw_defaults = [default and ast.Name("") for default in given.kw_defaults]
    return f"({ast.unparse(given)})"
