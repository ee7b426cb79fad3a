"""``gtpo-verl sweep``: runs over axes in Hydra's sweep syntax, as Ray jobs or as processes of this machine."""

import argparse
from pathlib import Path

from gtpo_verl.config import choices, with_config_dir
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import run as experiment
from gtpo_verl.files import local_path

EPILOG = """\
examples:
  gtpo-verl sweep algo=dapo,gtpo,grpo_s seed='range(8)' setting=quickstart hardware=cpu --local
  gtpo-verl sweep sweep=dapo_vs_gtpo setting=paper_gtpo_7b ... --address http://HEAD:8265
  gtpo-verl sweep sweep=alpha seed=1,2 ... --dry-run     runs, names and costs; nothing is written
  gtpo-verl sweep status outputs/alpha                   state, step, accuracy, time left
  gtpo-verl sweep stop outputs/alpha                     every run finishes its step and saves a checkpoint

A value a,b or range(8) makes an axis, and a run is trained for every combination. sweep=NAME takes axes from a file; a
key on the command line replaces the file's. The same command continues a sweep that was stopped or killed: a finished
run is never trained again, and others go on from their checkpoints. docs/guides/sweeps.md has the rest.
"""
ACTIONS = {"status": experiment.status, "stop": experiment.stop}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    from gtpo_verl.planning.timing import GPUS

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help=f"as for `gtpo-verl train`, with several values for an axis; sweep= {' | '.join(choices('sweep'))}; or "
        "`status DIR`, `stop DIR`",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the runs and their cost and stop")
    parser.add_argument(
        "--dir",
        type=local_path,
        help="the sweep's directory (default: outputs/NAME-SETTING, NAME the file's or that of the axes)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="processes of this machine, no cluster")
    where.add_argument("--address", metavar="URL", help="dashboard of the Ray cluster (default: Ray's own choice)")
    parser.add_argument("--parallel", type=int, metavar="N", help="runs at once (default: as many as fit)")
    parser.add_argument(
        "--config-dir", "-cd", type=Path, metavar="DIR", help="your own configuration, on Hydra's search path"
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="GPU of --dry-run's costs (default: h100)")
    parser.add_argument("--measured", type=Path, metavar="RUN", help="take assumptions of --dry-run's costs from a run")


def run(args: argparse.Namespace) -> int:
    """Train, plan, show or stop a sweep; returns the exit code."""
    if args.overrides[:1] and args.overrides[0] in ACTIONS:
        if len(args.overrides) != 2:
            raise UserError(f"name one sweep: gtpo-verl sweep {args.overrides[0]} DIR")
        return ACTIONS[args.overrides[0]](Path(args.overrides[1]))
    where = experiment.Where(local=args.local, parallel=args.parallel, address=args.address)
    overrides = with_config_dir(args.overrides, args.config_dir)
    if args.dry_run:
        return experiment.plan(overrides, args.dir, where, gpu=args.gpu, measured=args.measured)
    return experiment.train(overrides, args.dir, where)
