"""A softmax policy small enough that every group of responses can be listed: exact means and covariances of gradients.

Responses have three tokens of a vocabulary of two; the logits of a token are a row of a table, by its place and the
token before it. A response is correct where the number of its ones is odd.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from transformers import PretrainedConfig

from gtpo_verl.algorithms import Batch, algorithm
from gtpo_verl.audit.gradients import DECILES, Products

LENGTH, VOCABULARY, START = 3, 2, 2
PATHS = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))  # (8, 3)
CORRECT = PATHS.sum(1) % 2 == 1
G = 4


class TableModel(torch.nn.Module):
    """The table as a causal model in float64; the prompt is one token. Two parameters, so that one can be chosen."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(LENGTH, VOCABULARY + 1, VOCABULARY, generator=generator, dtype=torch.float64)
        self.first = torch.nn.Parameter(table[:1])
        self.rest = torch.nn.Parameter(table[1:])
        self.config = PretrainedConfig(vocab_size=VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        table = torch.cat([self.first, self.rest])
        place = torch.arange(input_ids.shape[1]).clamp(max=LENGTH - 1).expand_as(input_ids)
        before = torch.where(place == 0, START, input_ids)
        return SimpleNamespace(logits=table[place, before])

    @property
    def table(self) -> np.ndarray:
        return torch.cat([self.first, self.rest]).detach().numpy()


@dataclass(frozen=True)
class Exact:
    """Of every path (8): probability, scores of its tokens (8, 3, P), entropies and log-probs (8, 3)."""

    probability: np.ndarray
    scores: np.ndarray
    entropy: np.ndarray
    log_probs: np.ndarray

    @classmethod
    def of(cls, table: np.ndarray) -> "Exact":
        log_pi = table - np.logaddexp.reduce(table, axis=-1, keepdims=True)
        scores = np.zeros((len(PATHS), LENGTH, *table.shape))
        entropy, log_probs = np.zeros((2, len(PATHS), LENGTH))
        for number, path in enumerate(PATHS):
            for t, token in enumerate(path):
                before = START if t == 0 else path[t - 1]
                scores[number, t, t, before] = -np.exp(log_pi[t, before])
                scores[number, t, t, before, token] += 1
                entropy[number, t] = -(np.exp(log_pi[t, before]) * log_pi[t, before]).sum()
                log_probs[number, t] = log_pi[t, before, token]
        return cls(np.exp(log_probs.sum(1)), scores.reshape(len(PATHS), LENGTH, -1), entropy, log_probs)

    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """All groups with contrast, (K, G) paths, and their probabilities, which add up to 1."""
        every = np.array(list(itertools.product(range(len(PATHS)), repeat=G)))
        right = CORRECT[every].sum(1)
        every = every[(right > 0) & (right < G)]
        probability = self.probability[every].prod(1)
        return every, probability / probability.sum()

    def batch(self, groups: np.ndarray, seed: int = 0) -> Batch:
        paths = groups.reshape(-1)
        return Batch(
            torch.ones(len(paths), LENGTH, dtype=torch.bool),
            torch.arange(len(groups)).repeat_interleave(G),
            torch.tensor(CORRECT[paths]),
            entropy=torch.tensor(self.entropy[paths]),
            rewards=torch.tensor(2.0 * CORRECT[paths] - 1, dtype=torch.float64),
            old_log_probs=torch.tensor(self.log_probs[paths]),
            seed=seed,
        )

    def gradients(self, groups: np.ndarray, name: str, tokens: int = LENGTH) -> np.ndarray:
        """g of each group, (K, P), with credit on the first `tokens` alone; `truth`: the leave-one-out gradient."""
        if name == "truth":
            right = CORRECT[groups].astype(float)
            credit = np.repeat(((right - right.mean(1, keepdims=True)) * G / (G - 1))[..., None], LENGTH, axis=2)
        else:
            credit = algorithm(name).advantages(self.batch(groups)).advantages.numpy().reshape(*groups.shape, LENGTH)
        return np.einsum("kgt,kgtp->kp", credit[..., :tokens], self.scores[groups][..., :tokens, :])


def products_of(g: dict[str, np.ndarray], h: np.ndarray, audited: np.ndarray, weight: np.ndarray) -> Products:
    """Dot products by their definition; g: (K, P) by name, 0 where not audited. Both metrics: 1, and `weight` (P,)."""
    every, shape = np.stack(list(g.values())), (len(g), len(h), 2, DECILES)
    total, of_h = every.sum(1, keepdims=True), h.sum(0)
    weights = [np.ones_like(weight), weight]
    dots = {"gg": every * every, "gG": every * total, "gh": every * h, "gH": every * of_h, "hG": h * total}
    truths = {"hh": h * h, "hH": h * of_h}
    return Products(
        np.array(list(g)),
        audited,
        **{name: np.stack([(each * w).sum(-1) for w in weights]) for name, each in (dots | truths).items()},
        noise=np.ones(shape),
        signal=np.ones(shape),
        tokens=np.ones((2, DECILES)),
        norms=np.ones((2, DECILES)),
        entropies=np.ones((2, DECILES)),
    )
