"""A rank and an entropy survive their journey in one int64, and what holds no entropy is refused."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import codec

FLOAT32 = st.floats(0.0, 20.0, width=32)


@given(st.lists(st.tuples(st.integers(1, 2**31 - 1), FLOAT32), max_size=50))
def test_round_trip_is_bit_exact(pairs):
    ranks = [rank for rank, _ in pairs]
    entropies = np.array([entropy for _, entropy in pairs], np.float32)
    words = codec.pack(torch.tensor(ranks, dtype=torch.int64), torch.from_numpy(entropies))
    got_ranks, got_entropies = codec.unpack(words.tolist())
    assert got_ranks.tolist() == ranks
    assert got_entropies.tobytes() == entropies.tobytes()


def test_the_layout_is_the_documented_one():
    word = codec.pack(torch.tensor([5], dtype=torch.int32), torch.tensor([1.5]))
    assert word.dtype == torch.int64
    assert word.item() == 5 << 32 | 0x3FC00000  # 1.5 in IEEE 754


def test_a_negative_zero_does_not_spill_into_the_rank():
    ranks, entropies = codec.unpack(codec.pack(torch.tensor([7]), torch.tensor([-0.0])).tolist())
    assert (ranks.item(), abs(entropies.item())) == (7, 0.0)


@pytest.mark.parametrize("rank", [0, 1, 151_935, 2**32 - 1, None])
def test_a_plain_rank_is_refused(rank):
    packed = codec.pack(torch.tensor([1]), torch.tensor([0.5])).item()
    with pytest.raises(UserError, match="without gtpo_verl's patch"):
        codec.unpack([packed, rank])


@pytest.mark.parametrize("entropy", [float("nan"), float("inf")])
@pytest.mark.parametrize("rank", [0, 3])  # vLLM ranks a token among NaN logits at 0
def test_a_broken_entropy_is_refused_as_such(entropy, rank):
    words = codec.pack(torch.tensor([rank]), torch.tensor([entropy])).tolist()
    codec.check_packed(words)  # the worker was patched
    with pytest.raises(UserError, match="logits are"):
        codec.unpack(words)


def completion(ranks):
    """vLLM's list of dicts: the sampled tokens are 10, 11, …"""
    return [10 + i for i in range(len(ranks))], [{10 + i: SimpleNamespace(rank=rank)} for i, rank in enumerate(ranks)]


def test_completion_entropies_follow_the_tokens():
    entropies = torch.rand(4)
    tokens, logprobs = completion(codec.pack(torch.arange(1, 5), entropies).tolist())
    assert codec.completion_entropies(tokens, logprobs).tolist() == entropies.tolist()


def test_an_empty_completion_has_no_entropies():
    assert codec.completion_entropies([], []).shape == (0,)


def test_flat_logprobs_are_read_at_the_sampled_tokens():
    from vllm.logprobs import FlatLogprobs, Logprob

    words = codec.pack(torch.tensor([2, 1]), torch.tensor([0.25, 1.5])).tolist()
    flat = FlatLogprobs()
    for word in words:
        flat.append({10: Logprob(-1.0, word, None), 99: Logprob(-0.5, 1, None)})
    assert codec.completion_entropies([10, 10], flat).tolist() == [0.25, 1.5]


def test_a_completion_of_another_length_is_refused():
    tokens, logprobs = completion(codec.pack(torch.tensor([1, 2]), torch.rand(2)).tolist())
    for other in ([*tokens, 5], tokens[:1]):
        with pytest.raises(UserError, match=f"2 log-probs for {len(other)} tokens: entropies cannot be aligned"):
            codec.completion_entropies(other, logprobs)


def test_a_completion_without_logprobs_is_refused():
    with pytest.raises(UserError, match="set logprobs=0"):
        codec.completion_entropies([5], None)


def test_unpacking_needs_no_torch():
    use = "from gtpo_verl.integrations.vllm import codec; codec.unpack([3 << 32])"
    script = f"import sys; {use}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
