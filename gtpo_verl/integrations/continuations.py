"""Samples responses and continuations of prefixes in bulk, and verifies them as a training does.

The rollout side of `gtpo-verl eval` without its agent loops. Sampling is that of the training
(`actor_rollout_ref.rollout`, not `val_kwargs`), and a prefix is continued from its token ids.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.rollout.replica import RolloutReplicaRegistry

from gtpo_verl.config import set_value
from gtpo_verl.errors import UserError, first_line
from gtpo_verl.evaluation.continuations import BulkSample, Continuation, Prefix
from gtpo_verl.integrations.evaluate import Problems, serving
from gtpo_verl.integrations.reward_loop import Scorable
from gtpo_verl.integrations.standalone import standalone
from gtpo_verl.integrations.vllm.bulk import BulkRequest, BulkVLLMReplica
from gtpo_verl.integrations.vllm.requirements import KEY, truncates
from gtpo_verl.integrations.vllm.wiring import enable_rollout_entropy
from gtpo_verl.runs.correctness import is_correct, score, verdict
from gtpo_verl.seeds import derived

AHEAD = 2  # calls in flight for each server
SINGLE_TURN = "single_turn_agent"

Key = tuple[int, bytes]  # a row and the tokens of a response to it


def bulk_servers(config: DictConfig) -> None:
    """Turn a training's configuration into that of standalone servers that continue in bulk; in place.

    Raises UserError: the run's sampling has no exact entropies, or its responses have several turns.
    """
    rollout = config.actor_rollout_ref.rollout
    if truncates(rollout):
        raise UserError(
            f"{KEY}.top_p={rollout.top_p}, top_k={rollout.top_k} cut the distribution, and an audit needs the entropy "
            "that tokens were sampled with: set top_p=1 and top_k=-1."
        )
    loop = rollout.agent.default_agent_loop
    if loop != SINGLE_TURN:
        raise UserError(
            f"{KEY}.agent.default_agent_loop={loop}: an audit continues responses of one turn; a tool's answer could "
            f"not be continued. Set it to {SINGLE_TURN}."
        )
    standalone(config)
    set_value(config, f"{KEY}.calculate_log_probs", True)
    enable_rollout_entropy(config)
    RolloutReplicaRegistry.register("vllm", lambda: BulkVLLMReplica)


class Prompts(Problems):
    """The rows of the data as token ids, and what the verifier needs of them."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self._limit = config.data.max_prompt_length
        self._known: dict[int, tuple[int, ...]] = {}
        self._builder: Any = create_continuous_token_builder(
            self.tokenizer,
            hf_model_type=self.model_type,
            chat_template_kwargs=dict(config.data.get("apply_chat_template_kwargs") or {}),
        )

    def tokens(self, row: int) -> tuple[int, ...]:
        """The prompt of a row, of one that is too long its end, as verl's agent loop cuts it.

        Raises UserError: the model's tokenizer cannot render it.
        """
        return self._whole(row)[-self._limit :]

    def fits(self, row: int) -> bool:
        """Whether the prompt of a row is not cut."""
        return len(self._whole(row)) <= self._limit

    def _whole(self, row: int) -> tuple[int, ...]:
        if row not in self._known:
            messages = list(self.row(row)["raw_prompt"])
            try:
                self._known[row] = tuple(self._builder.build_initial_tokens(messages))
            except Exception as error:
                raise UserError(
                    f"the model's tokenizer cannot render the prompt of row {row} ({first_line(error)}): the data does "
                    "not fit the model; a base model without a chat template needs one in its tokenizer."
                ) from error
        return self._known[row]

    def columns(self, row: int) -> dict[str, Any]:
        """The columns of a row for the verifier."""
        return {name: value for name, value in self.row(row).items() if not isinstance(value, torch.Tensor)}

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""
        return str(self.tokenizer.decode(list(tokens)))

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Each token as text."""
        return [self.text([token]) for token in tokens]


class Sampler:
    """Continues prefixes on the servers of a job."""

    def __init__(self, config: DictConfig, prompts: Prompts, servers: Sequence[Any], verifiers: Sequence[Any]) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._prompts, self._servers, self._verifiers = prompts, list(servers), list(verifiers)
        self._length = int(config.data.max_response_length)
        self._threshold = float(config.algorithm.correct_threshold)
        self._seed = int(config.seed)
        self._sampling = {
            "temperature": float(rollout.temperature),
            "top_p": float(rollout.top_p),
            "top_k": int(rollout.top_k),
            "repetition_penalty": 1.0,
            "ignore_eos": bool(rollout.get("ignore_eos", False)),
        }
        self._at_once = int(rollout.max_num_seqs)  # continuations in a call

    def continued(self, prefixes: Iterable[Prefix]) -> Iterator[tuple[Prefix, list[Continuation]]]:
        """Continue every prefix; each with its continuations, as soon as they are verified.

        Raises UserError: the verifier failed, or gives no verdict.
        """
        calls = _calls(prefixes, self._at_once)
        generating: dict[Any, tuple[list[Prefix], Any]] = {}
        judging: dict[Any, tuple[list[Prefix], list[list[BulkSample]], Iterable[Key]]] = {}
        idle, verifiers = deque(self._servers * AHEAD), itertools.cycle(self._verifiers)
        while True:
            while idle and (call := next(calls, None)) is not None:
                server = idle.popleft()
                reference = server.continue_all.remote([self._request(prefix) for prefix in call], self._sampling)
                generating[reference] = call, server
            if not generating and not judging:
                return
            ready, _ = ray.wait([*generating, *judging], num_returns=1)
            for reference in ready:
                if reference in generating:
                    call, server = generating.pop(reference)
                    samples = ray.get(reference)
                    idle.append(server)
                    responses = self._scorables(call, samples)
                    judged = next(verifiers).compute_scores.remote(list(responses.values()))
                    judging[judged] = call, samples, responses.keys()
                else:
                    call, samples, keys = judging.pop(reference)
                    yield from self._verdicts(call, samples, dict(zip(keys, ray.get(reference), strict=True)))

    def _request(self, prefix: Prefix) -> BulkRequest:
        left = self._length - len(prefix.tokens)
        return BulkRequest(
            self._prompts.tokens(prefix.row) + prefix.tokens,
            prefix.count,
            left if prefix.most is None else min(prefix.most, left),
            derived(self._seed, "audit", prefix.key) >> 1,
            prefix.entropies,
        )

    def _scorables(self, call: list[Prefix], samples: list[list[BulkSample]]) -> dict[Key, Scorable]:
        """The different responses of a call, each once."""
        found: dict[Key, Scorable] = {}
        for prefix, continuations in zip(call, samples, strict=True):
            for sample in continuations:
                response = _joined(prefix, sample)
                key = prefix.row, response.tobytes()
                if key not in found:
                    prompt = np.array(self._prompts.tokens(prefix.row), dtype=np.int64)
                    found[key] = Scorable(prompt, response, self._prompts.columns(prefix.row))
        return found

    def _verdicts(
        self, call: list[Prefix], samples: list[list[BulkSample]], results: dict[Key, Any]
    ) -> Iterator[tuple[Prefix, list[Continuation]]]:
        for prefix, continuations in zip(call, samples, strict=True):
            found = []
            for sample in continuations:
                response = _joined(prefix, sample)
                correct, score = self._verdict(prefix.row, results[prefix.row, response.tobytes()])
                truncated = len(response) >= self._length
                found.append(Continuation(**vars(sample), correct=correct, score=score, truncated=truncated))
            yield prefix, found

    def _verdict(self, row: int, result: Any) -> tuple[bool, float]:
        if isinstance(result, Exception):
            raise UserError(
                f"the verifier failed on a response to row {row} of the data ({type(result).__name__}: {result}); what "
                "was sampled before is kept. See the traceback in audit.log."
            ) from result
        info = result["reward_extra_info"]
        acc = verdict(info, f"on a response to row {row} of the data")
        found = score(info)
        return is_correct(acc, self._threshold), float(result["reward_score"] if found is None else found)


def _joined(prefix: Prefix, sample: BulkSample) -> np.ndarray:
    return np.concatenate([np.array(prefix.tokens, dtype=np.int64), sample.tokens.astype(np.int64)])


def _calls(prefixes: Iterable[Prefix], at_once: int) -> Iterator[list[Prefix]]:
    """Prefixes in lists of at most so many continuations, or of one prefix."""
    call: list[Prefix] = []
    for prefix in prefixes:
        if call and sum(each.count for each in call) + prefix.count > at_once:
            yield call
            call = []
        call.append(prefix)
    if call:
        yield call


@contextmanager
def sampler(config: DictConfig, prompts: Prompts, *, wait: bool) -> Iterator[Sampler]:
    """Run Ray, vLLM and the verifier for a block.

    Raises UserError: the cluster has no room and ``wait`` is off.
    """
    with serving(config, wait=wait) as (manager, reward):
        yield Sampler(config, prompts, manager.server_handles, reward.reward_loop_worker_handles)
