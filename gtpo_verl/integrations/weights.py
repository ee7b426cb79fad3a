"""Compares the weights of a model with its configuration, by the names and shapes of the tensors; nothing is loaded."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from gtpo_verl.files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers looks for them in this order

Shape = tuple[int, ...]


def weights_fault(directory: Path, config: Any) -> str | None:
    """What of the weights in a directory does not fit a model's configuration, in one line.

    Args:
        directory: of a model in Hugging Face format, whose files are whole.
        config: transformers' own configuration object.

    Returns:
        None where all fits, and where it cannot be said: the weights are not in safetensors or are quantized, the model
        has code of its own, or transformers may convert tensors as it loads them.
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


def _stored(directory: Path) -> dict[str, Shape] | str:
    """{name: shape} of the tensors that transformers would load, empty if they are not in safetensors; or a fault."""
    from safetensors import SafetensorError, safe_open

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
            with safe_open(directory / name, framework="pt") as content:
                found |= {tensor: tuple(content.get_slice(tensor).get_shape()) for tensor in content.keys()}  # noqa: SIM118
        except SafetensorError as error:
            return f"{name} is no safetensors file ({error})"
    return found


def _empty_model(config: Any) -> Any:
    """The model of a configuration on the meta device, where it takes no memory; None where its parameters are not
    known to be the tensors of its files.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = getattr(config, "architectures", None)
    if not isinstance(kind, type) or (named and kind.__name__ not in named):
        return None
    if getattr(config, "quantization_config", None) is not None or _converted(kind, config):
        return None
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception:  # loading it will say why, in transformers' words
        return None
    model.tie_weights()
    return model


def _converted(kind: Any, config: Any) -> bool:
    """Whether transformers loads this model's tensors under other names or in other shapes than its files have."""
    if getattr(kind, "_checkpoint_conversion_mapping", None):  # before version 5
        return True
    if importlib.util.find_spec("transformers.conversion_mapping") is None:
        return False
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return bool(get_checkpoint_conversion_mapping(config.model_type))


def _first(faults: list[str]) -> str:
    others = len(faults) - 1
    return faults[0] + (f", and so on for {others} other tensor{'s' * (others > 1)}" if others else "")


def _written(shape: Shape) -> str:
    return " × ".join(map(str, shape)) or "a number"
