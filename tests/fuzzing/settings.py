"""Settings of a run that make no sense: composing, the checks before a run, and the plan."""

import copy
import json
import math
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError

from fuzzing import PASSED, REFUSED, check, refused
from gtpo_verl import config as configs
from gtpo_verl.errors import UserError
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.problems import errors_of
from gtpo_verl.rules import stages

GROUPS = (
    ("setting=quickstart", "hardware=cpu", "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B"),
    ("setting=small_gpu", "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B"),
    ("setting=paper_gtpo_32b", "backend=megatron", "algo=grpo_s"),
)
SECTIONS = ("data", "trainer", "actor_rollout_ref", "algorithm", "reward", "guards", "seed")
VALUES = (
    *("null", "true", "false", "-1", "0", "1", "2", "3", "1.5", "0.5", "1e30", "-1e30", "nan", "inf", "x", "''", "[]"),
    *("[1]", "[x]", "{}", "{a:1}", "1" + "0" * 30, "1" * 400, "'${nope}'", "'${seed}'", "'[b]'", "'a b'", "4096"),
)


@cache
def _composed(groups: tuple[str, ...]) -> tuple[DictConfig, tuple[str, ...]]:
    """The configuration of these groups, and its keys."""
    found = configs.compose_config(groups)
    keys: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        for name, value in node.items():
            keys.append(f"{prefix}{name}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    walk(OmegaConf.to_container(found), "")
    return found, tuple(key for key in keys if key.split(".")[0] in SECTIONS)


def settings(rng: Random, directory: Path) -> str:
    """One to three keys with odd values: the plan is finite numbers, or there is one line."""
    groups = rng.choice(GROUPS)
    sound, keys = _composed(groups)
    given = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    try:
        parsed = configs.parse_overrides(given)
        with configs.hydra_app():
            configs._check_keys(parsed, configs._defaults(groups))
        composed = copy.deepcopy(sound)
        for item in parsed:
            OmegaConf.update(composed, item.key_or_group, item.value(), force_add=True)
        with configs.hydras_errors("these overrides do not compose"):  # as where they are composed
            OmegaConf.to_container(composed, resolve=True)
        configs.prepare(composed, [*groups, *given])
        errors = errors_of(stages.problems(composed))
        for error in errors:
            check("\n" not in error, f"{given}: {error!r}")
        if errors:
            return refused(UserError(errors[0]))
        plan = make_plan(composed).to_dict()
    except UserError as error:
        return refused(error)
    except ConfigTypeError:  # of a section that is none any more: composing says it in one line
        return REFUSED
    except Exception as error:
        raise AssertionError(" ".join(given)) from error
    check(_finite(plan), f"a plan with numbers that are not finite: {given}")
    json.dumps(plan)
    return PASSED


def _finite(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(map(_finite, tree.values()))
    if isinstance(tree, list | tuple):
        return all(map(_finite, tree))
    return not isinstance(tree, float) or math.isfinite(tree)
