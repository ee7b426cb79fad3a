"""How a prompt asks for its answer. The verifier must read what the prompt asks for, so both are named alike.

* ``answer``: DAPO's instruction around the problem; the last line is to be ``Answer: ...``.
* ``boxed``: the instruction of the Qwen2.5-Math family behind the problem; the answer is to be in ``\\boxed{}``.
"""

from gtpo_verl.errors import UserError

# (before the problem, behind it); the first as DAPO-Math-17k prints it, so that its prompts are recognised
STYLES = {
    "answer": (
        (
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        ),
        '\n\nRemember to put your answer on its own line after "Answer:".',
    ),
    "boxed": ("", "\n\nPlease reason step by step, and put your final answer within \\boxed{}."),
}


def wrap(problem: str, style: str) -> str:
    """The problem with the instruction of a style around it."""
    before, behind = STYLES[style]
    return before + problem + behind


def unwrap(prompt: str) -> tuple[str, str | None]:
    """The problem in a prompt, and the style of the instruction around it; None where it carries neither instruction."""
    for style, (before, behind) in STYLES.items():
        if prompt.startswith(before) and prompt.rstrip().endswith(behind.rstrip()):
            return prompt[len(before) :].rstrip()[: -len(behind)].strip(), style
    return prompt.strip(), None


def restyle(prompt: str, style: str | None) -> str:
    """The prompt in another style; None leaves it as it is.

    Raises:
        UserError: its own instruction is unknown, so it cannot be taken off.
    """
    if style is None:
        return prompt
    problem, found = unwrap(prompt)
    if found is None:
        raise UserError(
            f"--style {style}: a prompt has an instruction of its own, or none, and the two cannot be told apart "
            f"({problem[:60]!r}…): leave --style out to keep the prompts as they are."
        )
    return wrap(problem, style)
