"""A policy whose values are known: a table of states, with the probability of every token and the state it leads to.

A response is a walk over `states` of `length` tokens. At a fork the token moves the state up or down, at a routine
token it leads nowhere whatever it is; the two lowest states are lost and the two highest solved, for good. It is
correct where it ends in the upper half. Entropies are high at most forks, and low at most routine tokens.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from gtpo_verl.algorithms import Batch
from gtpo_verl.audit.metrics import Credit
from gtpo_verl.audit.values import Values

MOVES = np.array([-2, -1, 0, 1, 2])


@dataclass(frozen=True)
class Sampled:
    """Responses of P prompts with G responses each, flat: B = P · G rows of L tokens.

    V: (B, L + 1), exact. states: (B, L + 1). tables: (B,) the prompt of each.
    """

    tables: np.ndarray
    states: np.ndarray
    tokens: np.ndarray
    entropy: np.ndarray
    log_probs: np.ndarray
    correct: np.ndarray
    V: np.ndarray

    def rows(self, kept: np.ndarray) -> "Sampled":
        return Sampled(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    @property
    def prompt(self) -> tuple[str, ...]:
        return tuple(f"p{table}" for table in self.tables)

    @property
    def mask(self) -> np.ndarray:
        return np.ones(self.entropy.shape, dtype=bool)

    def points(self, steps: int) -> np.ndarray:
        length = self.entropy.shape[1]
        return np.tile(np.linspace(0, length, steps + 1).round().astype(np.int64), (len(self.tables), 1))

    def exact(self, steps: int) -> Values:
        V = np.take_along_axis(self.V, self.points(steps), axis=1)
        known, counts = np.full((2, *V.shape), np.inf), np.full(len(V), steps)
        return Values(np.stack([V, V]), known, self.correct, self.prompt, np.ones(len(V)), counts)

    def values(self, steps: int, continuations: int, rng: np.random.Generator) -> Values:
        """Values by continuations: the number of correct ones is binomial. V(0) is shared by a prompt's responses."""
        V = np.take_along_axis(self.V, self.points(steps), axis=1)[:, :-1]
        trials = np.full((2, *V.shape), continuations // 2)
        trials[:, :, 0] *= 4
        successes = rng.binomial(trials, V[None])
        _, first = np.unique(self.tables, return_index=True)
        successes[:, :, 0] = successes[:, first, 0][:, np.searchsorted(np.unique(self.tables), self.tables)]
        return Values.of_counts(successes, trials, self.correct, self.prompt, np.ones(len(V)))

    def credit(self, tokens: np.ndarray, steps: int) -> Credit:
        return Credit.of_tokens(tokens, self.mask, self.points(steps), self.correct)

    def batch(self) -> Batch:
        rewards = torch.tensor(np.where(self.correct, 1.0, -1.0))
        return Batch(
            torch.ones(self.entropy.shape, dtype=torch.bool),
            torch.tensor(self.tables),
            torch.tensor(self.correct),
            entropy=torch.tensor(self.entropy),
            rewards=rewards,
            old_log_probs=torch.tensor(self.log_probs),
        )


class TabularPolicy:
    """One table a prompt, drawn from `seed`."""

    def __init__(self, prompts: int, *, length: int = 24, states: int = 9, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.length, self.states = length, states
        shape = (prompts, length, states)
        fork = rng.random(shape) < 0.35
        sharp = np.where(rng.random(shape) < np.where(fork, 0.1, 0.8), 6.0, 0.7)
        logits = rng.normal(size=(*shape, len(MOVES))) * sharp[..., None]
        self.log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        self.probs = np.exp(self.log_probs)
        self.entropy = -(self.probs * self.log_probs).sum(-1)
        here = np.arange(states)[None, None, :, None]
        settled = (here < 2) | (here >= states - 2)
        move = np.where(fork[..., None] & ~settled, MOVES, 0)
        self.next = np.clip(here + move, 0, states - 1)
        self.start = rng.integers(3, states - 3, size=prompts)
        self.V = np.empty((prompts, length + 1, states))
        self.V[:, -1] = np.arange(states) >= states // 2
        for t in reversed(range(length)):
            self.V[:, t] = self._expected(self.V[:, t + 1], t).clip(0, 1)  # of sums, round-off is left

    def _expected(self, values: np.ndarray, t: int) -> np.ndarray:
        """E[values(next state)] for each state: (P, states)."""
        behind = np.take_along_axis(values[:, None, :], self.next[:, t].reshape(len(values), 1, -1), axis=2)
        return (self.probs[:, t] * behind.reshape(self.probs[:, t].shape)).sum(-1)

    def continued(self, tables: np.ndarray, states: np.ndarray, t: int, rng: np.random.Generator) -> np.ndarray:
        """Walk on from `states` (N,) at token t; returns the verdicts (N,)."""
        for step in range(t, self.length):
            token = _draw(self.probs[tables, step, states], rng)
            states = self.next[tables, step, states, token]
        return states >= self.states // 2

    def sample(self, responses: int, seed: int = 0) -> Sampled:
        """`responses` of each prompt that has contrast among them; prompts without are left out."""
        rng = np.random.default_rng(seed)
        tables = np.repeat(np.arange(len(self.start)), responses)
        states, tokens = [self.start[tables]], []
        for t in range(self.length):
            token = _draw(self.probs[tables, t, states[-1]], rng)
            tokens.append(token)
            states.append(self.next[tables, t, states[-1], token])
        walk, drawn, times = np.stack(states, 1), np.stack(tokens, 1), np.arange(self.length)
        correct = walk[:, -1] >= self.states // 2
        place = (tables[:, None], times[None, :], walk[:, :-1])
        found = Sampled(
            tables,
            walk,
            drawn,
            self.entropy[place],
            self.log_probs[(*place, drawn)],
            correct,
            self.V[tables[:, None], np.arange(self.length + 1)[None, :], walk],
        )
        solved = correct.reshape(-1, responses).sum(1)
        return found.rows(np.repeat((solved > 0) & (solved < responses), responses))

    def state_variance(self, sampled: Sampled, points: np.ndarray) -> np.ndarray:
        """Var of V behind each step given the state before it, (B, M), exact."""
        steps = itertools.pairwise(points)
        found = [self.variance_behind(*step)[sampled.tables, sampled.states[:, step[0]]] for step in steps]
        return np.stack(found, axis=1)

    def variance_behind(self, start: int, end: int) -> np.ndarray:
        """Var of V(end) given each state at `start`, (P, states), exact."""
        second = self.V[:, end] ** 2
        for t in reversed(range(start, end)):
            second = self._expected(second, t)
        return second - self.V[:, start] ** 2


def _draw(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A token of each row of probs (N, A)."""
    total = probs.cumsum(-1)
    return np.minimum((rng.random(len(probs))[:, None] * total[:, -1:] > total).sum(-1), probs.shape[1] - 1)
