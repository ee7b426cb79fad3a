"""The weights of a model by the names and shapes of their tensors: whether they fit its configuration, and the bucket
in which verl sends them. Nothing is loaded.
"""

import math
import re
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig

from gtpo_verl.files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers looks for them in this order

Shape = tuple[int, ...]


def weights_fault(directory: Path, config: Any) -> str | None:
    """What of the weights in a directory does not fit transformers' configuration of a model, in one line.

    None where all fits, and where it cannot be said: the weights are not in safetensors or are quantized, the model has
    code of its own, or transformers may convert tensors as it loads them.
    """
    stored = _stored(directory)
    if isinstance(stored, str):
        return stored
    model = _empty_model(config) if stored else None
    if model is None:
        return None
    names: dict[int, list[str]] = {}  # of one parameter: tied embeddings have two
    shapes: dict[str, Shape] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[name] = tuple(parameter.shape)
    different = [
        f"{name} is {_written(stored[name])}, by the configuration {_written(shape)}"
        for name, shape in shapes.items()
        if name in stored and stored[name] != shape
    ]
    if different:
        return _first(different)
    buffers = dict(model.named_buffers())
    if any(name not in shapes and name not in buffers and not name.endswith("inv_freq") for name in stored):
        return None  # tensors of other names: the missing ones may be made of them
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    missing = [
        f"{alike[0]} is missing"
        for alike in names.values()
        if not any(name in stored or any(pattern.search(name) for pattern in optional) for name in alike)
    ]
    return _first(missing) if missing else None


def shapes_in(file: Path) -> dict[str, Shape]:
    """{tensor: shape} of a safetensors file.

    Raises ValueError: what the file is instead.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            names = tensors.keys()
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        cut = "not fully covered" in str(error)
        raise ValueError("was cut off" if cut else "is no safetensors file, or was cut off") from error


def model_directory(path: str) -> Path | None:
    """Where a model lies on this machine: its directory, or that of the hub's cache; None where it is not here."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


# -------------------------------------------------------------------- the bucket of a weight sync

TINY = 10_000_000  # parameters; the embedded tasks' model has 0.66 M, and takes 1.7 times as long on two threads
LEAST_BUCKET, VERLS_BUCKET = 64, 2048  # MiB; verl's default is for a model whose size is not known here


def tensor_shapes(directory: Path) -> dict[str, Shape]:
    """{tensor: shape} of the safetensors files in a directory."""
    return {name: shape for file in directory.glob("*.safetensors") for name, shape in shapes_in(file).items()}


def actor_dtype(config: DictConfig) -> str:
    """The type of the actor's weights, in the words of its engine's section; float32 where FSDP's has null."""
    actor = config.actor_rollout_ref.actor
    return str(actor.megatron.dtype if actor.strategy == "megatron" else actor.fsdp_config.model_dtype or "fp32")


def needed_bucket(config: DictConfig) -> tuple[str, int] | None:
    """The largest tensor that the actor sends to the rollout, and the MiB of a bucket that holds it, by the model's
    files or, without safetensors, by its config.json; None where the model is not here.

    Without a GPU verl sends weights in shared memory and ends at a tensor that is larger than the bucket; between
    processes on one GPU such a tensor goes alone.
    """
    directory = model_directory(str(config.actor_rollout_ref.model.path))
    if directory is None:
        return None
    shapes = tensor_shapes(directory)
    if not shapes:
        settings = read_json(directory / "config.json") or {}
        sizes: list[Any] = [settings.get(name) for name in ("vocab_size", "hidden_size")]
        if not all(isinstance(size, int) for size in sizes):
            return None
        shapes = {"the embedding": tuple(map(int, sizes))}
    name = max(shapes, key=lambda name: math.prod(shapes[name]))
    each = 2 if "16" in actor_dtype(config) else 4
    return name, math.ceil(math.prod(shapes[name]) * each / 2**20)


def fit_to_model(config: DictConfig) -> None:
    """Fill in, in place, what hardware=cpu leaves to the model: a bucket that holds every tensor; and, but for a model
    whose kernels are too small for it, a thread for every core and micro-batches without padding.
    """
    model, variables = config.actor_rollout_ref.model, config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    if config.trainer.device == "cpu":
        directory = model_directory(str(model.path))
        shapes = {} if directory is None else tensor_shapes(directory)
        tiny = bool(shapes) and sum(map(math.prod, shapes.values())) < TINY
        if model.use_remove_padding is None:
            model.use_remove_padding = not tiny
        if "OMP_NUM_THREADS" in variables and variables["OMP_NUM_THREADS"] is None:
            variables["OMP_NUM_THREADS"] = "1" if tiny else str(psutil.cpu_count(logical=False) or 1)
    settings = config.actor_rollout_ref.rollout.checkpoint_engine
    if settings.update_weights_bucket_megabytes is None:
        needed = needed_bucket(config)
        settings.update_weights_bucket_megabytes = VERLS_BUCKET if needed is None else max(LEAST_BUCKET, needed[1])


# -------------------------------------------------------------------- weights and configuration


def _stored(directory: Path) -> dict[str, Shape] | str:
    """{name: shape} of the tensors that transformers would load, empty if they are not in safetensors; or a fault."""
    if (directory / SINGLE).is_file():
        files = [SINGLE]
    elif (directory / INDEX).is_file():
        try:
            files = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{INDEX} is not readable"
    elif any(directory.glob("model-*-of-*.safetensors")) and not any(directory.glob("*.bin")):
        return f"{INDEX}, which lists its files, is missing"
    else:
        files = []
    found: dict[str, Shape] = {}
    for name in files:
        try:
            found |= shapes_in(directory / name)
        except ValueError as error:
            return f"{name} {error}"
    return found


def _empty_model(config: Any) -> Any:
    """The model of a configuration on the meta device, where it takes no memory; None where its parameters are not
    known to be the tensors of its files.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = getattr(config, "architectures", None)
    if not isinstance(kind, type) or (named and kind.__name__ not in named):
        return None
    if getattr(config, "quantization_config", None) is not None:
        return None
    # transformers may load its tensors under other names or in other shapes than its files have
    if get_checkpoint_conversion_mapping(config.model_type):
        return None
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception:  # loading it will say why, in transformers' words
        return None
    model.tie_weights()
    return model


def _first(faults: list[str]) -> str:
    others = len(faults) - 1
    return faults[0] + (f", and so on for {others} other tensor{'s' * (others > 1)}" if others else "")


def _written(shape: Shape) -> str:
    return " × ".join(map(str, shape)) or "a number"
