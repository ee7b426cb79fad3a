"""The pages that come from the code: commands from their parsers, keys from the composed configuration."""

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from gtpo_verl.algorithms import algorithms
from gtpo_verl.cli import COMMANDS
from gtpo_verl.config import GROUPS, choices, compose_config, flattened, verl_config_dir

CONFIGS = Path(__file__).parents[1] / "configs"
COMMANDS_HEAD = """\
# Commands

Generated from the parsers of `gtpo_verl/commands`. `KEY=VALUE` is a Hydra override of a run's
[configuration](configuration.md). Exit codes: 0; 1 for a run, sweep or check that failed; 2 for a command that was
refused, with one line that begins with `error:`. `GTPO_VERL_TRACEBACK=1` shows the stack trace behind that line."""
CONFIGURATION_HEAD = """\
# Configuration

Generated from the composed configuration. A run is verl's configuration with the keys below; every key of verl can be
overridden as [verl documents it](https://verl.readthedocs.io/en/latest/examples/config.html), and `gtpo-verl train ...
--cfg` prints the whole of a run.

## Groups

A word `GROUP=OPTION` chooses a file of `configs/GROUP`; `--config-dir` adds a directory of your own."""
CHANGED_HEAD = """\
## Keys of verl with another default

Defaults of `gtpo-verl train` with `algo=dapo setting=default hardware=gpu`. `python -m gtpo_verl.main_ppo` keeps
verl's."""
SETTINGS_HEAD = """\
## Settings of the methods

Defaults of `algo=NAME`. [Methods](methods.md) explains them, and the [Python API](api.md) those of GTPO and GRPO-S."""


def write_pages(directory: Path) -> None:
    """Write ``reference/commands.md`` and ``reference/configuration.md``, where they have changed."""
    for name, text in (("commands", commands()), ("configuration", configuration())):
        page = directory / "reference" / f"{name}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ commands


def commands() -> str:
    """One section a command, with its arguments and examples."""
    parts = [COMMANDS_HEAD]
    for name, summary in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"gtpo-verl {name}", formatter_class=_Plain)
        module = importlib.import_module(f"gtpo_verl.commands.{name.replace('-', '_')}")
        module.add_arguments(parser)
        parts += [f"## {name}", summary[0].upper() + summary[1:] + "."]
        rows = [
            _row(action) for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS
        ]
        if rows:
            parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
        if epilog := getattr(module, "EPILOG", ""):
            parts.append(f"```text\n{epilog.strip()}\n```")
    return "\n\n".join(parts) + "\n"


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Of any terminal's width."""


def _row(action: argparse.Action) -> str:
    metavar = action.metavar or (None if action.nargs == 0 else action.dest.upper())
    words = [metavar] if isinstance(metavar, str) else list(metavar or ())
    value = " ".join(words) or "{" + ",".join(map(str, action.choices or ())) + "}"
    names = [" ".join([option, value]) if action.nargs != 0 else option for option in action.option_strings] or [value]
    meaning = (action.help or "") % {"default": action.default}
    return f"| {', '.join(f'`{_cell(name)}`' for name in names)} | {_cell(meaning)} |"


# ------------------------------------------------------------------------------------------------------- configuration


def configuration() -> str:
    """The groups, the keys that are ours, the keys of verl with another default, and the settings of each method."""
    ours = _plain(compose_config(["algo=dapo"]))
    verls = _verls_defaults()
    methods = tuple(f"algorithm.{name}" for name in [*algorithms(), "guide"])
    comments = _comments(CONFIGS / "base.yaml") | _comments(CONFIGS / "train.yaml")
    presets = {name: _plain(compose_config([f"algo={name}"])) for name in algorithms() if name in choices("algo")}
    new, changed, settings = [], [], []
    bounds: dict[str, list[str]] = {}  # a row for each, not for each of its four keys
    for key in [key for key in ours if key.startswith("guards.bounds.")]:
        bound, _, part = key.rpartition(".")
        bounds.setdefault(bound, []).append(f"{part}={_value(ours.pop(key))}")
    for key, value in (ours | {bound: " ".join(parts) for bound, parts in bounds.items()}).items():
        if key.startswith(methods):
            value = presets.get(key.split(".")[1], ours).get(key, value)
            settings.append(f"| `{key}` | `{_value(value)}` |")
        elif key not in verls:
            new.append(f"| `{key}` | `{_value(value)}` | {_cell(comments.get(key, ''))} |")
        elif value != verls[key]:
            changed.append(f"| `{key}` | `{_value(value)}` | `{_value(verls[key])}` | {_cell(comments.get(key, ''))} |")
    parts = [
        CONFIGURATION_HEAD,
        *_groups(),
        "## Keys of this package",
        "\n".join(["| key | default | meaning |", "|---|---|---|", *new]),
        CHANGED_HEAD,
        "\n".join(["| key | here | verl | why |", "|---|---|---|---|", *changed]),
        SETTINGS_HEAD,
        "\n".join(["| key | default |", "|---|---|", *settings]),
    ]
    return "\n\n".join(parts) + "\n"


def _groups() -> Iterator[str]:
    for group in GROUPS:
        rows = [f"| `{option}` | {_cell(_heading(CONFIGS / group / f'{option}.yaml'))} |" for option in choices(group)]
        yield f"### {group}"
        yield "\n".join(["| option | |", "|---|---|", *rows])


def _heading(path: Path) -> str:
    """The comment at the top of a configuration file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#") and "@package" not in line]
    return " ".join(comments)


def _comments(path: Path) -> dict[str, str]:
    """{dotted key: the comment behind it, or in the lines above it} of a YAML file."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("# "):
            above.append(line.strip(" #"))
            continue
        match = re.match(r"( *)([\w]+):(?: .*?)?(?:\s# (.*))?$", line)
        if match is None:
            continue
        indent = len(match[1])
        parents = [*(item for item in parents if item[0] < indent), (indent, match[2])]
        if comment := match[3] or " ".join(above):
            found[".".join(name for _, name in parents)] = comment
        above = []
    return found


def _plain(config: Any) -> dict[str, Any]:
    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    return {key: value for key, value in flattened(content).items() if not isinstance(value, dict)}


def _verls_defaults() -> dict[str, Any]:
    with initialize_config_dir(str(verl_config_dir()), version_base=None):
        return _plain(compose("ppo_trainer"))


def _value(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return _cell(text)


def _cell(text: str) -> str:
    text = re.sub(r"\bdocs/(\w+)/([\w-]+)\.md", r"[\2](../\1/\2.md)", text)
    return " ".join(text.split()).replace("|", "\\|")
