"""An entropy and a rank in the int64 in which vLLM's worker sends the rank of every sampled token to its front end:

    packed = max(rank, 1) << 32 | float32 bits of the entropy

No byte more is sent, the true rank survives, and a worker that was not patched is recognised by ranks below 2**32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gtpo_verl.errors import UserError

if TYPE_CHECKING:
    import torch

_LOW = (1 << 32) - 1


def pack(ranks: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Put ranks (N,) and entropies (N,) float32, nats, into one word each: (N,) int64, at least 2**32.

    A rank of 0 (vLLM's answer for a row of NaN) becomes 1, so that packed words are always recognised; an entropy of
    NaN passes through and is refused by ``unpack``.
    """
    import torch  # the front end only unpacks, and needs no torch for it

    bits = entropies.to(torch.float32).view(torch.int32).to(torch.int64) & _LOW
    return ranks.to(torch.int64).clamp(min=1) << 32 | bits


def check_packed(words: Sequence[int | None]) -> npt.NDArray[np.int64]:
    """Return the words (N,) as an array.

    Raises UserError: one of them is a plain rank, because the worker that sent it is not patched.
    """
    packed = np.asarray(words if len(words) else np.empty(0, np.int64))
    if packed.dtype != np.int64 or (packed <= _LOW).any():
        raise UserError(
            "vLLM returned no entropies: its worker runs without gtpo_verl's patch. "
            "Start the server through gtpo_verl's replica, or set GTPO_VERL_ROLLOUT_ENTROPY=1 and leave VLLM_PLUGINS "
            "unset."
        )
    return packed


def unpack(words: Sequence[int | None]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Take ranks and entropies (nats) apart again: (N,) words to (N,) ranks and (N,) float32 entropies.

    Raises UserError: as ``check_packed``; or an entropy is NaN or infinite, because the model's logits are.
    """
    packed = check_packed(words)
    entropies = (packed & _LOW).astype(np.uint32).view(np.float32)
    if not np.isfinite(entropies).all():
        raise UserError(
            f"the policy's entropy is {entropies[~np.isfinite(entropies)][0]} for a sampled token: the model's logits "
            "are NaN or infinite in vLLM. Check the weights that were sent to it."
        )
    return packed >> 32, entropies


def packed_words(token_ids: Sequence[int], logprobs: Any) -> list[int | None]:
    """The words of the sampled tokens in what vLLM returned for one completion.

    token_ids: (T,).
    logprobs: ``CompletionOutput.logprobs`` of a request with ``logprobs=0``: T dicts from token id to ``Logprob``, or
    vLLM's ``FlatLogprobs``.
    Raises UserError: the two differ in length, or the request did not ask for log-probs.
    """
    if logprobs is None:
        raise UserError(
            "the request asked for no log-probs, and entropies travel with them: set logprobs=0 in SamplingParams."
        )
    if len(logprobs) != len(token_ids):
        raise UserError(
            f"vLLM returned {len(logprobs)} log-probs for {len(token_ids)} tokens: entropies cannot be aligned."
        )
    if hasattr(logprobs, "start_indices"):  # FlatLogprobs: the sampled token is first at every position
        return [logprobs.ranks[start] for start in logprobs.start_indices]
    return [entry[token].rank for token, entry in zip(token_ids, logprobs, strict=True)]


def completion_entropies(token_ids: Sequence[int], logprobs: Any) -> npt.NDArray[np.float32]:
    """The entropies (nats) of one completion, (T,) float32, aligned with its tokens.

    Raises UserError: as ``packed_words`` and ``unpack``.
    """
    return unpack(packed_words(token_ids, logprobs))[1]
