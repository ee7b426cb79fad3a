"""Makes vLLM's samplers send an entropy with every sampled token, in this process.

Which of vLLM's two model runners serves a model depends on version, model and settings, so both are patched, each where
the sampled token's log-prob and rank are computed:

* V1: ``Sampler.gather_logprobs``. Prompt tokens pass through it too and must not be changed, so it packs only inside
  the sampler and the rejection sampler of speculative decoding.
* V2: ``compute_topk_scores`` (``compute_topk_logprobs`` in 0.24), in the modules of both samplers, with another rank
  kernel. Prompt log-probs look it up in another module, which is not patched.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.temporarily import bound
from gtpo_verl.integrations.vllm import codec
from gtpo_verl.integrations.vllm.kernels import RankAndEntropyKernel, entropy, rank_and_entropy
from gtpo_verl.versions import VLLM_TESTED, check_vllm, tested_range

_V2_MODULES = ("vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.spec_decode.rejection_sampler")
_V2_NAMES = ("compute_topk_scores", "compute_topk_logprobs")
_V2_RANKS_KERNEL = ["output_ptr", "logits_ptr", "logits_stride", "token_ids_ptr", "vocab_size", "BLOCK_SIZE"]
_MARK = "_gtpo_verl_entropy"

_sampling: ContextVar[bool] = ContextVar("gtpo_verl_sampling", default=False)


def install() -> None:
    """Patch the samplers of this process; a second call changes nothing.

    Raises UserError: the installed vLLM is not supported, or lacks what is patched.
    """
    check_vllm_version()
    _patch_v1()
    _patch_v2()


def check_vllm_version() -> str:
    """Return the version of vLLM.

    Raises UserError: it is older than all that were tested.
    """
    import vllm

    check_vllm(str(vllm.__version__))
    return str(vllm.__version__)


def _patch_v1() -> None:
    from vllm.platforms import current_platform

    sampler = _get(importlib.import_module("vllm.v1.sample.sampler"), "Sampler")
    rejection: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")
    rejection_sampler = _get(rejection, "RejectionSampler")
    if hasattr(sampler, _MARK):
        return
    gather = _get(sampler, "gather_logprobs")

    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if not _sampling.get():
            return gather(logprobs, num_logprobs, token_ids)  # prompt tokens
        if logprobs.is_cuda and num_logprobs == 0:
            return gather_fused(logprobs, token_ids)
        gathered = gather(logprobs, num_logprobs, token_ids)
        if logprobs.is_cuda:
            return gathered._replace(selected_token_ranks=rank_and_entropy(logprobs, token_ids))
        return gathered._replace(selected_token_ranks=codec.pack(gathered.selected_token_ranks, entropy(logprobs)))

    forward = _while_sampling(_get(sampler, "forward"))
    get_logprobs = _while_sampling(_get(rejection_sampler, "_get_logprobs_tensors"))
    sampler.gather_logprobs = staticmethod(gather_logprobs)
    sampler.forward = forward
    rejection_sampler._get_logprobs_tensors = get_logprobs
    if current_platform.is_cpu():
        _get(rejection, "expand_batch_to_tokens")  # refused if it is called something else
        rejection.expand_batch_to_tokens = _expand
    setattr(sampler, _MARK, True)


def gather_fused(logprobs: torch.Tensor, token_ids: torch.Tensor) -> Any:
    """What V1's ``gather_logprobs`` returns for the sampled token alone, its rank and entropy from one read of the row.

    Of ``logprobs`` (N, V) on a device with Triton and ``token_ids`` (N,) int64 it makes vLLM's ``LogprobsTensors``:
    ids (N, 1) int32, log-probs (N, 1), packed words (N,) int64.
    """
    from vllm.v1.outputs import LogprobsTensors

    ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(
        logprob_token_ids=ids.to(torch.int32),
        logprobs=logprobs.gather(-1, ids),
        selected_token_ranks=rank_and_entropy(logprobs, token_ids),
    )


def _expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """V1's ``expand_batch_to_tokens``: a request's temperature, top-k or top-p (B,) for each drafted token (N,).

    On a CPU vLLM's own leaves the result uninitialised (github.com/vllm-project/vllm/issues/55005), and drafts are
    accepted or rejected with whatever the memory held.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _while_sampling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with bound(_sampling, True):
            return method(*args, **kwargs)

    return marked


def _patch_v2() -> None:
    for module_name in _V2_MODULES:
        module = importlib.import_module(module_name)
        name = next((name for name in _V2_NAMES if hasattr(module, name)), _V2_NAMES[0])
        scores = _get(module, name)
        if not hasattr(scores, _MARK):
            setattr(module, name, _with_fused_ranks(scores))


def _with_fused_ranks(scores: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in whose namespace ``_ranks_kernel`` is ours."""
    assert isinstance(scores, types.FunctionType)
    kernel = scores.__globals__.get("_ranks_kernel")
    if kernel is None or "_ranks_kernel" not in scores.__code__.co_names:
        raise _moved(f"{scores.__module__}.{scores.__name__} uses no _ranks_kernel")
    arguments = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
    if arguments != _V2_RANKS_KERNEL:
        raise _moved(f"{scores.__module__}._ranks_kernel takes {', '.join(arguments)}")
    names = {**scores.__globals__, "_ranks_kernel": RankAndEntropyKernel()}
    fused = types.FunctionType(scores.__code__, names, scores.__name__, scores.__defaults__, scores.__closure__)
    fused.__kwdefaults__ = scores.__kwdefaults__
    setattr(fused, _MARK, True)
    return fused


def _get(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise _moved(f"{owner.__name__} has no {name}")
    return found


def _moved(what: str) -> UserError:
    return UserError(
        f"vLLM {check_vllm_version()} cannot be patched for rollout entropies ({what}): install vLLM "
        f"{tested_range(VLLM_TESTED)} as released, or set algorithm.entropy.source=actor."
    )
