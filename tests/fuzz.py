"""Hostile input by the hundred thousand: estimators, losses, rows of data, files of runs, and whole commands.

    python tests/fuzz.py --cases 100000 --seed 0 --output fuzz.json
    python tests/fuzz.py --only estimators:4711            one case, with its stack trace

The rules: finite numbers give finite numbers; what cannot be used is refused in one line, with an exit code other than
0; nothing is left running. A case follows from seed, family and number, so it can be repeated alone. Ctrl-C keeps what
was done in --dir, and the same command goes on. Exit code 1: a rule was broken.
"""

import argparse
import importlib
import shutil
import sys
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzzing import Case, attempt
from rich.progress import Progress

from gtpo_verl.files import read_json, write_json

# family: (its module in fuzzing, the share of the cases in process that it gets; 0: counted by --commands)
FAMILIES = {
    "estimators": ("tensors", 0.6),
    "losses": ("tensors", 0.24),
    "verdicts": ("rows", 0.13),
    "rows": ("rows", 0.02),
    "run_files": ("run_files", 0.008),
    "settings": ("settings", 0.002),
    "commands": ("commands", 0.0),
}
KEPT = 50  # broken cases of a family whose traces are kept
SAVED_EVERY = 5.0  # seconds


def case_of(family: str) -> Case:
    """The function that runs a case of a family."""
    case: Case = getattr(importlib.import_module(f"fuzzing.{FAMILIES[family][0]}"), family)
    return case


def run_case(family: str, number: int, seed: int, directory: Path) -> tuple[str, str]:
    """Run a case in a directory of its own, which is empty; returns its outcome and trace."""
    place = directory / f"{family}-{number}"
    shutil.rmtree(place, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return attempt(case_of(family), Random(f"{seed}/{family}/{number}"), place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def fuzz(counts: dict[str, int], seed: int, directory: Path, progress: Progress) -> dict[str, Any]:
    """Run so many cases of each family, but for those done before; returns what became of them."""
    file = directory / "state.json"
    state: dict[str, Any] = read_json(file) or {"seed": seed, "families": {}}
    if state["seed"] != seed:
        raise SystemExit(f"error: {file} has the cases of seed {state['seed']}: name another --dir")
    saved = time.monotonic()
    try:
        for family, count in counts.items():
            found = state["families"].setdefault(family, {"cases": 0, "outcomes": {}, "broken": {}})
            bar = progress.add_task(family, total=count, completed=found["cases"])
            for number in range(found["cases"], count):
                outcome, trace = run_case(family, number, seed, directory)
                found["outcomes"][outcome] = found["outcomes"].get(outcome, 0) + 1
                found["cases"] = number + 1
                if trace and len(found["broken"]) < KEPT:
                    found["broken"][str(number)] = trace
                progress.update(bar, completed=number + 1)
                if time.monotonic() - saved > SAVED_EVERY:
                    write_json(file, state)
                    saved = time.monotonic()
    finally:
        write_json(file, state)
    return state


def main() -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="in process (default: %(default)s)")
    parser.add_argument("--commands", type=int, default=300, help="whole commands (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("outputs/fuzz"), help="of the state (default: %(default)s)")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="these alone; may be repeated")
    parser.add_argument("--only", metavar="FAMILY:NUMBER", help="run one case and print its trace")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.dir = args.dir.resolve()  # commands have another working directory
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.only:
        family, _, number = args.only.partition(":")
        outcome, trace = run_case(family, int(number), args.seed, args.dir)
        print(trace or outcome)
        return int(bool(trace))
    counts = {
        family: round(args.cases * share) if share else args.commands
        for family, (_, share) in FAMILIES.items()
        if args.family is None or family in args.family
    }
    with Progress() as progress:
        state = fuzz(counts, args.seed, args.dir, progress)
    for family, found in state["families"].items():
        print(f"{family}: {found['cases']} cases, {found['outcomes']}")
        for number, trace in found["broken"].items():
            print(f"\n{family}:{number}\n{trace}")
    if args.output:
        write_json(args.output, state)
    return int(any(found["broken"] for found in state["families"].values()))


if __name__ == "__main__":
    sys.exit(main())
