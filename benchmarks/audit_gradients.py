"""Writes the results of an audit of gradients as a table: `gradients-NAME.json` and `.md` in benchmarks/results.

    python benchmarks/audit_gradients.py NAME AUDIT [AUDIT ...]

AUDIT is the directory of `gtpo-verl audit MODEL --gradients N ... --output AUDIT`; a second one, as with
`--gradient-params`, is a column of its own. Nothing is sampled here.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from gtpo_verl.algorithms import algorithms
from gtpo_verl.audit.gradients import Products, figures
from gtpo_verl.audit.store import GRADIENTS_FILE
from gtpo_verl.files import read_json

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    ("groups needed, truth", "sgd", "along/dapo"),
    ("in Adam's metric", "adam", "along/dapo"),
    ("own direction", "sgd", "own/dapo"),
    ("SNR of a step", "sgd", "snr"),
    ("gain", "sgd", "gain"),
)


def cell(figure: list[float | None]) -> str:
    value, low, high = figure
    return "n.r." if value is None else f"{value:.2f} ({low:.2f} to {high:.2f})"


def report(name: str, audits: list[dict[str, Any]]) -> str:
    lines = [f"# Gradients of `{name}`", "", "`benchmarks/audit_gradients.py`; docs/guides/audit.md explains.", ""]
    for audit in audits:
        facts = audit["measurement"]
        chosen = f" with a name like `{facts['chosen']}`" if facts["chosen"] else ""
        lines += [
            (
                f"{facts['groups']} groups of {facts['samples']} and {facts['others']} more in the true gradient, "
                f"credits of {facts['step']} groups at a time, {facts['parameters']:,} parameters{chosen}. "
                f"{audit['sampled by']}"
            ),
            "",
            f"| | {' | '.join(heading for heading, *_ in COLUMNS)} |",
            f"|---|{'---|' * len(COLUMNS)}",
        ]
        for method, figure in audit["gradients"]["methods"].items():
            entry = algorithms().get(method)
            cells = [cell(figure[metric][key]) for _, metric, key in COLUMNS]
            lines.append(f"| {entry.label if entry else method} (`{method}`) | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("audits", type=Path, nargs="+")
    options = parser.parse_args()
    found = []
    for directory in options.audits:
        record = read_json(directory / "audit.json")
        assert record is not None, f"{directory} holds no audit"
        products = Products.read(directory / GRADIENTS_FILE)
        found.append(
            {
                "sampled by": record.get("sampled by", "Responses sampled by vLLM."),
                "measurement": record["measurement"],
                "gradients": figures(products, record["measurement"]["step"]),
            }
        )
    (RESULTS / f"gradients-{options.name}.json").write_text(json.dumps(found) + "\n")
    (RESULTS / f"gradients-{options.name}.md").write_text(report(options.name, found))
    print(report(options.name, found))


if __name__ == "__main__":
    main()
