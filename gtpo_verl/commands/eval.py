"""``gtpo-verl eval``: a model's answers to a validation set, sampled and judged as the training would, and their figures."""

import argparse
import datetime as dt
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl import preflight
from gtpo_verl.config import GROUPS, compose_config, files_of, prepare, with_hardware
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.records import (
    PROBLEMS_FILE,
    RECORD_FILE,
    ProblemFile,
    differences,
    open_evaluation,
    write_summary,
)
from gtpo_verl.evaluation.summary import Figure, Sample, SourceSummary, paired_changes, summarize
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.runs.reader import flatten

EPILOG = """\
MODEL is
  a run of gtpo-verl train      its trained model, with the settings and the validation set of the run
  a checkpoint of such a run    RUN/checkpoints/global_step_N, the same for an earlier step
  a model                       a directory in Hugging Face format, or ORGANISATION/NAME on the hub

examples:
  gtpo-verl eval outputs/gtpo-20260101-120000                       after the training
  gtpo-verl eval outputs/gtpo-20260101-120000 --before              the model that the training started from
  gtpo-verl eval outputs/gtpo-20260101-120000 data.val_files=data/aime-2025.parquet actor_rollout_ref.rollout.val_kwargs.n=32
  gtpo-verl eval Qwen/Qwen2.5-1.5B setting=default data.val_files=data/math-500.parquet trainer.n_gpus_per_node=8

Every problem is written to problems.jsonl as it is finished. Ctrl-C keeps what is there and the same command goes on with the
rest; a changed setting is refused by name. trainer.n_gpus_per_node and actor_rollout_ref.rollout.tensor_model_parallel_size
say how many replicas of vLLM there are.
"""

# Settings that decide how fast answers come, not which: they may change when an evaluation goes on.
_SPEED = re.compile(
    r"data\.(train_\w+|val_files|val_batch_size|gen_batch_size|shuffle|validation_shuffle|dataloader_num_workers"
    r"|filter_overlong_prompts_workers)$"
    r"|reward\.(num_workers|reward_model\..*)$"  # a reward model is refused
    r"|actor_rollout_ref\.model\.(path|external_lib|enable_gradient_checkpointing|enable_activation_offload)$"
    r"|actor_rollout_ref\.rollout\.(nnodes|n_gpus_per_node|n|temperature|top_p|top_k|load_format|calculate_log_probs"
    r"|gpu_memory_utilization|max_num_seqs|max_num_batched_tokens|log_prob_\w+|\w+_parallel_size|enforce_eager"
    r"|enable_\w+|free_cache_engine|cudagraph_capture_sizes|agent\.num_workers|agent\.agent_loop_config_path"
    r"|checkpoint_engine\..*|prometheus\..*|profiler\..*|trace\..*|disable_log_stats)$"
)
_SECTIONS = ("data", "reward", "actor_rollout_ref.model", "actor_rollout_ref.rollout", "algorithm.correct_threshold")
BEFORE = "before"  # the evaluation of the model that a run started from
_ENDS = 1 << 20  # bytes at both ends of a file of weights that tell one training step from the next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="a run, a checkpoint or a model, see below")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, as for gtpo-verl train")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: RUN/evaluation/NAME, or outputs/eval-MODEL"
    )
    parser.add_argument("--before", action="store_true", help="with a run: the model it started from")
    parser.add_argument("--fresh", action="store_true", help="discard what an earlier call has left in the output")
    parser.add_argument(
        "--failures-as-wrong", action="store_true", help="count samples whose generation or verifier failed as wrong"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    subject = find_subject(args.model, before=args.before)
    config = configuration(subject, args.overrides)
    preflight.check_evaluation(config)
    if config.reward.reward_model.enable:
        raise UserError("reward.reward_model.enable=true: `gtpo-verl eval` judges with a verifier, not with a model.")
    output = (args.output or subject.output).resolve()

    from gtpo_verl.integrations.launch import export_environment

    export_environment(config)
    from gtpo_verl.integrations.checks import check_with_verl
    from gtpo_verl.integrations.evaluate import Problems, standalone

    settings = settings_of(config)
    standalone(config)
    check_with_verl(config)
    problems = Problems(config)
    facts = {
        "model": str(config.actor_rollout_ref.model.path),
        "command": shlex.join(["gtpo-verl", "eval", args.model, *args.overrides]),
        "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": run_versions(),
        "hardware": hardware(),
        "settings": settings,
    }
    file = open_evaluation(output, facts, fresh=args.fresh)
    todo = [row for row in range(len(problems)) if row not in file.records]
    print(f"Evaluation: {output}\n{len(problems)} rows, {len(file.records)} of them finished before.", flush=True)
    if todo:
        _answer(config, problems, todo, file, failures_as_wrong=args.failures_as_wrong)
    limits = {"limit": config.data.max_response_length, "threshold": config.algorithm.correct_threshold}
    samples = [sample for record in file.records.values() for sample in record.samples(**limits)]
    summaries = summarize(samples)
    changes = _since_before(output, settings, samples, limits)
    write_summary(
        output,
        {
            "model": facts["model"],
            "sources": [asdict(summary) for summary in summaries],
            "since_before": {source: asdict(figure) for source, figure in changes.items()},
        },
    )
    print_summary(summaries)
    for source, figure in changes.items():
        value, interval = _cells(figure, share=True)
        print(f"{source}: {value} since before the training, 95 % interval {interval}, paired by problem")
    _plot(summaries, output)
    print(f"Problems: {file.file}\nSummary:  {output / 'summary.json'}")
    return 0


# -------------------------------------------------------------------- what is evaluated


@dataclass(frozen=True)
class Subject:
    """A model, where its evaluation is kept, and the configuration of the run that it comes from, if it does."""

    path: str
    output: Path
    config_file: Path | None = None


def find_subject(name: str, *, before: bool = False) -> Subject:
    """What MODEL means.

    Raises:
        UserError: it is nothing that can be evaluated; says what to do.
    """
    directory = Path(name).expanduser()
    if (directory / "run.json").is_file() and (directory / "config.yaml").is_file():
        return _of_run(directory, before=before)
    if before:
        raise UserError(f"--before: {name} is no run of gtpo-verl train, so it is not known what it started from.")
    if directory.name.startswith("global_step_") and (directory / "actor").is_dir():
        return _of_checkpoint(directory)
    if (directory / "run.json").is_file():
        raise UserError(f"{name} holds several runs: name one of them, for example {name}/gtpo.")
    return Subject(name, Path("outputs") / f"eval-{Path(name).name}")


def _of_run(directory: Path, *, before: bool) -> Subject:
    config_file = directory / "config.yaml"
    if before:
        start: Any = OmegaConf.load(config_file)
        return Subject(str(start.actor_rollout_ref.model.path), directory / "evaluation" / BEFORE, config_file)
    model = directory / "model"
    if not model.is_dir():
        raise UserError(
            f"{directory} has no trained model yet: it is linked when the training ends and saves one "
            "(actor_rollout_ref.actor.checkpoint.save_contents with hf_model); RUN/checkpoints/global_step_N can be named."
        )
    step = re.search(r"global_step_\d+", str(model.resolve()))
    return Subject(str(model.resolve()), directory / "evaluation" / (step[0] if step else "model"), config_file)


def _of_checkpoint(directory: Path) -> Subject:
    directory = directory.resolve()
    model = directory / "actor" / "huggingface"
    if not any(model.glob("*.safetensors")):
        raise UserError(
            f"{directory} has no weights in Hugging Face format: merge its shards with `python -m verl.model_merger merge "
            f"--backend fsdp --local_dir {directory / 'actor'} --target_dir MODEL`, and evaluate MODEL."
        )
    run = directory.parent.parent
    config_file = run / "config.yaml"
    if not config_file.is_file():
        return Subject(str(model), Path("outputs") / f"eval-{directory.name}")
    return Subject(str(model), run / "evaluation" / directory.name, config_file)


def configuration(subject: Subject, overrides: Sequence[str]) -> DictConfig:
    """The run's own configuration with overrides, or one composed from them for a model that is no run's.

    Raises:
        UserError: an override does not fit.
    """
    if subject.config_file is None:
        overrides, note = with_hardware(overrides)
        if note:
            print(note, file=sys.stderr)
        config = compose_config([*overrides, f"actor_rollout_ref.model.path={json.dumps(subject.path)}"])
    else:
        loaded = OmegaConf.load(subject.config_file)
        assert isinstance(loaded, DictConfig)
        config = override(loaded, overrides)
        config.actor_rollout_ref.model.path = subject.path
    prepare(config, overrides)
    config.data.train_files = None  # nothing is trained
    return config


def override(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Apply KEY=VALUE overrides to the configuration of a run, whose groups are settled.

    Raises:
        UserError: an override does not parse, chooses a group, or names a key that is not there.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise UserError(f"these overrides do not parse: {' '.join(str(error).split())}") from error
    for item in parsed:
        key = item.key_or_group
        if key in GROUPS:
            raise UserError(
                f"{key}=: the settings are the run's. Override single keys, or evaluate RUN/model with {key}= and the others."
            )
        if item.is_delete() or item.is_sweep_override():
            raise UserError(f"{item.input_line}: an evaluation takes KEY=VALUE and +KEY=VALUE alone.")
        if not item.is_add() and OmegaConf.select(config, key, default=_MISSING) is _MISSING:
            raise UserError(f"{key}: the run has no such key. To add one, write +{key}=...")
        OmegaConf.update(config, key, item.value(), force_add=True)
    return config


_MISSING = object()


def settings_of(config: DictConfig) -> dict[str, Any]:
    """All that the answers depend on, flat: settings, and checksums of the data and the model."""
    settings: dict[str, Any] = {}
    for section in _SECTIONS:
        value = OmegaConf.select(config, section)
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        settings |= dict(flatten({section: plain}))
    settings = {key: value for key, value in settings.items() if not _SPEED.search(key)}
    files = files_of(config.data.val_files)
    settings["data.val_files"] = [_file_checksum(file) for file in files]
    function = config.reward.custom_reward_function
    if function.path is not None:
        settings["reward.custom_reward_function.path"] = _file_checksum(str(function.path))
    settings["model"] = _model_checksum(str(config.actor_rollout_ref.model.path))
    return settings


def _file_checksum(file: str) -> str:
    if not Path(file).is_file():
        return file  # remote storage, or a module of a package
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _model_checksum(path: str) -> str:
    """Of the names, the sizes and both ends of the files of a model; the name alone on the hub."""
    directory = Path(path)
    if not directory.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.suffix not in (".safetensors", ".json", ".jinja", ".bin", ".model"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_ENDS))
            stream.seek(max(0, size - _ENDS))
            digest.update(stream.read())
    return digest.hexdigest()


# -------------------------------------------------------------------- answers and figures


def _answer(config: DictConfig, problems: Any, todo: list[int], file: Any, *, failures_as_wrong: bool) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from gtpo_verl.integrations.evaluate import evaluate

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        total = len(todo) + len(file.records)
        bar = progress.add_task("starting Ray and vLLM", total=total, completed=len(file.records))

        def keep(record: Any) -> None:
            file.add(record)
            progress.update(bar, completed=len(file.records), description="problems")

        try:
            evaluate(config, problems, todo, keep, failures_as_wrong=failures_as_wrong)
        except KeyboardInterrupt:
            progress.console.print(
                f"\n{len(file.records)} of {total} problems are in {file.file}; the same command goes on with the rest."
            )
            raise


def _since_before(
    output: Path, settings: dict[str, Any], samples: Sequence[Sample], limits: dict[str, Any]
) -> dict[str, Figure]:
    """The change since ``before`` beside this evaluation; empty where there is none, or it was made with other settings."""
    directory = output.parent / BEFORE
    if output.name == BEFORE or not (directory / PROBLEMS_FILE).is_file():
        return {}
    theirs = json.loads((directory / RECORD_FILE).read_text())["settings"]
    if any(not line.startswith("model was ") for line in differences(theirs, settings)):
        return {}
    records = ProblemFile(directory / PROBLEMS_FILE).records.values()
    return paired_changes([sample for record in records for sample in record.samples(**limits)], samples)


def print_summary(summaries: Iterable[SourceSummary]) -> None:
    """Print the figures of each data source as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    for summary in summaries:
        table = Table("", "value", "95 % interval", title_justify="left")
        table.title = f"{summary.data_source}: {summary.problems} problems, {summary.samples} samples each"
        rows = [(f"mean@{summary.samples}", summary.mean, True)]
        rows += [(f"pass@{k}", figure, True) for k, figure in summary.pass_at.items() if k > 1]
        rows += [(f"maj@{k}", figure, True) for k, figure in summary.majority_at.items() if k > 1]
        if summary.response_length and summary.truncated_share:
            rows += [("response length", summary.response_length, False), ("truncated", summary.truncated_share, True)]
        for name, figure, share in rows:
            table.add_row(name, *_cells(figure, share))
        if summary.failed:
            table.add_row("failed samples, counted as wrong", str(summary.failed), "")
        if summary.unjudged:
            table.add_row("the verifier failed, counted as wrong", str(summary.unjudged), "")
        console.print(table)


def _cells(figure: Figure, share: bool) -> tuple[str, str]:
    def text(value: float) -> str:
        return f"{100 * value:.1f} %" if share else f"{value:,.1f}"

    if figure.low is None or figure.high is None:
        return text(figure.value), "no spread"
    return text(figure.value), f"{text(figure.low)} to {text(figure.high)}"


def _plot(summaries: Sequence[SourceSummary], output: Path) -> None:
    """``pass_at_k.png``: the curve of each data source with its intervals, where there is more than one k."""
    from gtpo_verl.report import plots
    from gtpo_verl.report.pass_at_k import pass_at_k_figure

    drawn = [summary for summary in summaries if len(summary.pass_at) > 1]
    if drawn:
        (output / "pass_at_k.png").write_bytes(plots.png(pass_at_k_figure(drawn, plots.LIGHT)))
