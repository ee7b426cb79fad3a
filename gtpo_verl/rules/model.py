"""Rules of the models of a run: they are here or on the hub, whole, and the bucket of a weight sync and the memory of a
machine without GPUs hold them.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.errors import first_line, within
from gtpo_verl.files import read_json
from gtpo_verl.integrations.launch import joined_cluster
from gtpo_verl.integrations.weights import model_directory, needed_bucket, shapes_in, tensor_shapes
from gtpo_verl.planning.memory import GIB, HostMemory, known_host_memory, machine_memory, micro_batch_key, total_of
from gtpo_verl.problems import Problem, warning
from gtpo_verl.rules.ranges import ROLLOUT

HUB_TIMEOUT = 5.0  # seconds
BYTES = 20  # a parameter, in float32: the actor's, its gradient, Adam's two moments, and the rollout's
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"


def model(config: DictConfig) -> Iterator[Problem]:
    """The model is there."""
    settings = config.actor_rollout_ref.model
    if not settings.path:  # an empty one would be the current directory
        yield Problem(
            "no model: set actor_rollout_ref.model.path=DIRECTORY (Hugging Face format) or =ORGANISATION/NAME on the "
            "hub."
        )
        return
    yield from _model_at("actor_rollout_ref.model.path", str(settings.path), settings.get("tokenizer_path"))


def trained_model(config: DictConfig) -> Iterator[Problem]:
    """The model is there; without a GPU, what its training holds fits into the machine's memory and the bucket of a
    weight sync.
    """
    found = list(model(config))
    yield from found
    if found or config.trainer.device != "cpu":
        return
    settings = config.actor_rollout_ref.model
    directory = model_directory(str(settings.path))
    needed = BYTES * sum(map(math.prod, tensor_shapes(directory).values())) if directory else 0
    total, _ = machine_memory()
    if needed > total:
        yield Problem(
            f"actor_rollout_ref.model.path={settings.path}: its weights, their gradients, Adam's state and the "
            f"rollout's weights take {needed / 2**30:.0f} GiB in float32, and this machine has "
            f"{total / 2**30:.0f}: train it on a GPU."
        )
    given = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    largest = None if given is None else needed_bucket(config)
    if largest is not None and largest[1] > given:
        yield Problem(
            f"{BUCKET}={given}: the largest tensor of the model, {largest[0]}, takes {largest[1]} MiB, and without a "
            "GPU it is not sent in parts: set it to null, which follows the model."
        )


def guide_model(config: DictConfig) -> Iterator[Problem]:
    """The guide of `source=server` is there."""
    from gtpo_verl.algorithms.mixed_policy import guide_config  # imports torch

    guide = guide_config(config.algorithm.guide)
    if guide.served:
        yield from _model_at("algorithm.guide.model", str(guide.model), None)


def _model_at(key: str, path: str, tokenizer: str | None) -> Iterator[Problem]:
    """What is wrong with the model that a key names, in a directory, on remote storage or on the hub."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        yield from _files(f"{key}={directory}", directory, Path(tokenizer).expanduser() if tokenizer else directory)
    elif "://" in path:
        return  # verl copies it from remote storage
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        yield Problem(f"{key}={path}: no such directory.")
    else:
        yield from _on_hub(key, path)


def _files(key: str, directory: Path, tokenizer: Path) -> Iterator[Problem]:
    """A local model has a readable configuration, a tokenizer and whole weights."""
    file = directory / "config.json"
    if not file.is_file():
        yield Problem(f"{key} has no config.json: it must be a model in Hugging Face format.")
        return
    if not isinstance(_json(file), dict):
        yield Problem(f"{key}: its config.json is not readable: copy the model again.")
    if tokenizer.is_dir() and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        yield Problem(f"{tokenizer} has no tokenizer: copy it there, or set actor_rollout_ref.model.tokenizer_path.")
    weights: set[str] = set()
    for kind in ("safetensors", "bin"):  # an index of the latter may lie beside weights of the former
        if not weights:
            indices = directory.glob(f"*.{kind}.index.json")
            weights = {name for index in indices for name in ((_json(index) or {}).get("weight_map") or {}).values()}
            weights |= {file.name for file in directory.glob(f"*.{kind}")}
    if not weights:
        yield Problem(f"{key} has no weights (*.safetensors or *.bin): copy them there.")
    for name in sorted(weights):
        try:
            if not (directory / name).is_file():
                raise ValueError("is missing")
            if name.endswith(".safetensors"):
                shapes_in(directory / name)  # which says whether it was cut off
        except ValueError as fault:
            yield Problem(f"{key}: {name} {fault}: copy the model again.")


def _json(file: Path) -> Any:
    """What a JSON file holds; None where it is not JSON."""
    try:
        return read_json(file)
    except (ValueError, RecursionError):
        return None


def _on_hub(key: str, name: str) -> Iterator[Problem]:
    """A model on the hub is whole in its cache on this machine, or the hub has it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    cached = model_directory(name)
    missing = "no such directory" if cached is None else next(_files(str(cached), cached, cached), None)
    if missing is None:
        return
    what = missing if isinstance(missing, str) else f"in the hub's cache, {missing.message.rstrip('.')}"
    try:
        within(HUB_TIMEOUT, lambda: get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT))
    except HfHubHTTPError as error:
        yield Problem(f"{key}={name}: {what}, and the hub says: {first_line(error)}")
    except Exception as error:
        yield Problem(
            f"{key}={name}: {what}, and the hub could not be asked within {HUB_TIMEOUT:.0f} s "
            f"({type(error).__name__}): give a local directory."
        )


def memory(config: DictConfig) -> Iterator[Problem]:
    """A run without GPUs that starts a Ray of its own fits into this machine."""
    parts = None if joined_cluster(config) else known_host_memory(config)
    if parts is None:
        return
    found = list(beyond_the_machine(config, parts))
    yield from found
    total, free = machine_memory()
    needed = total_of(parts)
    if not found and needed > free:
        yield warning(
            f"where responses reach their limit this run needs about {needed / GIB:.0f} GiB, and other processes leave "
            f"{free / GIB:.0f} of this machine's {total / GIB:.0f} free: start it after them. Linux ends a process of "
            "one of the runs where the memory is used up."
        )


def beyond_the_machine(config: DictConfig, memory: HostMemory) -> Iterator[Problem]:
    """The memory that a run needs is there."""
    needed, (there, _) = total_of(memory), machine_memory()
    if needed > there:
        size, largest = max((size, part) for parts in memory.values() for part, size in parts.items())
        remedies = dict.fromkeys(("activations", "logits"), f"lower {micro_batch_key(config, update=True)}")
        remedies["KV cache"] = "lower VLLM_CPU_KVCACHE_SPACE, or use fewer ranks"
        yield warning(
            f"where responses reach their limit this run needs about {needed / GIB:.0f} GiB, most of it for {largest} "
            f"({size / GIB:.0f} GiB), and this machine has {there / GIB:.0f}: "
            f"{remedies.get(largest, 'use a smaller model')}."
        )


RULES = (trained_model, guide_model, memory)
