"""The covering arrays of tests/support/pairwise.py cover."""

import itertools

from pairwise import pairwise

AXES = {"a": range(4), "b": "xyz", "c": (None, [1]), "d": (0, 1), "e": range(5)}


def test_every_pair_of_values_occurs_in_few_points() -> None:
    points = pairwise(AXES)
    assert all(list(point) == list(AXES) for point in points)
    for one, other in itertools.combinations(AXES, 2):
        met = [(point[one], point[other]) for point in points]
        assert all(pair in met for pair in itertools.product(AXES[one], AXES[other]))
    assert len(points) < 30  # 20 is the least, 4 · 5; the product has 240


def test_the_same_seed_gives_the_same_points() -> None:
    assert pairwise(AXES, seed=3) == pairwise(AXES, seed=3) != pairwise(AXES, seed=4)
