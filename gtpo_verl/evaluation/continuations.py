"""What is asked of a sampler of continuations, and what it answers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a response to a row of the data, to be continued `count` times.

    key: names the request, and its random streams. entropies: whether those of the new tokens are wanted. most: new
    tokens at most; None for as many as the limit of a response leaves.
    """

    key: tuple[int, ...]
    row: int
    tokens: tuple[int, ...]
    count: int
    entropies: bool = False
    most: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class BulkSample:
    """The new tokens (T,); entropies in nats and log-probs, (T,), where asked for. ended: by the policy's own end or a
    stop string, not by the limit or by `Prefix.most`.
    """

    tokens: NDArray[np.int32]
    ended: bool
    entropies: NDArray[np.float32] | None = None
    log_probs: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Continuation(BulkSample):
    """A sample with the verdict on the response, the verifier's score, and whether it reached the length limit."""

    correct: bool
    score: float
    truncated: bool
