"""How a prompt asks for the answer. The verifier must extract what the prompt asks for, so both have the same names.

* ``answer``: DAPO's instruction around the problem, which asks for ``Answer: ...`` on the last line.
* ``boxed``: the instruction of the Qwen2.5-Math family after the problem, which asks for the answer in ``\\boxed{}``.
"""

from gtpo_verl.errors import UserError

# (text before the problem, text after it); `answer` is that of DAPO-Math-17k, so its prompts are recognised
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
    """The problem with the instruction of a style."""
    before, behind = STYLES[style]
    return before + problem + behind


def unwrap(prompt: str) -> tuple[str, str | None]:
    """The problem in a prompt, and the style of its instruction, None where it has neither instruction."""
    for style, (before, behind) in STYLES.items():
        if prompt.startswith(before) and prompt.rstrip().endswith(behind.rstrip()):
            return prompt[len(before) :].rstrip()[: -len(behind)].strip(), style
    return prompt.strip(), None


def restyle(prompt: str, style: str | None) -> str:
    """The prompt in another style; with None, unchanged. Raises UserError: the prompt has an unknown instruction, which
    cannot be removed.
    """
    if style is None:
        return prompt
    problem, found = unwrap(prompt)
    if found is None:
        raise UserError(
            f"--style {style}: a prompt has no known instruction to replace ({problem[:60]!r}…): leave --style out to "
            "keep the prompts unchanged."
        )
    return wrap(problem, style)
