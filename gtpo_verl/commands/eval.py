"""``gtpo-verl eval``: samples a model's responses to a validation set, verifies them as the training does, reports."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from gtpo_verl.commands.options import declare, overrides_of
from gtpo_verl.evaluation.records import ProblemFile, ProblemRecord, changes_since, open_evaluation
from gtpo_verl.evaluation.render import print_changes, print_summary
from gtpo_verl.evaluation.settings import facts_of, settings_of
from gtpo_verl.evaluation.subject import BEFORE, configuration, find_subject
from gtpo_verl.evaluation.summary import summarize
from gtpo_verl.files import write_bytes, write_json
from gtpo_verl.integrations.launch import export_environment
from gtpo_verl.rules.stages import check_evaluation
from gtpo_verl.rules.start import check_output
from gtpo_verl.runs.lock import LOCK_FILE, results_lock
from gtpo_verl.runs.terminal import progress_over

if TYPE_CHECKING:
    from gtpo_verl.integrations.evaluate import Problems

LOG_FILE, SUMMARY_FILE = "eval.log", "summary.json"  # beside the problems
EPILOG = """\
MODEL is
  a run of gtpo-verl train      its trained model, with the settings and the validation set of the run
  a checkpoint of such a run    RUN/checkpoints/global_step_N, the same for an earlier step
  a model                       a directory in Hugging Face format, or ORGANISATION/NAME on the hub

examples:
  gtpo-verl eval outputs/gtpo-seed0-20260101-120000          after the training
  gtpo-verl eval outputs/gtpo-seed0-20260101-120000 --before   the model that the training started from
  gtpo-verl eval outputs/gtpo-seed0-20260101-120000 data.val_files=data/aime-2025.parquet \\
      actor_rollout_ref.rollout.val_kwargs.n=32
  gtpo-verl eval outputs/task-countdown/model setting=quickstart task=countdown     an embedded task
  gtpo-verl eval Qwen/Qwen2.5-1.5B setting=default verifier=boxed data.val_files=data/math-500.parquet \\
      trainer.n_gpus_per_node=8

Every problem is written to problems.jsonl when it is finished. Ctrl-C keeps the finished ones, and repeating the
command evaluates the rest; it refuses to if a setting has changed on which the responses depend. The number of vLLM
replicas follows from trainer.n_gpus_per_node and actor_rollout_ref.rollout.tensor_model_parallel_size. On a node of a
Ray cluster it joins that Ray (docs/guides/cluster-ray.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    place = "default: RUN/evaluation/NAME, or outputs/eval-MODEL"
    declare(parser, "model", "overrides", "--config-dir", ("--output", place), "--before", "--fresh", "--wait")
    declare(parser, ("--failures-as-wrong", False, "count samples whose generation or verifier failed as wrong"))


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    subject = find_subject(args.model, before=args.before)
    overrides = overrides_of(args)
    config = configuration(subject, overrides)
    output = check_output(args.output or subject.output)
    check_evaluation(config, overrides)

    export_environment(config)
    from gtpo_verl.integrations.checks import check_with_verl
    from gtpo_verl.integrations.evaluate import Problems
    from gtpo_verl.integrations.standalone import standalone

    settings = settings_of(config)
    standalone(config)
    check_with_verl(config)
    problems = Problems(config)
    with results_lock(output / LOCK_FILE):
        return _finish(config, settings, problems, output, args)


def _finish(
    config: DictConfig, settings: Mapping[str, Any], problems: "Problems", output: Path, args: argparse.Namespace
) -> int:
    """Begin the evaluation, or go on with the one that is there, to its summary; returns the exit code."""
    facts = facts_of(config, settings)
    if args.fresh:
        (output / SUMMARY_FILE).unlink(missing_ok=True)
    file = open_evaluation(output, facts, fresh=args.fresh)
    todo = [row for row in range(len(problems)) if row not in file.records]
    print(f"Evaluation: {output}\n{len(problems)} rows, {len(file.records)} of them finished before.", flush=True)
    if todo:
        _evaluate(config, problems, todo, file, failures_as_wrong=args.failures_as_wrong, wait=args.wait)
    limits = {"limit": config.data.max_response_length, "threshold": config.algorithm.correct_threshold}
    samples = file.samples(**limits)
    summaries = summarize(samples)
    before = output.parent / BEFORE
    changes = {} if output == before else changes_since(before, settings, samples, **limits)
    write_json(
        output / SUMMARY_FILE,
        {
            "model": facts["model"],
            "sources": [asdict(summary) for summary in summaries],
            "since_before": {source: asdict(figure) for source, figure in changes.items()},
        },
    )
    print_summary(summaries)
    print_changes(changes)
    (output / "pass_at_k.png").unlink(missing_ok=True)  # of an earlier evaluation
    drawn = [summary for summary in summaries if len(summary.pass_at) > 1]
    if drawn:
        from gtpo_verl.report.pass_at_k import pass_at_k_png

        write_bytes(output / "pass_at_k.png", pass_at_k_png(drawn))
    print(f"Problems: {file.file}\nSummary:  {output / SUMMARY_FILE}")
    return 0


def _evaluate(
    config: DictConfig, problems: "Problems", todo: list[int], file: ProblemFile, *, failures_as_wrong: bool, wait: bool
) -> None:
    """Evaluate the rows in ``todo`` with a progress bar; each is in ``file`` as soon as it is finished."""
    from gtpo_verl.integrations.evaluate import evaluate

    with progress_over(file.file.with_name(LOG_FILE), file.file) as progress:
        total = len(todo) + len(file.records)
        bar = progress.add_task("starting Ray and vLLM", total=total, completed=len(file.records))

        def keep(record: ProblemRecord) -> None:
            file.add(record)
            progress.update(bar, completed=len(file.records), description="problems")

        evaluate(config, problems, todo, keep, failures_as_wrong=failures_as_wrong, wait=wait)
