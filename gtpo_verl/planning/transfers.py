"""Seconds that a step spends moving bytes: collectives of the training engine, offload, weight sync, checkpoints.

FSDP gathers a layer's weights ahead of its use, so that only what is slower than the computation shows; Megatron's
tensor parallelism waits for every collective, and so does Ulysses' all-to-all. Latencies are left out.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from gtpo_verl.integrations.weights import actor_dtype
from gtpo_verl.planning.memory import BF16, FP32, MODEL_DTYPES, checkpoints_activations, engine_state
from gtpo_verl.planning.parallel import Parallelism
from gtpo_verl.planning.shapes import ModelShape
from gtpo_verl.planning.step import Step

GIGA = 1e9
MASTER_AND_ADAM = 3 * FP32  # bytes a parameter: float32 weight and Adam's two moments


@dataclass(frozen=True)
class Network:
    """Bytes per second of one GPU's links: to the others of its node, to other nodes, and to host memory."""

    node_gpus: int
    link: float
    network: float
    host: float

    @classmethod
    def of(cls, config: DictConfig, values: Mapping[str, float]) -> "Network":
        share = GIGA * values["transfer_efficiency"]
        return cls(
            node_gpus=config.trainer.n_gpus_per_node,
            link=values["gpu_link"] * share,
            network=values["gpu_network"] * share,
            host=values["host_link"] * share,
        )

    def gather(self, bytes_: float, ranks: int) -> float:
        """Seconds until each of ``ranks`` has all of ``bytes_``, of which it had a share; or of a reduce-scatter."""
        # inside a node by the link of each GPU; between nodes they enter each once, over the network of all its GPUs
        moved = bytes_ * (ranks - 1) / ranks
        inside = moved / self.link
        return inside if ranks <= self.node_gpus else max(inside, moved / (self.network * self.node_gpus))


def old_log_prob_seconds(
    shape: ModelShape, parallel: Parallelism, step: Step, network: Network, computing: float
) -> float:
    """Seconds of the forward pass over the whole batch."""
    micro_batches = step.old_log_prob_micro_batches
    exposed = _activation_collectives(shape, parallel, step, network)
    if parallel.megatron:
        return computing * (1 + _bubble(parallel, micro_batches)) + exposed
    gathered = micro_batches * network.gather(BF16 * shape.parameters, parallel.shard)
    return max(computing, gathered) + exposed


def update_seconds(
    config: DictConfig, shape: ModelShape, parallel: Parallelism, step: Step, network: Network, computing: float
) -> float:
    """Seconds of forward and backward, ``ppo_epochs`` times, with the reduction of gradients at every update."""
    actor = config.actor_rollout_ref.actor
    # forward, backward, and perhaps forward again
    repeats = actor.ppo_epochs * (3 if checkpoints_activations(config, parallel) else 2)
    exposed = repeats * _activation_collectives(shape, parallel, step, network)
    if parallel.megatron:
        share = shape.parameters / (parallel.tensor * parallel.pipeline)
        ranks = parallel.data * parallel.context
        # gradients in float32 to the rank that holds their part of the optimizer, weights in bfloat16 back
        reduced = network.gather((FP32 + BF16) * share, ranks) if ranks > 1 else 0.0
        bubble = _bubble(parallel, step.micro_batches_per_update)
        return computing * (1 + bubble) + exposed + step.updates * reduced
    gathers = 2 if actor.fsdp_config.reshard_after_forward else 1
    gathered = step.micro_batches_per_step * gathers * network.gather(BF16 * shape.parameters, parallel.shard)
    # verl reduces once per update, also over several micro-batches
    reduced = step.updates * network.gather(FP32 * shape.parameters, parallel.shard)
    return max(computing, gathered + reduced) + exposed


def _bubble(parallel: Parallelism, micro_batches: int) -> float:
    """Idle share of a pipeline without interleaving, relative to the computation."""
    return (parallel.pipeline - 1) / max(micro_batches, 1)


def _activation_collectives(shape: ModelShape, parallel: Parallelism, step: Step, network: Network) -> float:
    """Seconds of one forward pass over the batch in collectives on activations, which every layer waits for."""
    tokens = step.tokens / parallel.data  # of the ranks that share them
    seconds = 0.0
    if parallel.tensor > 1:  # sequence parallel: gather before and scatter after attention and MLP
        layers = shape.layers / parallel.pipeline
        seconds += layers * 4 * network.gather(BF16 * tokens / parallel.context * shape.hidden, parallel.tensor)
    if parallel.sequence > 1:  # Ulysses: queries, keys, values there, and the output back, each GPU its part
        width = (2 * shape.heads + 2 * shape.key_value_heads) * shape.head_size
        part = BF16 * tokens / parallel.sequence * width
        seconds += shape.layers * network.gather(part, parallel.sequence)
    return seconds


def offload_seconds(config: DictConfig, shape: ModelShape, parallel: Parallelism, network: Network) -> float:
    """Seconds of a step in which parameters go to host memory and come back, for the old-log-prob pass, the update and
    the weight sync; and the optimizer, for the update.
    """
    actor = config.actor_rollout_ref.actor
    engine = actor.megatron if parallel.megatron else actor.fsdp_config
    parameters, _, optimizer, _ = engine_state(config, shape, parallel)
    moved = 6 * parameters * bool(engine.param_offload) + 2 * optimizer * bool(engine.optimizer_offload)
    return moved / network.host


def weight_sync_seconds(shape: ModelShape, values: Mapping[str, float]) -> float:
    """Seconds until the rollout engines have the new weights, in bfloat16."""
    return BF16 * shape.parameters / (GIGA * values["weight_sync_bandwidth"])


def checkpoint_bytes(
    config: DictConfig, shape: ModelShape, parallel: Parallelism, contents: Collection[str] = ()
) -> float:
    """Bytes of one checkpoint of the actor; contents: of these of its parts alone.

    FSDP saves all in the type of its parameters; Megatron's weights are those in Hugging Face format, saved once.
    """
    actor = config.actor_rollout_ref.actor
    saved = set(actor.checkpoint.save_contents)
    if parallel.megatron:
        each = {"model": BF16, "optimizer": MASTER_AND_ADAM, "hf_model": 0 if "model" in saved else BF16}
    else:
        weight = MODEL_DTYPES[actor_dtype(config)]
        each = {"model": weight, "optimizer": 2 * weight, "hf_model": weight}
    return float(shape.parameters * sum(each[name] for name in saved & each.keys() & set(contents or each)))


def checkpoint_seconds(
    config: DictConfig, shape: ModelShape, parallel: Parallelism, values: Mapping[str, float]
) -> float:
    """Seconds of a checkpoint, spread over the steps between two of them."""
    if config.trainer.save_freq < 1:
        return 0.0
    seconds = checkpoint_bytes(config, shape, parallel) / (GIGA * values["storage_bandwidth"])
    return seconds / config.trainer.save_freq
