"""Kinds of tokens, and their shares against loops, identities and exact values."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tabular_policy import Sampled, TabularPolicy

from gtpo_verl.audit.kinds import KINDS, kind_of, kind_shares
from gtpo_verl.audit.values import Values

M = 5  # steps of 4 and of 5 tokens
DRAWS = 200
TEXTS = (" 12", " =", "Ġso", ".", "<|im_end|>")  # by token
OF_TOKEN = ("numbers", "operators", "words", "punctuation", "special tokens")


@pytest.mark.parametrize(
    ("kind", "texts"),
    {
        "numbers": ["7", " 12", "1st", "-3", "3.5", "Ġ12", "▁7", "²", "½", "=4", "$5", "２"],
        "operators": [" = ", "+", "-", "−", "*", "**", "/", "==", "Ġ=", "×", "≤", "=(", "->"],
        "punctuation": [".", ",", ").", " (", "$", "`", "\\[", "|", "…", "。", "Ġ(", ",\n", "%"],
        "words": [" the", "Ġso", "▁we", "x1", "don't", "s", "(a", "\\frac", "é", "二", "</think>", "<b>"],
        "space": [" ", "\n", "\n\n", "\t", "Ġ", "ĊĊ", "▁", ""],
        "special tokens": ["<|im_end|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", " <|eot_id|>\n"],
        "other": ["\ufffd", "🙂", "→", "°"],
    }.items(),
)
def test_kinds_of_awkward_tokens(kind: str, texts: list[str]) -> None:
    assert kind in KINDS
    assert {text: kind_of(text) for text in texts} == dict.fromkeys(texts, kind)


@pytest.fixture(scope="module")
def sampled() -> Sampled:
    return TabularPolicy(80, seed=1).sample(8)


@pytest.fixture(scope="module")
def values(sampled: Sampled) -> Values:
    measured = sampled.values(M, 16, np.random.default_rng(2))
    return replace(measured, weight=np.random.default_rng(3).uniform(0.5, 2, len(sampled.tables)))


@pytest.fixture(scope="module")
def credit(sampled: Sampled) -> dict[str, np.ndarray]:
    """Three tokens longer than the responses, as beside longer ones that are not audited."""
    uniform = np.where(sampled.correct, 1.0, -1.0)[:, None] * np.ones_like(sampled.entropy)
    each = {"dapo": uniform, "entropy": uniform * sampled.entropy}
    return {name: np.pad(rows, ((0, 0), (0, 3))) for name, rows in each.items()}


def texts_of(sampled: Sampled) -> list[list[str]]:
    return [[TEXTS[token] for token in row] for row in sampled.tokens]


def shares(
    sampled: Sampled, values: Values, credit: dict[str, np.ndarray], texts: list[list[str]] | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    return kind_shares(values, credit, texts or texts_of(sampled), sampled.points(M), draws=DRAWS)


def test_shares_against_loops(sampled: Sampled, values: Values, credit: dict[str, np.ndarray]) -> None:
    found = shares(sampled, values, credit)
    first, second = values.halves
    points = sampled.points(M)
    for verdict, correct in {"correct": True, "wrong": False}.items():
        tokens, energy = Counter[str](), Counter[str]()
        weights = {name: Counter[str]() for name in credit}
        for i in np.flatnonzero(values.correct == correct):
            for step, (start, end) in enumerate(itertools.pairwise(points[i].tolist())):
                square = (first[i, step + 1] - first[i, step]) * (second[i, step + 1] - second[i, step])
                for t in range(start, end):
                    kind = OF_TOKEN[sampled.tokens[i, t]]
                    tokens[kind] += values.weight[i]
                    energy[kind] += values.weight[i] * square / (end - start)
                    for name, each in credit.items():
                        weights[name][kind] += values.weight[i] * abs(each[i, t])
        assert set(found[verdict]) == set(OF_TOKEN)
        for kind, of in found[verdict].items():
            assert of["tokens"].value == pytest.approx(tokens[kind] / tokens.total())
            assert of["energy"].value == pytest.approx(energy[kind] / energy.total())
            for name, weight in weights.items():
                assert of["credit"][name].value == pytest.approx(weight[kind] / weight.total())
            for figure in (of["tokens"], of["energy"], of["credit"]["entropy"]):
                assert figure.low < figure.value < figure.high
            # the same size for every token: the share of the tokens
            assert of["credit"]["dapo"] == pytest.approx(of["tokens"])


def flat(found: dict[str, dict[str, dict[str, Any]]]) -> dict[tuple[str, ...], float]:
    figures = {}
    for verdict, kinds in found.items():
        for kind, of in kinds.items():
            for name, figure in {**of["credit"], "tokens": of["tokens"], "energy": of["energy"]}.items():
                figures[verdict, kind, name] = figure.value
    return figures


def moved(before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float]) -> set[tuple[str, ...]]:
    return {key for key, value in before.items() if abs(after[key] - value) > 1e-9}


def test_what_moves_a_share(sampled: Sampled, values: Values, credit: dict[str, np.ndarray]) -> None:
    before = flat(shares(sampled, values, credit))
    row = int(np.flatnonzero(~values.correct)[0])
    # twice the credit of all: nothing; of one token: the shares of that method and verdict
    scaled = {name: each * 7 for name, each in credit.items()}
    assert moved(before, flat(shares(sampled, values, scaled))) == set()
    other = credit["entropy"].copy()
    other[row, 4] -= 3
    after = flat(shares(sampled, values, credit | {"entropy": other}))
    assert moved(before, after) == {("wrong", kind, "entropy") for kind in OF_TOKEN}
    kind = OF_TOKEN[sampled.tokens[row, 4]]
    assert after["wrong", kind, "entropy"] > before["wrong", kind, "entropy"]
    # another value of one point: the shares of Σ A²
    halves = values.halves.copy()
    halves[:, row, 2] = [0.9, 0.8]
    after = flat(shares(sampled, replace(values, halves=halves), credit))
    assert moved(before, after) == {("wrong", kind, "energy") for kind in OF_TOKEN}
    # another text of one token: two kinds gain and lose
    texts = texts_of(sampled)
    texts[row][4] = TEXTS[1] if kind != OF_TOKEN[1] else TEXTS[0]
    new = kind_of(texts[row][4])
    after = flat(shares(sampled, values, credit, texts))
    changed = {key for key in moved(before, after) if key[2] == "tokens"}
    assert changed == {("wrong", kind, "tokens"), ("wrong", new, "tokens")}
    weight = values.weight[row] / (values.weight[~values.correct].sum() * sampled.tokens.shape[1])
    assert after["wrong", new, "tokens"] - before["wrong", new, "tokens"] == pytest.approx(weight)


def test_shares_that_are_not_defined(sampled: Sampled, values: Values, credit: dict[str, np.ndarray]) -> None:
    opposed = replace(values, halves=np.stack([values.halves[0], 1 - values.halves[0]]))  # no signal in the product
    of_correct = credit["dapo"] * values.correct[:, None]
    found = shares(sampled, opposed, credit | {"correct": of_correct})
    assert all(of["energy"] == (None, None, None) for kinds in found.values() for of in kinds.values())
    assert all(of["credit"]["correct"].value is None for of in found["wrong"].values())
    assert all(of["credit"]["correct"] == of["credit"]["dapo"] for of in found["correct"].values())


def test_few_prompts_have_no_interval_and_one_verdict_no_other(sampled: Sampled, credit: dict[str, np.ndarray]) -> None:
    rows = np.isin(sampled.tables, np.unique(sampled.tables)[:19]) & sampled.correct
    few = sampled.rows(rows)
    found = shares(few, few.exact(M), {name: each[rows] for name, each in credit.items()})
    assert set(found) == {"correct"}
    assert all(of[name].low is None for of in found["correct"].values() for name in ("tokens", "energy"))


def test_noise_does_not_attenuate_a_share(sampled: Sampled, credit: dict[str, np.ndarray]) -> None:
    """The mean over 30 measurements with 16 continuations of a point is the exact share, within 3.5 SE and the bias of
    a ratio. Squares of the mean advantages are closer to the share of the tokens.
    """
    steps = 24  # one token each
    points, texts = sampled.points(steps), texts_of(sampled)
    dapo = {"dapo": credit["dapo"]}

    def energy(measured: Values) -> float:
        found = kind_shares(measured, dapo, texts, points, draws=2)["wrong"]["words"]["energy"].value
        assert found is not None
        return float(found)

    exact = energy(sampled.exact(steps))
    rng = np.random.default_rng(5)
    drawn, naive = [], []
    for _ in range(30):
        measured = sampled.values(steps, 16, rng)
        drawn.append(energy(measured))
        naive.append(energy(replace(measured, halves=np.stack([measured.mean] * 2))))
    error = np.std(drawn) / math.sqrt(len(drawn))
    assert abs(np.mean(drawn) - exact) < 3.5 * error + 0.01
    assert 2 * exact < np.mean(naive)  # a token that moves nowhere decides little, and is as noisy as the others
