"""Where the squared true advantages of a finished audit are: by entropy, by probability and by kind of token.

``python benchmarks/deciding_tokens.py AUDIT [LEAVE_OUT]``: shares of tokens, of Σ A² and of the size of DAPO's and
GTPO's credit, by verdict, of all responses but the LEAVE_OUT with the most Σ A²; with 95 % intervals over prompts for
the second and its ratio to the first. Made for audits with a point at every token (``--steps`` at the length limit).

Of an audit of gradients: the shares of each method's noise and signal on wrong responses and on the tenths of the
tokens by entropy, with 95 % intervals (jackknife over groups).
"""

import sys
from pathlib import Path

import numpy as np
import torch

from gtpo_verl.audit.analysis import DRAWS, Figure, as_figure, enough_prompts, resampled
from gtpo_verl.audit.gradients import Products, jackknife, without
from gtpo_verl.audit.kinds import KINDS, kinds_of
from gtpo_verl.audit.methods import credit_of, methods
from gtpo_verl.audit.metrics import by_step
from gtpo_verl.audit.sampling import choose_responses, measured
from gtpo_verl.audit.score import batch_of, padded
from gtpo_verl.audit.store import plan_of, reopen


def of_gradients(products: Products) -> None:
    print(f"wrong responses have {products.tokens[0].sum() / products.tokens.sum():.3f} of the tokens")
    for row, name in enumerate(products.names.tolist()):
        for kind in ("noise", "signal"):
            each = getattr(products, kind)[row, products.audited]  # (N, 2, 10)
            left = without(each.sum(0), np.moveaxis(each, 0, -1))  # (2, 10, 1 + N)
            parts = {"wrong": left[0].sum(0)} | {f"tenth {k + 1}": left[:, k].sum(0) for k in range(left.shape[1])}
            for part, inside in parts.items():
                share = jackknife(inside / left.sum((0, 1)), np.ones(len(each), bool))
                print(f"{name:14} {kind:7} {part:9} {_text(share)}")


def main() -> None:
    gradients = Path(sys.argv[1]) / "gradients.npz"
    if gradients.is_file():
        of_gradients(Products.read(gradients))
        return
    store = reopen(Path(sys.argv[1]))
    seed = int(store.facts["seed"])
    chosen = choose_responses(store.rollouts, plan_of(store), seed)
    values = measured(store, chosen)
    rows = [each.entropies for each in chosen.responses]
    entropies, mask = (each.numpy() for each in padded(rows, torch.float64))
    log_probs = padded([each.log_probs for each in chosen.responses], torch.float64)[0].numpy()
    tokens = by_step(mask, chosen.points)
    energy = values.energy / np.maximum(tokens, 1)
    kept = np.ones_like(values.correct)
    total = values.weight * values.energy.sum(1)
    left_out = np.argsort(-total)[: int(sys.argv[2]) if len(sys.argv) > 2 else 0]
    kept[left_out] = False
    if len(left_out):
        print(f"left out: responses {sorted(left_out.tolist())}, {total[left_out].sum() / total.sum():.3f} of Σ A²")
    verdicts = {"all": kept, "correct": values.correct & kept, "wrong": ~values.correct & kept}

    batch = batch_of(chosen.batch, seed)
    assigned = {
        each.name: np.abs(credit_of(each, batch, None)[chosen.rows])[:, : mask.shape[1]] * mask
        for each in methods(("dapo", "gtpo"))
    }

    def shares(name: str, marked: np.ndarray) -> None:
        """Of tokens, of Σ A² and of two methods' credit on marked tokens, (N, T)."""
        count = by_step(marked, chosen.points)
        terms = {"energy": energy * count, "all": values.energy, "tokens": count, "length": tokens}
        for verdict, within in verdicts.items():
            sums = resampled({key: values.weight * term.sum(1) for key, term in terms.items()}, within, values, DRAWS)
            of_tokens, of_energy = sums["tokens"] / sums["length"], sums["energy"] / sums["all"]
            share, ratio = (as_figure(each, enough_prompts(values)) for each in (of_energy, of_energy / of_tokens))
            weight = (values.weight * within)[:, None]
            given = [f"{x} {(weight * c * marked).sum() / (weight * c).sum():.3f}" for x, c in assigned.items()]
            print(
                f"{name:24} {verdict:8} tokens {of_tokens[0]:.3f}  energy {_text(share)}  ratio {_text(ratio)} ", *given
            )

    for part, name in ((0.8, "a fifth"), (0.75, "a quarter"), (0.5, "half")):
        least = np.quantile(entropies[mask], part)
        shares(f"{name} above {least:.2f} nat", mask & (entropies >= least))
    shares("probability 0.9 and more", mask & (log_probs >= np.log(0.9)))
    shares("probability below 0.1", mask & (log_probs < np.log(0.1)))
    kinds = kinds_of([each.texts for each in chosen.responses], mask.shape[1])
    for kind in KINDS:
        shares(kind, kinds == kind)


def _text(figure: Figure) -> str:
    return " ".join(f"{each:.3f}" for each in figure if each is not None)


if __name__ == "__main__":
    main()
