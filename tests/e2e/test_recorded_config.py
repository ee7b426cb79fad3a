"""Every key that ``configs/`` sets is acted on: seen to be read in a real training, or somewhere that is named here."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dotted import dotted
from omegaconf import DictConfig

from gtpo_verl.config import compose_config, verl_config_dir

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["GTPOConfig", "GRPOSConfig"])
def test_every_setting_of_an_algorithm_is_used_by_it(name: str) -> None:
    """The sections algorithm.gtpo and algorithm.grpo_s are read whole, into these classes, which refuse a name they do
    not know.
    """
    from gtpo_verl import algorithms

    directory = Path(algorithms.__file__).parent
    source = "".join(path.read_text() for path in directory.glob("*.py") if path.name != "config.py")
    used = set(re.findall(r"\bconfig\.(\w+)", source))
    assert [field.name for field in dataclasses.fields(getattr(algorithms, name)) if field.name not in used] == []


# What is handed on whole, to whom.
HANDED_ON = {
    "algorithm.guide": "GuideConfig, which refuses an unknown name",
    "actor_rollout_ref.actor.megatron.override_transformer_config": "Megatron's model provider",
    "actor_rollout_ref.rollout.engine_kwargs.vllm": "vLLM's argument parser, which refuses an unknown name",
    "guards.bounds": "gtpo_verl/runs/guards.py, which refuses an unknown name",
    "ray_kwargs.ray_init.runtime_env.env_vars.KMP_BLOCKTIME": "the OpenMP runtime under torch",
    "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS": "the OpenMP runtime under torch",
    "ray_kwargs.ray_init.runtime_env.env_vars.OMP_WAIT_POLICY": "the OpenMP runtime under torch",
    "ray_kwargs.ray_init.runtime_env.env_vars.RAY_prestart_worker_first_driver": "Ray's node daemon, which is C++",
    "reward.custom_reward_function.reward_kwargs": "the verifier, as keyword arguments",
}

# Sections that verl gives to the code that reads the second one, for a worker that the run below has not.
LIKE = {"actor_rollout_ref.ref": "actor_rollout_ref.actor"}

_FSDP = "verl/workers/engine/fsdp/transformer_impl.py"
_LOSSES = "verl/trainer/ppo/core_algos.py"
_MEGATRON = "verl/workers/engine/megatron/transformer_impl.py"

# Keys that the quickstart of conftest.py does not read, or not where the recorder sees it, and who does: FILE:LINE.
ELSEWHERE = {
    # sections of an engine that became plain dicts, or that a module of settings acts on itself
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": f"{_FSDP}:394",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype": f"{_FSDP}:395",
    "actor_rollout_ref.actor.policy_loss._target_": "hydra/_internal/instantiate/_instantiate2.py:35",
    "actor_rollout_ref.actor.optim.lr": "verl/workers/config/optimizer.py:327",
    "actor_rollout_ref.actor.optim.weight_decay": "verl/workers/config/optimizer.py:328",
    "actor_rollout_ref.model.external_lib": "verl/workers/config/model.py:149",
    "actor_rollout_ref.model.override_config.attn_implementation": "verl/workers/config/model.py:185",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "verl/utils/config.py:200",  # which checks the temperature then
    # losses of other methods
    "actor_rollout_ref.actor.policy_loss.beta1": "gtpo_verl/integrations/losses.py",
    "actor_rollout_ref.actor.policy_loss.beta2": "gtpo_verl/integrations/losses.py",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": f"{_LOSSES}:1788",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ub": f"{_LOSSES}:1792",
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb": f"{_LOSSES}:1793",
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": f"{_LOSSES}:1884",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": f"{_LOSSES}:1885",
    # GPUs
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": f"{_MEGATRON}:266",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": f"{_MEGATRON}:266",
    "actor_rollout_ref.actor.megatron.param_offload": f"{_MEGATRON}:197",
    "actor_rollout_ref.actor.megatron.optimizer_offload": f"{_MEGATRON}:198",
    "actor_rollout_ref.actor.megatron.seed": f"{_MEGATRON}:195",
    # a critic
    "critic.data_loader_seed": "verl/trainer/ppo/v1/trainer_base.py:1812",
    "critic.strategy": "verl/workers/config/critic.py:219",
    # what happens in no step of it: a budget that is spent, a value that is not finite
    "algorithm.filter_groups.on_budget": "gtpo_verl/integrations/sampling.py",
    "guards.max_skipped_steps": "gtpo_verl/integrations/step/not_finite.py",
    "guards.not_finite": "gtpo_verl/integrations/step/not_finite.py",
    # the command, before the run
    "trainer.allow_changes": "gtpo_verl/rules/start.py",
    # environment variables
    "ray_kwargs.ray_init.runtime_env.env_vars.GTPO_VERL_RUN": "gtpo_verl/integrations/plugin.py",
    "ray_kwargs.ray_init.runtime_env.env_vars.TORCHDYNAMO_DISABLE": "torch/_dynamo/eval_frame.py:1752",
    "ray_kwargs.ray_init.runtime_env.env_vars.TQ_NUM_THREADS": "transfer_queue/client.py:42",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_DEVICE": "verl/workers/engine/base.py:406",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM": "verl/plugin/platform/platform_manager.py:92",
    "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE": "vllm/envs.py:870",
    "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_OMP_THREADS_BIND": "vllm/envs.py:876",
    "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_ENABLE_V1_MULTIPROCESSING": "vllm/envs.py:1398",
}


def set_by_configs() -> set[str]:
    keys: set[str] = set()
    for path in CONFIGS.rglob("*.yaml"):
        if path.parent.name == "sweep":
            continue  # of several runs, not of one
        document = yaml.safe_load(path.read_text()) or {}
        document.pop("defaults", None)
        keys |= set(dotted(document))
    return keys


def takers(config: DictConfig) -> dict[str, set[str]]:
    """For every key that others take their value from, by interpolation, those others."""
    found: dict[str, set[str]] = {}
    for key, value in dotted(config).items():
        if isinstance(value, str):
            for source in re.findall(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)", value):
                found.setdefault(source, set()).add(key)
    return found


def below(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def dead(keys: Iterable[str], read: set[str]) -> list[str]:
    """Keys that nobody is known to act on: not read, by themselves or through an interpolation, and in no list
    above.
    """
    through = takers(compose_config(["setting=quickstart", "hardware=cpu"]))

    def acted_on(key: str) -> bool:
        for section, model in LIKE.items():
            if key.startswith(f"{section}."):
                key = key.replace(section, model, 1)
        return bool(({key} | through.get(key, set())) & read) or key in ELSEWHERE or below(key, HANDED_ON)

    return sorted(key for key in keys if not acted_on(key))


@pytest.mark.parametrize("key", ELSEWHERE)
def test_the_place_that_is_said_to_read_a_key_names_it(key: str) -> None:
    file, _, line = ELSEWHERE[key].partition(":")
    root = CONFIGS.parent if file.startswith("gtpo_verl/") else verl_config_dir().parents[2]
    lines = (root / file).read_text().splitlines()
    assert key.rpartition(".")[2] in (lines[int(line) - 1] if line else "\n".join(lines))


@pytest.fixture
def recorded(quickstart: Any) -> dict[str, set[str]]:
    """The keys that a real training of every algorithm used, and the modules that did; in all its processes."""
    return quickstart.readers


@pytest.mark.e2e
def test_every_key_that_configs_set_is_read(recorded: dict[str, set[str]]) -> None:
    assert dead(set_by_configs(), set(recorded)) == []


@pytest.mark.e2e
def test_no_exception_is_made_for_a_key_that_is_read(recorded: dict[str, set[str]]) -> None:
    assert sorted(set(ELSEWHERE) & set(recorded)) == []


@pytest.mark.e2e
def test_a_key_that_nobody_reads_is_found(recorded: dict[str, set[str]]) -> None:
    """The run had two such keys, and a printout, a copy and a conversion of the sections that hold them."""
    assert "trainer.project_name" in recorded
    assert dead(["trainer.nobody_reads_this", "trainer.project_name"], set(recorded)) == ["trainer.nobody_reads_this"]
