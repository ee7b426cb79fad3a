r"""DAPO's ``Answer:`` rule: cases by hand, and the same verdict as verl's own scorer on anything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils.reward_score import math_dapo

from gtpo_verl.verifiers.answer import DELETED, REPLACED, judge, last_box, normalise


@pytest.mark.parametrize(
    ("response", "truth", "right", "pred"),
    [
        ("Answer: 34", "34", True, "34"),
        ("so it is 34.\nanswer :  34", "34", True, "34"),
        ("Answer: $34$", "34", True, "34"),
        ("Answer: \\boxed{34}", "34", True, "34"),
        ("Answer: 1\nAnswer: 2", "2", True, "2"),
        ("Answer:\n\n34", "34", True, "34"),
        ("Answer: x = 34", "34", True, "34"),
        ("Answer: 34 dollars", "34", True, "34"),
        ("Answer: 1,000", "1000", True, "1000"),
        ("Answer: \\frac12", "\\frac{1}{2}", True, "\\frac{1}{2}"),
        ("Answer: 90^\\circ", "90", True, "90"),
        ("Answer: \\text{Evelyn}", "Evelyn", True, "Evelyn"),
        ("Answer: 34.", "34", False, "34."),
        ("Answer: 0.5", "\\frac{1}{2}", False, "0.5"),
        ("Answer: 35", "34", False, "35"),
        ("The result is 34", "34", False, "[INVALID]"),
        ("", "34", False, "[INVALID]"),
        ("thus \\boxed{34}", "34", True, "34"),
        ("thus \\boxed{ 34}", "34", False, " 34"),
        ("thus \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True, "\\frac{1}{2}"),
        ("thus \\boxed{34", "34", False, "[INVALID]"),
        ("Answer: 35 or \\boxed{34}", "34", False, "35or34"),
        ("Answer: 34" + " " * 300, "34", False, "[INVALID]"),
        ("\\boxed{34}" + " " * 100, "34", False, "[INVALID]"),
    ],
)
def test_cases(response: str, truth: str, right: bool, pred: str) -> None:
    assert judge(response, truth) == (right, pred)


def test_the_strict_rule_reads_the_box_alone() -> None:
    assert judge("Answer: 34", "34", strict_box=True) == (False, "[INVALID]")
    assert judge("Answer: 35 \\boxed{34}", "34", strict_box=True) == (True, "34")


def test_normalising_is_what_minerva_does() -> None:
    assert normalise("The area is A = 12 square cm") == "12"
    assert normalise("an $x$ and $y$") == "x"
    assert normalise("x,\\text{and} y") == "x,y"
    assert normalise("3, 4") == "34"  # a list of numbers is taken for one with thousands: the rule's quirk
    assert normalise("\\sqrt3") == "\\sqrt{3}"


def test_the_last_box_has_balanced_braces() -> None:
    assert last_box("\\boxed{1} \\boxed{\\frac{2}{3}} end}") == "\\frac{2}{3}"
    assert last_box("\\boxed{1} \\boxed{2") is None
    assert last_box("\\boxed1") is None


PIECES = st.one_of(
    st.sampled_from(
        [before for before, _ in REPLACED]
        + [after for _, after in REPLACED]
        + list(DELETED)
        + ["Answer:", "answer :", "ANSWER: ", "Answer", "\n", " ", "=", "$", "{", "}", "\\", ",", ".", "-", "\t", "\r", "\u2028"]
        + ["\\boxed{", "\\text{", "\\textbf{", "\\overline{", "\\frac", "\\sqrt", "1", "23", "1,000", "x", "a", "m", "²", "٣"]
    ),
    st.text(max_size=5),
)  # fmt: skip
TEXT = st.lists(PIECES, max_size=25).map("".join)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(before=TEXT, answer=TEXT, marked=st.booleans(), truth=st.one_of(st.none(), TEXT), strict=st.booleans())
def test_the_verdict_is_verls(before: str, answer: str, marked: bool, truth: str | None, strict: bool) -> None:
    """Also where the truth is the answer itself, so that right ones are among them."""
    response = before + ("Answer: " if marked else "") + answer
    truth = answer if truth is None else truth
    theirs = math_dapo.compute_score(response, truth, strict_box_verify=strict)
    right, pred = judge(response, truth, strict_box=strict)
    assert right == theirs["acc"]
    assert (1.0 if right else -1.0) == theirs["score"]
    assert pred == ("[INVALID]" if theirs["pred"] is None else theirs["pred"])
