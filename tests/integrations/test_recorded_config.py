"""Every setting, backend and hardware makes a configuration that verl accepts, and every key that ``configs/`` sets is acted on."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import choices, compose_config, set_value, verl_config_dir
from gtpo_verl.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"

# ---------------------------------------------------------------- every combination


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory for verl to look into: the published models are not here."""
    from gtpo_verl.quickstart import model as tiny

    directory = tmp_path_factory.mktemp("model")
    tokenizer = tiny.build_tokenizer()
    tiny.save(tiny.build_model(len(tokenizer), seed=0), tokenizer, directory)
    return directory


def convert(config: DictConfig) -> None:
    """What verl's trainer and workers do with a configuration before they build anything."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    # so their sections are never converted: no algorithm has a critic, and no KL term asks for a reference policy
    assert not need_critic(config)
    assert not need_reference_policy(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    section = config.actor_rollout_ref
    for part in (section.actor, section.rollout, section.model, section.rollout.checkpoint_engine):
        omega_conf_to_dataclass(part)


@pytest.fixture
def quick_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra reads verl's files again for every composition: with PyYAML's C parser that is no longer most of the time."""
    monkeypatch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_yaml")
@pytest.mark.parametrize("hardware", choices("hardware"))
@pytest.mark.parametrize("backend", choices("backend"))
@pytest.mark.parametrize("setting", choices("setting"))
def test_every_setting_backend_and_hardware_is_valid_for_verl(
    setting: str, backend: str, hardware: str, tiny_model: Path
) -> None:
    from gtpo_verl import preflight

    # every algorithm with every backend and hardware, the three arms with every setting: tests/test_config.py proves that an algorithm
    # touches its own keys alone
    algorithms = choices("algo") if setting == "default" else ("dapo", "gtpo", "grpo_s")
    refused = backend == "megatron" and hardware == "cpu"
    for algorithm in ("gtpo",) if refused else algorithms:
        chosen = [f"setting={setting}", f"backend={backend}", f"hardware={hardware}", f"algo={algorithm}"]
        config = compose_config(chosen)
        set_value(config, "actor_rollout_ref.model.path", str(tiny_model))
        if setting == "quickstart":
            config.trainer.n_gpus_per_node = 1  # verl's 8 are more than its 192 responses are meant for
        if refused:
            with pytest.raises(UserError, match="backend=megatron needs GPUs"):
                preflight.check(config)
            continue
        convert(config)


# ---------------------------------------------------------------- every key


@pytest.mark.parametrize("name", ["GTPOConfig", "GRPOSConfig"])
def test_every_setting_of_an_algorithm_is_used_by_it(name: str) -> None:
    """The sections algorithm.gtpo and algorithm.grpo_s are read whole, into these classes, which refuse a name they do not know."""
    from gtpo_verl import algorithms

    directory = Path(algorithms.__file__).parent
    source = "".join(path.read_text() for path in directory.glob("*.py") if path.name != "config.py")
    used = set(re.findall(r"\.(\w+)", source))
    assert [field.name for field in dataclasses.fields(getattr(algorithms, name)) if field.name not in used] == []


# What is handed on whole, to whom.
HANDED_ON = {
    "actor_rollout_ref.actor.megatron.override_transformer_config": "Megatron's model provider",
    "actor_rollout_ref.rollout.engine_kwargs.vllm": "vLLM's argument parser, which refuses a name that it does not know",
    "ray_kwargs.ray_init.runtime_env.env_vars.KMP_BLOCKTIME": "the OpenMP runtime under torch",
    "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS": "the OpenMP runtime under torch",
    "ray_kwargs.ray_init.runtime_env.env_vars.OMP_WAIT_POLICY": "the OpenMP runtime under torch",
    "reward.custom_reward_function.reward_kwargs": "the verifier, as keyword arguments",
}

# Sections that verl gives to the code that reads the second one, for a worker that the run below has not.
LIKE = {"actor_rollout_ref.ref": "actor_rollout_ref.actor"}

_FSDP = "verl/workers/engine/fsdp/transformer_impl.py"
_MEGATRON = "verl/workers/engine/megatron/transformer_impl.py"

# Keys that a one-step run of the quickstart does not read, or not where the recorder sees it, and who does: FILE:LINE.
ELSEWHERE = {
    # sections of an engine that became plain dicts, or that a module of settings acts on itself
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": f"{_FSDP}:393",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": f"{_FSDP}:394",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype": f"{_FSDP}:395",
    "actor_rollout_ref.actor.optim.lr": "verl/workers/config/optimizer.py:327",
    "actor_rollout_ref.actor.optim.weight_decay": "verl/workers/config/optimizer.py:328",
    "actor_rollout_ref.actor.policy_loss._target_": "hydra/_internal/instantiate/_instantiate2.py:35",
    "actor_rollout_ref.model.external_lib": "verl/workers/config/model.py:149",
    "actor_rollout_ref.model.override_config.attn_implementation": "verl/workers/config/model.py:185",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "verl/utils/config.py:200",  # which checks the temperature then
    # GPUs
    "actor_rollout_ref.actor.megatron.param_offload": f"{_MEGATRON}:197",
    "actor_rollout_ref.actor.megatron.optimizer_offload": f"{_MEGATRON}:198",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": f"{_MEGATRON}:272",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": f"{_MEGATRON}:273",
    # a critic
    "critic.strategy": "verl/workers/config/critic.py:219",
    # GRPO-S
    "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_low": "gtpo_verl/integrations/losses.py",
    "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_high": "gtpo_verl/integrations/losses.py",
    "actor_rollout_ref.actor.policy_loss.seq_ratio": "gtpo_verl/integrations/losses.py",
    # environment variables
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_DEVICE": "verl/workers/engine/base.py:406",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM": "verl/plugin/platform/platform_manager.py:92",
    "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE": "vllm/envs.py:870",
    "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_OMP_THREADS_BIND": "vllm/envs.py:876",
    "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_ENABLE_V1_MULTIPROCESSING": "vllm/envs.py:1398",
}


def leaves(node: object, prefix: str = "") -> Iterable[str]:
    """Dotted keys of all values in a YAML document; a list is a value."""
    if not isinstance(node, dict):
        yield prefix
        return
    for name, value in node.items():
        yield from leaves(value, f"{prefix}.{name}".lstrip("."))


def set_by_configs() -> set[str]:
    keys: set[str] = set()
    for path in CONFIGS.rglob("*.yaml"):
        document = yaml.safe_load(path.read_text()) or {}
        document.pop("defaults", None)
        keys |= set(leaves(document))
    return keys


def takers(config: DictConfig) -> dict[str, set[str]]:
    """For every key that others take their value from, by interpolation, those others."""
    found: dict[str, set[str]] = {}

    def walk(node: object, prefix: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                walk(value, f"{prefix}.{name}".lstrip("."))
        elif isinstance(node, str):
            for source in re.findall(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)", node):
                found.setdefault(source, set()).add(prefix)

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found


def below(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def dead(keys: Iterable[str], read: set[str]) -> list[str]:
    """Keys that nobody is known to act on: not read, by themselves or through an interpolation, and in no list above."""
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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The keys that a real training of one step used, and the modules that did; in all its processes."""
    from gtpo_verl.quickstart.task import prepare_task

    base = tmp_path_factory.mktemp("recorded")
    task = prepare_task(tmp_path_factory.getbasetemp() / "task", progress=False)
    notes = base / "notes"
    notes.mkdir()
    recorder = Path(__file__).with_name("recorder")
    path = os.pathsep.join(filter(None, [str(recorder), os.environ.get("PYTHONPATH")]))
    command = [
        *(sys.executable, "-m", "gtpo_verl.train", "algo=gtpo", "setting=quickstart", "hardware=cpu"),
        f"actor_rollout_ref.model.path={task.model_path}",
        f"data.train_files={task.train_file}",
        f"data.val_files={task.val_file}",
        f"trainer.run_dir={base / 'run'}",
        *("trainer.total_training_steps=1", "trainer.credit_dump_freq=1", "data.val_max_samples=16"),
        *("+trainer.nobody_reads_this=1", "+actor_rollout_ref.model.override_config.nobody=1"),
    ]
    environment = os.environ | {"PYTHONPATH": path, "GTPO_VERL_RECORD": str(notes)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=base)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    keys: dict[str, set[str]] = {}
    for file in notes.iterdir():
        for line in file.read_text().splitlines():
            key, _, reader = line.partition("\t")
            if reader.startswith("transfer_queue."):  # TransferQueue makes a configuration of its own of the section
                key = f"transfer_queue.{key}"
            keys.setdefault(key, set()).add(reader)
    return keys


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
