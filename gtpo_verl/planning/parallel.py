"""Parallelism of a run, read from the configuration as verl reads it; nothing heavy is imported."""

from dataclasses import dataclass

from omegaconf import DictConfig

from gtpo_verl.errors import UserError


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the parallel groups, in GPUs. ``data`` ranks see different responses, ``sequence`` (FSDP) or ``context``
    GPUs split one; ``shard`` GPUs share a copy of FSDP's parameters; each of ``replicas`` engines has ``rollout`` GPUs.
    """

    gpus: int
    megatron: bool
    data: int
    tensor: int
    pipeline: int
    context: int
    sequence: int
    shard: int
    rollout: int
    rollout_tensor: int
    replicas: int

    @property
    def split(self) -> int:
        """Number of GPUs over which the tokens of a micro-batch are split."""
        return self.context * self.sequence


def parallelism(config: DictConfig) -> Parallelism:
    """Read the parallel sizes from a composed run. Raises UserError: sizes do not divide; the message names the keys to
    change.
    """
    actor, engine = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    megatron = actor.strategy == "megatron"
    tensor = pipeline = context = sequence = shard = 1
    if megatron:
        tensor, pipeline = actor.megatron.tensor_model_parallel_size, actor.megatron.pipeline_model_parallel_size
        context = actor.megatron.context_parallel_size
    else:
        older = actor.get("ulysses_sequence_parallel_size") or 1  # which verl reads if it is set
        sequence = older if older > 1 else actor.fsdp_config.ulysses_sequence_parallel_size
        wanted = actor.fsdp_config.fsdp_size
        shard = gpus if wanted < 0 or wanted >= gpus else wanted
    rollout = engine.tensor_model_parallel_size * engine.data_parallel_size * engine.pipeline_model_parallel_size
    servers = 0  # devices of the engines that `separate_async` has beside the trainer's, or instead of them
    if config.trainer.v1.trainer_mode == "separate_async":
        servers = (engine.nnodes or 0) * (engine.n_gpus_per_node or 0)
    hybrid = config.actor_rollout_ref.hybrid_engine or not servers
    key, of_rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    ulysses, share = f"{key}.fsdp_config.ulysses_sequence_parallel_size", f"{key}.fsdp_config.fsdp_size"
    copy_takes = f"one copy of the model takes {tensor} × {pipeline} × {context} GPUs"
    engine_takes = f"one rollout engine takes {rollout} GPUs", f"{of_rollout}.tensor_model_parallel_size"
    for size, there, section, what, remedy in (
        (tensor * pipeline * context, gpus, "trainer", copy_takes, f"{key}.megatron.*"),
        (sequence, gpus, "trainer", f"{ulysses}={sequence} takes so many GPUs", "it"),
        (shard, gpus, "trainer", f"{share}={shard} takes so many GPUs", "it"),
        *([(rollout, gpus, "trainer", *engine_takes)] if hybrid else []),
        *([(rollout, servers, of_rollout, *engine_takes)] if servers else []),
    ):
        if size < 1 or there % size:
            raise UserError(
                f"{what}, of which {there} is not a multiple: change {remedy}, or the number of GPUs with "
                f"{section}.nnodes and {section}.n_gpus_per_node."
            )
    return Parallelism(
        gpus=gpus,
        megatron=megatron,
        data=gpus // (tensor * pipeline * context * sequence),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        sequence=sequence,
        shard=shard,
        rollout=rollout,
        rollout_tensor=engine.tensor_model_parallel_size,
        replicas=(gpus if hybrid else servers) // rollout,
    )
