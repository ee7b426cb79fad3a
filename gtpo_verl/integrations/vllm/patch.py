"""Makes vLLM's samplers send an entropy with every sampled token, in this process.

vLLM has two model runners, and each has one place where the sampled token's log-prob and rank are computed:

* V1: ``Sampler.gather_logprobs``, called by the sampler and by the rejection sampler of speculative decoding. Prompt
  tokens pass through it too and must not be changed, so it packs only inside those two callers. On a GPU it is replaced
  by one kernel that computes rank and entropy in one pass, unless top log-probs were requested as well.
* V2: ``compute_topk_scores`` (``compute_topk_logprobs`` in 0.24), looked up by name in the modules of the sampler and
  of the rejection sampler. Prompt log-probs look it up in another module, which is not patched. The function is kept,
  and its rank kernel is replaced by one that computes the entropy in the same pass.

Both are patched always: which runner serves a model depends on version, model and settings.

On a CPU, V1's rejection sampler also gets the temperatures of the requests (``_expand``): tokens must come from the
distribution whose entropy they carry.
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

    Raises:
        UserError: the installed vLLM is not supported, or lacks what is patched; the version is named.
    """
    check_vllm_version()
    _patch_v1()
    _patch_v2()


def check_vllm_version() -> str:
    """Return the version of vLLM.

    Raises:
        UserError: it is older than all that were tested.
    """
    version = vllm_version()
    check_vllm(version)
    return version


def vllm_version() -> str:
    """The version of the installed vLLM."""
    import vllm

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

    Args:
        logprobs: (N, V) float, on a device with Triton.
        token_ids: (N,) int64, the sampled tokens.

    Returns:
        vLLM's ``LogprobsTensors``: ids (N, 1) int32, log-probs (N, 1), packed words (N,) int64.
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
    """V1's ``expand_batch_to_tokens``: a request's temperature, top-k or top-p for each of its drafted tokens.

    On a CPU vLLM's own leaves the result uninitialised (github.com/vllm-project/vllm/issues/55005), and drafts are
    accepted or rejected with whatever the memory held.

    Args:
        x: (B,) of the requests.
        cu_num_tokens: (B,) integers, where the tokens of each request end.
        num_tokens: N, of all requests together.
        replace_from: a value of ``x`` that counts as ``replace_to``.
        replace_to: what it counts as.

    Returns:
        (N,), of the type of ``x``.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _while_sampling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        token = _sampling.set(True)
        try:
            return method(*args, **kwargs)
        finally:
            _sampling.reset(token)

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
        f"vLLM {vllm_version()} cannot be patched for rollout entropies ({what}): install vLLM "
        f"{tested_range(VLLM_TESTED)} as released, or set algorithm.entropy.source=actor."
    )
