"""The entropy of a row against float64: real vocabularies, masked ids, certain and uniform policies, both float
types.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gtpo_verl.integrations.vllm import kernels

QWEN_VOCABULARY = 151_936
TOLERANCE = 1e-6  # nat


def exact(x: torch.Tensor) -> torch.Tensor:
    """H(softmax(x)) in float64."""
    return torch.special.entr(x.double().softmax(-1)).sum(-1)


def hard_rows(vocabulary: int) -> dict[str, torch.Tensor]:
    """(V,) rows that break naive entropies."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(vocabulary, generator=draw)
    one_hot = torch.full((vocabulary,), -torch.inf)
    one_hot[vocabulary // 2] = 3.0
    masked_tail = 4 * normal.clone()
    masked_tail[vocabulary - vocabulary // 3 :] = -torch.inf
    masked_head = 4 * normal.clone()
    masked_head[: vocabulary // 2] = -torch.inf  # whole blocks of -inf come first
    almost_certain = normal.clone()
    almost_certain[7] = 80.0
    return {
        "uniform": torch.zeros(vocabulary),
        "flat": normal,
        "usual": 4 * normal,
        "peaked": 20 * normal,
        "log-probs": (4 * normal).log_softmax(-1),
        "far from zero": 4 * normal + 1000.0,
        "growing": torch.linspace(-60, 60, vocabulary),  # the running maximum changes in every block
        "falling": torch.linspace(60, -60, vocabulary),
        "one-hot": one_hot,
        "almost certain": almost_certain,
        "masked tail": masked_tail,
        "masked head": masked_head,
    }


NAMES = sorted(hard_rows(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocked_torch_is_exact_at_a_real_vocabulary(dtype):
    x = torch.stack([hard_rows(QWEN_VOCABULARY)[name] for name in NAMES]).to(dtype)
    error = (kernels.entropy(x).double() - exact(x)).abs()
    assert error.max() <= TOLERANCE, dict(zip(NAMES, error.tolist(), strict=True))


def test_known_values():
    vocabulary = 1024
    rows = hard_rows(vocabulary)
    got = kernels.entropy(torch.stack([rows["uniform"], rows["one-hot"]]))
    assert got[0].item() == pytest.approx(math.log(vocabulary), abs=1e-6)
    assert got[1].item() == 0.0


def test_a_shift_of_the_logits_changes_nothing_beyond_rounding():
    x = 4 * torch.randn(8, 500)
    torch.testing.assert_close(kernels.entropy(x + 100.0), kernels.entropy(x), atol=2e-5, rtol=0)


def test_rows_do_not_see_each_other():
    x = torch.randn(300, 1000)  # more rows than fit a block
    together = kernels.entropy(x)
    alone = torch.cat([kernels.entropy(row[None]) for row in x])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_nan_and_all_masked_rows_are_not_hidden():
    x = torch.zeros(2, 10)
    x[0, 3] = torch.nan
    x[1] = -torch.inf
    assert kernels.entropy(x).isnan().all()


def test_no_temporary_of_the_size_of_the_input():
    rows, vocabulary = 8, QWEN_VOCABULARY
    x = torch.randn(rows, vocabulary)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if (
                isinstance(result, torch.Tensor)
                and result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            ):
                largest = max(largest, result.numel())
            return result

    with Watch():
        kernels.entropy(x)
    assert 0 < largest <= max(kernels._BLOCK, vocabulary)  # a block, or one row where a row is longer


INTERPRETED = """
import json, sys
import torch
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import codec, kernels, patch

rows, tokens = torch.load(sys.argv[1])
answer = {}


def words_of(x, tokens):
    return kernels.rank_and_entropy(x, tokens).tolist()


for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
    x = rows.to(dtype)
    words = torch.empty(len(x), dtype=torch.int64)
    kernels.RankAndEntropyKernel()[(len(x),)](words, x, x.stride(0), tokens, x.shape[1], BLOCK_SIZE=8192)
    ranks, entropies = codec.unpack(words.tolist())
    wide = torch.randn(x.shape[1], len(x)).to(dtype).t().copy_(x)  # rows that are not contiguous
    answer[name] = {
        "entropies": codec.unpack(words_of(x, tokens))[1].tolist(),
        "strided": codec.unpack(words_of(wide, tokens))[1].tolist(),
        "as vLLM calls it": entropies.tolist(),
        "ranks": ranks.tolist(),
    }
v1 = patch.gather_fused(rows, tokens)
ranks, entropies = codec.unpack(v1.selected_token_ranks.tolist())
answer["v1"] = {
    "ids": v1.logprob_token_ids.tolist(),
    "log_probs": v1.logprobs.tolist(),
    "entropies": entropies.tolist(),
    "ranks": ranks.tolist(),
}
broken = torch.zeros(2, 10)
broken[0, 3] = torch.nan
broken[1] = -torch.inf
for row in broken:
    try:
        codec.unpack(words_of(row[None], torch.tensor([0])))
    except UserError as error:
        answer.setdefault("broken", []).append(str(error))
few = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 3.0, 1.0]])
strided, _ = codec.unpack(words_of(few, few.topk(2).indices[:, -1]))
answer["strided tokens"] = strided.tolist()
answer["empty"] = words_of(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64))
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The Triton kernel through Triton's interpreter, which must be chosen before Triton is imported."""
    path: Path = tmp_path_factory.mktemp("kernels") / "rows.pt"
    rows = torch.stack([hard_rows(QWEN_VOCABULARY)[name] for name in NAMES])
    # the fifth most likely token; only a token that can be sampled has a meaningful rank
    tokens = rows.topk(5).indices[:, -1].where(rows.isfinite().sum(-1) >= 5, rows.argmax(-1))
    torch.save((rows, tokens), path)
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return rows, tokens, json.loads(run.stdout.splitlines()[-1])  # vLLM logs before it


@pytest.mark.slow
def test_tokens_may_be_a_column_of_a_table(interpreted):
    assert interpreted[2]["strided tokens"] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", ["entropies", "strided", "as vLLM calls it"])
def test_the_triton_kernel_is_exact(interpreted, call, dtype):
    rows, _, answer = interpreted
    error = (torch.tensor(answer[dtype][call]).double() - exact(rows.to(getattr(torch, dtype)))).abs()
    assert error.max() <= TOLERANCE, dict(zip(NAMES, error.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_ranks_as_vllm_does(interpreted, dtype):
    rows, tokens, answer = interpreted
    x = rows.to(getattr(torch, dtype))
    assert answer[dtype]["ranks"] == (x >= x.gather(-1, tokens[:, None])).sum(-1).tolist()


@pytest.mark.slow
def test_v1_on_a_gpu_returns_what_vllm_returns_and_the_entropy(interpreted):
    rows, tokens, answer = interpreted
    v1 = answer["v1"]
    assert v1["ids"] == tokens[:, None].tolist()
    assert v1["log_probs"] == rows.gather(-1, tokens[:, None]).tolist()
    assert v1["ranks"] == (rows >= rows.gather(-1, tokens[:, None])).sum(-1).tolist()
    assert (torch.tensor(v1["entropies"]).double() - exact(rows)).abs().max() <= TOLERANCE


@pytest.mark.slow
def test_the_triton_kernel_does_not_hide_nan(interpreted):
    first, second = interpreted[2]["broken"]
    assert first == second
    assert first.startswith("the policy's entropy is nan for a sampled token")


@pytest.mark.slow
def test_an_empty_batch_launches_nothing(interpreted):
    assert interpreted[2]["empty"] == []
