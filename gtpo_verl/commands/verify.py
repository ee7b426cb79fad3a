"""``gtpo-verl verify FILE``: how far the two verifiers agree on the responses of a run."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from gtpo_verl.commands.options import declare
from gtpo_verl.errors import UserError
from gtpo_verl.files import check_writable, write_json
from gtpo_verl.verifiers import RULES
from gtpo_verl.verifiers.agreement import Agreement, read_samples, threshold_of, verified
from gtpo_verl.verifiers.pool import VerifierPool

REPORT_FILE = "agreement.json"
SCHEMA = 1  # of the JSON report; raised when a key is removed or changes its meaning

EPILOG = """\
FILE is a dump of responses as verl writes it: validation/STEP.jsonl of a run, or a file in trainer.rollout_data_dir.
Each line is an object with `output` (the response) and `gts` (the correct answer); `input` (the prompt) and `acc` (what
the run's own verifier returned) are used where they exist.

examples:
  gtpo-verl verify outputs/dapo/validation/100.jsonl
  gtpo-verl verify rollouts/*.jsonl --output agreement --workers 8

Ctrl-C stops and reports on the responses verified so far.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a dump of responses, JSON lines")
    declare(
        parser,
        ("--workers N", 2, "processes per rule"),
        ("--timeout SECONDS", 10.0, "time limit per sample"),
        ("--memory-mb MIB", 1024, "memory limit per sample"),
        ("--no-fallback", False, "boxed: without a box a response is wrong; else its last formula or number counts"),
        ("--correct-threshold ACC", float, "`acc` of a correct response (default: that of the run of FILE, else 1.0)"),
        ("--examples N", 10, "disagreements to show"),
        ("--output", f"also write {REPORT_FILE} there"),
    )


def run(args: argparse.Namespace) -> int:
    """Verify every response by both rules and report; returns the exit code."""
    given = args.correct_threshold
    thresholds = {file: threshold_of(file) if given is None else given for file in args.files}
    total = sum(1 for _ in read_samples(thresholds))  # every line is checked before the first is verified
    if total == 0:
        raise UserError(f"no response in {', '.join(map(str, args.files))}.")
    if args.output is not None:
        check_writable(args.output)
    limits = {"workers": args.workers, "timeout": args.timeout, "memory_mb": args.memory_mb}
    agreement = Agreement()
    interrupted = False
    counts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        VerifierPool("answer", **limits) as answer,
        VerifierPool("boxed", {"fallback": not args.no_fallback}, **limits) as boxed,
        Progress(*counts, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("verifying", total=total)
        try:
            for sample, first, second in verified(read_samples(thresholds), answer, boxed, ahead=4 * args.workers):
                agreement.add(sample, first, second, args.examples)
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    if agreement.samples == 0:
        raise KeyboardInterrupt
    print_report(agreement, total)
    if args.output is not None:
        report = {
            "schema": SCHEMA,
            "files": [str(file) for file in thresholds],
            "correct_thresholds": list(thresholds.values()),
            "responses": total,
        }
        write_json(args.output / REPORT_FILE, report | agreement.as_dict())
        print(f"report: {args.output / REPORT_FILE}", file=sys.stderr)
    return 130 if interrupted else 0


def print_report(agreement: Agreement, total: int) -> None:
    """Print the 2x2 table, the share with its interval, the failures, and examples."""
    console = Console(soft_wrap=True)
    cells, (low, high) = agreement.cells, agreement.interval()
    counts = [Column(name, justify="right") for name in ("boxed: right", "boxed: wrong")]
    table = Table("", *counts, box=None, header_style="dim", pad_edge=False)
    table.add_row("answer: right", str(cells["both"]), str(cells["answer_only"]))
    table.add_row("answer: wrong", str(cells["boxed_only"]), str(cells["neither"]))
    console.print(table)
    if agreement.samples < total:
        console.print(f"interrupted: {agreement.samples} of {total} responses were verified", style="bold yellow")
    console.print(
        f"agreement {_percent(agreement.share())}, the mean over {len(set(agreement.prompts))} prompts with "
        f"{agreement.samples} responses, 95 % interval {_percent(low)} to {_percent(high)}",
        highlight=False,
    )
    for rule in RULES:
        failures = agreement.failures[rule]
        if failures:
            text = ", ".join(f"{count} {name}" for name, count in sorted(failures.items()))
            console.print(f"{rule}: failed on {failures.total()} (counted as wrong): {text}")
        same, other = agreement.recorded[rule][True], agreement.recorded[rule][False]
        if same + other:
            share = _percent(same / (same + other))
            console.print(f"{rule}: agrees with the run on {share} of {same + other}", highlight=False)
    for example in agreement.examples:
        console.print(f"\n{example.place}  truth {example.truth!r}", markup=False, highlight=False)
        for rule, verdict in (("answer", example.answer), ("boxed", example.boxed)):
            what = "right" if verdict["acc"] else verdict["verifier_failure"] or "wrong"
            console.print(f"  {rule}: {what}, extracted {verdict['pred']!r}", markup=False, highlight=False)
        console.print(f"  ...{example.end}", markup=False, highlight=False, style="dim")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
