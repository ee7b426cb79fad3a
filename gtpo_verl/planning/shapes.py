"""The shape of a model from its config.json; parameters are counted on torch's meta device, without weights."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError, first_line
from gtpo_verl.integrations.weights import model_directory

# What ships with the package: the values of these keys in each config.json
_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
MODELS = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, 131072, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, 32768, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, 131072, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, 131072, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, 131072, False),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 152064, 131072, False),
    "Qwen2.5-Math-1.5B": (1536, 8960, 28, 12, 2, 151936, 4096, True),
    "Qwen2.5-Math-7B": (3584, 18944, 28, 28, 4, 152064, 4096, False),
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, 8192, True),
}
INSTRUCT = "-Instruct"
INSTRUCT_POSITIONS = 32768  # the Instruct models of Qwen2.5 have the shape of their base model and these positions


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder; parameters are counted on the model that transformers builds.

    ``block`` is one layer, ``embedding`` the input embedding, ``head`` the output projection (0 if it is tied to the
    embedding).
    """

    name: str
    source: str
    parameters: int
    embedding: int
    head: int
    block: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    positions: int

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all but an embedding that is not the head too (a lookup)."""
        return self.parameters - (self.embedding if self.head else 0)

    @property
    def key_value_width(self) -> int:
        """Width of the keys of one token and layer; its values are as wide."""
        return self.key_value_heads * self.head_size

    def key_value_bytes(self, tensor_parallel: int, bytes_each: int = 2) -> int:
        """Bytes of KV cache per token on one GPU; with more ranks than key-value heads, heads are repeated."""
        heads = max(self.key_value_heads // tensor_parallel, 1)
        return 2 * self.layers * heads * self.head_size * bytes_each


def load_shape(path: str | None) -> ModelShape:
    """The shape of a model: a local directory, a name on the hub that is in the cache, or one of those whose config
    ships with the package. Raises UserError: it is not here, or is not a dense decoder.
    """
    if path is None:
        raise UserError(
            f"no model: set actor_rollout_ref.model.path to a directory, or to one of Qwen/{', '.join(MODELS)}."
        )
    path = str(path)
    directory, name = model_directory(path), path.rsplit("/", 1)[-1]
    shipped = name.removesuffix(INSTRUCT) in MODELS
    own = Path(path).expanduser().is_dir()  # its config.json counts more than the one of its name
    if directory is not None and (own or not shipped) and (directory / "config.json").is_file():
        file = directory / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError("it holds another value")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not a JSON object ({first_line(error)}): copy the model again.") from error
        return _count(path, json.dumps(config), str(file))
    if not shipped:
        raise UserError(
            f"actor_rollout_ref.model.path={path}: no config.json there, and none in the hub's cache. Give a directory "
            f"(its config.json is enough to plan), or one of Qwen/{', '.join(MODELS)}."
        )
    config = dict(zip(_KEYS, MODELS[name.removesuffix(INSTRUCT)], strict=True))
    config["model_type"] = "qwen2" if name.startswith("Qwen") else "llama"
    if name.startswith("Qwen") and name.endswith(INSTRUCT) and "Math" not in name:
        config["max_position_embeddings"] = INSTRUCT_POSITIONS
    return _count(path, json.dumps(config), "shipped with gtpo_verl")


@cache
def _count(name: str, config_json: str, source: str) -> ModelShape:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads(config_json)
    kind = config.get("model_type")
    try:
        full: Any = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(full)
        layers = model.model.layers
        text = full.get_text_config()
        experts = any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        if experts or len({_numel(layer) for layer in layers}) != 1 or not hasattr(text, "intermediate_size"):
            raise UserError(f"{source}: a plan needs a dense decoder with identical layers, and {kind} is not one.")
    except (KeyError, ValueError, AttributeError) as error:
        raise UserError(
            f"{source}: transformers cannot build a decoder from model_type={kind}: {first_line(error):.200}"
        ) from error
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return ModelShape(
        name=name,
        source=source,
        parameters=_numel(model),
        embedding=embedding.numel(),
        head=0 if text.tie_word_embeddings else head.numel(),
        block=_numel(layers[0]),
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=text.num_attention_heads,
        key_value_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=text.vocab_size,
        positions=text.max_position_embeddings,
    )


def _numel(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
