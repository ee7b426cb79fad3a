"""What ``gtpo-verl audit --gradient-params`` costs in truth, on a small model: figures of some parameters beside those
of all.

``python benchmarks/gradient_params.py AUDIT MODEL KEY=VALUE ...``, with model and overrides of the audit of gradients
whose rollouts AUDIT has. Keeps the gradients of all groups in memory, 4 bytes a parameter, group and method, and writes
``benchmarks/results/gradient-params-AUDIT.md``.
"""

import re
import sys
from pathlib import Path

import numpy as np
from rich.progress import track

from gtpo_verl.audit.backward import load_policy, parts_of
from gtpo_verl.audit.gradients import DECILES, Products, figures_of, jackknife, moments
from gtpo_verl.audit.methods import methods
from gtpo_verl.audit.sampling import groups_with_contrast
from gtpo_verl.audit.store import RECORD_FILE, Store, plan_of
from gtpo_verl.evaluation.subject import configuration, find_subject
from gtpo_verl.files import read_json
from gtpo_verl.integrations.context import Overlong
from gtpo_verl.integrations.launch import export_environment

METHODS = ("dapo", "gtpo", "dapo_blame", "psr", "fork20")
PATTERNS = ("", r"layers\.0\.", r"layers\.1\.", "self_attn", "mlp", "norm", "embed")


def products_of(g: np.ndarray, h: np.ndarray, audited: np.ndarray) -> Products:
    """Dot products of gradients g (M, K, P), 0 where not audited, and h (K, P), in the plain metric alone."""
    count = (len(g), len(h))
    gg, big_g, gh, big_h, hg = (np.zeros((2, *count)) for _ in range(5))
    h = h.astype(np.float64)
    for row, single in enumerate(g):
        each = single.astype(np.float64)
        gg[:, row], big_g[:, row] = (each * each).sum(1), each @ each.sum(0)
        gh[:, row], big_h[:, row], hg[:, row] = (each * h).sum(1), each @ h.sum(0), h @ each.sum(0)
    of_truth = np.stack([(h * h).sum(1)] * 2), np.stack([h @ h.sum(0)] * 2)
    # by token, which the figures here do not need
    by_token = {name: np.ones((*count, 2, DECILES)) for name in ("noise", "signal")}
    by_token |= {name: np.ones((2, DECILES)) for name in ("tokens", "norms", "entropies")}
    return Products(np.array(METHODS), audited, gg, big_g, gh, big_h, hg, *of_truth, **by_token)


def main(audit: Path, model: str, overrides: list[str]) -> None:
    config = configuration(find_subject(model), overrides)
    export_environment(config)
    from gtpo_verl.integrations.continuations import Prompts  # imports verl, which reads the environment

    store = Store(audit, read_json(audit / RECORD_FILE))
    plan, step = plan_of(store), store.facts["step"]
    groups = groups_with_contrast(store.rollouts, plan)
    overlong = Overlong(*store.facts["overlong"]) if store.facts["overlong"] else None
    parts, number = parts_of(groups, plan.gradients, step, methods(METHODS), overlong, store.facts["seed"])
    policy = load_policy(config, Prompts(config).tokens, "")
    every = [(part, rows) for part in parts for rows in part.groups]
    audited = np.array([len(part.credits) > 1 for part, _ in every])
    g = np.zeros((len(METHODS), len(every), policy.size), np.float32)
    h = np.zeros((len(every), policy.size), np.float32)
    for k, (part, rows) in enumerate(track(every, "gradients")):
        found = policy.gradients(part.rollouts[rows], part.credits[:, rows]).numpy()
        h[k] = found[0]
        if audited[k]:
            g[:, k] = found[[number[name] for name in METHODS]]
    named = [(name, each.numel()) for name, each in policy._model.named_parameters()]
    whole: dict[str, np.ndarray] = {}
    lines = []
    for pattern in PATTERNS:
        place = np.concatenate([np.full(size, bool(re.search(pattern, name))) for name, size in named])
        products = products_of(g[..., place], h[:, place], audited)
        found = moments(products, 0)
        truth = jackknife(found.truth, audited).resolved
        cells = []
        for row, name in enumerate(METHODS[1:], 1):
            figure = figures_of(row, found, products, step, truth)["along/dapo"]
            needed = (found.second[row] / found.along[row] ** 2) / (found.second[0] / found.along[0] ** 2)
            relative = jackknife(needed / whole.setdefault(name, needed), audited, logarithm=True)
            values = [figure] if not pattern else [figure, relative]
            known = " · ".join(f"{each.value:.2f} ({each.low:.2f} to {each.high:.2f})" for each in values)
            cells.append("n.r." if figure.value is None else known)
        snr = figures_of(0, found, products, step, truth)["snr"]
        lines.append(
            f"| {f'`{pattern}`' if pattern else 'all'} | {place.mean():.0%} | {' | '.join(cells)} | {snr.value:.2f} |"
        )
    head = f"| parameters | share | {' | '.join(f'`{name}`' for name in METHODS[1:])} | DAPO's SNR of a step |"
    rule = "|---" * (len(METHODS) + 2) + "|"
    about = (
        f"`benchmarks/gradient_params.py`, over an audit of {audited.sum()} groups and {(~audited).sum()} more in the "
        f"true gradient, {policy.size:,} parameters. Groups needed along the truth relative to DAPO, by the gradient "
        "of some parameters; behind the dot, relative to the figure of all. 95 % intervals by jackknife over groups."
    )
    text = "\n".join([f"# Gradients of some parameters, {audit.name}", "", about, "", head, rule, *lines, ""])
    (Path(__file__).parent / "results" / f"gradient-params-{audit.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
