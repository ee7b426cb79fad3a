"""Covering arrays: few combinations of options in which every pair of values occurs."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Point = dict[str, Any]
Item = tuple[str, int]  # an axis and the position of a value on it: values need not be hashable


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0, candidates: int = 20) -> list[Point]:
    """Points of the product of ``axes`` such that any two values of two axes meet in one; the same for the same seed.

    Greedy: each point is built around a pair that is still missing, as the best of several random completions. Two axes
    at least.
    """
    rng = random.Random(seed)
    items = {name: [(name, index) for index in range(len(values))] for name, values in axes.items()}
    missing = {
        frozenset(pair)
        for one, other in itertools.combinations(items.values(), 2)
        for pair in itertools.product(one, other)
    }
    points = []
    while missing:
        start = min(missing, key=sorted)
        drawn = [_complete(start, items, missing, rng) for _ in range(candidates)]
        best = max(drawn, key=lambda point: len(missing & _pairs(point)))
        missing -= _pairs(best)
        points.append(
            {name: axes[name][index] for name, index in sorted(best, key=lambda item: list(axes).index(item[0]))}
        )
    return points


def _complete(
    start: frozenset[Item], items: Mapping[str, list[Item]], missing: set[frozenset[Item]], rng: random.Random
) -> list[Item]:
    """``start`` and one value of every other axis, in random order, each the one that closes most pairs with those
    before.
    """
    point = list(start)
    rest = [name for name in items if name not in dict(point)]
    for name in rng.sample(rest, len(rest)):
        values = rng.sample(items[name], len(items[name]))
        point.append(max(values, key=lambda value: sum(frozenset((value, other)) in missing for other in point)))
    return point


def _pairs(point: Sequence[Item]) -> set[frozenset[Item]]:
    return set(map(frozenset, itertools.combinations(point, 2)))
