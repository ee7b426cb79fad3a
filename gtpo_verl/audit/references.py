"""Credits that need no method, between which the methods lie: random, by position alone, by state, by continuations."""

import numpy as np

from gtpo_verl.audit.metrics import Credit
from gtpo_verl.audit.values import Bools, Ints, Values
from gtpo_verl.runs.statistics import Floats

RANDOM_SEEDS = 20


def random_credit(uniform: Floats, mask: Bools, points: Ints, correct: Bools, seed: int) -> Credit:
    """The uniform credit of DAPO (N, T) times a weight of each token, drawn from U(0, 2)."""
    weight = np.random.default_rng(seed).uniform(0, 2, size=uniform.shape)
    return Credit.of_tokens(uniform * weight, mask, points, correct)


def position_credit(values: Values, tokens: Ints) -> Credit:
    """What the number of the step and the verdict tell: the mean A at the same step of responses to other prompts, 0
    where none has the verdict and the step. Not a method: the final length and the truth of other responses are in it.
    """
    A, prompt = values.advantages.mean(axis=0), np.asarray(values.prompt)
    credit = np.zeros_like(A)
    for row in range(len(A)):
        others = (prompt != prompt[row]) & (values.correct == values.correct[row])
        weight = values.weight[others, None] * values.is_step[others]
        credit[row] = (weight * A[others]).sum(0) / np.maximum(weight.sum(0), 1e-300)
    return Credit.of_steps(np.where(values.is_step, credit, 0.0), tokens, values.correct)


def state_credit(variance: Floats, V: Floats, tokens: Ints, correct: Bools) -> Credit:
    """E[A | state, verdict], the best rule that knows the verdict and the state at the start of a step.

    It is Var / V in correct and -Var / (1 - V) in wrong responses, V of the state (N, M) and Var that of V behind the
    step. A method may do better where a step has several tokens: later entropies tell which way it went.
    """
    variance = np.maximum(variance, 0.0)
    share = np.where(correct[:, None], V, V - 1)
    return Credit.of_steps(np.where(variance > 0, variance / np.where(share == 0, 1.0, share), 0.0), tokens, correct)


def branch_shares(successes: Ints, trials: Ints) -> Floats:
    """V behind each branch by its continuations, (..., J); where it is known, trials are 0 and successes 0 or 1."""
    return np.where(trials == 0, successes, successes / np.maximum(trials, 1))


def branch_variance(successes: Ints, trials: Ints) -> Floats:
    """Var of V behind a step, (..., J) to (...): that between J branches, less what their continuations add."""
    share = branch_shares(successes, trials)
    within = np.where(trials < 2, 0.0, share * (1 - share) / np.maximum(trials - 1, 1))
    return np.asarray(share.var(axis=-1, ddof=1) - within.mean(axis=-1))


def oracle_credit(values: Values, tokens: Ints) -> Credit:
    """A of the first half; to be scored by the second alone (`Values.energy_of_second`)."""
    return Credit.of_steps(values.advantages[0], tokens, values.correct)
