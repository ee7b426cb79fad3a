"""``gtpo-verl submit``: a training as a job on a Ray cluster, submitted from any machine with Ray and this package."""

import argparse
import datetime as dt
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from gtpo_verl.commands.options import declare, overrides_of
from gtpo_verl.errors import UserError
from gtpo_verl.experiments.handover import HandOver
from gtpo_verl.experiments.jobs import Jobs
from gtpo_verl.experiments.package import carried_files
from gtpo_verl.experiments.request import check_request, run_dir_of
from gtpo_verl.experiments.status import print_jobs
from gtpo_verl.runs.terminal import STOPPED

EPILOG = """\
examples:
  gtpo-verl submit --address http://HEAD:8265 -- setting=paper_gtpo_7b algo=gtpo trainer.run_dir=/shared/runs/gtpo ...
  gtpo-verl submit --env HF_TOKEN --exclude 'figures/' -- reward.custom_reward_function.path=rewards/mine.py ...
  gtpo-verl submit --check -- ...       what only the cluster can say of a run, without training
  gtpo-verl submit --list
  gtpo-verl stop JOB                    after the current step, with a checkpoint

The job carries this package and the files of the working directory, without hidden files, data, weights and what
.gitignore and .rayignore name. Relative paths of data and model are taken from here and must be the same on the nodes;
other relative paths are those of the working directory. A job's first phase is the check of `gtpo-verl train --check`,
and that every node uses this package. Ctrl-C while following leaves the job alone.
"""


# The lines by which a training says how far it is.
_STEP = re.compile(rf"(?P<what>step|{STOPPED}) (?P<step>\d+)(/| of )(?P<steps>\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, "overrides", ("--config-dir", "of the files that the job carries"), "--address")
    what = parser.add_mutually_exclusive_group()
    declare(
        what,
        ("--detach", False, "print the job's id and return, without following its log to the end"),
        ("--list", False, "show the trainings that were submitted to this cluster"),
        ("--logs JOB", str, "follow the log of one of them, from the beginning"),
    )
    declare(
        parser,
        ("--check", "check the run on the cluster and stop"),
        ("--wait", "let the training wait for devices that other jobs hold"),
        "--allow-changes",
        ("--retries N", 0, "go on after a failure, until more than N attempts in a row have brought no new step"),
        ("--id JOB", str, "name of the job (default: the run directory's, and the time)"),
        ("--working-dir DIR", Path, "files to carry (default: this directory's)"),
        ("--exclude PATTERN", list, "files to leave out, as in .gitignore"),
        ("--env NAME[=VALUE]", list, "a variable for the job, this process's where no value is given; in no log"),
        ("--environment FILE", Path, "a bash script whose exports are passed like --env"),
    )
    parser.set_defaults(working_dir=Path())


def run(args: argparse.Namespace) -> int:
    """Submit, or look at jobs; returns the exit code."""
    if not args.list and not args.logs:
        return submit(args)
    if args.overrides:
        raise UserError("--list and --logs take no overrides.")
    jobs = Jobs(args.address)
    if args.logs:
        return follow(jobs, args.logs)
    print_jobs(jobs.list())
    return 0


def submit(args: argparse.Namespace) -> int:
    """Check what can be checked here, submit, and follow unless told otherwise; returns the exit code."""
    if args.id and args.id != _as_id(args.id):
        raise UserError(f"--id {args.id}: use letters, digits and _.- only, for instance {_as_id(args.id)}.")
    if args.retries < 0:
        raise UserError(f"--retries {args.retries}: it must be 0 or more.")
    working_dir = args.working_dir.expanduser().resolve()
    files = carried_files(working_dir, args.exclude)
    overrides = check_request(overrides_of(args), working_dir=working_dir, carried=files)
    environment = variables(args.env, args.environment)
    jobs = Jobs(args.address)
    run_dir = run_dir_of(overrides)
    name = args.id or f"{_as_id(run_dir)}-{dt.datetime.now():%Y%m%d-%H%M%S}"
    print(f"Carrying gtpo_verl and {len(files)} file{'s' * (len(files) != 1)} of {working_dir}", flush=True)
    task = HandOver(
        action="check" if args.check else "train",
        run_dir=run_dir,
        overrides=tuple(overrides),
        environment=environment,
        wait=args.wait,
        retries=args.retries,
    )
    if not jobs.submit(task, name, working_dir, files):
        raise UserError(f"a job {name} exists on {jobs.address}: choose another --id.")
    print(f"Job {name} on {jobs.address}\n{_hints(name)}", flush=True)
    return 0 if args.detach else follow(jobs, name)


def follow(jobs: Jobs, name: str) -> int:
    """Print the log of a job until it ends, and of one that was stopped how far it is; returns 0 if it succeeded."""
    jobs.known(name)
    unfinished, step, stopped = "", "", False
    try:
        for text in jobs.follow(name):
            sys.stdout.write(text)
            sys.stdout.flush()
            *lines, unfinished = (unfinished + text).split("\n")
            for found in filter(None, map(_STEP.match, lines)):
                step, stopped = f" after step {found['step']} of {found['steps']}", found["what"] == STOPPED
    except KeyboardInterrupt:
        print(f"\nThe job goes on. {_hints(name)}", file=sys.stderr)
        return 130
    job = jobs.known(name)
    if job.status == "FAILED":
        raise UserError(f"job {name} failed: {job.reason}")
    if stopped or job.status == "STOPPED":
        print(f"Job {name} was stopped{step}. To resume it, submit the same line again, with a new --id if it has one.")
    print(f"Job {name}: {job.status}", flush=True)
    return 0 if job.status == "SUCCEEDED" else 1


def variables(given: Iterable[str], script: Path | None) -> dict[str, str]:
    """The variables for a job: the exports of a script, then those given as NAME or NAME=VALUE. What acts only when a
    process starts is left to the nodes, whose own script exports it before `ray start`. Raises UserError: a variable is
    not set here, or is given and acts only when a process starts.
    """
    exported = exports(script) if script else {}
    found = {name: value for name, value in exported.items() if not _acts_early(name)}
    if left := sorted(exported.keys() - found.keys()):
        print(f"note: {', '.join(left)} of {script}: the nodes' own is used, from before `ray start`.", flush=True)
    for item in given:
        name, separator, value = item.partition("=")
        if not name:
            raise UserError(f"--env {item}: it has no name.")
        if not separator and name not in os.environ:
            raise UserError(f"--env {name}: it is not set here.")
        found[name] = value if separator else os.environ[name]
    if early := sorted(filter(_acts_early, found)):
        raise UserError(f"{', '.join(early)}: set it on the nodes before `ray start`; it acts when a process starts.")
    return found


def _acts_early(name: str) -> bool:
    return name.startswith("LD_") or name in ("PATH", "PYTHONPATH")


def exports(script: Path) -> dict[str, str]:
    """What a bash script exports. Raises UserError: there is no such script, or it fails; with its last line."""
    if not script.is_file():
        raise UserError(f"--environment {script}: no such file.")
    program = (  # sourced where no variable is exported yet, all keeping their values: its own exports are left
        'for _gtpo in $(compgen -e); do declare +x "$_gtpo"; done; source "$1" >&2; _gtpo=$?; set +a; '
        '[ $_gtpo = 0 ] || exit $_gtpo; printf "%s\\0" end; '
        'for _gtpo in $(compgen -e); do printf "%s=%s\\0" "$_gtpo" "${!_gtpo}"; done'
    )
    done = subprocess.run(
        ["bash", "-c", program, "bash", str(script.resolve())], capture_output=True, text=True, errors="surrogateescape"
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"]
        raise UserError(f"{script}: {said[-1].removeprefix('error: ')}")
    if not done.stdout:
        raise UserError(f"{script}: it ends the shell, and its exports with it: `return` in place of `exit`.")
    return dict(item.split("=", 1) for item in done.stdout.split("\0")[1:] if item)


def _as_id(path: str) -> str:
    """The last part of a path in the characters of an address and a file name, which a job's id becomes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(path).name).strip("-.") or "run"


def _hints(name: str) -> str:
    return f"`gtpo-verl submit --logs {name}` follows it, `gtpo-verl stop {name}` stops it."
