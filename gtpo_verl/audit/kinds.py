"""Which kinds of tokens the steps that decide are made of, and on which kinds each method's credit falls."""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtpo_verl.audit.analysis import DRAWS, Figure, as_figure, enough_prompts, resampled
from gtpo_verl.audit.metrics import by_step
from gtpo_verl.audit.values import Bools, Ints, Values
from gtpo_verl.runs.statistics import Floats

KINDS = ("numbers", "operators", "punctuation", "words", "space", "special tokens", "other")
SPECIAL = re.compile(r"<[|｜].+[|｜]>|</?s>|<(bos|eos|pad|unk|start_of_turn|end_of_turn)>")
OPERATORS = frozenset("+-*/=<>^×÷·−±≤≥≠≈")
NOT_DECODED = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})  # how vocabularies write space


def kind_of(text: str) -> str:
    """The kind of a token by its text: the first letter or digit decides, and without one an operator, then
    punctuation.
    """
    if SPECIAL.fullmatch(text.strip()):
        return "special tokens"
    text = text.translate(NOT_DECODED).strip()
    if not text:
        return "space"
    for character in text:
        if character.isalpha():
            return "words"
        if character.isnumeric():
            return "numbers"
    if not OPERATORS.isdisjoint(text):
        return "operators"
    return "punctuation" if any(map(_is_punctuation, text)) else "other"


def kinds_of(texts: Sequence[Sequence[str]], length: int) -> NDArray[np.str_]:
    """The kinds of the tokens of responses, (N, length); "" behind the end of each."""
    return np.array([[*map(kind_of, row), *[""] * (length - len(row))] for row in texts])


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def kind_shares(
    values: Values, credit: Mapping[str, Floats], texts: Sequence[Sequence[str]], points: Ints, *, draws: int = DRAWS
) -> dict[str, dict[str, dict[str, Any]]]:
    """Shares by verdict and by kind that occurs: `tokens`; `energy`, of Σ A², of which the tokens of a step have equal
    parts; `credit`, of Σ |credit|, by method. Shares of a sum that is not positive are not defined.

    credit: (N, T) of each token, by method. texts: of the tokens of each response. points: (N, M + 1).
    """
    length = next(iter(credit.values())).shape[1]
    kinds = kinds_of(texts, length)
    is_kind = {kind: kinds == kind for kind in KINDS if (kinds == kind).any()}
    of_step = {kind: by_step(mask, points) for kind, mask in is_kind.items()}
    tokens = np.sum(list(of_step.values()), axis=0)

    def shares(terms: Mapping[str, Floats], rows: Bools) -> dict[str, Figure]:
        sums = resampled({kind: values.weight * term.sum(1) for kind, term in terms.items()}, rows, values, draws)
        total = np.sum(list(sums.values()), axis=0)
        total = np.where(total > 0, total, np.nan)
        return {kind: as_figure(each / total, enough_prompts(values)) for kind, each in sums.items()}

    of_energy = {kind: values.energy * count / np.maximum(tokens, 1) for kind, count in of_step.items()}
    found = {}
    for verdict, rows in {"correct": values.correct, "wrong": ~values.correct}.items():
        if not rows.any():
            continue
        counted, energy = shares(of_step, rows), shares(of_energy, rows)
        of_credit = {
            name: shares({kind: np.abs(each) * mask for kind, mask in is_kind.items()}, rows)
            for name, each in credit.items()
        }
        found[verdict] = {
            kind: {
                "tokens": counted[kind],
                "energy": energy[kind],
                "credit": {name: each[kind] for name, each in of_credit.items()},
            }
            for kind in is_kind
        }
    return found
