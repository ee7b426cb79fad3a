"""Options of the commands as rows of a table, and those that several commands share, each with one meaning."""

import argparse
from pathlib import Path
from typing import Any

from gtpo_verl.config import GROUPS, with_config_dir
from gtpo_verl.files import local_path
from gtpo_verl.runs.continuation import ALLOWED

# (names and metavar, default or type, help); False is a flag, and `list` takes several values
Row = tuple[str, Any, str]
_SHARED: tuple[Row, ...] = (
    ("overrides KEY=VALUE", list, f"Hydra overrides; `gtpo-verl methods` lists what groups take: {', '.join(GROUPS)}"),
    ("what X", str, "directory of a run or of a sweep, or a job of `gtpo-verl submit`"),
    ("model MODEL", str, "a run, a checkpoint or a model, see below"),
    ("--config-dir,-cd DIR", Path, "your own configuration, on Hydra's search path"),
    ("--check", False, "check all that can be checked, and stop"),
    ("--output DIR", local_path, "directory of the results"),
    ("--fresh", False, "discard what an earlier command has left in the output directory"),
    ("--wait", False, "on a Ray cluster, wait until there is room"),
    ("--allow-changes KEY,...", str, "go on although these settings have changed; the record and reports say so"),
    ("--before", False, "of a run: the model that its training started from"),
    ("--address URL", str, "the cluster's dashboard (default: RAY_API_SERVER_ADDRESS, or this machine's)"),
    ("--measured RUN", Path, "take assumptions from a run directory"),
)
_BY_NAME = {row[0].partition(" ")[0].partition(",")[0]: row for row in _SHARED}


def declare(parser: argparse._ActionsContainer, *options: Row | tuple[str, str] | str) -> None:
    """Declare options: each a row, or a shared one by its name, alone or with what is said of it here."""
    for option in options:
        if isinstance(option, str):
            names, kind, text = _BY_NAME[option]
        elif len(option) == 2:
            names, kind, _ = _BY_NAME[option[0]]
            text = option[1]
        else:
            names, kind, text = option
        flags, _, metavar = names.partition(" ")
        settings: dict[str, Any] = {"help": text, **({"metavar": metavar} if metavar else {})}
        if kind is False:
            settings["action"] = "store_true"
        elif kind is list:
            settings |= {"action": "append", "default": []} if flags.startswith("-") else {"nargs": "*"}
        elif callable(kind):
            settings["type"] = kind
        else:
            settings |= {"type": type(kind), "default": kind, "help": f"{text} (default: %(default)s)"}
        parser.add_argument(*flags.split(","), **settings)


def share_gpu(
    parser: argparse.ArgumentParser, text: str = "GPU whose data sheet is used (default: %(default)s)"
) -> None:
    """Declare ``--gpu`` and ``--measured``, which say how fast the devices of a plan are."""
    from gtpo_verl.planning.timing import GPUS

    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help=text)
    declare(parser, "--measured")


def overrides_of(args: argparse.Namespace) -> list[str]:
    """The overrides of a command line, with those that its options stand for."""
    given = with_config_dir(args.overrides, getattr(args, "config_dir", None))
    allowed = getattr(args, "allow_changes", None)
    return [*given, f"{ALLOWED}=[{allowed}]"] if allowed else given
