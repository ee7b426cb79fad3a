"""What is known to go wrong with a configuration, found before anything starts.

An *error* stops a run or makes it meaningless, a *warning* costs memory, time or accuracy, a *note* is worth knowing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.planning.memory import GIB, Memory, entropy_bytes, micro_batch_tokens
from gtpo_verl.planning.parallel import Parallelism
from gtpo_verl.planning.shapes import ModelShape
from gtpo_verl.planning.step import Step

ENTROPY_SCRATCH = 1 * GIB  # from here on, whole-batch entropies are worth a warning


@dataclass(frozen=True)
class Finding:
    """One thing to know; ``level`` is error, warning or note."""

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
            found.append(Finding("error", f"{key}={size}: the model's {heads} attention heads do not divide by it."))
        elif groups % size and not (repeats and size % groups == 0):
            found.append(Finding("error", f"{key}={size}: the model's {groups} key-value heads do not divide by it."))
    if shape.layers % parallel.pipeline:
        found.append(
            Finding(
                "error",
                f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={parallel.pipeline}: {shape.layers} layers do not divide.",
            )
        )
    if parallel.sequence > 1 and not config.actor_rollout_ref.model.use_remove_padding:
        found.append(
            Finding(
                "error",
                "sequence parallelism works on packed sequences: set actor_rollout_ref.model.use_remove_padding=true.",
            )
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = rollout.max_model_len
    if longest > shape.positions:
        found.append(
            Finding(
                "error",
                f"data.max_prompt_length + data.max_response_length = {longest} exceeds the {shape.positions} positions of {shape.name}: "
                "shorten them, or take a model with longer positions.",
            )
        )
    elif limit is not None and limit > shape.positions:
        found.append(
            Finding(
                "error",
                f"actor_rollout_ref.rollout.max_model_len={limit} exceeds the {shape.positions} positions of {shape.name}: vLLM refuses it.",
            )
        )
    elif limit is None and shape.positions > 2 * longest:
        found.append(
            Finding(
                "warning",
                f"actor_rollout_ref.rollout.max_model_len is not set, so the engine prepares for the model's {shape.positions} tokens where "
                f"{longest} are needed: it starts only if its KV cache holds one sequence that long.",
            )
        )
    if actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1:
        found.append(
            Finding(
                "note",
                "one update a step: the policy is the one that sampled, so every ratio is 1 and no clip range does anything.",
            )
        )
    return found


def sampling_findings(config: DictConfig, step: Step) -> list[Finding]:
    """A yield that the budget of dynamic sampling does not reach."""
    if step.budget_prompts is None or step.generated_prompts <= step.budget_prompts:
        return []
    groups = config.algorithm.filter_groups
    kept = int(step.budget_prompts * step.sampling_yield)
    what = f"trains on about {kept} of {step.prompts} groups" if groups.on_budget == "train_smaller" else "stops"
    return [
        Finding(
            "warning",
            f"at a yield of {step.sampling_yield:g} a step needs {step.generated_prompts} prompts, and "
            f"algorithm.filter_groups.max_num_gen_batches={groups.max_num_gen_batches} allows {step.budget_prompts}: it {what}.",
        )
    ]


def memory_findings(config: DictConfig, shape: ModelShape, parallel: Parallelism, memory: Memory) -> list[Finding]:
    """Phases that do not fit, a KV cache that is too small, and logits that need not be there."""
    found = []
    for phase in memory.phases:
        if phase.total > memory.capacity:
            largest = max((part for part in phase.parts if part != "context"), key=lambda part: phase.parts[part])
            found.append(
                Finding(
                    "error",
                    f"{phase.name} needs about {phase.total / GIB:.0f} of {memory.capacity / GIB:.0f} GiB a GPU, most of it for "
                    f"{largest} ({phase.parts[largest] / GIB:.0f} GiB): {_REMEDIES[largest]}.",
                )
            )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if memory.engine.kv_tokens < longest:
        found.append(
            Finding(
                "error",
                f"the KV cache of a rollout engine holds {memory.engine.kv_tokens:,} tokens, less than one sequence of {longest:,}: raise "
                "actor_rollout_ref.rollout.gpu_memory_utilization or tensor_model_parallel_size.",
            )
        )
    if not config.actor_rollout_ref.actor.entropy_from_logits_with_chunking:
        scratch = entropy_bytes(config, shape, micro_batch_tokens(config, parallel, update=False), parallel)
        if scratch > ENTROPY_SCRATCH:
            found.append(
                Finding(
                    "warning",
                    f"entropies of a whole micro-batch of logits take up to {scratch / GIB:.1f} GiB and are computed in bfloat16: set "
                    "actor_rollout_ref.actor.entropy_from_logits_with_chunking=true.",
                )
            )
    return found


_REMEDIES = {
    "parameters": "shard over more GPUs, or set param_offload=true in the actor's engine",
    "gradients": "shard over more GPUs, or set param_offload=true in the actor's engine",
    "optimizer": "shard over more GPUs, or set optimizer_offload=true in the actor's engine",
    "gathered layers": "use Megatron's tensor parallelism, which gathers nothing",
    "activations": "lower ppo_max_token_len_per_gpu or the micro-batch, or split sequences over more GPUs",
    "logits": "lower ppo_max_token_len_per_gpu or the micro-batch, or split sequences over more GPUs",
    "entropy": "set actor_rollout_ref.actor.entropy_from_logits_with_chunking=true",
    "rollout engine": "lower actor_rollout_ref.rollout.gpu_memory_utilization, or offload the actor",
}


def mode_findings(config: DictConfig) -> list[Finding]:
    """What the arithmetic of a step leaves out: other ways to generate, and the comparison of ``entropy.source=rollout``."""
    found = []
    mode, entropy = config.trainer.v1.trainer_mode, config.algorithm.entropy
    if mode != "sync":
        rollout = config.actor_rollout_ref.rollout
        own = {
            "colocate_async": "does not wait for responses under way, which go on in the next step",
            "separate_async": f"generates while the actor trains, on {rollout.nnodes} × {rollout.n_gpus_per_node} more GPUs",
        }
        differs = own.get(mode, "is not known here")
        found.append(
            Finding(
                "warning",
                f"trainer.v1.trainer_mode={mode}: memory and time here are those of sync, which generates all responses of a step "
                f"before it trains; {mode} {differs}.",
            )
        )
    if entropy.source == "rollout" and entropy.check_every > 0:
        found.append(
            Finding(
                "note",
                "algorithm.entropy.source=rollout: the pass before the updates is not in these times; it runs in the first two steps, and "
                f"in one of {entropy.check_every} after them, to compare (algorithm.entropy.check_every).",
            )
        )
    return found


# -------------------------------------------------------------------- settings without effect


@dataclass(frozen=True)
class _Idle:
    """Keys that nothing reads when ``idle`` holds."""

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
    _Idle(("algorithm.gtpo.",), _not("algorithm.adv_estimator", "gtpo"), "the advantage estimator is another one"),
    _Idle(("algorithm.grpo_s.",), _not("algorithm.adv_estimator", "grpo_s"), "the advantage estimator is another one"),
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
    _Idle((f"{_ACTOR}.clip_ratio",), lambda config: True, "clip_ratio_low and clip_ratio_high are set", but=("_low", "_high", "_c")),
    _Idle((f"{_FILTER}.",), _is(f"{_FILTER}.enable", False), f"{_FILTER}.enable=false", but=("enable",)),
    _Idle(
        ("data.gen_batch_size",),
        _is(f"{_FILTER}.enable", True),
        "with dynamic sampling verl fetches prompts one by one; what is in flight is set by "
        f"{_FILTER}.max_inflight_gen_batches",
    ),
    _Idle(
        (f"{_OVERLONG}.", "reward.reward_kwargs.max_resp_len"),
        _is(f"{_OVERLONG}.enable", False),
        f"{_OVERLONG}.enable=false",
        but=("enable",),
    ),
    *(
        _Idle(
            (f"algorithm.{name}.length_denominator",),
            _not(f"algorithm.{name}.length_penalty", "soft"),
            f"only algorithm.{name}.length_penalty=soft has a slope",
        )
        for name in ("gtpo", "grpo_s")
    ),
    _Idle(
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        _is(f"{_ACTOR}.use_dynamic_bsz", True),
        f"micro-batches are cut by tokens ({_ACTOR}.ppo_max_token_len_per_gpu)",
    ),
    _Idle(
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"),
        _is(f"{_ACTOR}.use_dynamic_bsz", False),
        f"micro-batches are cut by responses: set {_ACTOR}.use_dynamic_bsz=true",
    ),
    _Idle(
        ("algorithm.rollout_correction.rollout_",),
        _is("algorithm.entropy.source", "rollout"),
        "with algorithm.entropy.source=rollout the ratio starts at the rollout's log-probs and the clip bounds it",
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
    _Idle(("critic.",), _not("algorithm.adv_estimator", "gae"), "no estimator here has a critic"),
    _Idle(
        ("reward_model.", "custom_reward_function.", "sandbox_fusion."),
        lambda config: True,
        "verl's current trainer reads reward.*",
    ),
)  # fmt: skip


def idle_findings(config: DictConfig, overrides: Sequence[str]) -> list[Finding]:
    """Overrides that change nothing in this run, each with the reason."""
    found = []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        for rule in _IDLE:
            prefix = next((prefix for prefix in rule.prefixes if key.startswith(prefix)), None)
            if prefix is None or key.removeprefix(prefix) in rule.but or not rule.idle(config):
                continue
            found.append(Finding("warning", f"{override} has no effect: {rule.reason}."))
            break
    return found
