"""The tiny model: a 0.66 M-parameter Qwen2 that reads bytes, warm-started on noisy demonstrations in plain PyTorch."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from gtpo_verl.tasks import WarmStart

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
IGNORED = -100  # label of a position without a loss

# Contents are joined without any markup: the model was never shown roles.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer without merges: padding, end of sequence and one token per byte.

    Text in Unicode's composed form survives encoding and decoding. A newline is one token, as verl's agent loop needs.
    """
    vocabulary = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    bpe.normalizer = normalizers.NFC()  # as in Qwen's tokenizer, which transformers makes of this one on loading
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,  # never used; without it transformers adds Qwen's own on loading, beyond the model's vocabulary
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def build_model(vocabulary_size: int, seed: int, **shape: Any) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 in fp32, initialised from ``seed`` without touching the caller's random state.

    The vocabulary must be the tokenizer's: verl masks surplus ids in vLLM alone, and entropies would differ. ``shape``:
    other sizes, in the names of ``Qwen2Config``.
    """
    embedded = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,  # a head size of 32, the smallest that vLLM's attention on the CPU accepts
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    special: dict[str, Any] = {"pad_token_id": PAD_ID, "bos_token_id": None, "eos_token_id": EOS_ID}
    config = Qwen2Config(vocab_size=vocabulary_size, dtype="float32", **special, **(embedded | shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a Hugging Face model directory: configuration, safetensors, tokenizer and chat template."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Iterator[tuple[str, str]],
    recipe: WarmStart,
    on_step: Callable[[float], None],
) -> None:
    """Train ``model`` in place to continue prompts with their demonstrations.

    ``pairs`` yields (prompt, demonstration); each pair is used once. The loss is the mean cross-entropy over the
    demonstrations' tokens, the end of sequence included. ``on_step`` receives the loss (nat per token) after each step.
    """
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / recipe.warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)),
    )
    for _ in range(recipe.steps):
        input_ids, labels = _collate(tokenizer, list(islice(pairs, recipe.batch_size)))
        # Padding is on the right and attention is causal: no real position sees it, so no mask is needed.
        hidden = model.model(input_ids=input_ids[:, :-1]).last_hidden_state  # (batch, length - 1, 128)
        targets = labels[:, 1:]
        scored = targets != IGNORED
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[scored]), targets[scored])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(loss.item())
    model.eval()


def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Sample one response per prompt at temperature 1 from the full distribution.

    Returns the tokens of each response in order, padded after the end of sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    responses: list[list[int]] = [[] for _ in prompts]
    encoded = [tokenizer(text).input_ids for text in prompts]
    # Prompts of equal length go together, so that no position is padding.
    by_length = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    for _, group in groupby(by_length, key=lambda index: len(encoded[index])):
        indices = list(group)
        input_ids = torch.tensor([encoded[index] for index in indices])
        tokens = _sample_equal_lengths(model, input_ids, max_new_tokens, generator)
        for index, row in zip(indices, tokens.tolist(), strict=True):
            responses[index] = row
    return responses


@torch.no_grad()
def _sample_equal_lengths(
    model: Qwen2ForCausalLM, input_ids: torch.Tensor, max_new_tokens: int, generator: torch.Generator
) -> torch.Tensor:
    """Continue ``input_ids`` (batch, length) to (batch, up to max_new_tokens); padding follows the end of sequence."""
    cache = None
    ended = torch.zeros(len(input_ids), dtype=torch.bool)
    sampled = []
    for _ in range(max_new_tokens):
        output = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        input_ids = torch.multinomial(output.logits[:, -1].softmax(dim=-1), 1, generator=generator)
        sampled.append(input_ids[:, 0].masked_fill(ended, PAD_ID))
        ended |= input_ids[:, 0] == EOS_ID
        if ended.all():
            break
    return torch.stack(sampled, dim=1)


def _collate(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids`` and ``labels`` (batch, length), padded on the right; prompts and padding carry no label."""
    prompts = tokenizer([prompt for prompt, _ in pairs]).input_ids
    continuations = tokenizer([text for _, text in pairs]).input_ids
    rows = [prompt + text + [EOS_ID] for prompt, text in zip(prompts, continuations, strict=True)]
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), PAD_ID)
    labels = torch.full((len(rows), length), IGNORED)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        input_ids[index, : len(row)] = torch.tensor(row)
        labels[index, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
    return input_ids, labels
