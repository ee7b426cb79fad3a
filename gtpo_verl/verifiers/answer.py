"""DAPO's ``Answer:`` rule: the text after the last "Answer:" equals the ground truth when both are normalised.

The normalisation is Minerva's (arXiv 2206.14858, appendix D.1), with the order and the quirks of verl's ``math_dapo``.
"""

import re

TAIL = 300  # characters of a response that are read; the longest answer in MATH-500 has 159
BOX_TAIL = 100  # of these, the characters searched for a box
NO_ANSWER = "[INVALID]"  # the prediction of a response without an answer

ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
BOX = "\\boxed{"

# Applied in this order: articles, spaces, and "and" in lists; \text{m} is a unit.
REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", "")),
    *(("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
# Units and words in MATH's answers, deleted anywhere, then the LaTeX left around them.
DELETED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet"), *("minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3",
    "\\text{\n}"), *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)  # fmt: skip
REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),  # the first formula of a line that has any
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def judge(response: str, truth: str, *, strict_box: bool = False) -> tuple[bool, str]:
    """Extract a response's final answer and compare it with the ground truth.

    The answer is what follows the last "Answer:" (in any case) on its line, in the last 300 characters. Without one, or
    with ``strict_box``, a box in the last 100 characters counts, and must equal the truth character by character.
    Returns whether it is right, and the extracted answer (normalised, or the content of the box), ``[INVALID]`` for
    none.
    """
    response = response[-TAIL:]
    if not strict_box:
        found = ANSWER.findall(response)
        answer = normalise(found[-1] if found else NO_ANSWER)
        if answer != NO_ANSWER:
            return answer == normalise(truth), answer
    boxed = last_box(response[-BOX_TAIL:])
    if boxed is None:
        return not strict_box and normalise(truth) == NO_ANSWER, NO_ANSWER
    return boxed == truth, boxed


def normalise(answer: str) -> str:
    """Return an answer without units, articles, styling and spaces; of an equation, its last side."""
    answer = answer.rpartition("=")[2]
    for before, after in REPLACED:
        answer = answer.replace(before, after)
    for text in DELETED:
        answer = answer.replace(text, "")
    for pattern, replacement in REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, None where there is none or its braces are not closed."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if text[position] == "}" and depth == 0:
            return text[start + len(BOX) : position]
    return None
