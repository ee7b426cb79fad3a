"""The weights of a model are compared with its configuration, by the headers of its files."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.weights import INDEX, SINGLE, needed_bucket, weights_fault
from gtpo_verl.tasks.model import build_model

SHARD = "2KB"
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def write(directory: Path, *, tied: bool = False, sharded: bool = False) -> Path:
    shape = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    model = build_model(40, 0, **shape, tie_word_embeddings=tied)
    model.save_pretrained(directory, **({"max_shard_size": SHARD} if sharded else {}))
    assert (directory / INDEX).exists() == sharded
    return directory


def fault(directory: Path) -> str | None:
    return weights_fault(directory, AutoConfig.from_pretrained(directory))


def change(directory: Path, **settings: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_fits_its_own_configuration_alone(tmp_path: Path, tied: bool, sharded: bool) -> None:
    model = write(tmp_path, tied=tied, sharded=sharded)
    assert fault(model) is None
    change(model, hidden_size=32)
    assert "model.embed_tokens.weight is 40 × 16, by the configuration 40 × 32, and so on for " in str(fault(model))
    change(model, hidden_size=16, vocab_size=41)
    others = "" if tied else ", and so on for 1 other tensor"
    assert fault(model) == f"model.embed_tokens.weight is 40 × 16, by the configuration 41 × 16{others}"
    change(model, vocab_size=40, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert "model.layers.2.self_attn.q_proj.weight is missing, and so on for 11 other tensors" in str(fault(model))
    change(model, num_hidden_layers=2, layer_types=["full_attention"] * 2, tie_word_embeddings=not tied)
    assert fault(model) == ("lm_head.weight is missing" if tied else None)


def test_a_tensor_or_the_index_is_missing(tmp_path: Path) -> None:
    single = write(tmp_path / "single")
    tensors = load_file(single / SINGLE)
    gone = tensors.pop("model.norm.weight")
    save_file(tensors, single / SINGLE)
    assert fault(single) == "model.norm.weight is missing"
    save_file(tensors | {"norm.weight": gone}, single / SINGLE)  # a name that something may know
    assert fault(single) is None
    save_file(tensors | {"model.norm.weight": gone, "model.rotary_emb.inv_freq": torch.ones(4)}, single / SINGLE)
    assert fault(single) is None

    sharded = write(tmp_path / "sharded", sharded=True)
    index = sharded / INDEX
    content = json.loads(index.read_text())
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if "-00001-" not in file}
    index.write_text(json.dumps(content))
    assert "is missing" in str(fault(sharded))
    index.write_text("{")
    assert fault(sharded) == f"{INDEX} is not readable"
    index.unlink()
    assert fault(sharded) == f"{INDEX}, which lists its files, is missing"


def test_what_cannot_be_said_is_accepted(tmp_path: Path) -> None:
    model = write(tmp_path)
    change(model, hidden_size=32, quantization_config={"quant_method": "fp8"})
    assert fault(model) is None
    change(model, hidden_size=32, quantization_config=None, architectures=["Qwen2ForSequenceClassification"])
    assert fault(model) is None
    change(model, architectures=["Qwen2ForCausalLM"])
    assert "by the configuration" in str(fault(model))
    (model / SINGLE).rename(model / "pytorch_model.bin")
    assert fault(model) is None


@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaForCausalLM, LlamaConfig(**SMALL)), (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8))]
)
@pytest.mark.parametrize("tied", [False, True])
def test_other_architectures_fit(tmp_path: Path, kind: Any, config: Any, tied: bool) -> None:
    config.tie_word_embeddings = tied
    kind(config).save_pretrained(tmp_path)
    assert fault(tmp_path) is None


def test_a_large_model_takes_no_time(tmp_path: Path) -> None:
    """Qwen2.5-32B, with a file of one tensor."""
    sizes = {"vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    config = Qwen2Config(**sizes, num_attention_heads=40, num_key_value_heads=8, tie_word_embeddings=False)
    save_file({"model.norm.weight": torch.ones(5120)}, tmp_path / SINGLE)
    weights_fault(tmp_path, Qwen2Config(**SMALL))  # imports
    start = time.process_time()
    assert "and so on for 769 other tensors" in str(weights_fault(tmp_path, config))
    assert time.process_time() - start < 2


def test_the_bucket_holds_the_largest_tensor_in_the_type_of_the_engine(tmp_path: Path) -> None:
    """Megatron's type is in its own section; a configuration without FSDP's is asked all the same."""
    build_model(40_000, 0, **{name: value for name, value in SMALL.items() if name != "vocab_size"}).save_pretrained(
        tmp_path
    )
    config = compose_config(["backend=megatron", f"actor_rollout_ref.model.path={tmp_path}"])
    for dtype, mib in (("float32", 3), ("bfloat16", 2)):  # 40,000 × 16 numbers, 2.4 and 1.2 MiB
        config.actor_rollout_ref.actor.megatron.dtype = dtype
        assert "fsdp_config" not in config.actor_rollout_ref.actor
        found = needed_bucket(config)
        assert found is not None
        assert found[1] == mib
