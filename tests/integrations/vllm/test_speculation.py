"""The rejection samplers of both model runners, alone: entropies of accepted, corrected and bonus tokens in the mode
that production uses.

With draft models, real engines speculate in test_exactness.py; which runner can do so on a CPU depends on vLLM's
version.
"""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from gtpo_verl.integrations.vllm import codec

TOLERANCE = 2e-6  # nat
VOCABULARY = 1000
TEMPERATURES = torch.tensor([0.6, 1.0, 1.0])  # a request each; the last one is greedy, which counts as 1
DRAFTED = [2, 1, 2]  # drafted tokens of each request; each also has a row for the bonus token
SAMPLED = [
    [5, 17, 3],
    [8, -1, -1],
    [30, 2, -1],
]  # what came out: all accepted and a bonus; none; one and its correction


def rows() -> torch.Tensor:
    """(8, V) logits of drafted and bonus positions, divided by their request's temperature, a third of the ids
    masked.
    """
    logits = 4 * torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[:, 2 * VOCABULARY // 3 :] = -torch.inf
    return logits / TEMPERATURES.repeat_interleave(torch.tensor(DRAFTED) + 1)[:, None]


def expected() -> list[tuple[int, float, int]]:
    """(token, entropy, rank) of every token that came out, in float64."""
    logits = rows().double()
    starts = [0, 3, 5]
    found = []
    for start, tokens in zip(starts, SAMPLED, strict=True):
        for offset, token in enumerate(token for token in tokens if token >= 0):
            row = logits[start + offset]
            found.append((token, torch.special.entr(row.softmax(-1)).sum().item(), int((row >= row[token]).sum())))
    return found


def check(tokens: list[int], words: list[int]) -> None:
    ranks, entropies = codec.unpack(words)
    wanted_tokens, wanted_entropies, wanted_ranks = zip(*expected(), strict=True)
    assert tokens == list(wanted_tokens)
    assert ranks.tolist() == list(wanted_ranks)
    assert entropies.tolist() == pytest.approx(wanted_entropies, abs=TOLERANCE)


def test_v1(patched):
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    sampler = patched(logprobs_mode="processed_logprobs")
    logits = rows()
    bonus, target = torch.tensor([2, 4, 7]), torch.tensor([0, 1, 3, 5, 6])
    metadata = SimpleNamespace(
        cu_num_sampled_tokens=torch.tensor([3, 5, 8]), bonus_logits_indices=bonus, target_logits_indices=target
    )
    sampled = torch.tensor(SAMPLED, dtype=torch.int32)
    rejection = RejectionSampler(sampler)
    tensors = rejection._get_logprobs_tensors(0, metadata, logits, logits[target], logits[bonus], sampled)
    tokens, lists = rejection.parse_output(sampled, VOCABULARY, logprobs_tensors=tensors)
    check([token for row in tokens for token in row], lists.sampled_token_ranks.tolist())


def test_v1_judges_drafts_at_the_temperatures_of_their_requests_on_a_cpu(patched):
    from vllm.v1.sample import rejection_sampler

    expand = rejection_sampler.expand_batch_to_tokens
    ends = torch.tensor(DRAFTED).cumsum(0, dtype=torch.int32)
    temperatures = expand(torch.tensor([0.6, 1.3, 0.0]), ends, 5, replace_from=0, replace_to=1)
    assert torch.equal(temperatures, torch.tensor([0.6, 0.6, 1.3, 1.0, 1.0]))
    top_k = expand(torch.tensor([7, 0, 9], dtype=torch.int32), ends, 5)
    assert torch.equal(top_k, torch.tensor([7, 7, 0, 9, 9], dtype=torch.int32))


V2 = """
import json, sys
from types import SimpleNamespace
import torch
from gtpo_verl.integrations.vllm import patch
patch.install()
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

logits, sampled, counts = torch.load(sys.argv[1])
rejection = RejectionSampler.__new__(RejectionSampler)
rejection.sampler = SimpleNamespace(logprobs_mode="processed_logprobs")
starts = torch.tensor([0, 3, 5, 8], dtype=torch.int32)
tensors = rejection._get_logprobs_tensors(sampled, counts, logits, starts, starts.numpy(), 0)
words, ids = tensors.selected_token_ranks.tolist(), tensors.logprob_token_ids[:, 0].tolist()
kept = [int(start) + i for start, count in zip(starts, counts) for i in range(count)]
print(json.dumps({"tokens": [ids[i] for i in kept], "words": [words[i] for i in kept]}))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_v2(tmp_path, engine_python, v2_on_cpu):
    path = tmp_path / "rows.pt"
    sampled = torch.tensor(SAMPLED)
    torch.save((rows(), sampled, (sampled >= 0).sum(-1, dtype=torch.int32)), path)
    run = subprocess.run(
        [engine_python, "-c", V2, str(path)], env={**os.environ, **v2_on_cpu}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    check(answer["tokens"], answer["words"])
