"""Two steps of the gradients on SmolLM2 (`results/smollm2-audits/sums-gradients`) that the audit has no command for.

``python benchmarks/smollm2_gradients.py join FIRST SECOND``: add to the audit FIRST the methods that SECOND, over the
same rollouts, has beside its own; ``gtpo-verl audit --reanalyse FIRST`` then shows all. Every figure of a method is of
products of its own gradients and of the true gradient, which both runs must have in common to the last bit.

``... clusters AUDIT``: groups needed along the truth relative to DAPO and to GTPO, with 95 % intervals by jackknife
over groups, and over problems that differ in order alone, whose influences on the logarithm are added first.
"""

import re
import sys
from pathlib import Path

import numpy as np
from scipy import stats

from gtpo_verl.audit.gradients import Products, moments
from gtpo_verl.audit.sampling import groups_with_contrast
from gtpo_verl.audit.store import plan_of, reopen

# The axis of the methods in each array of `Products`; the other arrays have none.
AXES = {"names": 0, "noise": 0, "signal": 0, "gg": 1, "gG": 1, "gh": 1, "gH": 1, "hG": 1}


def join(first: Path, second: Path) -> None:
    mine, theirs = (vars(Products.read(place / "gradients.npz")) for place in (first, second))
    names, others = mine["names"].tolist(), theirs["names"].tolist()
    new = [name for name in others if name not in names]
    joined = {}
    for name, values in mine.items():
        axis = AXES.get(name)
        if axis is None:
            assert np.array_equal(values, theirs[name]), f"{name} differs"
            joined[name] = values
            continue
        for common in set(names) & set(others):
            pair = values.take(names.index(common), axis), theirs[name].take(others.index(common), axis)
            assert np.array_equal(*pair), f"{name} of {common} differs"
        added = theirs[name].take([others.index(one) for one in new], axis)
        joined[name] = np.concatenate([values, added], axis)
    Products(**joined).write(first / "gradients.npz")
    print(f"{first}: {', '.join(joined['names'].tolist())}")


def clusters(audit: Path) -> None:
    store = reopen(audit)
    products = Products.read(audit / "gradients.npz")
    groups = groups_with_contrast(store.rollouts, plan_of(store))[: len(products.audited)]
    problems = ["".join(sorted(re.findall(r"[0-9+-]", group[0].prompt))) for group in groups]
    _, number = np.unique(problems, return_inverse=True)
    print(f"{len(groups)} groups, {number.max() + 1} problems without order")
    found, names = moments(products, 0), products.names.tolist()
    needed = np.log(found.second / found.along**2)
    for other in ("dapo", "gtpo"):
        for row, name in enumerate(names):
            estimates = needed[row] - needed[names.index(other)]
            influence = estimates[1:] - estimates[1:].mean()
            intervals = []
            for each in (influence, np.bincount(number, influence)):
                half = stats.t.ppf(0.975, len(each) - 1) * np.sqrt((each**2).sum() * (1 - 1 / len(each)))
                low, value, high = np.exp(estimates[0] + half * np.array([-1, 0, 1]))
                intervals.append(f"{value:.2f} ({low:.2f} to {high:.2f})")
            print(f"{name:14} / {other}: by group {intervals[0]}, by problem {intervals[1]}")


if __name__ == "__main__":
    {"join": join, "clusters": clusters}[sys.argv[1]](*map(Path, sys.argv[2:]))
