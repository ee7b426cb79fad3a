"""``gtpo-verl report``: compares runs, or arms over their seeds, on an HTML page with plots and tables."""

import argparse
from pathlib import Path

from gtpo_verl.commands.options import declare
from gtpo_verl.report import page
from gtpo_verl.report.seeds import ENDPOINTS

TOLERATED = "A setting makes arms of its own; code, versions, hardware and checksums are tolerated. May be repeated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="directory of a run, of a sweep or of one training, a .jsonl file of verl's file logger, a directory of "
        "TensorBoard's event files, or an offline run of Weights & Biases",
    )
    text = "; ".join(f"{name}: {what}" for name, what in ENDPOINTS.items())
    parser.add_argument(
        "--endpoint", choices=ENDPOINTS, default="mean", help=f"over seeds, {text} (default: %(default)s)"
    )
    declare(
        parser,
        ("--allow KEY", list, "compare runs although they differ in KEY; the report says so. " + TOLERATED),
        (
            "--output",
            "of report.html, summary.json, figures/ (default: that of the run, or outputs/report-NAMES of several)",
        ),
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and print its table; returns the exit code."""
    report = page.write_report(args.runs, args.output or page.default_output(args.runs), args.allow, args.endpoint)
    page.print_table(report)
    return 0
