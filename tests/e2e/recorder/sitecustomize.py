"""Notes every configuration key that is used, in every process of a run; test_recorded_config.py puts this directory on
PYTHONPATH.

Python imports a module of this name at its start, so Ray's workers and vLLM's processes have it too. A key is used when
code other than a converter, a validator or a printer takes its value: from a DictConfig, or, where verl converts a
section into a dataclass, from the field of that instance. Converting, copying or resolving a section uses nothing in
it.

Each process appends lines ``key<TAB>module`` to ``$GTPO_VERL_RECORD/PID``, at once: Ray ends its workers without a
farewell.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

# Modules that pass values on or look at them without doing what they say.
PASSING = (
    "__main__",  # gtpo_verl.train, which makes paths absolute
    "_collections_abc",
    "copy",
    "dataclasses",
    "hydra",
    "omegaconf",
    "pickle",
    "pprint",
    "ray.cloudpickle",
    "swap",
    "gtpo_verl.commands",
    "gtpo_verl.config",
    "gtpo_verl.integrations.checks",
    "gtpo_verl.integrations.launch",
    "gtpo_verl.planning",
    "gtpo_verl.rules",
    "verl.base_config",
    "verl.utils.config",
    "verl.workers.config",
)
# Of these, the ones that stand between a reader and the value: the reader is who called them.
BETWEEN = ("_collections_abc", "verl.base_config", __name__)
TAG = "_recorded_path"

_seen: set[str] = set()
_process = 0


def note(key: str, frame: FrameType | None) -> None:
    """Write the key down unless whoever reads it is in ``PASSING``."""
    global _process
    while frame is not None and frame.f_globals.get("__name__", "").startswith(BETWEEN):
        frame = frame.f_back
    reader = frame.f_globals.get("__name__", "") if frame is not None else ""
    if reader.startswith(PASSING):
        return
    if _process != os.getpid():  # a fork starts with what its parent has seen
        _process = os.getpid()
        _seen.clear()
    if key in _seen:
        return
    _seen.add(key)
    with open(os.path.join(os.environ["GTPO_VERL_RECORD"], str(_process)), "a") as file:
        file.write(f"{key}\t{reader}\n")


def watch_omegaconf(module: ModuleType) -> None:
    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(key, str) and not key.startswith("__"):
                note(self._get_full_key(key), sys._getframe(1))
            return method(self, key, *args, **kwargs)

        return read

    for name in ("__getattr__", "__getitem__", "get", "pop"):
        setattr(module.DictConfig, name, watched(getattr(module.DictConfig, name)))
    select = module.OmegaConf.select

    def selected(cfg: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        note(f"{cfg._get_full_key('')}.{key}".lstrip("."), sys._getframe(1))
        return select(cfg, key, *args, **kwargs)

    module.OmegaConf.select = staticmethod(selected)


def watch_dataclasses(module: ModuleType) -> None:
    plain = object.__getattribute__

    def read(self: Any, name: str) -> Any:
        if not name.startswith("_"):
            path = plain(self, "__dict__").get(TAG)
            if path is not None and name in type(self).__dataclass_fields__:
                note(f"{path}.{name}", sys._getframe(1))
        return plain(self, name)

    module.BaseConfig.__getattribute__ = read


def watch_conversion(module: ModuleType) -> None:
    convert = module.omega_conf_to_dataclass

    def converted(config: Any, *args: Any, **kwargs: Any) -> Any:
        result = convert(config, *args, **kwargs)
        if hasattr(config, "_get_full_key"):
            tag(result, config, config._get_full_key(""))
        return result

    module.omega_conf_to_dataclass = converted


def tag(instance: Any, section: Any, path: str) -> None:
    """Note on a dataclass, and on those in it that the configuration has too, which section it was made from."""
    from verl.base_config import BaseConfig

    if not isinstance(instance, BaseConfig):
        return
    object.__setattr__(instance, TAG, path)
    for field in dataclasses.fields(instance):
        if field.name in section:
            tag(vars(instance).get(field.name), section._get_node(field.name), f"{path}.{field.name}")


def change_trainer(module: ModuleType) -> None:
    if "GTPO_VERL_TEST_ALGORITHMS" in os.environ:
        from swap import swap_algorithms

        swap_algorithms(module)


WATCHED = {
    "gtpo_verl.integrations.trainer": change_trainer,
    "omegaconf": watch_omegaconf,
    "verl.base_config": watch_dataclasses,
    "verl.utils.config": watch_conversion,
}


if "GTPO_VERL_RECORD" in os.environ:
    sys.path.append(str(Path(__file__).parents[2] / "support"))
    from import_hooks import install

    install(after=WATCHED)
