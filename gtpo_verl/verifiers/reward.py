"""The two rules in the form that verl calls: ``reward.custom_reward_function.path=pkg://gtpo_verl.verifiers.reward``, ``name=answer`` or ``boxed``.

Each reward worker of verl (``reward.num_workers``) has a pool of its own, ``workers`` processes large. A misspelt key of
``reward_kwargs`` is an error, because the functions name what they take.
"""

import asyncio
import atexit
import threading
from collections.abc import Mapping
from numbers import Number
from typing import Any

from gtpo_verl.errors import UserError
from gtpo_verl.verifiers.pool import TAIL, Verdict, VerifierPool

_pools: dict[str, VerifierPool] = {}
_lock = threading.Lock()


async def answer(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    strict_box: bool = False,
    workers: int = 2,
    timeout: float = 10.0,
    memory_mb: int = 1024,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> Verdict:
    """Judge a response by DAPO's ``Answer:`` rule; see ``gtpo_verl.verifiers.answer``.

    Args:
        solution_str: the response.
        ground_truth: the right answer, text or a number.
        strict_box: an option of the rule.
        workers, timeout, memory_mb: limits of the pool; see ``gtpo_verl.verifiers.pool.VerifierPool``.
        data_source, extra_info, reward_router_address, reward_model_tokenizer: passed by verl, not read.
    """
    options = {"strict_box": strict_box}
    limits = {"workers": workers, "timeout": timeout, "memory_mb": memory_mb}
    return await asyncio.wrap_future(_pool("answer", options, limits).submit(solution_str, truth_text(ground_truth)))


async def boxed(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    fallback: bool = True,
    decimals: int = 6,
    strict: bool = True,
    set_relations: bool = False,
    workers: int = 2,
    timeout: float = 10.0,
    memory_mb: int = 1024,
    max_chars: int = TAIL,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> Verdict:
    """Judge a response by Math-Verify; see ``gtpo_verl.verifiers.boxed``.

    Args:
        solution_str: the response.
        ground_truth: the right answer, text or a number.
        fallback, decimals, strict, set_relations: options of the rule.
        workers, timeout, memory_mb, max_chars: limits of the pool; see ``gtpo_verl.verifiers.pool.VerifierPool``.
        data_source, extra_info, reward_router_address, reward_model_tokenizer: passed by verl, not read.
    """
    options = {"fallback": fallback, "decimals": decimals, "strict": strict, "set_relations": set_relations}
    limits = {"workers": workers, "timeout": timeout, "memory_mb": memory_mb, "max_chars": max_chars}
    return await asyncio.wrap_future(_pool("boxed", options, limits).submit(solution_str, truth_text(ground_truth)))


def truth_text(ground_truth: Any) -> str:
    """The right answer as text.

    Raises:
        UserError: it is neither text nor a number; a list printed as one would make every response wrong without a word.
    """
    if not isinstance(ground_truth, str | Number):
        raise UserError(
            f"reward_model.ground_truth must be text or a number, and is {type(ground_truth).__name__}: {ground_truth!r:.80}"
        )
    return str(ground_truth)


def _pool(rule: str, options: dict[str, Any], limits: dict[str, Any]) -> VerifierPool:
    key = repr((rule, options, limits))
    with _lock:
        if key not in _pools:
            _pools[key] = VerifierPool(rule, options, **limits)
        return _pools[key]


@atexit.register
def close_pools() -> None:
    """Stop the processes of this process's pools; a later call starts new ones."""
    with _lock:
        while _pools:
            _pools.popitem()[1].close()
