"""``gtpo-verl traces``: what a guiding policy answers to the prompts of a training, as columns of their file."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from gtpo_verl.commands.options import declare, overrides_of
from gtpo_verl.config import absolute, quoted
from gtpo_verl.data.trace_file import Answers, TraceFile, write_with_traces
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.settings import settings_as_in_training
from gtpo_verl.evaluation.subject import configuration, find_subject
from gtpo_verl.integrations.launch import export_environment
from gtpo_verl.rules.stages import check_evaluation
from gtpo_verl.rules.start import check_output
from gtpo_verl.runs.lock import results_lock
from gtpo_verl.runs.terminal import progress_over

if TYPE_CHECKING:
    from gtpo_verl.evaluation.continuations import Continuation
    from gtpo_verl.integrations.continuations import Prompts

EPILOG = """\
MODEL is a run, a checkpoint or a model, as for gtpo-verl eval. It answers every prompt of FILE, a parquet file in
verl's schema, sampled as the training samples (actor_rollout_ref.rollout.temperature). Responses that the verifier
calls correct become the columns guide_responses and guide_log_probs, which algorithm.guide reads
(docs/guides/mixed-policy.md); one that the limit cut off is never kept.

examples:
  gtpo-verl traces Qwen/Qwen2.5-32B-Instruct data/dapo-math-17k.parquet verifier=answer \\
      trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4
  gtpo-verl traces outputs/gtpo-seed0-20260101-120000 data/train.parquet --samples 4 --output with_traces

Token ids and log-probabilities are the guide's: the student needs the same tokenizer. Ctrl-C keeps what is
finished, and the same command goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("model", "the guide: a run, a checkpoint or a model"),
        ("file FILE", Path, "prompts: a parquet file in verl's schema"),
        "overrides",
        "--config-dir",
        ("--output", "of NAME.traces.parquet (default: that of FILE)"),
        "--fresh",
        "--wait",
        ("--samples N", 1, "of each prompt"),
        ("--keep-wrong", False, "keep responses that the verifier calls wrong, too"),
    )


def run(args: argparse.Namespace) -> int:
    """Sample, and write the file; returns the exit code."""
    source, output = _files(args)
    subject = find_subject(args.model)
    overrides = overrides_of(args)
    config = configuration(subject, [*overrides, f"data.val_files={quoted(source)}"])
    # rows are known by their number in the file
    config.data.filter_overlong_prompts = False
    config.data.val_max_samples = -1
    check_evaluation(config, overrides)

    export_environment(config)
    from gtpo_verl.integrations.checks import check_with_verl
    from gtpo_verl.integrations.continuations import Prompts, bulk_servers

    settings = settings_as_in_training(config) | {"--samples": args.samples, "--keep-wrong": args.keep_wrong}
    bulk_servers(config)
    check_with_verl(config)
    prompts = Prompts(config)
    with results_lock(output.with_name(f".{output.name}.lock")):
        file = TraceFile(output.with_name(f"{output.name}.sampled.jsonl"), settings, fresh=args.fresh)
        todo = [row for row in range(len(prompts)) if row not in file.answers]
        print(f"{len(prompts)} prompts, {len(file.answers)} of them answered before.", flush=True)
        if todo:
            _sample(config, prompts, file, todo, args)
        write_with_traces(source, output, file.answers.values())
    _report(file, output)
    return 0


def _files(args: argparse.Namespace) -> tuple[Path, Path]:
    source = Path(absolute(str(args.file)))
    if not source.is_file():
        raise UserError(f"{args.file}: no such file; FILE is the parquet file whose prompts the guide answers.")
    if source.suffix != ".parquet":
        raise UserError(f"{args.file} is not a parquet file: `gtpo-verl prepare-data parquet {args.file}` makes one.")
    output = check_output(args.output or source.parent) / f"{source.stem}.traces.parquet"
    if output.is_dir():
        raise UserError(f"{output} is a directory: remove it, or choose another --output.")
    if args.samples < 1:
        raise UserError(f"--samples {args.samples}: it must be at least 1.")
    return source, output


def _sample(
    config: DictConfig, prompts: "Prompts", file: TraceFile, todo: Sequence[int], args: argparse.Namespace
) -> None:
    """Let the guide answer the rows in ``todo``, with a progress bar; each is kept as soon as it is judged."""
    from gtpo_verl.evaluation.continuations import Prefix
    from gtpo_verl.integrations.continuations import sampler

    fitting = [row for row in todo if prompts.fits(row)]
    with progress_over(file.file.with_suffix(".log"), file.file) as progress:
        bar = progress.add_task("starting Ray and vLLM", total=None)
        with sampler(config, prompts, wait=args.wait) as work:
            prefixes = (Prefix((row,), row, (), args.samples, entropies=True) for row in fitting)
            for number, (prefix, samples) in enumerate(work.continued(prefixes), start=1):
                file.add(kept(prefix.row, samples, keep_wrong=args.keep_wrong))
                progress.update(bar, description="prompts answered", completed=number, total=len(fitting))
    for row in set(todo) - set(fitting):
        file.add(Answers(row, [], [], 0, 0, 0))


def kept(row: int, samples: "Sequence[Continuation]", *, keep_wrong: bool) -> Answers:
    """The answers to a row: of the samples those that the limit did not cut off and, unless asked, that are correct."""
    chosen = [each for each in samples if not each.truncated and (each.correct or keep_wrong)]
    log_probs = []
    for each in chosen:
        assert each.log_probs is not None
        log_probs.append(each.log_probs.tolist())
    return Answers(
        row,
        [each.tokens.tolist() for each in chosen],
        log_probs,
        sampled=len(samples),
        correct=sum(each.correct for each in samples),
        truncated=sum(each.truncated for each in samples),
    )


def _report(file: TraceFile, output: Path) -> None:
    answers = file.answers.values()
    sampled, correct = sum(each.sampled for each in answers), sum(each.correct for each in answers)
    truncated = sum(each.truncated for each in answers)
    answered, left_out = sum(bool(each.responses) for each in answers), sum(not each.sampled for each in answers)
    print(
        f"{sampled} responses, {correct / max(sampled, 1):.1%} correct, {truncated} cut off by the limit; "
        f"{answered} of {len(answers)} prompts have one that is kept."
    )
    if left_out:
        print(f"Prompts not asked, as they are longer than data.max_prompt_length: {left_out}.")
    if not answered:
        print("warning: no response was kept, so a run with this file would be refused.")
    print(f"Data: {output}")
