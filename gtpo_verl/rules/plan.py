"""Rules of the figures of a plan: shapes that do not split, memory that is not there, and what a plan leaves out."""

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.standalone import guide_of
from gtpo_verl.planning.memory import (
    ENGINE_DTYPES,
    ENGINE_WORKSPACE,
    GIB,
    entropy_bytes,
    micro_batch_key,
    micro_batch_tokens,
)
from gtpo_verl.planning.plan import Plan
from gtpo_verl.planning.shapes import load_shape
from gtpo_verl.planning.transfers import checkpoint_bytes
from gtpo_verl.problems import SEVERITIES, Problem, evaluate, note, warning
from gtpo_verl.rules import ranges, sizes, stages
from gtpo_verl.rules.model import beyond_the_machine
from gtpo_verl.rules.ranges import ACTOR, GROUPS, ROLLOUT

RANK_RATE = 1.0  # GB/s at which one process writes: an assumption, not measured
ENTROPY_SCRATCH = 1 * GIB  # above this, entropies of a whole micro-batch get a warning


def splits(config: DictConfig, plan: Plan) -> Iterator[Problem]:
    """Heads and layers divide over ranks."""
    shape, parallel = plan.shape, plan.parallel
    for key, size, repeats in (
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", parallel.sequence, True),
        (f"{ACTOR}.megatron.tensor_model_parallel_size", parallel.tensor, False),
        (f"{ROLLOUT}.tensor_model_parallel_size", parallel.rollout_tensor, True),
    ):
        groups = shape.key_value_heads
        if shape.heads % size:
            yield Problem(f"{key}={size} does not divide the model's {shape.heads} attention heads.")
        elif groups % size and not (repeats and size % groups == 0):
            yield Problem(f"{key}={size} does not divide the model's {groups} key-value heads.")
    if shape.layers % parallel.pipeline:
        yield Problem(
            f"{ACTOR}.megatron.pipeline_model_parallel_size={parallel.pipeline} does not divide the model's "
            f"{shape.layers} layers."
        )
    if parallel.sequence > 1 and not config.actor_rollout_ref.model.use_remove_padding:
        yield Problem(
            "sequence parallelism needs packed sequences: set actor_rollout_ref.model.use_remove_padding=true."
        )


def positions(config: DictConfig, plan: Plan) -> Iterator[Problem]:
    """Sequences are no longer than the model's positions."""
    longest, limit = plan.step.longest_sequence, config.actor_rollout_ref.rollout.max_model_len
    has = f"the {plan.shape.positions} positions of {plan.shape.name}"
    if longest > plan.shape.positions:
        yield Problem(
            f"{sizes.PROMPT_AND_RESPONSE} = {longest} exceeds {has}: reduce them, or use a model with a longer context."
        )
    elif limit is not None and limit > plan.shape.positions:
        yield Problem(f"{ROLLOUT}.max_model_len={limit} exceeds {has}: vLLM rejects it.")
    elif limit is None and plan.shape.positions > 2 * longest:
        yield warning(
            f"{ROLLOUT}.max_model_len is not set, so vLLM uses the model's {plan.shape.positions} positions and starts "
            f"only if its KV cache holds one sequence of that length: set it to {longest}."
        )


def steps(config: DictConfig, plan: Plan) -> Iterator[Problem]:
    """Where nothing is clipped; and the yield at which dynamic sampling exceeds its budget."""
    step, groups = plan.step, config.algorithm.filter_groups
    if step.updates == 1:
        yield note(
            "one update per step: the policy is the one that sampled, so every ratio is 1 and nothing is clipped."
        )
    if step.budget_prompts is None or step.generated_prompts <= step.budget_prompts:
        return
    kept = int(step.budget_prompts * step.sampling_yield)
    smaller = groups.on_budget == "train_smaller"
    what = f"the step trains on about {kept} of {step.prompts} groups" if smaller else "the run stops"
    yield warning(
        f"at a yield of {step.sampling_yield:g} a step needs {step.generated_prompts} prompts, and "
        f"{GROUPS}.max_num_gen_batches={groups.max_num_gen_batches} allows {step.budget_prompts}: {what}."
    )


def _remedy(config: DictConfig, phase: str, part: str) -> str:
    """What makes the largest part of a phase of `memory_of` smaller."""
    if part in ("parameters", "gradients", "optimizer"):
        megatron = config.actor_rollout_ref.actor.strategy == "megatron"
        if phase == "update" or (phase, part) == ("old log-probs", "parameters"):  # there, offloaded between or not
            own = f", or set {ACTOR}.fsdp_config.offload_policy=true, of FSDP2"
            return f"shard over more GPUs{'' if megatron else own}"
        offload = (
            f"{'megatron' if megatron else 'fsdp_config'}.{'optimizer' if part == 'optimizer' else 'param'}_offload"
        )
        return f"shard over more GPUs, or set {ACTOR}.{offload}=true"
    return {
        "gathered layers": "use Megatron's tensor parallelism, which does not gather layers",
        "entropy": f"set {ACTOR}.entropy_from_logits_with_chunking=true",
        "rollout engine": f"lower {ROLLOUT}.gpu_memory_utilization, or offload the actor",
    }.get(part, f"lower {micro_batch_key(config, update=phase == 'update')}, or split sequences over more GPUs")


def memory(config: DictConfig, plan: Plan) -> Iterator[Problem]:
    """Every phase fits into a GPU and a sequence into the KV cache, or a run without GPUs into this machine."""
    found = plan.memory
    if plan.host_memory is not None:
        yield from beyond_the_machine(config, plan.host_memory)
    if found is None:
        return
    for phase, parts in found.phases.items():
        total = sum(parts.values())
        if total > found.capacity:
            largest = max((part for part in parts if part != "context"), key=lambda part: parts[part])
            yield Problem(
                f"{phase} needs about {total / GIB:.0f} GiB per GPU of {found.capacity / GIB:.0f}, most of it for "
                f"{largest} ({parts[largest] / GIB:.0f} GiB): {_remedy(config, phase, largest)}."
            )
    longest = plan.step.longest_sequence
    if found.engine.kv_tokens < longest:
        yield Problem(
            f"the KV cache of a rollout engine holds {found.engine.kv_tokens:,} tokens, less than one sequence of "
            f"{longest:,}: raise {ROLLOUT}.gpu_memory_utilization or tensor_model_parallel_size."
        )
    if not config.actor_rollout_ref.actor.entropy_from_logits_with_chunking:
        tokens = micro_batch_tokens(config, plan.parallel, update=False)
        scratch = entropy_bytes(config, plan.shape, tokens, plan.parallel)
        if scratch > ENTROPY_SCRATCH:
            yield warning(
                f"computing the entropies of a whole micro-batch takes up to {scratch / GIB:.1f} GiB: set "
                f"{ACTOR}.entropy_from_logits_with_chunking=true."
            )


def guide_devices(config: DictConfig, plan: Plan) -> Iterator[Problem]:
    """The devices of a guide's servers, and whether its weights leave them room."""
    guide = guide_of(config)
    if plan.memory is None or not guide.served:
        return
    rollout, shape = config.actor_rollout_ref.rollout, load_shape(guide.model)
    weights = ENGINE_DTYPES[rollout.dtype] * shape.parameters / guide.tensor_parallel_size
    budget = rollout.gpu_memory_utilization * plan.memory.capacity
    room = (
        f"its weights take about {weights / GIB:.1f} GiB on each, of the {budget / GIB:.1f} GiB that "
        f"{ROLLOUT}.gpu_memory_utilization={rollout.gpu_memory_utilization} gives vLLM"
    )
    if weights + ENGINE_WORKSPACE >= budget:
        remedy = "raise algorithm.guide.tensor_parallel_size, or that share"
        yield Problem(f"the guide {shape.name} leaves no room for a KV cache: {room}: {remedy}.")
        return
    yield note(
        f"the guide {shape.name} has {guide.devices} GPU{'s' * (guide.devices > 1)} of its own besides those of "
        f"trainer.*: {room}."
    )


def checkpoints(config: DictConfig, plan: Plan) -> Iterator[Problem]:
    """What a checkpoint costs."""
    trainer = config.trainer
    if trainer.save_freq <= 0:
        yield note(f"trainer.save_freq={trainer.save_freq}: a run is saved only when it is stopped.")
        return
    giga = checkpoint_bytes(config, plan.shape, plan.parallel) / 1e9
    merged = 0.0 if plan.parallel.megatron else checkpoint_bytes(config, plan.shape, plan.parallel, {"hf_model"}) / 1e9
    rate, kept = plan.assumptions["storage_bandwidth"].value, trainer.max_actor_ckpt_to_keep
    disk = f"{giga * (kept + 1):,.0f} GB with the {kept} that stay" if kept else "all of them stay"
    text = (
        f"a checkpoint, every {trainer.save_freq} steps, is {giga:,.1f} GB, and while one is written {disk}; about "
        f"{(giga - merged) / rate + merged / RANK_RATE:,.0f} s at an assumed {rate:g} GB/s of all ranks together"
    )
    if merged:
        text += (
            f", {merged / RANK_RATE:,.0f} s of them for hf_model, which one rank writes at {RANK_RATE:g} GB/s while "
            "the others wait: `gtpo-verl export` makes it when it is needed"
        )
    yield note(f"{text}.")


def left_out(config: DictConfig, plan: Plan) -> Iterator[Problem]:
    """What a plan leaves out: other trainer modes, and the periodic comparison of `entropy.source=rollout`."""
    mode, entropy, rollout = config.trainer.v1.trainer_mode, config.algorithm.entropy, config.actor_rollout_ref.rollout
    if mode != "sync":
        differs = {
            "colocate_async": "does not wait for unfinished responses, which continue in the next step",
            "separate_async": (
                f"generates while the actor trains, on {rollout.nnodes} × {rollout.n_gpus_per_node} more GPUs"
            ),
        }.get(mode, "is unknown to this planner")
        yield warning(
            f"trainer.v1.trainer_mode={mode}: memory and time are estimated for sync, which generates all responses of "
            f"a step before it trains; {mode} {differs}."
        )
    if entropy_source(config).skips_actor_pass and entropy.check_every > 0:
        yield note(
            "algorithm.entropy.source=rollout: these times are without the old-log-prob pass, which runs in the first "
            f"two steps and in one of {entropy.check_every} after them to compare entropies "
            "(algorithm.entropy.check_every)."
        )


RULES = (splits, positions, steps, memory, guide_devices, checkpoints, left_out)


def plannable(config: DictConfig) -> bool:
    """Whether the numbers of a configuration make a step: a plan can show its other errors beside the figures."""
    return not (evaluate(ranges.RULES, config) or evaluate([sizes.batches], config))


def problems(config: DictConfig, plan: Plan, given: Sequence[str] = ()) -> list[Problem]:
    """What is wrong with a plan and its configuration, errors first; given: the user's overrides."""
    found = [*stages.problems(config, given), *evaluate(RULES, config, plan)]
    return sorted(found, key=lambda problem: SEVERITIES.index(problem.severity))
