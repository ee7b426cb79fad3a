"""``gtpo-verl methods``: the registered methods, and what the groups of the configuration take."""

import argparse

from gtpo_verl.config import GROUPS, choices

EPILOG = "A file of your own is chosen the same way: DIR/algo/NAME.yaml is algo=NAME with --config-dir DIR."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has none."""


def run(args: argparse.Namespace) -> int:
    """Print both lists; returns the exit code."""
    from gtpo_verl.algorithms import algorithms

    for name, method in algorithms().items():
        needs = ", ".join(sorted(method.needs)) or "the verdicts"
        print(f"{name:24}{method.label}: {method.level} advantages from {needs}")
    for group in (*GROUPS, "sweep"):
        print(f"\n{group}=\n  {' '.join(choices(group))}")
    return 0
