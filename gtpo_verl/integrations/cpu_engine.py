"""verl's FSDP engine on a CPU, which computes only what a loss reads: every prompt of a micro-batch once, and logits
where they predict a token of a response.

verl packs the rows of a micro-batch into one (`use_remove_padding`). Here the responses of a prompt share it: each
token attends to its own response and to its prompt, by a mask of all pairs.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.vllm.kernels import entropy

Rows = list[list[int]]


@dataclass(frozen=True)
class SharedPrompts:
    """Where the tokens of packed rows go when equal prompts become one. Indices are int64.

    total: N, packed tokens. kept: (M,) those that are computed. piece, prompt: (M,) the prompt or response that a kept
    token belongs to, and the prompt that it follows, its own for a token of a prompt. predicting: (R,) packed tokens
    whose next one belongs to a response, in order. source: (R,) their places among the kept.
    """

    total: int
    kept: torch.Tensor
    piece: torch.Tensor
    prompt: torch.Tensor
    predicting: torch.Tensor
    source: torch.Tensor

    @classmethod
    def of(cls, tokens: torch.Tensor, offsets: list[int], prompt_lengths: list[int]) -> "SharedPrompts":
        """The layout of rows, of which each is a prompt of at least one token, then a response.

        tokens: (N,) of all rows. offsets: where each row begins, and N. prompt_lengths: of each row.
        """
        kept, piece, prompt, predicting, source = columns = [list[int]() for _ in range(5)]
        known: dict[tuple[int, ...], tuple[int, int]] = {}  # a prompt: its piece, and the place of its last token
        pieces = 0
        for start, end, length in zip(offsets[:-1], offsets[1:], prompt_lengths, strict=True):
            text = tuple(tokens[start : start + length].tolist())
            if text not in known:
                kept += range(start, start + length)
                piece += [pieces] * length
                prompt += [pieces] * length
                known[text] = pieces, len(kept) - 1
                pieces += 1
            shared, last = known[text]
            first, count = len(kept), end - start - length
            kept += range(start + length, end)
            piece += [pieces] * count
            prompt += [shared] * count
            pieces += 1
            if count:
                predicting += range(start + length - 1, end - 1)
                source += [last, *range(first, first + count - 1)]
        return cls(len(tokens), *map(torch.tensor, columns))

    def mask(self) -> torch.Tensor:
        """(1, 1, M, M) bool: which kept tokens each attends to."""
        order = torch.arange(len(self.kept))
        own = self.piece[:, None] == self.piece
        theirs = self.prompt[:, None] == self.piece
        return ((order[:, None] >= order) & (own | theirs))[None, None]


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="cpu")
class CpuFSDPEngine(FSDPEngineWithLMHead):
    """verl's engine; with `use_remove_padding` it shares prompts, and micro-batches hold the responses of whole groups.

    It is verl's with another attention than sdpa, layers with a window, multimodal inputs or fused kernels.
    """

    _layout: SharedPrompts | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_entropy_from_logits = entropies(self.compute_entropy_from_logits)

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False) -> Any:
        if not self._shares:
            return super().forward_backward_batch(data, loss_function, forward_only)
        with temporarily(transformer_impl, "prepare_micro_batches", by_prompt):
            return super().forward_backward_batch(data, loss_function, forward_only)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        self._layout = None
        lengths = prompt_lengths(micro_batch)
        if lengths is None or not self._shares or not _is_plain(inputs, micro_batch):
            return inputs, arguments
        tokens = micro_batch["input_ids"]
        self._layout = layout = SharedPrompts.of(tokens.values(), tokens.offsets().tolist(), lengths)
        inputs["input_ids"] = inputs["input_ids"][:, layout.kept]
        inputs["position_ids"] = inputs["position_ids"][:, layout.kept]
        inputs["attention_mask"] = layout.mask()
        inputs["logits_to_keep"] = layout.source
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            arguments[name] = arguments[name][layout.predicting]
        return inputs, arguments

    @property
    def _shares(self) -> bool:
        """Whether the model can compute shared prompts; an adapter around it hides `logits_to_keep`."""
        config = self.module.config
        return (
            config._attn_implementation == "sdpa"
            and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
            and "logits_to_keep" in inspect.signature(self.module.forward).parameters
        )

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        """Back to a value for each packed token; those that predict no token of a response have 0."""
        if self._layout is None:
            return super()._gather_and_unpad_packed(tensor, pad_size)
        return tensor.new_zeros(self._layout.total).index_copy(0, self._layout.predicting, tensor)


def _is_plain(inputs: dict[str, Any], micro_batch: TensorDict) -> bool:
    """Whether a micro-batch is packed text and nothing else."""
    return (
        set(inputs) == {"input_ids", "attention_mask", "position_ids"}
        and inputs["attention_mask"] is None  # removed padding
        and inputs["position_ids"].dim() == 2
        and not tu.get_non_tensor_data(data=micro_batch, key="distillation_use_topk", default=False)
    )


def entropies(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The entropies of packed logits (N, V) as those of the rollouts are computed; with a gradient, by verl's `stock`.

    verl subtracts Σ p x from the logarithm of Σ exp x. In float32 a CPU's softmax of 49,152 ids adds up to 1 ± 5e-6,
    which logits of 15 to 20 multiply to an error of 1e-4 nat.
    """

    def computed(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and logits.requires_grad:
            return stock(logits, *args, **kwargs)
        return entropy(logits)

    return computed


def by_prompt(data: TensorDict, dp_group: Any = None, **options: Any) -> tuple[list[TensorDict], Rows | None]:
    """verl's micro-batches; dynamic ones of packed rows keep the responses of a prompt together."""
    lengths = prompt_lengths(data)
    packed = tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
    dynamic = tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
    if lengths is None or not packed or not dynamic:
        return prepare_micro_batches(data, dp_group=dp_group, **options)
    tokens = data["input_ids"]
    bins = bins_of(tokens.values(), tokens.offsets().tolist(), lengths, int(data["max_token_len_per_gpu"]))
    count = torch.tensor(len(bins))
    if dp_group is not None:  # all ranks take part in as many collectives
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=dp_group)
    while len(bins) < int(count):
        largest = max(bins, key=len)
        bins.append([largest.pop() for _ in range(len(largest) // 2)])
    return [tu.index_select_tensor_dict(data, rows) for rows in bins], bins


def bins_of(tokens: torch.Tensor, offsets: list[int], prompt_lengths: list[int], limit: int) -> Rows:
    """Rows in micro-batches of at most `limit` tokens with equal prompts counted once; a longer row is alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, (start, length) in enumerate(zip(offsets[:-1], prompt_lengths, strict=True)):
        groups.setdefault(tuple(tokens[start : start + length].tolist()), []).append(row)
    bins: Rows = []
    room = 0
    for prompt, rows in groups.items():
        shared = False  # with the open micro-batch
        for row in rows:
            response = offsets[row + 1] - offsets[row] - len(prompt)
            size = response + (0 if shared else len(prompt))
            if not bins or size > room:
                bins.append([])
                room, size = limit, response + len(prompt)
            bins[-1].append(row)
            room -= size
            shared = True
    return bins


def prompt_lengths(batch: TensorDict) -> list[int] | None:
    """Tokens of each row's prompt; None where the batch does not say."""
    if "input_ids" not in batch or not batch["input_ids"].is_nested or "response_mask" not in batch:
        return None
    total, mask = batch["input_ids"].offsets().diff(), batch["response_mask"]
    if not mask.is_nested:
        return None
    lengths: list[int] = (total - mask.offsets().diff()).tolist()
    return lengths if min(lengths) > 0 else None
