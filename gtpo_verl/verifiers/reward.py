"""The rules as reward functions of verl.

To be set as ``reward.custom_reward_function.path=pkg://gtpo_verl.verifiers.reward`` and ``name=answer``, ``boxed`` or
``reasoning_gym``. ``solution_str`` is the response, ``ground_truth`` the correct answer, text or a number.
``limits`` are ``workers``, ``timeout``, ``memory_mb`` and ``max_chars`` of ``gtpo_verl.verifiers.pool.VerifierPool``,
of which every reward worker of verl has its own; other keyword arguments are options of the rule. What else verl passes
is not used. An unknown key in ``reward_kwargs`` is an error.
"""

import asyncio
import atexit
import json
import threading
from collections.abc import Mapping
from numbers import Number
from typing import Any

from gtpo_verl.errors import UserError
from gtpo_verl.verifiers.pool import Verdict, VerifierPool

_pools: dict[str, VerifierPool] = {}
_lock = threading.Lock()


async def answer(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    strict_box: bool = False,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
    **limits: Any,
) -> Verdict:
    """Verify a response by DAPO's ``Answer:`` rule; see ``gtpo_verl.verifiers.answer``."""
    return await _judge("answer", {"strict_box": strict_box}, limits, solution_str, truth_text(ground_truth))


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
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
    **limits: Any,
) -> Verdict:
    """Verify a response by Math-Verify; see ``gtpo_verl.verifiers.boxed``."""
    options = {"fallback": fallback, "decimals": decimals, "strict": strict, "set_relations": set_relations}
    return await _judge("boxed", options, limits, solution_str, truth_text(ground_truth))


async def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
    **limits: Any,
) -> Verdict:
    """Let the generator of a problem score the answer; see ``gtpo_verl.verifiers.reasoning_gym``. Raises UserError:
    ``extra_info`` has no ``reasoning_gym``, the record of the problem.
    """
    record = (extra_info or {}).get("reasoning_gym")
    if record is None:
        raise UserError(
            f"verifier=reasoning_gym: a row of {data_source} has no extra_info.reasoning_gym, the record of its "
            "problem: `gtpo-verl prepare-data reasoning-gym:NAME` writes it."
        )
    return await _judge("gtpo_verl.verifiers.reasoning_gym", {}, limits, solution_str, json.dumps(dict(record)))


def truth_text(ground_truth: Any) -> str:
    """The ground truth as text. Raises UserError: it is neither text nor a number; a list as text would make every
    response wrong silently.
    """
    if not isinstance(ground_truth, str | Number):
        raise UserError(
            "reward_model.ground_truth must be text or a number, and is "
            f"{type(ground_truth).__name__}: {ground_truth!r:.80}"
        )
    return str(ground_truth)


async def _judge(rule: str, options: dict[str, Any], limits: dict[str, Any], response: str, truth: str) -> Verdict:
    key = repr((rule, options, limits))
    with _lock:
        if key not in _pools:
            _pools[key] = VerifierPool(rule, options, **limits)
        pool = _pools[key]
    return await asyncio.wrap_future(pool.submit(response, truth))


@atexit.register
def close_pools() -> None:
    """Stop all pools of this process; a later call starts new ones."""
    with _lock:
        while _pools:
            _pools.popitem()[1].close()
