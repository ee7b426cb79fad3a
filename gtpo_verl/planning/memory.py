"""Memory of one GPU in each phase of a step, component by component, and the size of the KV cache.

FSDP keeps float32 parameters, gradients and Adam states of its shard and gathers a layer at a time in bfloat16;
Megatron keeps bfloat16 weights and float32 gradients of its model-parallel share and, with the distributed optimizer, a
data-parallel share of float32 weights and Adam states. The phases run one after the other: the largest decides.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.weights import actor_dtype
from gtpo_verl.planning.parallel import Parallelism, parallelism
from gtpo_verl.planning.shapes import ModelShape, load_shape

GIB = 1024**3
BF16, FP32 = 2, 4
# {name: bytes} of what verl's FSDP engines take, and of what vLLM does; `auto` is the model's own, here 16 bits
MODEL_DTYPES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
ENGINE_DTYPES = {"auto": 2, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}

# Constants that do not follow from shapes, in bytes; printed with every plan.
CONTEXT = 2 * GIB  # CUDA context, NCCL buffers, memory that the allocator cannot use
ASLEEP = 1 * GIB  # kept by a sleeping rollout engine: CUDA graphs, its own context
ENGINE_WORKSPACE = 3 * GIB  # activations and CUDA graphs of an active rollout engine


@dataclass(frozen=True)
class Engine:
    """A rollout engine's share of one GPU. ``kv_tokens`` is the capacity of one replica, over all of its GPUs."""

    budget: float
    weights: float
    workspace: float
    kv_cache: float
    kv_bytes_per_token: int
    kv_tokens: int


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU in bytes: by phase of the step and component, and the engine's; ``capacity`` is the GPU's."""

    capacity: float
    phases: dict[str, dict[str, float]]
    engine: Engine

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, in GiB."""
        engine = {name: getattr(self.engine, name) / GIB for name in ("budget", "weights", "workspace", "kv_cache")}
        return {
            "capacity_gib": self.capacity / GIB,
            "phases_gib": {name: {k: v / GIB for k, v in parts.items()} for name, parts in self.phases.items()},
            "totals_gib": {name: sum(parts.values()) / GIB for name, parts in self.phases.items()},
            "engine_gib": engine,
            "kv_bytes_per_token": self.engine.kv_bytes_per_token,
            "kv_tokens_per_replica": self.engine.kv_tokens,
        }


def memory_of(config: DictConfig, shape: ModelShape, parallel: Parallelism, capacity: float) -> Memory:
    """Estimate the memory of one GPU of ``capacity`` bytes, for a composed run whose batches divide."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    engine_config = actor.megatron if parallel.megatron else actor.fsdp_config
    parameters, gradients, optimizer, gathered = engine_state(config, shape, parallel)
    always = bool(engine_config.get("offload_policy", False))  # offloaded to host memory while the engine generates
    parameters_away, optimizer_away = engine_config.param_offload or always, engine_config.optimizer_offload or always
    # Megatron's gradient buffers stay unless parameters are offloaded; FSDP's gradients are gone after the update
    buffers = gradients if parallel.megatron and not parameters_away else 0.0
    engine = engine_of(config, shape, capacity)
    asleep = float(ASLEEP) if rollout.free_cache_engine else engine.budget

    held = {  # by the trainer, outside of an update
        "context": float(CONTEXT),
        "parameters": parameters,
        "gradients": buffers,
        "optimizer": 0.0 if optimizer_away else optimizer,
    }
    generate = held | {"parameters": 0.0 if parameters_away else parameters, "rollout engine": engine.budget}
    tokens = micro_batch_tokens(config, parallel, update=False)
    score = held | {
        "gathered layers": gathered,
        # of one layer, which is all that a forward pass without gradients keeps
        "activations": tokens * BF16 * 3 * (shape.intermediate + shape.hidden) / parallel.tensor,
        "logits": _logits(shape, tokens, parallel, backward=False),
        "entropy": entropy_bytes(config, shape, tokens, parallel),
        "rollout engine": asleep,
    }
    tokens = micro_batch_tokens(config, parallel, update=True)
    update = held | {
        "gradients": gradients,
        "optimizer": optimizer,
        # gathered for the backward pass too, and the gradient of a layer before its reduction, in bfloat16 and float32
        "gathered layers": gathered + (0 if parallel.megatron else (BF16 + FP32) * max(shape.block, shape.head)),
        "activations": _activations(config, shape, tokens, parallel),
        "logits": _logits(shape, tokens, parallel, backward=True),
        "rollout engine": asleep,
    }
    if actor.calculate_entropy or actor.entropy_coeff != 0:
        update["entropy"] = entropy_bytes(config, shape, tokens, parallel)
    return Memory(capacity, {"generate": generate, "old log-probs": score, "update": update}, engine)


def engine_state(config: DictConfig, shape: ModelShape, parallel: Parallelism) -> tuple[float, float, float, float]:
    """Parameters, gradients, optimizer and gathered layers on one GPU during an update, in bytes."""
    return (_megatron if parallel.megatron else _fsdp)(config, shape, parallel)


def _fsdp(config: DictConfig, shape: ModelShape, parallel: Parallelism) -> tuple[float, float, float, float]:
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    each = MODEL_DTYPES[actor_dtype(config)]
    share = 0.0 if fsdp.offload_policy else shape.parameters / parallel.shard  # FSDP2's policy keeps it in host memory
    # sharded: the current layer, the prefetched one, embedding and head; on one GPU: the bfloat16 copy of a layer
    layers = 2 * shape.block + shape.embedding + shape.head if parallel.shard > 1 else shape.block
    return each * share, each * share, 2 * each * share, float(BF16 * layers)


def _megatron(config: DictConfig, shape: ModelShape, parallel: Parallelism) -> tuple[float, float, float, float]:
    layers = math.ceil(shape.layers / parallel.pipeline)
    if parallel.pipeline == 1:
        ends = shape.embedding + shape.head
    else:
        ends = max(shape.embedding, shape.head or shape.embedding)  # a tied head is copied to the last stage
    share = (layers * shape.block + ends) / parallel.tensor
    distributed = config.actor_rollout_ref.actor.megatron.use_distributed_optimizer
    spread = parallel.data * parallel.context if distributed else 1
    return BF16 * share, FP32 * share, 3 * FP32 * share / spread, 0.0


def micro_batch_tokens(config: DictConfig, parallel: Parallelism, *, update: bool) -> int:
    """Largest number of tokens of a micro-batch on one GPU."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    prompts = actor.ppo_mini_batch_size if update else config.data.train_batch_size
    rows = prompts * rollout.n // parallel.data
    limit = OmegaConf.select(config, micro_batch_key(config, update=update))
    if actor.use_dynamic_bsz:
        return min(limit, math.ceil(rows * longest / parallel.split))
    return math.ceil(limit * longest / parallel.split)


def micro_batch_key(config: DictConfig, *, update: bool) -> str:
    """The setting that says how large a micro-batch is, of updates or of old log-probs."""
    prefix = "actor.ppo" if update else "rollout.log_prob"
    unit = "max_token_len" if config.actor_rollout_ref.actor.use_dynamic_bsz else "micro_batch_size"
    return f"actor_rollout_ref.{prefix}_{unit}_per_gpu"


def layer_activation_bytes(shape: ModelShape) -> int:
    """Bytes per token that autograd saves for the backward pass of one layer, in bfloat16 with fused attention."""
    # float32 input and scale, bfloat16 result before and after the weight; queries, keys, values, output and the
    # float32 log-sum-exp of each head; gate, its activation, up and their product
    norms = 2 * (8 * shape.hidden + 4)
    attention = 4 * shape.heads * shape.head_size + 4 * shape.key_value_width + 4 * shape.heads
    return norms + attention + 8 * shape.intermediate


def _activations(config: DictConfig, shape: ModelShape, tokens: int, parallel: Parallelism) -> float:
    """Bytes that an update keeps for the backward pass on one GPU. With a pipeline, the first stage keeps one
    micro-batch per stage of its share of the layers: the same as without.
    """
    model = config.actor_rollout_ref.model
    whole = tokens * layer_activation_bytes(shape) / parallel.tensor
    if checkpoints_activations(config, parallel):
        kept = 0.0 if model.enable_activation_offload and not parallel.megatron else BF16 * shape.hidden * shape.layers
        return tokens * kept / parallel.tensor + whole
    return shape.layers * whole


def checkpoints_activations(config: DictConfig, parallel: Parallelism) -> bool:
    """Whether a layer's activations are recomputed in the backward pass."""
    if parallel.megatron:
        options = config.actor_rollout_ref.actor.megatron.override_transformer_config
        return options.get("recompute_granularity") == "full"
    return bool(config.actor_rollout_ref.model.enable_gradient_checkpointing)


def _logits(shape: ModelShape, tokens: int, parallel: Parallelism, *, backward: bool) -> float:
    """Logits over the vocabulary and the temporaries of the log-prob, in bytes."""
    # FSDP: bfloat16, without a copy; in an update flash-attention's cross entropy writes their gradient in place.
    # Megatron: float32 softmax besides, and in the old-log-prob pass a copy for the entropy.
    values = tokens * shape.vocabulary / parallel.tensor
    if not parallel.megatron:
        return values * BF16
    return values * (BF16 + FP32) if backward else values * (2 * BF16 + FP32)


def entropy_bytes(config: DictConfig, shape: ModelShape, tokens: int, parallel: Parallelism) -> float:
    """Scratch memory of the entropies of one micro-batch: softmax, product and log-sum-exp over the vocabulary, float32
    by autocast on CUDA, of the logits' type for Megatron; with chunking a copy of the chunk as well.
    """
    actor = config.actor_rollout_ref.actor
    width = shape.vocabulary / parallel.tensor
    if actor.entropy_from_logits_with_chunking:
        return min(tokens, actor.entropy_from_logits_chunk_size) * width * 4 * FP32
    return tokens * width * 3 * (BF16 if parallel.megatron else FP32)


def engine_of(config: DictConfig, shape: ModelShape, capacity: float) -> Engine:
    """vLLM's share of a GPU: weights, workspace, and the rest as KV cache."""
    rollout = config.actor_rollout_ref.rollout
    each = ENGINE_DTYPES[rollout.dtype]
    budget = rollout.gpu_memory_utilization * capacity
    weights = each * shape.parameters / (rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size)
    sampler = FP32 * 2 * rollout.max_num_seqs * shape.vocabulary  # logits of a full batch, and their log-softmax
    workspace = ENGINE_WORKSPACE + sampler
    per_token = shape.key_value_bytes(rollout.tensor_model_parallel_size, each)
    cache = max(budget - weights - workspace, 0.0)
    per_replica = cache / per_token * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    return Engine(budget, weights, workspace, cache, per_token, int(per_replica))


# -------------------------------------------------------------------- a run without GPUs

# What a process holds whatever the model is, in bytes: fitted to the proportional set sizes of a step of SmolLM2-135M,
# measured alone, and compared with those of a quickstart (docs/inside/planning.md).
TRAINER_PROCESS = 1.1 * GIB  # of a rank
ENGINE_PROCESSES = 1.3 * GIB  # vLLM's server and engine of a rank
OTHER_PROCESSES = 3.9 * GIB  # command, Ray, task runner, TransferQueue, agent loops, reward workers
HostMemory = dict[str, dict[str, float]]  # {processes: {component: bytes}}


def host_memory(config: DictConfig, shape: ModelShape, parallel: Parallelism) -> HostMemory:
    """The most memory that a run without GPUs takes, in bytes by processes and component: in an update of padded
    sequences at their limit. Nothing is offloaded; types are float32 but for the engine's.
    """
    rollout, variables = config.actor_rollout_ref.rollout, config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    trained = MODEL_DTYPES[actor_dtype(config)] * shape.parameters
    copies = parallel.gpus / (parallel.shard * parallel.tensor * parallel.pipeline)
    tokens = micro_batch_tokens(config, parallel, update=True) * parallel.gpus
    activations = 2 * shape.layers * layer_activation_bytes(shape)  # those of bfloat16, twice as wide
    if checkpoints_activations(config, parallel):
        activations = FP32 * shape.hidden * shape.layers
    cache = float(variables.get("VLLM_CPU_KVCACHE_SPACE") or 4)  # vLLM's default
    return {
        "trainer": {
            "code and libraries": TRAINER_PROCESS * parallel.gpus,
            "parameters": trained * copies,
            "gradients": trained * copies,
            "optimizer": 2 * trained * copies,
            "activations": float(tokens * activations),
            "logits": float(tokens * shape.vocabulary * 3 * FP32),  # with their gradient and the softmax behind it
        },
        "vLLM": {
            "code and libraries": ENGINE_PROCESSES * parallel.gpus,
            "weights": float(ENGINE_DTYPES[rollout.dtype] * shape.parameters * parallel.replicas),
            "KV cache": cache * GIB * parallel.replicas,
        },
        "others": {"code and libraries": OTHER_PROCESSES},
    }


def total_of(memory: HostMemory) -> float:
    """Bytes of all processes together."""
    return sum(sum(parts.values()) for parts in memory.values())


def known_host_memory(config: DictConfig) -> HostMemory | None:
    """`host_memory` of a composed run; None on GPUs, where its model's shape is not known, or sizes do not divide."""
    if config.trainer.device != "cpu":
        return None
    try:
        return host_memory(config, load_shape(config.actor_rollout_ref.model.path), parallelism(config))
    except UserError:
        return None


def machine_memory() -> tuple[float, float]:
    """Bytes that this machine, or the container around this process, has, and how many of the machine's are free.

    What other processes take of a container's own limit is not known here.
    """
    memory = psutil.virtual_memory()
    limits = [float(memory.total)]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(file).read_text().strip() if Path(file).is_file() else "max"
        limits += [float(text)] if text.isdigit() else []
    return min(limits), min(float(memory.available), *limits)
