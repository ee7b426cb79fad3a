"""Known problems of a configuration, found before anything starts.

An *error* stops a run or makes it meaningless, a *warning* costs memory, time or accuracy, a *note* is information.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.planning.memory import (
    DTYPE_BYTES,
    ENGINE_WORKSPACE,
    GIB,
    Memory,
    entropy_bytes,
    micro_batch_tokens,
)
from gtpo_verl.planning.parallel import Parallelism
from gtpo_verl.planning.shapes import ModelShape, load_shape
from gtpo_verl.planning.step import Step

LEVELS = ("error", "warning", "note")
WRITE_RATE = 2e9  # bytes a second of a shared file system: an assumption, not measured
RANK_WRITE_RATE = 1e9  # of one process
ENTROPY_SCRATCH = 1 * GIB  # above this, entropies of a whole micro-batch get a warning


@dataclass(frozen=True)
class Finding:
    """One problem or remark; ``level`` is one of ``LEVELS``."""

    level: str
    message: str


def shape_findings(config: DictConfig, shape: ModelShape, parallel: Parallelism) -> list[Finding]:
    """Heads that do not divide over ranks, and sequences longer than the model's positions."""
    found = []
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    heads, groups = shape.heads, shape.key_value_heads
    splits = [
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", parallel.sequence, True),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", parallel.tensor, False),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", parallel.rollout_tensor, True),
    ]
    for key, size, repeats in splits:
        if heads % size:
            found.append(Finding("error", f"{key}={size} does not divide the model's {heads} attention heads."))
        elif groups % size and not (repeats and size % groups == 0):
            found.append(Finding("error", f"{key}={size} does not divide the model's {groups} key-value heads."))
    if shape.layers % parallel.pipeline:
        found.append(
            Finding(
                "error",
                f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={parallel.pipeline} does not divide "
                f"the model's {shape.layers} layers.",
            )
        )
    if parallel.sequence > 1 and not config.actor_rollout_ref.model.use_remove_padding:
        found.append(
            Finding(
                "error",
                "sequence parallelism needs packed sequences: set actor_rollout_ref.model.use_remove_padding=true.",
            )
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = rollout.max_model_len
    if longest > shape.positions:
        found.append(
            Finding(
                "error",
                f"data.max_prompt_length + data.max_response_length = {longest} exceeds the {shape.positions} "
                f"positions of {shape.name}: reduce them, or use a model with a longer context.",
            )
        )
    elif limit is not None and limit > shape.positions:
        found.append(
            Finding(
                "error",
                f"actor_rollout_ref.rollout.max_model_len={limit} exceeds the {shape.positions} positions of "
                f"{shape.name}: vLLM rejects it.",
            )
        )
    elif limit is None and shape.positions > 2 * longest:
        found.append(
            Finding(
                "warning",
                f"actor_rollout_ref.rollout.max_model_len is not set, so vLLM uses the model's {shape.positions} "
                f"positions and starts only if its KV cache holds one sequence of that length: set it to {longest}.",
            )
        )
    if actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1:
        found.append(
            Finding(
                "note",
                "one update per step: the policy is the one that sampled, so every ratio is 1 and nothing is clipped.",
            )
        )
    return found


def sampling_findings(config: DictConfig, step: Step) -> list[Finding]:
    """A yield at which dynamic sampling exceeds its budget."""
    if step.budget_prompts is None or step.generated_prompts <= step.budget_prompts:
        return []
    groups = config.algorithm.filter_groups
    kept = int(step.budget_prompts * step.sampling_yield)
    smaller = groups.on_budget == "train_smaller"
    what = f"the step trains on about {kept} of {step.prompts} groups" if smaller else "the run stops"
    return [
        Finding(
            "warning",
            f"at a yield of {step.sampling_yield:g} a step needs {step.generated_prompts} prompts, and "
            f"algorithm.filter_groups.max_num_gen_batches={groups.max_num_gen_batches} allows {step.budget_prompts}: "
            f"{what}.",
        )
    ]


def guide_findings(config: DictConfig, capacity: float) -> list[Finding]:
    """The devices of a guide's servers, and whether its weights leave them room; capacity: bytes of one."""
    from gtpo_verl.algorithms.mixed_policy import guide_config  # imports torch

    guide = guide_config(config.algorithm.guide)
    if not guide.served:
        return []
    rollout, shape = config.actor_rollout_ref.rollout, load_shape(guide.model)
    weights = DTYPE_BYTES[rollout.dtype] * shape.parameters / guide.tensor_parallel_size
    budget = rollout.gpu_memory_utilization * capacity
    room = (
        f"its weights take about {weights / GIB:.1f} GiB on each, of the {budget / GIB:.1f} GiB that "
        f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization} gives vLLM"
    )
    if weights + ENGINE_WORKSPACE >= budget:
        remedy = "raise algorithm.guide.tensor_parallel_size, or that share"
        return [Finding("error", f"the guide {shape.name} leaves no room for a KV cache: {room}: {remedy}.")]
    return [
        Finding(
            "note",
            f"the guide {shape.name} has {guide.devices} GPU{'s' * (guide.devices > 1)} of its own besides "
            f"those of trainer.*: {room}.",
        )
    ]


def memory_findings(config: DictConfig, shape: ModelShape, parallel: Parallelism, memory: Memory) -> list[Finding]:
    """Phases that do not fit, a KV cache that is too small, and entropies that take more memory than necessary."""
    found = []
    for phase in memory.phases:
        if phase.total > memory.capacity:
            largest = max((part for part in phase.parts if part != "context"), key=lambda part: phase.parts[part])
            found.append(
                Finding(
                    "error",
                    f"{phase.name} needs about {phase.total / GIB:.0f} GiB per GPU of {memory.capacity / GIB:.0f}, "
                    f"most of it for {largest} ({phase.parts[largest] / GIB:.0f} GiB): {_REMEDIES[largest]}.",
                )
            )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if memory.engine.kv_tokens < longest:
        found.append(
            Finding(
                "error",
                f"the KV cache of a rollout engine holds {memory.engine.kv_tokens:,} tokens, less than one sequence of "
                f"{longest:,}: raise actor_rollout_ref.rollout.gpu_memory_utilization or tensor_model_parallel_size.",
            )
        )
    if not config.actor_rollout_ref.actor.entropy_from_logits_with_chunking:
        scratch = entropy_bytes(config, shape, micro_batch_tokens(config, parallel, update=False), parallel)
        if scratch > ENTROPY_SCRATCH:
            found.append(
                Finding(
                    "warning",
                    f"computing the entropies of a whole micro-batch takes up to {scratch / GIB:.1f} GiB, in bfloat16: "
                    "set actor_rollout_ref.actor.entropy_from_logits_with_chunking=true.",
                )
            )
    return found


def checkpoint_findings(config: DictConfig, shape: ModelShape) -> list[Finding]:
    """What a checkpoint costs: bytes a parameter as verl's engines write them, and seconds at an assumed rate."""
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    if trainer.save_freq <= 0:
        return [Finding("note", f"trainer.save_freq={trainer.save_freq}: a run is saved only when it is stopped.")]
    contents = actor.checkpoint.save_contents
    megatron = actor.strategy == "megatron"
    weights = 2 if megatron else DTYPE_BYTES[actor.fsdp_config.model_dtype]
    optimizer = 12 if megatron else 2 * weights  # Megatron's master weights are in it
    sharded = shape.parameters * (weights * ("model" in contents) + optimizer * ("optimizer" in contents))
    merged = shape.parameters * weights * ("hf_model" in contents and not megatron)
    seconds = sharded / WRITE_RATE + merged / RANK_WRITE_RATE
    kept = trainer.max_actor_ckpt_to_keep
    disk = f"{(sharded + merged) * (kept + 1) / 1e9:,.0f} GB with the {kept} that stay" if kept else "all of them stay"
    text = (
        f"a checkpoint, every {trainer.save_freq} steps, is {(sharded + merged) / 1e9:,.1f} GB, and while one is "
        f"written {disk}; about {seconds:,.0f} s at an assumed {WRITE_RATE / 1e9:g} GB/s of all ranks together"
    )
    if merged:
        text += (
            f", {merged / RANK_WRITE_RATE:,.0f} s of them for hf_model, which one rank writes at "
            f"{RANK_WRITE_RATE / 1e9:g} GB/s while the others wait: `gtpo-verl export` makes it when it is needed"
        )
    return [Finding("note", f"{text}.")]


_REMEDIES = {
    "parameters": "shard over more GPUs, or set param_offload=true in the actor's engine",
    "gradients": "shard over more GPUs, or set param_offload=true in the actor's engine",
    "optimizer": "shard over more GPUs, or set optimizer_offload=true in the actor's engine",
    "gathered layers": "use Megatron's tensor parallelism, which does not gather layers",
    "activations": "lower ppo_max_token_len_per_gpu or the micro-batch, or split sequences over more GPUs",
    "logits": "lower ppo_max_token_len_per_gpu or the micro-batch, or split sequences over more GPUs",
    "entropy": "set actor_rollout_ref.actor.entropy_from_logits_with_chunking=true",
    "rollout engine": "lower actor_rollout_ref.rollout.gpu_memory_utilization, or offload the actor",
}


def mode_findings(config: DictConfig) -> list[Finding]:
    """What a plan leaves out: other trainer modes, and the periodic comparison of ``entropy.source=rollout``."""
    found = []
    mode, entropy = config.trainer.v1.trainer_mode, config.algorithm.entropy
    if mode != "sync":
        rollout = config.actor_rollout_ref.rollout
        own = {
            "colocate_async": "does not wait for unfinished responses, which continue in the next step",
            "separate_async": (
                f"generates while the actor trains, on {rollout.nnodes} × {rollout.n_gpus_per_node} more GPUs"
            ),
        }
        differs = own.get(mode, "is unknown to this planner")
        found.append(
            Finding(
                "warning",
                f"trainer.v1.trainer_mode={mode}: memory and time are estimated for sync, which generates all "
                f"responses of a step before it trains; {mode} {differs}.",
            )
        )
    if entropy_source(config).skips_actor_pass and entropy.check_every > 0:
        found.append(
            Finding(
                "note",
                "algorithm.entropy.source=rollout: these times are without the old-log-prob pass, which runs in the "
                f"first two steps and in one of {entropy.check_every} after them to compare entropies "
                "(algorithm.entropy.check_every).",
            )
        )
    return found


# -------------------------------------------------------------------- settings without effect


@dataclass(frozen=True)
class _Idle:
    """Keys that nothing reads if ``idle`` returns true."""

    prefixes: tuple[str, ...]
    idle: Callable[[DictConfig], bool]
    reason: str
    but: tuple[str, ...] = ()


def _at(config: DictConfig, path: str) -> Any:
    node: Any = config
    for name in path.split("."):
        node = node[name]
    return node


def _is(path: str, *values: Any) -> Callable[[DictConfig], bool]:
    return lambda config: _at(config, path) in values


def _not(path: str, *values: Any) -> Callable[[DictConfig], bool]:
    return lambda config: _at(config, path) not in values


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_FILTER, _OVERLONG = "algorithm.filter_groups", "reward.reward_kwargs.overlong_buffer_cfg"
_IDLE = (
    _Idle(
        ("algorithm.norm_adv_by_std_in_grpo",),
        # preflight refuses false
        lambda config: config.algorithm.adv_estimator != "grpo" and config.algorithm.norm_adv_by_std_in_grpo,
        "only verl's grpo estimator reads it",
    ),
    _Idle(
        ("algorithm.gamma", "algorithm.lam"),
        _is("algorithm.adv_estimator", "grpo", "gtpo", "grpo_s"),
        "the advantage estimator has neither a discount nor a trace",
    ),
    _Idle(("algorithm.pf_ppo.",), _is("algorithm.use_pf_ppo", False), "algorithm.use_pf_ppo=false"),
    _Idle(
        (f"{_ACTOR}.policy_loss.seq_",),
        _not(f"{_ACTOR}.policy_loss.loss_mode", "grpo_s"),
        "only the policy loss grpo_s has a sequence ratio",
    ),
    _Idle(
        (f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high", f"{_ACTOR}.clip_ratio_c"),
        _is(f"{_ACTOR}.policy_loss.loss_mode", "grpo_s"),
        "grpo_s clips the sequence ratio: actor_rollout_ref.actor.policy_loss.seq_clip_ratio_low and _high",
    ),
    _Idle(
        (f"{_ACTOR}.clip_ratio",),
        lambda config: True,
        "clip_ratio_low and clip_ratio_high are set",
        but=("_low", "_high", "_c"),
    ),
    _Idle((f"{_FILTER}.",), _is(f"{_FILTER}.enable", False), f"{_FILTER}.enable=false", but=("enable",)),
    _Idle(
        ("data.gen_batch_size",),
        _is(f"{_FILTER}.enable", True),
        "with dynamic sampling verl fetches prompts one by one; the number in flight is set by "
        f"{_FILTER}.max_inflight_gen_batches",
    ),
    _Idle(
        (f"{_OVERLONG}.", "reward.reward_kwargs.max_resp_len"),
        _is(f"{_OVERLONG}.enable", False),
        f"{_OVERLONG}.enable=false",
        but=("enable",),
    ),
    _Idle(
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        _is(f"{_ACTOR}.use_dynamic_bsz", True),
        f"micro-batches are sized by tokens ({_ACTOR}.ppo_max_token_len_per_gpu)",
    ),
    _Idle(
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"),
        _is(f"{_ACTOR}.use_dynamic_bsz", False),
        f"micro-batches are sized by responses: set {_ACTOR}.use_dynamic_bsz=true",
    ),
    _Idle(
        ("algorithm.rollout_correction.rollout_",),
        _is("algorithm.entropy.source", "rollout"),
        "with algorithm.entropy.source=rollout, the ratio is taken to the rollout's log-probs, and the clip bounds it",
    ),
    _Idle(
        ("algorithm.rollout_correction.rollout_is_",),
        _is("algorithm.rollout_correction.rollout_is", None),
        "algorithm.rollout_correction.rollout_is=null",
    ),
    _Idle(
        ("algorithm.rollout_correction.rollout_rs_",),
        _is("algorithm.rollout_correction.rollout_rs", None),
        "algorithm.rollout_correction.rollout_rs=null",
    ),
    _Idle(
        ("algorithm.rollout_correction.loss_type",),
        _not(f"{_ACTOR}.policy_loss.loss_mode", "bypass_mode"),
        "only verl's policy loss bypass_mode reads it",
    ),
    _Idle((f"{_ACTOR}.kl_loss_",), _is(f"{_ACTOR}.use_kl_loss", False), f"{_ACTOR}.use_kl_loss=false"),
    _Idle(
        ("algorithm.kl_ctrl.", "algorithm.kl_penalty"),
        _is("algorithm.use_kl_in_reward", False),
        "algorithm.use_kl_in_reward=false",
    ),
    _Idle((f"{_ACTOR}.grad_clip",), lambda config: True, f"verl reads {_ACTOR}.optim.clip_grad"),
    _Idle(("critic.",), _not("algorithm.adv_estimator", "gae"), "none of the estimators has a critic"),
    _Idle(
        ("reward_model.", "custom_reward_function.", "sandbox_fusion."),
        lambda config: True,
        "verl's current trainer reads reward.*",
    ),
)  # fmt: skip


def _method_rules(config: DictConfig) -> list[_Idle]:
    """Settings of methods that this run does not train, and of a length penalty that it does not use."""
    from gtpo_verl.algorithms.registry import algorithm_of, algorithms  # it imports torch, which --help does without

    trained = algorithm_of(config)
    name = trained.label if trained else f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    others = tuple(f"algorithm.{method.name}." for method in algorithms().values() if method is not trained)
    rules = [_Idle(others, lambda config: True, f"this run trains {name}")]
    if trained and "length_denominator" in {field.name for field in fields(trained.config)}:
        penalty = f"algorithm.{trained.name}.length_penalty"
        rules.append(
            _Idle(
                (f"algorithm.{trained.name}.length_denominator",),
                _not(penalty, "soft"),
                f"only {penalty}=soft has a slope",
            )
        )
    return rules


def idle_findings(config: DictConfig, overrides: Sequence[str]) -> list[Finding]:
    """Overrides without effect in this run, each with the reason."""
    found = []
    rules = (*_method_rules(config), *_IDLE)
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        for rule in rules:
            prefix = next((prefix for prefix in rule.prefixes if key.startswith(prefix)), None)
            if prefix is None or key.removeprefix(prefix) in rule.but or not rule.idle(config):
                continue
            found.append(Finding("warning", f"{override} has no effect: {rule.reason}."))
            break
    return found
