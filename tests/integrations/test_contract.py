"""The contract with verl, vLLM, TransferQueue and Ray: every symbol of theirs that the plugin calls, overrides or
subclasses has a line in ``contract.yaml``, which says how it is written.

When a release changes one of them, the failing line says which, before a run does; and a use that has no line fails
too, so the list is whole. Another release is read from source alone (``gtpo_verl/integrations/contract.py``); here,
where the packages can be imported, each line that is read is held against what Python itself says.
"""

import ast
import functools
import importlib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gtpo_verl.integrations
from gtpo_verl import versions
from gtpo_verl.commands import doctor
from gtpo_verl.integrations import contract
from gtpo_verl.integrations.contract import PACKAGES, Expected, Source, contract_of, main, moved, newer

INTEGRATIONS = Path(gtpo_verl.integrations.__file__).parent
CONTRACT = contract_of(*PACKAGES)
# Triton kernels import Triton, which a machine without an accelerator may have in no usable form; they use nothing of
# verl or vLLM.
NOT_IMPORTED = ("gtpo_verl.integrations.vllm.triton_kernels",)

# Nothing of ours names these: they call what we register, with these arguments, or hand us their objects.
UNNAMED = {
    "vllm.outputs.RequestOutput",
    "verl.trainer.ppo.ray_trainer.compute_advantage",
}


# -------------------------------------------------------------------- what Python says is there


def find(module: str, name: str) -> object:
    """The symbol, unbound: a class method or static method as the function it wraps."""
    target: object = importlib.import_module(module)
    for part in name.split("."):
        if inspect.isclass(target):
            owner = next((cls for cls in target.__mro__ if part in vars(cls)), None)
            if owner is None:
                raise AttributeError(f"{target.__qualname__} has no {part}")
            target = vars(owner)[part]
        else:
            target = getattr(target, part)
    target = getattr(target, "__func__", target)
    return getattr(target, "fn", target)  # Triton's kernels


def parameters(target: Any) -> str:
    """A signature without annotations and the values of defaults, which may change without harm."""
    parts, star = [], False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name == "_ray_trace_ctx":  # Ray's, once a test has made an actor of the class
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parts.append(f"{prefix}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return f"({', '.join(parts)})"


def fields(target: Any) -> set[str]:
    """Parameters of a function, or the names one may construct a class with and read from it."""
    if inspect.isclass(target) and issubclass(target, dict):  # a TypedDict, of typing or of typing_extensions
        return set(target.__annotations__)
    names = set(inspect.signature(target).parameters)
    if inspect.isclass(target):
        names |= {name for cls in target.__mro__ for name in vars(cls).get("__annotations__", {})}
    return names


@functools.cache
def assigned(cls: type) -> frozenset[str]:
    """Names that a class sets on ``self``, in any of its methods."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def sets(cls: type, name: str) -> bool:
    return any(name in assigned(base) for base in cls.__mro__ if is_foreign(base.__module__))


def found(module: str, name: str, expected: Expected) -> Expected:
    """What the installed packages have in the place of a line of the contract, written as the line is."""
    if expected == "attribute":
        owner, _, attribute = name.rpartition(".")
        cls = find(module, owner)
        assert inspect.isclass(cls)
        return "attribute" if sets(cls, attribute) else "nothing"
    target = find(module, name)
    if isinstance(expected, list):
        return [name for name in expected if name in fields(target)]
    if expected == "anything":
        return "anything"
    if expected == "class":
        return "class" if inspect.isclass(target) else type(target).__name__
    if isinstance(target, property):
        return "property"
    if isinstance(target, ModuleType):
        return "module"
    return parameters(target) if callable(target) else type(target).__name__


# -------------------------------------------------------------------- what the plugin uses


def is_foreign(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def our_files() -> list[Path]:
    """The modules that use verl and vLLM; the one that reads them as text does not."""
    return [path for path in sorted(INTEGRATIONS.rglob("*.py")) if path != Path(contract.__file__)]


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in our_files():
        name = ".".join(path.relative_to(INTEGRATIONS.parent.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a module imports of theirs, of what it takes from that by a dot, and of modules named in
    strings.
    """
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and is_foreign(node.module):
            for alias in node.names:
                local[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_foreign(alias.name):
                    local[alias.asname or alias.name.split(".")[0]] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local:
            yield f"{local[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(verl|vllm)(\.\w+)+", str(node.value)):
            yield str(node.value)


def inherited(module: ModuleType, tree: ast.Module) -> Iterator[str]:
    """Dotted names of what the module's classes override of theirs, call through ``super()`` or touch on ``self``."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        cls = getattr(module, node.name)
        theirs = [base for base in cls.__mro__ if is_foreign(base.__module__)]
        if not theirs:
            continue
        touched = {
            part.attr
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("self", "super()")
        }
        for name in touched | set(vars(cls)) & written_in(node):
            owner = next((base for base in theirs if name in vars(base)), None)
            if owner is None:
                owner = next((base for base in theirs if name in assigned(base)), None)
            if owner is not None:
                yield f"{owner.__module__}.{owner.__qualname__}.{name}"
            else:
                assert is_ours(cls, name), f"{cls.__qualname__}.{name}: nobody sets it"


def written_in(node: ast.ClassDef) -> set[str]:
    """Names that stand in a class body: methods, fields, constants."""
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    for part in node.body:
        if isinstance(part, ast.Assign):
            names |= {target.id for target in part.targets if isinstance(target, ast.Name)}
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
    return names


def is_ours(cls: type, name: str) -> bool:
    return any(
        name in vars(base) or name in vars(base).get("__annotations__", {}) or name in assigned(base)
        for base in cls.__mro__
        if base.__module__.startswith("gtpo_verl")
    )


def uses() -> set[str]:
    names: set[str] = set()
    for name, tree in modules():
        names |= set(imported(tree))
        if name not in NOT_IMPORTED:
            names |= set(inherited(importlib.import_module(name), tree))
    return {name for name in names if not is_module(name)}


def is_module(name: str) -> bool:
    """Whether the name is that of a module, whose symbols have lines of their own."""
    if name in sys.modules:  # also one that the plugin keeps from being imported
        return True
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def lines() -> set[str]:
    return {f"{module}.{name}" for module, names in CONTRACT.items() for name in names}


# -------------------------------------------------------------------- tests


@pytest.mark.parametrize("module", CONTRACT)
def test_what_is_installed_is_as_the_contract_says(module: str) -> None:
    assert {name: found(module, name, expected) for name, expected in CONTRACT[module].items()} == CONTRACT[module]


def test_the_source_says_what_python_says() -> None:
    """Read as text, all that is installed is what it is when it is imported; so another release can be read as text."""
    assert list(map(str, moved(CONTRACT, Source.installed()))) == []


def test_every_use_has_a_line() -> None:
    """A name of theirs that the plugin imports, overrides or touches, and that the contract does not know, may change
    unseen.
    """
    assert sorted(uses() - lines()) == []


def test_every_line_has_a_use() -> None:
    """A line that nothing in the plugin names any more holds a release back for nothing."""
    source = "\n".join(path.read_text() for path in our_files())
    words = set(re.findall(r"\w+", source)) | {"__init__"}
    unused = [line for line in sorted(lines()) if line.rsplit(".", 1)[-1] not in words]
    assert [line for line in unused if line not in UNNAMED] == []


def test_every_module_the_plugin_patches_by_name_is_there() -> None:
    named = {name for _, tree in modules() for name in imported(tree) if name.startswith("vllm.v1.")}
    assert {"vllm.v1.sample.sampler", "vllm.v1.worker.gpu.sample.sampler"} <= named
    assert {name for name in named if not is_module(name) and name not in lines()} == set()


# -------------------------------------------------------------------- another release

TREE = {
    "verl/__init__.py": "",
    "verl/trainer/__init__.py": """
        import typing
        if typing.TYPE_CHECKING:
            from .ppo import Trainer as PPOTrainer
        else:
            PPOTrainer = None
        from verl.trainer.names import *
        """,
    "verl/trainer/names.py": """
        try:
            from verl.trainer.ppo import REGISTRY
        except ImportError:
            REGISTRY = None
        from verl.trainer.ppo import Remote, late
        """,
    "verl/trainer/ppo.py": """
        import functools
        from dataclasses import dataclass

        import ray
        from verl.trainer.base import Base as Root

        REGISTRY: dict[str, object] = {}
        LIMIT = 3
        current: Root

        @dataclass
        class Config(Root):
            low: float = 0.2
            high: float = 0.28

        @ray.remote(num_cpus=1)
        class Remote:
            pass

        class Trainer(Root):
            def __init__(self, config, *, seed=0):
                self.config = config

            @functools.wraps(print)
            def step(self, metrics, /, timing, *more, poll=1.0, strict, **rest):
                self.metrics += metrics

            @property
            def size(self):
                return 1

            fit = step

        def late(metrics, *, limit=None):
            pass
        """,
    "verl/trainer/base.py": """
        class Base:
            size_of_base: int

            def __init__(self):
                self.replay_buffer = None

            @classmethod
            def create(cls, name): ...
        """,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("PPOTrainer", "class"),
        ("PPOTrainer", "(config, *, seed=)"),
        ("PPOTrainer.step", "(self, metrics, timing, *more, poll=, strict, **rest)"),
        ("PPOTrainer.fit", "(self, metrics, timing, *more, poll=, strict, **rest)"),
        ("PPOTrainer.create", "(cls, name)"),
        ("PPOTrainer.size", "property"),
        ("PPOTrainer.config", "attribute"),
        ("PPOTrainer.metrics", "attribute"),
        ("PPOTrainer.replay_buffer", "attribute"),
        ("REGISTRY", "dict"),
        ("late", "(metrics, *, limit=)"),
        ("ppo.LIMIT", "int"),
        ("ppo.current.create", "(cls, name)"),
        ("ppo.Config", ["high", "low", "size_of_base"]),
        ("Remote.__ray_actor_class__", "class"),
        ("ppo", "module"),
    ],
)
def test_a_symbol_is_read_through_imports_bases_and_decorators(name: str, line: Expected, tree: Path) -> None:
    assert Source(tree).describe("verl.trainer", name, line) == line


@pytest.mark.parametrize("name", ["no_such", "PPOTrainer.no_such", "no_such.module", "REGISTRY.no_such"])
@pytest.mark.parametrize("line", ["anything", "attribute", "class"])
def test_what_is_not_there_is_not_found(name: str, line: str, tree: Path) -> None:
    assert Source(tree).describe("verl.trainer", name, line) is None


def another_verl(directory: Path, *changes: tuple[str, str, str]) -> Path:
    """The installed verl with some text of it replaced: module, old, new."""
    (installed,) = importlib.import_module("verl").__path__
    shutil.copytree(installed, directory / "verl", ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    for module, old, new in changes:
        file = directory / f"{module.replace('.', '/')}.py"
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
    return directory


def test_what_another_verl_lacks_is_printed_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, buffer = "verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.v1.replay_buffer"
    verl = another_verl(
        tmp_path,
        (
            base,
            "def _compute_advantage(self, batch: KVBatchMeta, metrics",
            "def _compute_advantage(self, batch, numbers",
        ),
        (base, "def _validate(self)", "def _validate_all(self)"),
        (base, "def _save_checkpoint(self)", "def _save_checkpoint(self, path=None)"),
        (buffer, "self.refill_fn =", "self.refill_function ="),
        ("verl.workers.config.actor", "clip_ratio_high:", "clip_ratio_higher:"),
    )
    (verl / "verl" / "utils" / "tracking.py").unlink()
    assert main([str(verl / "verl")]) == 1
    trainer = f"{base}.PPOTrainer"
    *printed, last = capsys.readouterr().out.splitlines()
    settings = CONTRACT["verl.workers.config"]["ActorConfig"]
    left = [name for name in settings if name != "clip_ratio_high"]
    assert printed == [
        f"gone  {buffer}.ReplayBuffer.refill_fn is not there (was attribute)",
        f"gone  {trainer}._compute_advantage was (self, batch, metrics) and is (self, batch, numbers)",
        f"more  {trainer}._save_checkpoint was (self) and is (self, path=)",
        f"gone  {trainer}._validate is not there (was (self))",
        "gone  verl.utils.tracking.Tracking.finish is not there (was (self, exit_code=))",
        f"gone  verl.workers.config.ActorConfig was {', '.join(settings)} and is {', '.join(left)}",
    ]
    assert last.endswith("symbols, 5 gone, 1 with more")


def test_further_parameters_with_defaults_do_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verl = another_verl(
        tmp_path, ("verl.trainer.ppo.v1.trainer_base", "def _validate(self)", "def _validate(self, *, n=1, **rest)")
    )
    assert main([str(verl)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("._validate was (self) and is (self, *, n=, **rest)")


@pytest.mark.parametrize(
    ("was", "now", "more"),
    [
        ("(self, a, b=)", "(self, a, b=, c=)", True),
        ("()", "(*args, **kwargs)", True),
        ("(self, a, b=)", "(self, a, c, b=)", False),  # c must be given
        ("(self, a, b)", "(self, b, a)", False),
        ("(self, a, b=)", "(self, a, b)", False),
        ("(self, a)", "property", False),
        ("dict", "list", False),
    ],
)
def test_only_what_a_caller_need_not_give_is_more(was: str, now: str, more: bool) -> None:
    assert contract._only_more(was, now) is more


def test_a_directory_without_packages_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "holds none of verl, vllm" in capsys.readouterr().err


@pytest.fixture
def newer_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed calls itself 0.10.0.dev, as verl's main does."""
    theirs = {"verl": "0.10.0.dev"}
    for module in (contract, versions):
        monkeypatch.setattr(module, "installed_version", theirs.get)


@pytest.mark.usefixtures("newer_verl")
def test_a_newer_verl_is_a_warning_with_what_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.check_verl() == "0.10.0.dev"
    used = sum(len(names) for module, names in CONTRACT.items() if module.startswith("verl."))
    start = "verl 0.10.0.dev is newer than what was tested (0.9.1): "
    assert contract.warnings() == [f"{start}all {used} symbols of it that gtpo_verl uses are there."]
    old, new = "def _validate(self)", "def _validate_all(self)"
    changed = another_verl(tmp_path, ("verl.trainer.ppo.v1.trainer_base", old, new))
    source = Source(changed, *Source.installed().roots)
    monkeypatch.setattr(Source, "installed", lambda: source)
    symbol = "verl.trainer.ppo.v1.trainer_base.PPOTrainer._validate"
    assert contract.warnings() == [f"{start}of the {used} symbols that gtpo_verl uses, 1 moved: {symbol}."]
    (finding,) = [finding for finding in doctor.check_versions() if finding.what == "verl"]
    assert not finding.ok
    assert symbol in finding.remedy


def test_a_tested_version_needs_no_warning() -> None:
    assert newer("verl", versions.VERL_TESTED) is None
    assert contract.warnings() == []


# -------------------------------------------------------------------- what only a running Python can tell


def test_a_use_without_a_line_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk sees an import inside a function, an attribute of an imported module, an override and an attribute on
    self.
    """
    (tmp_path / "fresh_use.py").write_text(
        textwrap.dedent("""
        import transfer_queue as tq
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        class Fresh(PPOTrainer):
            def _balance_batch(self, batch, metrics):
                return self._update_critic(batch, self.checkpoint_manager)

        def late():
            from verl.utils.tracking import Tracking
            return tq.kv_put
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    tree = ast.parse((tmp_path / "fresh_use.py").read_text())
    try:
        seen = {*imported(tree), *inherited(importlib.import_module("fresh_use"), tree)}
    finally:
        sys.modules.pop("fresh_use", None)
    trainer = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
    assert seen == {
        trainer,
        *(f"{trainer}.{name}" for name in ("_balance_batch", "_update_critic", "checkpoint_manager")),
        "verl.utils.tracking.Tracking",
        "transfer_queue.kv_put",
    }


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_our_methods_come_first_in_every_trainer(mode: str) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from gtpo_verl.integrations.trainer import RunTrainer, trainer_class

    trainer, ours = trainer_class(mode), RunTrainer.__mro__[: RunTrainer.__mro__.index(PPOTrainer)]
    assert len(ours) == 3
    for name in {name for layer in ours for name, value in vars(layer).items() if inspect.isfunction(value)}:
        assert getattr(trainer, name) is getattr(RunTrainer, name), name


def test_a_ray_actor_class_tells_what_it_wraps() -> None:
    """`RunTrainer._init_resource_pool_mgr` takes verl's workers out of their actor classes this way."""
    import ray

    class Worker:
        pass

    assert ray.remote(Worker).__ray_actor_class__ is Worker


def test_both_engines_save_hugging_face_weights_where_they_are_looked_for() -> None:
    from verl.model_merger.base_model_merger import _default_hf_model_config_path

    from gtpo_verl.runs.checkpoints import HF_WEIGHTS

    found = (_default_hf_model_config_path(engine, "actor") for engine in ("fsdp", "megatron"))
    assert tuple(map(Path, found)) == HF_WEIGHTS
