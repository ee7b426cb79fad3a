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


@dataclass(frozen=True, eq=False)
class Continuation:
    """The new tokens (T,) with the verdict on the whole response and the verifier's score.

    entropies in nats and log_probs: (T,) where they were asked for. truncated: the length limit was reached. ended: by
    the policy's own end, not by the limit or by `Prefix.most`.
    """

    tokens: NDArray[np.int32]
    correct: bool
    score: float
    truncated: bool
    ended: bool
    entropies: NDArray[np.float32] | None = None
    log_probs: NDArray[np.float32] | None = None
