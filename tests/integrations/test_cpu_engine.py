"""Prompts that are computed once: verl's FSDP engine on a CPU against verl's own, and against rows one by one."""

import random
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from verl.utils.torch_functional import entropy_from_logits_with_chunking

from gtpo_verl.integrations.cpu_engine import CpuFSDPEngine, SharedPrompts, bins_of, entropies
from gtpo_verl.tasks import model as tiny


def rows(seed: int, prompts: int = 3, each: int = 4) -> tuple[torch.Tensor, list[int], list[int]]:
    draw = random.Random(seed)
    texts = [[draw.randrange(2, 250) for _ in range(draw.randint(1, 9))] for _ in range(prompts)]
    order = [text for text in texts for _ in range(each)]
    draw.shuffle(order)
    tokens: list[int] = []
    offsets = [0]
    for text in order:
        tokens += text + [draw.randrange(2, 250) for _ in range(draw.randint(0, 12))]
        offsets.append(len(tokens))
    return torch.tensor(tokens), offsets, [len(text) for text in order]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_shared_prompts_give_the_logits_and_gradients_of_rows_one_by_one(seed: int) -> None:
    tokens, offsets, lengths = rows(seed)
    model = tiny.build_model(258, seed=1).double()
    layout = SharedPrompts.of(tokens, offsets, lengths)
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(offsets)])
    found = model(
        input_ids=tokens[None, layout.kept],
        position_ids=positions[None, layout.kept],
        attention_mask=layout.mask(),
        logits_to_keep=layout.source,
    ).logits[0]
    expected = [
        model(input_ids=tokens[None, start:end]).logits[0, length - 1 : -1]
        for start, end, length in zip(offsets[:-1], offsets[1:], lengths, strict=True)
    ]
    assert len(layout.kept) < len(tokens)
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    parameters = list(model.parameters())
    ours = torch.autograd.grad((found * weights).sum(), parameters)
    theirs = torch.autograd.grad((torch.cat(expected) * weights).sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < 1e-6 * other.norm()  # transformers normalises in float32, whatever the model


@pytest.mark.parametrize("limit", [5, 20, 60, 1000])
def test_micro_batches_hold_every_row_once_within_the_limit(limit: int) -> None:
    for seed in range(20):
        tokens, offsets, lengths = rows(seed)
        bins = bins_of(tokens, offsets, lengths, limit)
        assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
        for chosen in bins:
            parts = [tokens[offsets[row] : offsets[row + 1]] for row in chosen]
            ends = torch.tensor([0, *map(len, parts)]).cumsum(0).tolist()
            size = len(SharedPrompts.of(torch.cat(parts), ends, [lengths[row] for row in chosen]).kept)
            assert size <= limit or len(chosen) == 1
        assert limit < 1000 or len(bins) == 1


def test_a_model_in_an_adapter_shares_no_prompts() -> None:
    """It would compute the prompts of every row, of which a micro-batch is to hold few."""
    engine = CpuFSDPEngine.__new__(CpuFSDPEngine)
    engine.module = tiny.build_model(258, seed=1)
    assert engine._shares
    engine.module = get_peft_model(engine.module, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert not engine._shares


@pytest.mark.slow
def test_entropies_of_a_real_vocabulary_are_exact_to_float32() -> None:
    """Logits as large as a language model's; verl's formula misses the same bound."""
    draw = torch.Generator().manual_seed(5)
    logits = 15 + 2.5 * torch.randn(64, 49152, generator=draw)
    logits[:32, :20] += 12.0  # a few likely tokens
    exact = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    found = entropies(entropy_from_logits_with_chunking)(logits)
    assert (found - exact).abs().max() < 5e-6
    assert (entropy_from_logits_with_chunking(logits) - exact).abs().max() > 5e-5
    with_gradient = entropies(entropy_from_logits_with_chunking)(logits[:2].requires_grad_())
    assert with_gradient.requires_grad
