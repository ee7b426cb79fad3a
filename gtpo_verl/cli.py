"""The command ``gtpo-verl``: one subcommand a module, each declaring its own arguments."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from gtpo_verl import __version__
from gtpo_verl.errors import main_guard

RAW = argparse.RawDescriptionHelpFormatter
# Each a module of `gtpo_verl.commands` with add_arguments(parser), run(args) and perhaps an
# EPILOG, imported when used: --help is fast.
GROUPS = {
    "train": {
        "quickstart": "train dapo, gtpo and grpo_s on an embedded task and write a report",
        "train": "train one model: Hydra overrides over verl's configuration",
        "sweep": "train every combination of several values, and go on where it was stopped",
        "submit": "train on a Ray cluster: submit a job that carries this plugin, follow and list jobs",
    },
    "while it trains": {
        "status": "where a training, a sweep or a job is, what it waits for, and why one that ended did",
        "stop": "let a training, a sweep or a job finish its step and save a checkpoint",
    },
    "before": {
        "plan": "what a configuration means, before a GPU is used: step arithmetic, memory, time",
        "methods": "list the methods, and what the groups of the configuration take",
        "recipes": "list the named experiments, or copy them with their launchers",
        "prepare-data": "convert a data set to verl's schema, checked for repetitions and overlap",
        "traces": "let a guiding policy answer the prompts of a file, for algo=dapo_mixed",
    },
    "afterwards": {
        "report": "compare runs: an HTML page, plots and a table",
        "eval": "evaluate a model as validation does: mean@k, pass@k, maj@k, intervals",
        "audit": "measure which method's credit falls on the steps that decide, against Monte-Carlo truth",
        "verify": "how far the two verifiers agree on the responses of a run",
        "export": "the weights of a checkpoint in Hugging Face format",
    },
    "installation": {
        "doctor": "check this installation, down to a Ray worker and a vLLM worker",
        "setup": "install the stack for this machine",
    },
}
LISTS = {"overrides": str, "files": Path, "runs": Path}  # arguments of any number, and their types
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
# Spellings of 0.1, which the release after this one does not know: options, and what has become a command.
RENAMED = {
    ("sweep", "--dry-run"): "--check",
    ("sweep", "--dir"): "--output",
    ("audit", "--dry-run"): "--check",
    ("setup", "--dry-run"): "--check",
}
MOVED = {
    ("sweep", "status"): "status",
    ("sweep", "stop"): "stop",
    ("submit", "--status"): "status",
    ("submit", "--stop"): "stop",
}


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"gtpo_verl.commands.{command.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``gtpo-verl``; returns the exit code."""
    argv = as_now(list(sys.argv[1:] if argv is None else argv))
    if argv[:1] in (["-sc"], ["--shell-completion"]):
        return main_guard(lambda: _complete(argv[1:]))
    parser = argparse.ArgumentParser(
        prog="gtpo-verl",
        formatter_class=RAW,
        description="GTPO, GRPO-S and DAPO on verl: credit assignment by policy entropy.",
        epilog=f"{_listed()}\n\n`gtpo-verl COMMAND --help` explains one. GTPO_VERL_TRACEBACK=1 shows stack traces.\n"
        'Shell completion, also of overrides: eval "$(gtpo-verl -sc install=bash)".',
    )
    parser.add_argument("--version", action="version", version=f"gtpo-verl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, description=text[0].upper() + text[1:] + ".", formatter_class=RAW)
        if name == wanted:
            command.epilog = getattr(_module(name), "EPILOG", None)
            _module(name).add_arguments(command)
    args, rest = parser.parse_known_args(argv)
    # argparse stops collecting KEY=VALUE and FILE at an option; what comes behind one belongs to the same list
    if rest:
        listed = next((name for name in LISTS if hasattr(args, name)), None)
        if listed is None or any(word.startswith("-") for word in rest):
            parser.error(f"unknown argument: {rest[0]}")
        getattr(args, listed).extend(map(LISTS[listed], rest))
    return main_guard(lambda: int(_module(args.command).run(args)))


def as_now(argv: list[str]) -> list[str]:
    """A command line in today's spelling, with a note on stderr for each word of 0.1's."""
    command, words = argv[:1], []
    for number, word in enumerate(argv[1:]):
        option, equals, value = word.partition("=")
        moved = MOVED.get((argv[0], word)) if number == 0 or word.startswith("--") else None
        if moved:
            command = [moved]
        elif renamed := RENAMED.get((argv[0], option)):
            words.append(renamed + equals + value)
        else:
            words.append(word)
            continue
        now = moved or f"{argv[0]} {renamed}"
        print(f"note: `{argv[0]} {option}` is `{now}` now; the next release does not know it.", file=sys.stderr)
    return [*command, *words]


def _listed() -> str:
    """The commands in groups."""
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:13} {text}" for name, text in commands.items()), ""]
    return "\n".join(lines[:-1])


def _complete(arguments: Sequence[str]) -> int:
    """Hydra's shell completion of overrides, in a command line whose first word is a command of ours."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    at_new_word = line.endswith(" ")
    if words and len(words) + at_new_word == 2:
        print(" ".join(COMMANDS))
        return 0
    if words:
        overrides = [word for word in words[2:-1] if "=" in word and not word.startswith(("-", "sweep="))]
        last = [words[-1]] if len(words) > 2 else []
        # with several values where a sweep may have them
        os.environ["COMP_LINE"] = " ".join([words[0], "--multirun", *overrides, *last]) + " " * at_new_word
    from gtpo_verl.config import complete_shell

    complete_shell(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
