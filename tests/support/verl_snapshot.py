"""Prints what this process looks like after the imports of a verl trainer: attributes, registries, logging, warnings,
environment and random state, as JSON.
"""

import hashlib
import importlib
import json
import logging
import os
import sys
import types
import warnings
from typing import Any

os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "auto")
MODULES = ("verl", "verl.trainer.main_ppo", "verl.trainer.ppo.v1", "verl.workers.rollout.base", "transfer_queue", "ray")
PACKAGES = ("verl", "transfer_queue", "vllm")
REGISTRIES = (
    ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"),
    ("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
    ("verl.plugin.platform.platform_manager", "PlatformRegistry._platforms"),
)
OF_THE_LOADER = ("_allowed", "_discovered", "_entry_points", "_ep", "_plugins_policy")  # of verl, which loads plugins


def told(value: Any) -> str:
    """What an attribute is: whose code, or which value."""
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict) and all(isinstance(key, str | tuple) for key in value):
        return str(sorted((str(key), told(item)) for key, item in value.items()))
    return str(type(value)) if not isinstance(value, str | int | float | tuple | None) else repr(value)


def attributes() -> dict[str, str]:
    """By dotted name, the attributes of modules and classes of these packages."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] not in PACKAGES or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("__") or (name == "verl" and attribute in OF_THE_LOADER):
                continue
            found[f"{name}.{attribute}"] = told(value)
            if isinstance(value, type) and value.__module__ == name:
                members = {member: told(item) for member, item in vars(value).items() if not member.startswith("__")}
                found |= {f"{name}.{attribute}.{member}": item for member, item in members.items()}
    return {name: value for name, value in found.items() if name not in {".".join(each) for each in REGISTRIES}}


def names_in(module: str, registry: str) -> list[str]:
    value: Any = sys.modules[module]
    for part in registry.split("."):
        value = getattr(value, part)
    return sorted(map(str, value))


def random_state() -> str:
    import random

    import numpy as np
    import torch

    random.seed(0)  # drawn from while ray is imported
    parts = (torch.get_rng_state().numpy().tobytes()[:8], str(np.random.get_state()[1][:4]).encode())  # type: ignore[index]
    return hashlib.sha256(b"".join(parts)).hexdigest()


import numpy as np  # noqa: E402
import torch  # noqa: E402

torch.manual_seed(123)
np.random.seed(123)
for module in MODULES:
    importlib.import_module(module)
print(
    json.dumps(
        {
            "attributes": attributes(),
            "registries": {name: names_in(module, name) for module, name in REGISTRIES},
            "filters": [str(item) for item in warnings.filters],
            "handlers": {
                name: [str(type(handler)) for handler in logging.getLogger(name).handlers]
                for name in ("", "verl", "vllm", "ray", "gtpo_verl")
            },
            "random": random_state(),
            "environment": dict(sorted(os.environ.items())),
        }
    )
)
