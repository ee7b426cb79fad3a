"""Memory against what torch allocates and saves, and against sums worked out by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.planning.memory import (
    BF16,
    FP32,
    GIB,
    Memory,
    host_memory,
    layer_activation_bytes,
    machine_memory,
    memory_of,
    total_of,
)
from gtpo_verl.planning.parallel import parallelism
from gtpo_verl.planning.shapes import ModelShape, load_shape

Run = Callable[..., DictConfig]
CAPACITY = 79.1 * GIB


def memory(config: DictConfig, model: str = "Qwen/Qwen2.5-7B") -> Memory:
    return memory_of(config, load_shape(model), parallelism(config), CAPACITY)


def parts(config: DictConfig, phase: str, model: str = "Qwen/Qwen2.5-7B") -> dict[str, float]:
    return memory(config, model).phases[phase]


def test_activations_of_a_layer_are_what_autograd_saves() -> None:
    """One layer of a small Qwen2 in bfloat16 with fused attention: the bytes that autograd keeps, without weights and
    rotations."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokens = 128
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    config._attn_implementation = "sdpa"
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    hidden = torch.randn(1, tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rotations = model.model.rotary_emb(hidden, positions)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *rotations)}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.model.layers[0](hidden, position_embeddings=rotations, position_ids=positions, attention_mask=None)
    assert out.requires_grad
    shape = ModelShape("", "", 0, 0, 0, 0, 1, 256, 704, 8, 2, 32, 64, tokens)
    assert sum(saved.values()) == tokens * layer_activation_bytes(shape)


def test_fsdp_shards_parameters_gradients_and_adam(run: Run) -> None:
    update = parts(run("setting=paper_gtpo_7b"), "update")
    share = 7_615_616_512 / 64
    assert update["parameters"] == update["gradients"] == FP32 * share
    assert update["optimizer"] == 2 * FP32 * share
    half = parts(run("setting=paper_gtpo_7b", {"actor_rollout_ref.actor.fsdp_config.fsdp_size": 32}), "update")
    assert half["optimizer"] == 2 * update["optimizer"]


def test_megatron_splits_weights_by_tensor_and_adam_by_data(run: Run) -> None:
    update = parts(run("setting=paper_gtpo_32b", "backend=megatron"), "update", "Qwen/Qwen2.5-32B")
    shape = load_shape("Qwen/Qwen2.5-32B")
    share = (shape.parameters - shape.hidden) / 8  # the last norm is left out
    assert update["parameters"] == BF16 * share
    assert update["gradients"] == FP32 * share
    assert update["optimizer"] == 3 * FP32 * share / 8


def test_a_pipeline_halves_the_layers_and_keeps_one_end(run: Run) -> None:
    sizes = {
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 4,
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
    }
    update = parts(run("setting=paper_gtpo_32b", "backend=megatron", sizes), "update", "Qwen/Qwen2.5-32B")
    shape = load_shape("Qwen/Qwen2.5-32B")
    assert update["parameters"] == BF16 * (32 * shape.block + shape.head) / 4


def test_offload_empties_the_gpu_while_the_engine_works(run: Run) -> None:
    kept = parts(run("setting=paper_gtpo_7b"), "generate")
    assert kept["parameters"] > 0
    assert kept["optimizer"] > 0
    offload = {f"actor_rollout_ref.actor.fsdp_config.{name}_offload": True for name in ("param", "optimizer")}
    config = run("setting=paper_gtpo_7b", offload)
    away = parts(config, "generate")
    assert away["parameters"] == away["optimizer"] == 0
    assert parts(config, "update")["optimizer"] > 0


def test_checkpointing_keeps_an_input_a_layer(run: Run) -> None:
    shape = load_shape("Qwen/Qwen2.5-7B")
    layer = 12288 * layer_activation_bytes(shape)
    with_it = parts(run("setting=paper_gtpo_7b"), "update")["activations"]
    assert with_it == 28 * 12288 * 3584 * BF16 + layer
    without = run("setting=paper_gtpo_7b", {"actor_rollout_ref.model.enable_gradient_checkpointing": False})
    assert parts(without, "update")["activations"] == 28 * layer
    offloaded = run("setting=paper_gtpo_7b", {"actor_rollout_ref.model.enable_activation_offload": True})
    assert parts(offloaded, "update")["activations"] == layer


def test_entropy_in_chunks_does_not_grow_with_the_micro_batch(run: Run) -> None:
    chunked = [
        parts(
            run("setting=paper_gtpo_7b", {"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": limit}),
            "old log-probs",
        )
        for limit in (12288, 24576)
    ]
    assert chunked[0]["entropy"] == chunked[1]["entropy"] == 2048 * 152064 * 4 * FP32
    assert chunked[1]["logits"] == 2 * chunked[0]["logits"] == 24576 * 152064 * BF16


def test_entropies_of_a_whole_micro_batch_are_float32_as_autocast_on_cuda_has_them(run: Run) -> None:
    whole = run("setting=paper_gtpo_7b", {"actor_rollout_ref.actor.entropy_from_logits_with_chunking": False})
    limit = whole.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
    assert parts(whole, "old log-probs")["entropy"] == limit * 152064 * 3 * FP32


def test_the_kv_cache_is_what_the_engine_has_left(run: Run) -> None:
    config = run("setting=paper_gtpo_7b", {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2})
    engine = memory(config).engine
    assert engine.budget == 0.75 * CAPACITY
    assert engine.weights == BF16 * 7_615_616_512 / 2
    assert engine.kv_cache == engine.budget - engine.weights - engine.workspace
    assert engine.kv_tokens == int(engine.kv_cache / (2 * 28 * 2 * 128 * BF16))


def test_without_sleep_the_engine_stays_during_the_update(run: Run) -> None:
    awake = run("setting=paper_gtpo_7b", {"actor_rollout_ref.rollout.free_cache_engine": False})
    assert parts(awake, "update")["rollout engine"] == 0.75 * CAPACITY
    assert parts(run("setting=paper_gtpo_7b"), "update")["rollout engine"] == GIB


def test_the_memory_of_a_run_without_gpus_is_that_of_all_its_processes(run: Run) -> None:
    """Qwen2.5-0.5B, one rank, worked out by hand: 494,032,768 parameters, 24 layers, a vocabulary of 151,936."""
    config = run("hardware=cpu", {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2})
    shape = load_shape("Qwen/Qwen2.5-0.5B")
    found = host_memory(config, shape, parallelism(config))
    trainer, engine = found["trainer"], found["vLLM"]
    weights, tokens = 4 * 494_032_768, 2 * (1024 + 2048)
    assert (trainer["parameters"], trainer["gradients"], trainer["optimizer"]) == (weights, weights, 2 * weights)
    assert trainer["logits"] == tokens * 151_936 * 12
    assert trainer["activations"] == tokens * 24 * 2 * layer_activation_bytes(shape)
    assert (engine["weights"], engine["KV cache"]) == (weights, 1 * GIB)  # VLLM_CPU_KVCACHE_SPACE
    two = run("hardware=cpu", {"trainer.n_gpus_per_node": 2})
    more = host_memory(two, shape, parallelism(two))
    assert more["trainer"]["parameters"] == weights  # sharded
    assert more["vLLM"] == {part: 2 * size for part, size in engine.items()}
    assert more["others"] == found["others"]
    assert total_of(found) == sum(trainer.values()) + sum(engine.values()) + found["others"]["code and libraries"]
    total, free = machine_memory()
    assert 0 < free < total < 2**50


def test_megatron_on_a_cpu_has_no_section_of_fsdp(run: Run) -> None:
    """Two tensor-parallel ranks have a copy of the model between them, in the type of Megatron's own section."""
    shape = load_shape("Qwen/Qwen2.5-0.5B")
    settings = {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2}
    config = run("backend=megatron", "hardware=cpu", settings)
    OmegaConf.set_struct(config, False)
    del config.actor_rollout_ref.actor["fsdp_config"]
    for dtype, each in (("float32", 4), ("bfloat16", 2)):
        config.actor_rollout_ref.actor.megatron.dtype = dtype
        assert host_memory(config, shape, parallelism(config))["trainer"]["parameters"] == each * 494_032_768


def test_a_quickstart_takes_what_was_measured(run: Run, tmp_path: Path) -> None:
    """The processes of one had proportional set sizes of 7.4 GiB together, with a model of 0.66 M parameters: trainer
    0.8, vLLM 2.2, others 4.4.
    """
    from gtpo_verl.tasks.model import build_model

    build_model(vocabulary_size=259, seed=0).save_pretrained(tmp_path)
    config = run("setting=quickstart", "hardware=cpu", {"actor_rollout_ref.model.path": str(tmp_path)})
    found = host_memory(config, load_shape(str(tmp_path)), parallelism(config))
    assert total_of(found) / GIB == pytest.approx(7.4, abs=0.5)
    assert sum(found["vLLM"].values()) / GIB == pytest.approx(2.2, abs=0.3)
