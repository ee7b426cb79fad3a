"""Checks a run before it starts: what would make it fail, and what it would silently do differently.

:func:`check` needs no verl and takes about a second; ``integrations.checks`` follows once verl is imported, still
before Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import check_path_in_job, files_of
from gtpo_verl.data.traces import check_traces
from gtpo_verl.errors import UserError, first_line, refuse, within
from gtpo_verl.files import file_in_the_way, read_json
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.vllm.requirements import check_rollout
from gtpo_verl.limits import check_limits
from gtpo_verl.planning.step import batch_problems
from gtpo_verl.runs import checkpoints
from gtpo_verl.runs.checkpoints import Layout, Start
from gtpo_verl.runs.guards import read_bounds
from gtpo_verl.seeds import LARGEST
from gtpo_verl.versions import check_vllm, installed_version

if TYPE_CHECKING:
    from gtpo_verl.algorithms import Algorithm
    from gtpo_verl.algorithms.mixed_policy import GuideConfig

HUB_TIMEOUT = 5.0  # seconds
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
NOT_FINITE = ("stop", "skip")
ON_BUDGET = ("train_smaller", "stop")
NORM_BY_STD_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo")  # verl's, which read norm_adv_by_std_in_grpo


def check(config: DictConfig) -> None:
    """Check paths, columns, sizes and modes of a composed configuration.

    Raises:
        UserError: the first problem, and what to do about it.
    """
    _check_seed(config)
    _check_run_dir(config)
    _check_guards(config)
    for note in _check_algorithm(config):
        print(f"note: {note}", flush=True)
    _check_backend(config)
    _check_entropy_source(config)
    _check_sizes(config)
    _check_model(config)
    _check_guide_model(config)
    check_data(config)
    _check_guide_columns(config)
    start = find_start(config)
    if start.message:
        print(f"warning: {start.message}", flush=True)


def problems(config: DictConfig) -> tuple[list[str], list[str]]:
    """Check a configuration without model, files and verl; returns errors, at most one per kind of check, and notes."""
    errors: list[str] = []
    notes: list[str] = []
    for examine in (_check_seed, _check_guards, _check_algorithm, _check_backend, _check_entropy_source, _check_sizes):
        try:
            notes.extend(examine(config) or ())
        except UserError as error:
            errors.append(str(error))
    return errors, notes


def check_evaluation(config: DictConfig, command: str) -> None:
    """Check what a command that samples and verifies needs of a configuration: lengths, model, verifier. Its validation
    files come later: those of an embedded task are made first.

    Raises:
        UserError: the first problem, and what to do about it.
    """
    _check_seed(config)
    check_limits(config)
    refuse(_length_problems(config))
    _check_model(config)
    if config.reward.reward_model.enable:
        raise UserError(f"reward.reward_model.enable=true: `gtpo-verl {command}` needs a verifier, not a reward model.")


def check_output(directory: Path) -> Path:
    """The absolute path of a directory for results, which need not be there yet.

    Raises:
        UserError: it would be lost with a submitted job, or a file is in the way.
    """
    check_path_in_job("--output", directory)
    if blocked := file_in_the_way(directory.resolve()):
        raise UserError(f"--output {directory}: {blocked} is a file, not a directory.")
    return directory.resolve()


def _check_seed(config: DictConfig) -> None:
    seed = config.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST:
        raise UserError(f"seed={seed}: it must be a whole number from 0 to {LARGEST}.")


def _check_run_dir(config: DictConfig) -> None:
    if config.trainer.run_dir is None:  # a plan has none
        return
    run_dir = Path(config.trainer.run_dir)
    if blocked := file_in_the_way(run_dir):
        raise UserError(f"trainer.run_dir={run_dir}: {blocked} is a file, not a directory.")


def _check_guards(config: DictConfig) -> None:
    guards = config.guards
    timeouts = ("stall_timeout", "phase_timeout", "reward_timeout")
    for key, high in (*((key, inf) for key in timeouts), ("max_failed_share", 1)):
        value = guards[key]
        if value is None and high == inf:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            most = "" if high == inf else f" and at most {high}"
            raise UserError(f"guards.{key}={value}: it must be a number above 0{most}.")
    if guards.not_finite not in NOT_FINITE:
        raise UserError(f"guards.not_finite={guards.not_finite}: choose {' or '.join(NOT_FINITE)}.")
    skipped = guards.max_skipped_steps
    if isinstance(skipped, bool) or not isinstance(skipped, int) or skipped < 0:
        raise UserError(f"guards.max_skipped_steps={skipped}: it must be a whole number, at least 0.")
    bounds: Any = OmegaConf.to_container(guards.bounds, resolve=True)
    if not isinstance(bounds, dict) or not all(entry is None or isinstance(entry, dict) for entry in bounds.values()):
        raise UserError("guards.bounds: each entry is a section, such as NAME: {metric: actor/grad_norm, max: 10}.")
    read_bounds(bounds)


# -------------------------------------------------------------------- algorithm


def _check_algorithm(config: DictConfig) -> list[str]:
    """Returns notes on unusual settings of the algorithm that is chosen."""
    from gtpo_verl.algorithms import algorithm_of, algorithms  # imports torch

    notes: list[str] = []
    for name, entry in algorithms().items():
        _, unusual = entry.configure(config.algorithm.get(name) or {})
        if config.algorithm.adv_estimator == entry.estimator:
            notes.extend(f"algorithm.{name}: {note}" for note in unusual)
    _check_loss(config.actor_rollout_ref.actor)
    chosen = algorithm_of(config)
    _check_ignored(config, chosen)
    _check_penalty(config, chosen)
    _check_guide(config)
    if chosen is not None:
        notes.extend(_without_effect(config, chosen))
    return notes + _check_dynamic_sampling(config)


def _without_effect(config: DictConfig, chosen: Algorithm) -> Iterator[str]:
    """What of the method this run leaves without effect."""
    actor = config.actor_rollout_ref.actor
    updates = config.data.train_batch_size // max(actor.ppo_mini_batch_size, 1) * actor.ppo_epochs
    if chosen.needs_several_updates and updates == 1 and not entropy_source(config).skips_actor_pass:
        yield (
            f"{chosen.label} acts on ratios other than 1, and with one update a step all of them are 1: this run "
            f"trains with DAPO's loss, averaged as loss_agg_mode={actor.loss_agg_mode} says. A smaller "
            "actor_rollout_ref.actor.ppo_mini_batch_size makes several updates."
        )
    if chosen.trains_without_contrast and config.algorithm.filter_groups.enable:
        yield (
            f"{chosen.label} trains on groups of one polarity too, and dynamic sampling removes them: set "
            "algorithm.filter_groups.enable=false."
        )
    if chosen.trains_without_contrast and "rewards" not in chosen.needs:
        overlong = config.reward.reward_kwargs.overlong_buffer_cfg
        if overlong.enable:
            yield f"{chosen.label} reads the verdict alone: the overlong penalty has no effect on it."


def _check_ignored(config: DictConfig, chosen: Algorithm | None) -> None:
    """Refuse settings of verl that change other estimators, and that the one in use does not read."""
    settings = config.algorithm
    name = f"algorithm.adv_estimator={settings.adv_estimator}"
    if settings.use_kl_in_reward and chosen is not None and chosen.verl_estimator is None:
        raise UserError(
            f"algorithm.use_kl_in_reward=true has no effect with {name}, whose advantages come from verdicts and "
            "entropies: set it to false. actor_rollout_ref.actor.use_kl_loss=true puts a KL term into the loss of "
            "every algorithm."
        )
    if not settings.norm_adv_by_std_in_grpo and settings.adv_estimator not in NORM_BY_STD_ESTIMATORS:
        raise UserError(f"algorithm.norm_adv_by_std_in_grpo=false has no effect with {name}: set it to true.")
    if settings.use_pf_ppo and settings.adv_estimator != "gae":
        raise UserError(f"algorithm.use_pf_ppo=true has no effect with {name}: only gae reads it. Set it to false.")
    if config.reward.reward_model.enable and not config.reward.custom_reward_function.path:
        raise UserError(
            "reward.reward_model.enable=true without a reward function gives scores and no verdict (`acc`): name a "
            "function that asks the reward model with reward.custom_reward_function.path=FILE.py and .name=FUNCTION."
        )


def _check_penalty(config: DictConfig, chosen: Algorithm | None) -> None:
    """Check that all algorithms would get the same soft overlong penalty."""
    overlong = "reward.reward_kwargs.overlong_buffer_cfg"
    settings, manager = config.reward.reward_kwargs.overlong_buffer_cfg, config.reward.reward_manager
    if not settings.enable:
        name = chosen.name if chosen else ""
        if config.algorithm.get(name, {}).get("length_penalty") == "soft":
            raise UserError(
                f"algorithm.{name}.length_penalty=soft takes its lengths from {overlong}, which is off: set "
                f"{overlong}.enable=true, or algorithm.{name}.length_penalty=none."
            )
        return
    if settings.penalty_factor <= 0:
        raise UserError(
            f"{overlong}.penalty_factor={settings.penalty_factor}: it must be above 0; {overlong}.enable=false "
            "switches the penalty off."
        )
    if manager.source == "register" and manager.name != "dapo":
        raise UserError(
            f"reward.reward_manager.name={manager.name} applies no overlong penalty: set it to dapo, or "
            f"{overlong}.enable=false."
        )


def _check_loss(actor: DictConfig) -> None:
    from gtpo_verl.algorithms import algorithm

    key, loss = "actor_rollout_ref.actor.policy_loss.loss_mode", actor.policy_loss.loss_mode
    grpo_s = algorithm("grpo_s")
    if loss == grpo_s.loss and actor.loss_agg_mode != grpo_s.aggregation:
        raise UserError(
            f"{key}={loss} averages over sequences: set actor_rollout_ref.actor.loss_agg_mode={grpo_s.aggregation} (it "
            f"is {actor.loss_agg_mode})."
        )
    if loss == "gtpo":  # of earlier versions
        raise UserError(f"{key}=gtpo is now verl's own, which computes the same: set it to vanilla.")
    if loss == "vanilla" and not (actor.clip_ratio_c or 0) > 1:
        raise UserError(
            f"actor_rollout_ref.actor.clip_ratio_c={_written(actor.clip_ratio_c)} (dual clip) must be above 1 with "
            f"{key}=vanilla: set it to 1e9 to switch the dual clip off."
        )


def _check_guide(config: DictConfig) -> None:
    """Check that this run can have rows of a guide, and divide by their probabilities."""
    from gtpo_verl.algorithms.mixed_policy import guide_config  # imports torch

    guide = guide_config(config.algorithm.guide)
    if guide.mode == "off":
        return
    key, settings, rollout = f"algorithm.guide.mode={guide.mode}", config.algorithm, config.actor_rollout_ref.rollout
    _check_guided_method(config, guide)
    if guide.reserved >= rollout.n:
        raise UserError(
            f"{key} may give {guide.reserved} of the actor_rollout_ref.rollout.n={rollout.n} responses of a group to "
            "the guide, and the policy's own decide whether: lower algorithm.guide.n_off or n_zero, or raise n."
        )
    for name, value, needed, why in (
        ("trainer.v1.trainer_mode", config.trainer.v1.trainer_mode, "sync", "the guide's rows have no weight version"),
        ("reward.reward_model.enable", config.reward.reward_model.enable, False, "verdicts are needed in the rollout"),
        (
            "distillation.enabled",
            (config.get("distillation") or {}).get("enabled", False),
            False,
            "it has a loss of its own",
        ),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay",
            rollout.get("enable_rollout_routing_replay", False),
            False,
            "no rollout has routed the guide's tokens",
        ),
        (
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
            rollout.agent.get("agent_loop_manager_class"),
            None,
            "this project's own gives rows to the guide",
        ),
    ):
        if value != needed:
            raise UserError(f"{key} does not go with {name}={value} ({why}): set it to {_written(needed)}.")
    if entropy_source(config).skips_actor_pass:
        raise UserError(
            f"{key} does not go with algorithm.entropy.source=rollout (no rollout has measured the guide's rows): set "
            "it to both or actor."
        )
    if guide.adv_scope == "on_only" and settings.use_kl_in_reward:
        raise UserError(
            "algorithm.guide.adv_scope=on_only does not read the KL term of algorithm.use_kl_in_reward=true: set it to "
            "false, or adv_scope=union."
        )
    if guide.ratio == "phi":
        _check_guide_probabilities(rollout)
    if guide.served and rollout.name != "vllm":
        raise UserError(
            f"algorithm.guide.source=server runs the guide in vLLM, and actor_rollout_ref.rollout.name={rollout.name}: "
            "set it to vllm."
        )
    if guide.served and rollout.logprobs_mode != "processed_logprobs":
        raise UserError(
            f"algorithm.guide.source=server needs log-probs at the training temperature: set "
            f"actor_rollout_ref.rollout.logprobs_mode=processed_logprobs (it is {rollout.logprobs_mode})."
        )


def _check_guided_method(config: DictConfig, guide: GuideConfig) -> None:
    """Check that the run's advantages and loss say what a guide's row is to them."""
    from gtpo_verl.algorithms import algorithm_of
    from gtpo_verl.algorithms.mixed_policy import GUIDED_LOSSES, has_rule

    key, estimator = f"algorithm.guide.mode={guide.mode}", config.algorithm.adv_estimator
    loss, chosen = config.actor_rollout_ref.actor.policy_loss.loss_mode, algorithm_of(config)
    if loss not in GUIDED_LOSSES:
        raise UserError(
            f"{key} does not go with actor_rollout_ref.actor.policy_loss.loss_mode={loss}, which has no rule for the "
            f"guide's rows: choose one of {', '.join(GUIDED_LOSSES)}."
        )
    if chosen is None or chosen.guide is None:
        raise UserError(
            f"{key} does not go with algorithm.adv_estimator={estimator}, which has no rule for the guide's rows: "
            "docs/mixed-policy.md lists the methods that have one, such as algo=dapo_mixed, luffy, gtpo and grpo_s."
        )
    if not has_rule(chosen, guide):
        raise UserError(
            f"algorithm.guide.adv_scope={guide.adv_scope} does not go with algorithm.adv_estimator={estimator}, whose "
            "advantages are over all rows of a group: set it to union."
        )
    if guide.in_entropy_stats and (chosen.guide == "alike" or "old_log_probs" in chosen.needs):
        why = "compares no tokens" if chosen.guide == "alike" else "reads old log-probs, which guide rows lack"
        raise UserError(
            f"algorithm.guide.in_entropy_stats=true does not go with algorithm.adv_estimator={estimator}, which {why}: "
            "set it to false."
        )


def _check_guide_probabilities(rollout: DictConfig) -> None:
    """Check that the policy's probabilities and the guide's are of whole distributions."""
    for name, needed in (("top_p", 1.0), ("top_k", -1), ("calculate_log_probs", True)):
        if rollout[name] != needed:
            raise UserError(
                f"algorithm.guide.ratio=phi divides by the guide's probabilities, which are those of the whole "
                f"distribution: set actor_rollout_ref.rollout.{name}={_written(needed)} (it is {rollout[name]}), or "
                "algorithm.guide.ratio=one and algorithm.guide.clip=none."
            )


def _written(value: Any) -> str:
    """A value as an override has it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _check_dynamic_sampling(config: DictConfig) -> list[str]:
    """Returns notes on what it does not do in this run."""
    settings = config.algorithm.filter_groups
    age = settings.carry_over.max_age
    if settings.on_budget not in ON_BUDGET:
        raise UserError(f"algorithm.filter_groups.on_budget={settings.on_budget}: choose {' or '.join(ON_BUDGET)}.")
    for key, value, least in (
        ("max_num_gen_batches", settings.max_num_gen_batches, 0),
        ("max_inflight_gen_batches", settings.max_inflight_gen_batches, 1),
        ("carry_over.max_age", age, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"algorithm.filter_groups.{key}={value}: it must be a whole number, at least {least}.")
    if settings.enable and config.skip.rollout_tq.enable:
        raise UserError(
            "skip.rollout_tq.enable=true replays stored batches, which dynamic sampling would filter again: set "
            "algorithm.filter_groups.enable=false."
        )
    mode, sampler = config.trainer.v1.trainer_mode, config.trainer.v1.sampler.get("custom_sampler") or {}
    if age == 0 and settings.enable and settings.max_num_gen_batches and mode != "sync":
        note = (
            f"trainer.v1.trainer_mode={mode} has no budget for dynamic sampling: "
            "algorithm.filter_groups.max_num_gen_batches and on_budget have no effect, and prompts without contrast "
            "are replaced without limit."
        )
        return [note]
    if age == 0:
        return []
    if not settings.enable:
        raise UserError(
            f"algorithm.filter_groups.carry_over.max_age={age} carries over what dynamic sampling leaves, and it is "
            "off: set algorithm.filter_groups.enable=true, or max_age=0."
        )
    if mode != "sync" or sampler.get("path"):
        raise UserError(
            f"algorithm.filter_groups.carry_over.max_age={age} needs trainer.v1.trainer_mode=sync with its own "
            "sampler: the asynchronous trainers keep their surplus already "
            "(trainer.v1.sampler.max_off_policy_threshold). Set max_age=0."
        )
    corrected = config.algorithm.rollout_correction.rollout_is is not None
    if not entropy_source(config).skips_actor_pass and not corrected:
        note = (
            "algorithm.filter_groups.carry_over: old log-probs of groups carried over are recomputed by the current "
            "actor, so the clipped ratio does not see their age; algorithm.rollout_correction.rollout_is=token "
            "corrects for it, and with algorithm.entropy.source=rollout the ratio is relative to the policy that "
            "generated them."
        )
        return [note]
    return []


def _check_backend(config: DictConfig) -> None:
    if config.actor_rollout_ref.actor.strategy == "megatron" and config.trainer.device == "cpu":
        raise UserError("backend=megatron needs GPUs: with hardware=cpu choose backend=fsdp.")


def _check_entropy_source(config: DictConfig) -> None:
    source = entropy_source(config)
    if config.algorithm.rollout_correction.bypass_mode and not source.skips_actor_pass:
        raise UserError(
            f"algorithm.rollout_correction.bypass_mode=true skips the pass that computes the actor's entropies, and "
            f"algorithm.entropy.source={source.name} needs them: set algorithm.entropy.source=rollout, or "
            "bypass_mode=false."
        )
    if config.algorithm.entropy.check_every < 0:
        raise UserError(
            f"algorithm.entropy.check_every={config.algorithm.entropy.check_every}: it must be a number of steps, or 0 "
            "for never."
        )
    if source.from_rollout:
        check_rollout(config.actor_rollout_ref.rollout)
        installed = installed_version("vllm")
        if installed is not None:  # it may be installed on the rollout's nodes only, where every server checks again
            check_vllm(installed)


# -------------------------------------------------------------------- sizes


def _check_sizes(config: DictConfig) -> None:
    refuse(_size_problems(config))


def _size_problems(config: DictConfig) -> Iterator[str]:
    """All sizes that do not fit each other."""
    batches = batch_problems(config)  # numbers outside their range come first
    rollout = config.actor_rollout_ref.rollout
    if rollout.n < 2:
        yield f"actor_rollout_ref.rollout.n={rollout.n}: a group needs at least two responses to be compared."
    yield from batches
    yield from _separate_server_problems(config)
    yield from _length_problems(config)


def _separate_server_problems(config: DictConfig) -> Iterator[str]:
    """What ``separate_async`` asserts when the trainer is made, minutes after the start."""
    if config.trainer.v1.trainer_mode != "separate_async":
        return
    for name in ("nnodes", "n_gpus_per_node"):
        value = config.actor_rollout_ref.rollout[name]
        if value < 1:
            yield (
                f"actor_rollout_ref.rollout.{name}={value}: trainer.v1.trainer_mode=separate_async has rollout servers "
                "on devices of their own; say how many, besides those of trainer."
            )
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    updates = config.trainer.v1.separate_async.parameter_sync_step
    if batch % mini == 0 and updates * mini != batch:
        yield (
            f"trainer.v1.separate_async.parameter_sync_step={updates}: it must be {batch // mini}, the updates of a "
            "step (data.train_batch_size / actor_rollout_ref.actor.ppo_mini_batch_size)."
        )


def _length_problems(config: DictConfig) -> Iterator[str]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    reward = config.reward.reward_kwargs
    overlong = reward.overlong_buffer_cfg
    limit = data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < data.max_prompt_length + data.max_response_length:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is shorter than data.max_prompt_length + "
            f"data.max_response_length = {data.max_prompt_length + data.max_response_length}: raise it, or set it to "
            "null."
        )
    if not overlong.enable:
        return
    if reward.max_resp_len != limit:
        why = (
            "the full penalty would never be reached"
            if reward.max_resp_len > limit
            else "verl's DAPO reward would go beyond the full penalty, and GTPO's and GRPO-S's would not"
        )
        yield (
            f"reward.reward_kwargs.max_resp_len={reward.max_resp_len} differs from data.max_response_length={limit}: "
            f"{why}. Remove the override; max_resp_len follows the limit."
        )
    if not 0 < overlong.len <= limit:
        yield (
            f"reward.reward_kwargs.overlong_buffer_cfg.len={overlong.len} must be between 1 and "
            f"data.max_response_length={limit}: it is the number of tokens before the limit over which the penalty "
            "grows."
        )


# -------------------------------------------------------------------- model and data


def _check_model(config: DictConfig) -> None:
    model = config.actor_rollout_ref.model
    if model.path is None:
        raise UserError(
            "no model: set actor_rollout_ref.model.path=DIRECTORY (Hugging Face format) or =ORGANISATION/NAME on the "
            "hub."
        )
    _check_model_at("actor_rollout_ref.model.path", str(model.path), model.get("tokenizer_path"))


def _check_guide_model(config: DictConfig) -> None:
    """Check that the guide of `source=server` is there."""
    from gtpo_verl.algorithms.mixed_policy import guide_config  # imports torch

    guide = guide_config(config.algorithm.guide)
    if not guide.served:
        return
    assert guide.model is not None
    _check_model_at("algorithm.guide.model", guide.model, None)


def _check_model_at(key: str, path: str, tokenizer: str | None) -> None:
    """Check the model that a key names, in a directory, on remote storage or on the hub."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        _check_model_files(f"{key}={directory}", directory, Path(tokenizer).expanduser() if tokenizer else directory)
        return
    if "://" in path:
        return  # verl copies it from remote storage
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"{key}={path}: no such directory.")
    _check_hub(key, path)


def _check_model_files(key: str, directory: Path, tokenizer: Path) -> None:
    """Check that a local model has a readable configuration, a tokenizer and whole weights."""
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"{key} has no config.json: it must be a model in Hugging Face format.")
    if not isinstance(_json(file), dict):
        raise UserError(f"{key}: its config.json is not readable: copy the model again.")
    if tokenizer.is_dir() and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{tokenizer} has no tokenizer: copy it there, or set actor_rollout_ref.model.tokenizer_path.")
    indices = [*directory.glob("*.safetensors.index.json"), *directory.glob("*.bin.index.json")]
    listed = {name for index in indices for name in set(((_json(index) or {}).get("weight_map") or {}).values())}
    weights = {*listed, *(file.name for pattern in ("*.safetensors", "*.bin") for file in directory.glob(pattern))}
    if not weights:
        raise UserError(f"{key} has no weights (*.safetensors or *.bin): copy them there.")
    for name in sorted(weights):
        problem = _weights_problem(directory / name)
        if problem:
            raise UserError(f"{key}: {name} {problem}: copy the model again.")


def _json(file: Path) -> Any:
    """What a JSON file holds; None where it is not JSON."""
    try:
        return read_json(file)
    except (ValueError, RecursionError):
        return None


def _weights_problem(file: Path) -> str | None:
    """Whether a file of weights is missing or was cut off; a safetensors file begins with the places of its tensors."""
    if not file.is_file():
        return "is missing"
    if file.suffix != ".safetensors":
        return None
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        try:
            places = json.loads(content.read(min(length, file.stat().st_size)))
            end = max((entry["data_offsets"][1] for name, entry in places.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return "is no safetensors file, or was cut off"
    return "was cut off" if file.stat().st_size < 8 + length + end else None


def _check_hub(key: str, name: str) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        within(HUB_TIMEOUT, lambda: get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT))
    except HfHubHTTPError as error:
        raise UserError(f"{key}={name}: no such directory, and the hub says: {first_line(error)}") from error
    except Exception as error:
        raise UserError(
            f"{key}={name}: no such directory, and the hub could not be asked within "
            f"{HUB_TIMEOUT:.0f} s ({type(error).__name__}): give a local directory."
        ) from error


def find_start(config: DictConfig) -> Start:
    """Find the checkpoint from which the run goes on; nothing is changed.

    Raises:
        UserError: it would start again although there are checkpoints, or cannot load the one that there is.
    """
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    layout = Layout(actor.strategy, trainer.nnodes * trainer.n_gpus_per_node, tuple(actor.checkpoint.load_contents))
    if trainer.resume_mode == "auto":
        return checkpoints.find_start(Path(trainer.default_local_dir), layout)
    if trainer.resume_mode == "disable":
        return Start(None)
    if trainer.resume_mode != "resume_path":
        raise UserError(f"trainer.resume_mode={trainer.resume_mode}: choose auto, disable or resume_path.")
    if not trainer.resume_from_path:
        raise UserError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N.")
    folder = Path(trainer.resume_from_path)
    checkpoints.check_folder(folder, layout)
    return Start(folder)


def check_data(config: DictConfig, keys: Sequence[str] = ("train_files", "val_files")) -> None:
    """Check that the local files under ``data`` exist, and that verl can read their columns.

    Raises:
        UserError: the first problem, and what to do about it.
    """
    import pyarrow.parquet as pq

    columns = {config.data.prompt_key, config.data.reward_fn_key, "reward_model"}
    for key in keys:
        if config.data[key] is None:
            raise UserError(
                f"no data: set data.{key}=FILE.parquet in verl's schema (columns {', '.join(sorted(columns))})."
            )
        for file in files_of(config.data[key]):
            if "://" in file:
                continue
            if Path(file).is_dir():
                raise UserError(
                    f"data.{key}={file} is a directory: name its files, in brackets: [A.parquet,B.parquet]."
                )
            if not Path(file).is_file():
                raise UserError(f"data.{key}={file}: no such file.")
            try:
                table = pq.ParquetFile(file)
            except Exception as error:
                raise UserError(f"data.{key}={file} is not a parquet file: {first_line(error)}") from error
            missing = columns - set(table.schema_arrow.names)
            if missing:
                raise UserError(
                    f"data.{key}={file} lacks the column{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}; "
                    f"it has {', '.join(table.schema_arrow.names)}."
                )
            for problem in _schema_problems(table.schema_arrow, config.data.prompt_key):
                raise UserError(f"data.{key}={file}: {problem}")
            if table.metadata.num_rows == 0:
                raise UserError(f"data.{key}={file} has no rows.")
            if (
                key == "train_files"
                and table.metadata.num_rows < config.data.train_batch_size
                and len(files_of(config.data[key])) == 1
            ):
                raise UserError(
                    f"data.{key}={file} has {table.metadata.num_rows} prompts, fewer than "
                    f"data.train_batch_size={config.data.train_batch_size}."
                )


def _check_guide_columns(config: DictConfig) -> None:
    """Check that the guide's columns are there; ``integrations.checks`` reads them, once there is a tokenizer."""
    from gtpo_verl.algorithms.mixed_policy import guide_config  # imports torch

    guide = guide_config(config.algorithm.guide)
    if guide.mode == "off" or guide.served:
        return
    for file in files_of(config.data.train_files):
        if "://" not in file:
            check_traces(file, limit=config.data.max_response_length, with_log_probs=guide.ratio == "phi")


def _schema_problems(schema: Any, prompt_key: str) -> Iterator[str]:
    """What keeps verl from reading these columns, by their Arrow types."""
    import pyarrow as pa

    prompt, reward = schema.field(prompt_key).type, schema.field("reward_model").type
    messages = prompt.value_type if pa.types.is_list(prompt) or pa.types.is_large_list(prompt) else None
    if messages is None or not pa.types.is_struct(messages) or {"role", "content"} - {field.name for field in messages}:
        yield (
            f"{prompt_key} must be a list of messages, each with role and content; it is {prompt}. "
            "`gtpo-verl prepare-data` makes such files."
        )
    if not pa.types.is_struct(reward) or "ground_truth" not in {field.name for field in reward}:
        yield (
            f"reward_model must be a dict with ground_truth, the right answer; it is {reward}. "
            "`gtpo-verl prepare-data` makes such files."
        )
