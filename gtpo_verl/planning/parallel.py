"""Parallelism of a run, read from the configuration as verl reads it; nothing heavy is imported."""

from dataclasses import dataclass

from omegaconf import DictConfig

from gtpo_verl.errors import UserError


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the parallel groups, in GPUs.

    ``data`` ranks see different responses. A response is split over ``sequence`` GPUs under FSDP (Ulysses), over
    ``context`` under Megatron. ``shard`` GPUs share one copy of FSDP's parameters. ``replicas`` rollout engines of
    ``rollout`` GPUs each serve the policy.
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
        sizes = actor.megatron
        tensor, pipeline = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
        context = sizes.context_parallel_size
    else:
        sequence, wanted = sequence_parallel(config), actor.fsdp_config.fsdp_size
        shard = gpus if wanted < 0 or wanted >= gpus else wanted
    rollout = engine.tensor_model_parallel_size * engine.data_parallel_size * engine.pipeline_model_parallel_size
    multiple, actor_key = f"{gpus} GPUs is not a multiple of", "actor_rollout_ref.actor"
    _check(
        gpus % (tensor * pipeline * context),
        f"{multiple} {tensor} × {pipeline} × {context}, the tensor, pipeline and context parallel sizes: change "
        f"{actor_key}.megatron.*, or trainer.nnodes and trainer.n_gpus_per_node.",
    )
    _check(
        gpus % sequence,
        f"{multiple} {actor_key}.fsdp_config.ulysses_sequence_parallel_size={sequence}: change one of them.",
    )
    _check(shard < 1 or gpus % shard, f"{multiple} {actor_key}.fsdp_config.fsdp_size={shard}: change one of them.")
    _check(
        gpus % rollout,
        f"one rollout engine takes {rollout} GPUs, of which {gpus} is not a multiple: change "
        "actor_rollout_ref.rollout.tensor_model_parallel_size, or the number of GPUs with trainer.nnodes and "
        "trainer.n_gpus_per_node.",
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
        replicas=gpus // rollout,
    )


def _check(rest: int, problem: str) -> None:
    if rest:
        raise UserError(problem)


def sequence_parallel(config: DictConfig) -> int:
    """Ulysses' size: verl reads the older key of the actor if it is set, and FSDP's otherwise."""
    actor = config.actor_rollout_ref.actor
    older = actor.ulysses_sequence_parallel_size
    return older if older > 1 else actor.fsdp_config.ulysses_sequence_parallel_size
