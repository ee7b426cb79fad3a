"""The table in docs/your-verl-command.md: verl's defaults that `gtpo-verl train` changes, and the keys that it adds.

``python tests/support/verl_defaults.py`` writes it anew, from the two composed configurations.
"""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import algorithms
from gtpo_verl.config import compose_config, flattened, verl_config_dir

PAGE = Path(__file__).parents[2] / "docs" / "your-verl-command.md"
START, END = "<!-- generated: python tests/support/verl_defaults.py -->\n", "<!-- end -->\n"


def leaves(config: DictConfig) -> dict[str, Any]:
    """{dotted key: value}, without sections; interpolations as written."""
    container: Any = OmegaConf.to_container(config, resolve=False)
    return {key: value for key, value in flattened(container).items() if not isinstance(value, dict) or not value}


def table() -> str:
    """What differs, as Markdown."""
    with initialize_config_dir(str(verl_config_dir()), version_base="1.3"):
        verls = leaves(compose("ppo_trainer"))
    ours = leaves(compose_config())
    changed = {key: value for key, value in ours.items() if key in verls and verls[key] != value}
    families = (*(f"algorithm.{name}." for name in (*algorithms(), "guide")), "guards.bounds.")
    added = {key: value for key, value in ours.items() if key not in verls and not key.startswith(families)}
    lines = ["| key | verl | `gtpo-verl train` |", "|---|---|---|"]
    lines += [f"| `{key}` | {_cell(verls[key])} | {_cell(value)} |" for key, value in sorted(changed.items())]
    lines += ["", "Added, besides `algorithm.METHOD.*` of every method, `algorithm.guide.*` and `guards.bounds.*`:", ""]
    lines += [
        "| key | default |",
        "|---|---|",
        *(f"| `{key}` | {_cell(value)} |" for key, value in sorted(added.items())),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`".replace("|", "\\|")


def written(text: str) -> str:
    """The page with the table of today."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
