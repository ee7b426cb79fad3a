"""The settings that the responses of an evaluation depend on; an evaluation is resumed only if none has changed."""

import fnmatch
import hashlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import files_of
from gtpo_verl.files import sha256_of
from gtpo_verl.runs.directory import flatten, now, within
from gtpo_verl.runs.provenance import hardware, run_versions

# Sections that responses and verdicts depend on, except for the keys in IGNORED.
SECTIONS = (
    "seed",
    "data",
    "reward",
    "actor_rollout_ref.model",
    "actor_rollout_ref.rollout",
    "algorithm.correct_threshold",
)
# Keys of `actor_rollout_ref.rollout` that may change when an evaluation is resumed, as patterns of fnmatch.
_OF_ROLLOUT = (
    # the training's own sampling; validation samples with rollout.val_kwargs
    *("n", "temperature", "top_p", "top_k", "calculate_log_probs", "log_prob_*"),
    # how many replicas there are, and how each runs: memory, batching, kernels
    *("nnodes", "n_gpus_per_node", "*_parallel_size", "gpu_memory_utilization", "max_num_seqs"),
    *("max_num_batched_tokens", "enforce_eager", "enable_*", "cudagraph_capture_sizes"),
    *("load_format", "free_cache_engine", "checkpoint_engine.*"),
    # workers around the servers, and monitoring
    *("agent.num_workers", "agent.agent_loop_config_path"),
    *("prometheus.*", "profiler.*", "trace.*", "disable_log_stats"),
)
IGNORED = (
    *(f"actor_rollout_ref.rollout.{key}" for key in _OF_ROLLOUT),
    # the training data, and the batches and order in which validation rows are read (not `data.shuffle`, by which
    # `data.val_max_samples` chooses them)
    *("data.train_*", "data.*batch_size", "data.validation_shuffle"),
    *("data.dataloader_num_workers", "data.filter_overlong_prompts_workers"),
    # compared by content below: the validation files and the model
    *("data.val_files", "actor_rollout_ref.model.path"),
    # how the model is trained
    *(f"actor_rollout_ref.model.{key}" for key in ("external_lib", "enable_gradient_checkpointing")),
    "actor_rollout_ref.model.enable_activation_offload",
    # workers of the verifier; a reward model is refused by the command
    *("reward.num_workers", "reward.reward_model.*"),
)
_ENDS = 1 << 20  # bytes at both ends of a weights file, enough to tell one training step from the next


def settings_of(config: DictConfig) -> dict[str, Any]:
    """All that the responses depend on, flat: settings, and checksums of data, reward function and model."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    settings = {
        key: value
        for key, value in flatten(plain)
        if within(key, SECTIONS) and not any(fnmatch.fnmatchcase(key, pattern) for pattern in IGNORED)
    }
    settings["data.val_files"] = [_file_checksum(file) for file in files_of(config.data.val_files)]
    function = config.reward.custom_reward_function
    if function.path is not None:
        settings["reward.custom_reward_function.path"] = _file_checksum(str(function.path))
    settings["model"] = _model_checksum(str(config.actor_rollout_ref.model.path))
    return settings


def settings_as_in_training(config: DictConfig) -> dict[str, Any]:
    """The same for responses that are sampled as the training samples, and not with ``val_kwargs``."""
    rollout = config.actor_rollout_ref.rollout
    sampling = {f"actor_rollout_ref.rollout.{key}": rollout[key] for key in ("temperature", "top_p", "top_k")}
    return {key: value for key, value in settings_of(config).items() if ".val_kwargs." not in key} | sampling


def facts_of(config: DictConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded with the responses that a command samples: model, command line, time, versions, settings."""
    return {
        "model": str(config.actor_rollout_ref.model.path),
        "command": shlex.join(["gtpo-verl", *sys.argv[1:]]),
        "created": now(),
        "versions": run_versions(),
        "hardware": hardware(),
        "settings": dict(settings),
    }


def _file_checksum(file: str) -> str:
    return sha256_of(Path(file)) if Path(file).is_file() else file  # remote storage, or a module of a package


def _model_checksum(path: str) -> str:
    """A digest of the names, sizes and both ends of a model's files; of a model on the hub, its name."""
    directory = Path(path)
    if not directory.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.suffix not in (".safetensors", ".json", ".jinja", ".bin", ".model"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_ENDS))
            stream.seek(max(0, size - _ENDS))
            digest.update(stream.read())
    return digest.hexdigest()
