r"""Math-Verify's rule: the boxed answer and the truth are the same mathematical object.

Math-Verify (Apache-2.0) parses both to SymPy and compares numbers, expressions, sets, intervals, matrices and relations. It is
called without its own time limits, which are alarms of the process: here the process that judges has one (``server``).
"""

import logging
import re
from typing import Any

from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from gtpo_verl.verifiers.answer import BOX, last_box

# It warns that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Hydra needs ANTLR 4.9, and the grammar that latex2sympy2_extended 1.11 generated for it lacks one rule that its code asks
# for: without it, every atom behind that question (percentages) fails. The grammar cannot produce such an atom: None is true.
if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    PSParser.AtomContext.FUNC_GAMMA = lambda self: None

# A box counts before everything else; then "final answer is ...", "answer: ...", the last formula, the last number.
LATEX = LatexExtractionConfig(boxed_match_priority=0)
EXPRESSION = ExprExtractionConfig()

DELIMITERS = ("$", "\\(", "\\[", BOX)
FORMULA = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:[ ,]\d{3})+)?(?:[.,]?\d+)?(?:/\d+)?\s*%?")
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")


def judge(
    response: str,
    truth: str,
    *,
    fallback: bool = True,
    decimals: int = 6,
    strict: bool = True,
    set_relations: bool = False,
) -> tuple[bool, str]:
    r"""Read a response's final answer and compare it with the truth.

    Args:
        response: text with the answer in ``\boxed{}``.
        truth: the right answer: a number, bare LaTeX, or text with LaTeX in delimiters or a box.
        fallback: read a response without a box by its last formula or number; False makes it wrong.
        decimals: places to which numbers are compared.
        strict: names of variables count, and a tuple is no set.
        set_relations: an inequality may answer an interval.

    Returns:
        Whether it is right, and the answer that was read: what stands in the box if there is one, else Math-Verify's text of it;
        empty for none.

    Raises:
        ValueError: nothing can be read from the truth, so that no response could be right.
    """
    box = last_box(response)
    if box is not None and box.strip() == truth.strip() != "":
        return True, box
    right = read_truth(truth)
    if not right:
        raise ValueError(f"no answer can be read from the truth {truth[:80]!r}")
    if fallback:
        answer = read(response)
    else:  # the box, and inside it LaTeX: a number in a formula that does not parse would be a fallback too
        answer = [] if box is None else parse(f"{BOX}{box}}}", (LATEX,), parsing_timeout=None)
    equal = verify(
        right,
        answer,
        float_rounding=decimals,
        strict=strict,
        allow_set_relation_comp=set_relations,
        timeout_seconds=None,
    )
    if box is not None and response.count(BOX) == 1:
        return bool(equal), box  # as it was written; Math-Verify's text has been through its normalisation
    return bool(equal), next((part for part in answer if isinstance(part, str)), "")


def warm_up() -> None:
    """Judge one answer of each kind, so that a process that is forked afterwards finds expressions compiled and tables built."""
    for response, truth in (
        (r"$\boxed{\frac{1}{2}}$", "0.5"),
        ("The answer is 1/2", r"\{1, 2\}"),
        (r"\boxed{x+1}", "$1+x$"),
    ):
        judge(response, truth)


def read(text: str) -> list[Any]:
    """Return the answer in a text as Math-Verify's candidates: a SymPy object where it parses, and its text."""
    found = parse(text, (LATEX, EXPRESSION), parsing_timeout=None)
    if FORMULA.search(text) and not parse(text, (LATEX,), parsing_timeout=None):
        # None of the formulas is one (a line break inside single dollars): a number in there is not the answer.
        return parse(FORMULA.sub(" ", text), (EXPRESSION,), parsing_timeout=None)
    return found


def read_truth(truth: str) -> list[Any]:
    """Return the right answer as candidates; a data set may hold it bare, in delimiters, or inside a solution."""
    truth = truth.strip()
    if any(mark in truth for mark in DELIMITERS):
        return read(truth)
    boxed = f"{BOX}{truth}}}"
    if not NUMBER.fullmatch(truth):
        return read(boxed) or read(truth)
    if DECIMAL_COMMA.fullmatch(truth):
        return read(truth) + read(boxed)  # 1,5 is a number in some data sets and a pair in others
    return read(truth)
