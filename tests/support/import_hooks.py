"""Changes modules as they are imported, in processes that a test only starts by others: called by a `sitecustomize`."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

Change = Callable[[ModuleType], object]


def install(after: Mapping[str, Change], before: Mapping[str, Change] | None = None) -> None:
    """From now on call these with the modules of these names, after or before their code has run."""
    sys.meta_path.insert(0, _Finder(dict(before or {}), dict(after)))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules as Python would have, and changes them before anyone gets hold of them."""

    def __init__(self, before: dict[str, Change], after: dict[str, Change]) -> None:
        self.before, self.after = before, after
        self.loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.before.keys() | self.after.keys() or fullname in self.loaders:
            return None
        self.loaders[fullname] = NotImplemented  # the search below comes here again
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        self.loaders[fullname] = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self.before:
            self.before[module.__name__](module)
        self.loaders[module.__name__].exec_module(module)
        if module.__name__ in self.after:
            self.after[module.__name__](module)
