"""``gtpo-verl sweep``: runs over axes in Hydra's sweep syntax, as Ray jobs or as processes of this machine."""

import argparse

from gtpo_verl.commands.options import declare, overrides_of, share_gpu
from gtpo_verl.experiments import run as experiment

EPILOG = """\
examples:
  gtpo-verl sweep algo=dapo,gtpo,grpo_s seed='range(8)' setting=quickstart hardware=cpu --local
  gtpo-verl sweep sweep=dapo_vs_gtpo setting=paper_gtpo_7b ... --address http://HEAD:8265
  gtpo-verl sweep sweep=alpha seed=1,2 ... --check       runs, names and costs; nothing is written
  gtpo-verl status outputs/alpha                         state, step, accuracy, time left
  gtpo-verl stop outputs/alpha                           every run finishes its step and saves a checkpoint

A value a,b or range(8) makes an axis, and a run is trained for every combination. sweep=NAME takes axes from a file; a
key on the command line replaces the file's. The same command continues a sweep that was stopped or killed: a finished
run is never trained again, and others go on from their checkpoints. docs/guides/sweeps.md has the rest.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("overrides", "as for `gtpo-verl train`, with several values for an axis; sweep=NAME takes axes from a file"),
        "--config-dir",
        ("--check", "print the runs and their cost, and stop"),
        ("--output", "the sweep's directory (default: outputs/NAME-SETTING, NAME the file's or that of the axes)"),
        "--allow-changes",
    )
    where = parser.add_mutually_exclusive_group()
    declare(where, ("--local", False, "processes of this machine, no cluster"), "--address")
    declare(parser, ("--parallel N", int, "runs at once (default: as many as fit)"))
    share_gpu(parser, "of the costs of --check (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train or plan a sweep; returns the exit code."""
    where = experiment.Where(local=args.local, parallel=args.parallel, address=args.address)
    overrides = overrides_of(args)
    if args.check:
        return experiment.plan(overrides, args.output, where, gpu=args.gpu, measured=args.measured)
    return experiment.train(overrides, args.output, where)
