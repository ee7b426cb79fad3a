r"""Math-Verify's rule: the boxed answer and the truth are the same mathematical object.

Math-Verify (Apache-2.0) parses both to SymPy and compares numbers, expressions, sets, intervals, matrices and
relations. Its own time limits are switched off: they use the alarm of the process, as ``server`` does.
"""

import logging
import re
from typing import Any

from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from gtpo_verl.verifiers.answer import BOX, last_box

# It would warn that its own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Hydra needs ANTLR 4.9. The grammar that latex2sympy2_extended 1.11 generated for that version lacks a rule that its
# code queries, and parsing fails at every atom checked after it (percentages). The grammar cannot produce such an atom,
# so None is the right reply.
if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    PSParser.AtomContext.FUNC_GAMMA = lambda self: None

# A box has priority; then "final answer is ...", "answer: ...", the last formula, the last number.
LATEX = LatexExtractionConfig(boxed_match_priority=0)
EXPRESSION = ExprExtractionConfig()

DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[|" + re.escape(BOX))  # \$ is a dollar sign
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
    r"""Extract a response's final answer and compare it with the ground truth.

    truth: a number, bare LaTeX, or text with LaTeX in delimiters or a box. fallback: without a box, use the last
    formula or number; with False such a response is wrong. decimals: decimal places to which numbers are compared.
    strict: variable names matter, and a tuple does not equal a set. set_relations: an inequality may equal an interval.

    Returns whether it is right, and the extracted answer: the content of the box if there is one, else Math-Verify's
    text of it, empty for none. Raises ValueError: the truth does not parse, so that no response could be right.
    """
    box = last_box(response)
    if box is not None and box.strip() == truth.strip() != "":
        return True, box
    if not (right := read_truth(truth)):
        raise ValueError(f"the ground truth {truth[:80]!r} does not parse")
    if fallback:
        answer = read(response)
    else:  # LaTeX in the box only: a number inside a formula that does not parse would be a fallback too
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
        return bool(equal), box  # as written; Math-Verify's text is normalised
    return bool(equal), next((part for part in answer if isinstance(part, str)), "")


def warm_up() -> None:
    """Verify one answer of each kind, so that forked processes inherit compiled expressions and tables."""
    for response, truth in (
        (r"$\boxed{\frac{1}{2}}$", "0.5"),
        ("The answer is 1/2", r"\{1, 2\}"),
        (r"\boxed{x+1}", "$1+x$"),
    ):
        judge(response, truth)


def read(text: str) -> list[Any]:
    """Return the answer in a text as Math-Verify's candidates: a SymPy object if it parses, and its text."""
    found = parse(text, (LATEX, EXPRESSION), parsing_timeout=None)
    if FORMULA.search(text) and not parse(text, (LATEX,), parsing_timeout=None):
        # no formula parses (for example one with a line break between single dollars): numbers in them do not count
        return parse(FORMULA.sub(" ", text), (EXPRESSION,), parsing_timeout=None)
    return found


def read_truth(truth: str) -> list[Any]:
    """Return the ground truth as candidates; data sets have it bare, in delimiters, or inside a solution."""
    truth = truth.strip()
    if DELIMITER.search(truth):
        return read(truth)
    boxed = f"{BOX}{truth}}}"
    if not NUMBER.fullmatch(truth):
        return read(boxed) or read(truth)
    if DECIMAL_COMMA.fullmatch(truth):
        return read(truth) + read(boxed)  # 1,5 is a number in some data sets, a pair in others
    return read(truth) or read(boxed)  # Math-Verify reads +5 in a formula only
