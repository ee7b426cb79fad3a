"""Options that several commands share, each with one spelling and one meaning; and spellings of earlier releases."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_verl.config import GROUPS, with_config_dir
from gtpo_verl.files import local_path
from gtpo_verl.runs.continuation import ALLOWED

_SHARED: dict[str, dict[str, Any]] = {
    "overrides": {
        "nargs": "*",
        "metavar": "KEY=VALUE",
        "help": "Hydra overrides over verl's configuration; `gtpo-verl methods` lists what its groups take: "
        f"{', '.join(GROUPS)}",
    },
    "--config-dir": {
        "short": "-cd",
        "type": Path,
        "metavar": "DIR",
        "help": "your own configuration, on Hydra's search path",
    },
    "--check": {"action": "store_true", "help": "check all that can be checked, and stop"},
    "--output": {"type": local_path, "metavar": "DIR", "help": "directory of the results"},
    "--fresh": {"action": "store_true", "help": "discard what an earlier command has left in the output directory"},
    "--wait": {"action": "store_true", "help": "on a Ray cluster, wait until there is room"},
    "--allow-changes": {
        "metavar": "KEY,...",
        "help": "go on in trainer.run_dir although these settings decide what is trained and have changed; its record "
        "and reports say so",
    },
    "--before": {"action": "store_true", "help": "of a run: the model that its training started from"},
    "--address": {
        "metavar": "URL",
        "help": "the cluster's dashboard (default: RAY_API_SERVER_ADDRESS, or this machine's)",
    },
    "--gpu": {"default": "h100", "help": "GPU whose data sheet is used (default: %(default)s)"},
    "--measured": {"type": Path, "metavar": "RUN", "help": "take assumptions from a run directory"},
}


def share(parser: argparse._ActionsContainer, options: Mapping[str, str]) -> None:
    """Declare options by name, each with what is said of it here, or what is said everywhere where that is empty."""
    for name, text in options.items():
        settings = dict(_SHARED[name])
        short = settings.pop("short", None)
        if name == "--gpu":
            from gtpo_verl.planning.timing import GPUS

            settings["choices"] = sorted(GPUS)
        parser.add_argument(*([name, short] if short else [name]), **settings | ({"help": text} if text else {}))


def renamed(
    parser: argparse._ActionsContainer,
    old: str,
    new: str,
    dest: str,
    *,
    kind: Callable[[str], Any] | None = None,
) -> None:
    """Take an option of an earlier release, with a note; ``kind``: of its value, None for a flag."""
    count: dict[str, Any] = {"nargs": 0} if kind is None else {"type": kind}
    parser.add_argument(
        old, action=_Renamed, new=new, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **count
    )


class _Renamed(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, new: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, **settings)
        self._new = new

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        note_renamed(str(option_string), self._new)
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def note_renamed(old: str, new: str) -> None:
    """Say on stderr how an earlier spelling is written now."""
    print(f"note: `{old}` is `{new}` now; the next release does not know the former.", file=sys.stderr, flush=True)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """The overrides of a command line, with those that its options stand for."""
    given = with_config_dir(args.overrides, getattr(args, "config_dir", None))
    allowed = getattr(args, "allow_changes", None)
    return [*given, f"{ALLOWED}=[{allowed}]"] if allowed else given
