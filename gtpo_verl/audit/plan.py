"""What an audit costs in tokens, and what it can see, before anything is sampled."""

import math
from dataclasses import dataclass

from gtpo_verl.errors import UserError
from gtpo_verl.planning.shapes import ModelShape

FEWEST_CONTINUATIONS = 8  # below, halves of two or three continuations leave intervals nobody can use
FEWEST_GROUPS = 20  # below, a jackknife says nothing
DESIGN_EFFECT = 1.5  # responses to one prompt resemble each other
QUANTILES = 7.85  # (1.96 + 0.84)²: a test at 5 %, two-sided, with a power of 80 %
AT_PROMPT = 4  # V(0) is shared by the responses to a prompt, so it gets so many times the continuations
BYTES_OF_A_CREDIT = 12  # for each parameter: its gradient in float32, and the sum over groups in float64
BYTES_BESIDE = 60  # for each parameter, whatever the methods: products and Adam's metric in float64; measured at 16 M
PROCESS = 2**30  # bytes that do not depend on the model: 0.8 GiB of libraries on a CPU, or CUDA's context
MOST_LOGITS = 2**26  # of one forward pass, or one response
BLOCK = 16  # tokens of vLLM's prefix cache that are computed again for a continuation, on average less


def bytes_for_gradients(methods: int) -> int:
    """For each parameter, beside its weight: of so many methods' credits and the leave-one-out credit."""
    return BYTES_OF_A_CREDIT * (methods + 1) + BYTES_BESIDE


def bytes_of_a_pass(shape: ModelShape, responses: int, prompt: int, response: int) -> float:
    """What autograd saves of a pass over so many responses to a prompt, of a gradient that is differentiated once more;
    of fewer responses where the logits of all are more than `MOST_LOGITS`.

    The factors are fitted, within 1 %, to the tensors saved for the shapes of Qwen2.5-0.5B and 1.5B and of SmolLM2-135M
    at 88 to 2,304 tokens.
    """
    whole = prompt + response
    rows = min(responses, max(1, MOST_LOGITS // (whole * shape.vocabulary)))
    layer = whole * (24 * shape.hidden + 12 * shape.intermediate) + 3 * shape.heads * whole**2
    return 4.0 * rows * (shape.layers * layer + 4 * response * shape.vocabulary)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of an audit.

    prompts: P, with contrast. samples: G, of each. responses: N audited. steps: M. continuations: K of each point.
    second_stage: responses whose points get `second_continuations` in all. branches: other steps sampled at the start
    of each step, for the state oracle, each continued K / 2 times. gradients: prompts with the methods' gradients,
    the others being in the true one alone; 0 for an audit of values.
    """

    prompts: int = 64
    samples: int = 8
    responses: int = 128
    steps: int = 16
    continuations: int = 16
    second_stage: int = 0
    second_continuations: int = 64
    branches: int = 0
    gradients: int = 0

    def __post_init__(self) -> None:
        for name, least in {"prompts": 1, "samples": 2, "responses": 1, "steps": 2, "second_stage": 0}.items():
            if getattr(self, name) < least:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be at least {least}.")
        if self.continuations < FEWEST_CONTINUATIONS or self.continuations % 2:
            raise UserError(
                f"--continuations {self.continuations}: it must be an even number, at least {FEWEST_CONTINUATIONS}, "
                "for two halves."
            )
        if self.branches < 0 or self.branches == 1:
            raise UserError(f"--branches {self.branches}: it must be 0, or at least 2 for a variance between them.")
        if self.gradients and not FEWEST_GROUPS <= self.gradients <= self.prompts:
            raise UserError(
                f"--gradients {self.gradients}: it must be at least {FEWEST_GROUPS}, for intervals, and at most "
                f"--prompts {self.prompts}."
            )

    @property
    def of_a_branch(self) -> int:
        """Continuations of a branch."""
        return self.continuations // 2

    @property
    def continued(self) -> int:
        """Continuations in all."""
        first = self.responses * (self.steps - 1) * self.continuations
        second = self.second_stage * (self.steps - 1) * max(0, self.second_continuations - self.continuations)
        branched = self.responses * self.steps * self.branches * self.of_a_branch
        return first + second + branched + self.prompts * AT_PROMPT * self.continuations

    def decoded(self, length: float) -> float:
        """Tokens to sample, for responses of this mean length: evenly spaced cuts leave half of it on average."""
        at_prompts = self.prompts * (self.samples + AT_PROMPT * self.continuations) * length
        inside = (self.continued - self.prompts * AT_PROMPT * self.continuations) * length / 2
        return at_prompts + inside + self.responses * self.branches * length

    def prefilled(self, length: float, prompt: float, *, cached: bool) -> float:
        """Tokens to read, with vLLM's prefix cache or without."""
        points = self.responses * (self.steps - 1 + self.steps * self.branches)
        if cached:
            return self.responses * (prompt + length) + points * BLOCK + self.prompts * prompt
        return points * 2 * (prompt + length / 2) + self.prompts * prompt

    @property
    def reliability(self) -> float:
        """λ = K / (K + M), the share of signal in the estimated advantages where V settles evenly."""
        return self.continuations / (self.continuations + self.steps)

    @property
    def detectable(self) -> float:
        """The smallest alignment seen at 5 % with a power of 80 %."""
        return math.sqrt(DESIGN_EFFECT * QUANTILES / ((self.steps - 1) * self.reliability * self.responses))

    @property
    def smallest_step(self) -> float:
        """The smallest |A| of a single step seen likewise at V = 1/2 with the first stage's continuations alone."""
        return math.sqrt(QUANTILES) * math.sqrt(2 * 0.25 / self.continuations)
