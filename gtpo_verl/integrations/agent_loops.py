"""verl's agent loop worker, doing once for a group what verl does for each of its responses.

* The prompt is rendered and tokenised once.
* The responses of a group are scored in one call, and written to TransferQueue in one call; states of prompts that
  change at about the same time too.
* A loop is constructed from its class, without hydra where its entry has no settings.
* The garbage collector does not walk through what was loaded before the first response.

With `algorithm.guide`, the last responses of a group may be the guide's (`guide`).

Rows, columns and failures are verl's. A loop of a user's own runs as in verl's worker.
"""

import asyncio
import copy
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, cast
from weakref import WeakMethod

import hydra
import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ, agent_loop_tq
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_attr
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gtpo_verl.collector import never_collect_what_is_loaded
from gtpo_verl.data.traces import LOG_PROBS, RESPONSES, traces_of
from gtpo_verl.integrations.guide import FIRST_SESSION, Reserve, as_output, versions_of
from gtpo_verl.integrations.guide_server import CLIENT
from gtpo_verl.integrations.reward_loop import Scorable
from gtpo_verl.integrations.standalone import guide_of
from gtpo_verl.integrations.streams import COLUMN, with_stream
from gtpo_verl.integrations.vllm.agent_loop import EntropySingleTurnAgentLoop, EntropyToolAgentLoop
from gtpo_verl.seeds import derived

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds that a response waits to be scored with others
STATE_PATIENCE = 0.02  # seconds that the state of a prompt waits to be written with others
SCORED_TOGETHER = 8  # responses in a call; more go to several reward workers, which verify at the same time
# Loops whose prompt follows from messages and tools alone.
KNOWN_LOOPS = (SingleTurnAgentLoop, ToolAgentLoop, EntropySingleTurnAgentLoop, EntropyToolAgentLoop)
GROUP = "gtpo_verl_group"
_AgentLoopWorker: Any = cast(Any, AgentLoopWorkerTQ).__ray_actor_class__  # verl's name is that of the Ray actor
Row = tuple[str, dict[str, Any], dict[str, Any]]  # key, columns, tag


class Gathering:
    """Handles what the members of a group bring in as few calls as possible.

    Called when every member has brought something or left, and at the latest ``patience`` seconds after the first has.

    Args:
        handle: takes what was brought, and returns a result or an exception for each.
        patience: seconds; None waits for all.
    """

    def __init__(self, handle: Callable[[list[Any]], Awaitable[list[Any]]], patience: float | None = None) -> None:
        self._handle = handle
        self._patience = patience
        self._expected = 0
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def expect(self) -> None:
        """One more member will take a seat."""
        self._expected += 1

    @contextmanager
    def seat(self) -> Iterator[Callable[[Any], Awaitable[Any]]]:
        """A member's place: a function that brings something and waits for its result. Leaving without is no error."""
        brought = False

        async def bring(thing: Any) -> Any:
            nonlocal brought
            brought = True
            self._expected -= 1
            return await self.bring(thing, last=self._expected == 0)

        try:
            yield bring
        finally:
            if not brought:
                self._expected -= 1
                if self._waiting and self._expected == 0:
                    self._call()

    async def bring(self, thing: Any, *, last: bool = False) -> Any:
        """Bring something, from no seat, and wait for its result; nothing else is waited for if it is the last."""
        result = asyncio.get_running_loop().create_future()
        self._waiting.append((thing, result))
        if last:
            self._call()
        elif self._timer is None and self._patience is not None:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._call)
        return await result

    def _call(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        call = asyncio.get_running_loop().create_task(self._answer(waiting))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, waiting: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        try:
            results = await self._handle([thing for thing, _ in waiting])
        except Exception as error:
            results = [error] * len(waiting)
        for (_, future), result in zip(waiting, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


class StatesTogether:
    """TransferQueue for verl's agent loops, which write the state of each prompt, a tag, by two requests of its own:
    those of the same moment are written together.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._gatherings: dict[str, Gathering] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    async def async_kv_put(self, key: str, partition_id: str, *, tag: dict[str, Any]) -> None:
        if partition_id not in self._gatherings:
            self._gatherings[partition_id] = Gathering(partial(self._put, partition_id), STATE_PATIENCE)
        await self._gatherings[partition_id].bring((key, tag))

    async def _put(self, partition_id: str, states: list[tuple[str, dict[str, Any]]]) -> list[None]:
        keys, tags = zip(*states, strict=True)
        await self._stock.async_kv_batch_put(keys=list(keys), partition_id=partition_id, tags=list(tags))
        return [None] * len(keys)


class Group:
    """What the responses of one prompt share; in a validation all prompts share the gatherings of scores and rows.

    With a reserve there are two gatherings of scores: one for the sessions that it waits for, `late_scores` for those
    that it holds.
    """

    def __init__(
        self,
        scores: Gathering,
        rows: Gathering,
        reserve: Reserve | None = None,
        late_scores: Gathering | None = None,
    ) -> None:
        self._scores = scores
        self.rows = rows
        self.reserve = reserve
        self._late_scores = late_scores
        self._first_prompt: tuple[Any, asyncio.Future[list[int]]] | None = None

    def scores(self, session: int) -> Gathering:
        """The gathering to which a session brings its response to be scored."""
        held = self.reserve is not None and self.reserve.holds(session)
        return self._late_scores if held and self._late_scores is not None else self._scores

    def expect(self, session: int) -> None:
        self.scores(session).expect()
        self.rows.expect()

    def share_prompt(self, loop: AgentLoopBase) -> None:
        """Let a loop take the tokens of its prompt from the loop of the group that asked for the same first."""
        # weak: a loop that refers to itself would live on, with its response, until the next garbage collection
        own_build = WeakMethod(loop.ct_build_initial_tokens)

        async def shared(messages: list[dict], tools: Any = None, **media: Any) -> list[int]:
            build = cast(Any, own_build())
            if self._first_prompt is None:
                asked = copy.deepcopy((messages, tools))  # a loop appends to its messages
                self._first_prompt = asked, asyncio.ensure_future(build(messages, tools=tools, **media))
            asked, tokens = self._first_prompt
            if asked != (messages, tools):
                return await build(messages, tools=tools, **media)
            return list(await tokens)

        cast(Any, loop).ct_build_initial_tokens = shared


class GroupAgentLoopWorker(_AgentLoopWorker):
    """verl's agent loop worker; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        never_collect_what_is_loaded()
        if not isinstance(agent_loop_tq.tq, StatesTogether):
            agent_loop_tq.tq = StatesTogether(agent_loop_tq.tq)
        handles = self.reward_loop_worker_handles
        # many prompts of few responses, which are all waited for
        self._of_validation = Gathering(self._request_scores, PATIENCE), Gathering(_put_validation, PATIENCE)
        self._scores_groups = self.processor is None and handles and hasattr(handles[0], "compute_scores")
        self._guide = guide_of(self.config)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if trajectory["validate"]:
            group = Group(*self._of_validation)
        else:
            scores, late_scores = (Gathering(self._request_scores, PATIENCE) for _ in range(2))
            group = Group(scores, Gathering(_put_training), self._reserve(prompt, trajectory["step"]), late_scores)
        await super()._run_prompt(prompt | {GROUP: group}, sampling_params, trajectory, trace)

    def _reserve(self, prompt: dict[str, Any], step: int) -> Reserve | None:
        """The reserve of a group in training; None where the guide takes no part or has no response to this prompt."""
        over = self._guide.last_step is not None and step > self._guide.last_step
        absent = not self._guide.served and prompt.get(RESPONSES) is None
        if self._guide.mode == "off" or over or absent:
            return None
        size = prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        if size <= self._guide.reserved:
            return None
        return Reserve(self._guide, size, self.config.algorithm.correct_threshold)

    def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, trace: bool = True, **columns: Any
    ) -> Awaitable[None]:
        # No coroutine: verl calls it for all responses of a group before the first of them starts.
        group: Group = columns.pop(GROUP)
        group.expect(columns["session_id"])
        # also where there is no guide: no row carries them
        traces = {column: columns.pop(column, None) for column in (RESPONSES, LOG_PROBS)}
        return self._respond(group, sampling_params, trajectory, trace, columns, traces)

    async def _respond(
        self,
        group: Group,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool,
        columns: dict[str, Any],
        traces: dict[str, Any],
    ) -> None:
        """Generate, score and write one response of a group."""
        with rollout_trace_attr(**trajectory, name="agent_loop", trace=trace), group.rows.seat() as write:
            outputs = await self._of_guide(group, sampling_params, columns, traces)
            outputs = outputs or await self._own(group, sampling_params, columns)
            if not outputs:
                logger.warning("Empty output for prompt %s_%s", columns["uid"], columns["session_id"])
                return
            await self._compute_teacher_logprobs(
                outputs[-1],
                prompt_ids=outputs[-1].prompt_ids,
                response_ids=outputs[-1].response_ids,
                validate=trajectory["validate"],
                sample_kwargs=columns,
            )
            await write(self._rows(outputs, columns))

    async def _own(
        self, group: Group, sampling_params: dict[str, Any], columns: dict[str, Any]
    ) -> list[AgentLoopOutput]:
        """Generate and score one response of the policy; empty where its loop returns none."""
        session = columns["session_id"]
        awaited = group.reserve.awaited(session) if group.reserve else nullcontext(_no_verdict)
        with awaited as judge, group.scores(session).seat() as score:
            loop = self._agent_loop(columns.pop("agent_name"), group, self.llm_client)
            output = await loop.run(with_stream(sampling_params, columns), **columns)
            outputs = output if isinstance(output, list) else [output]
            if outputs:
                await self._score(outputs, columns, score)
                judge(outputs)
            return outputs

    async def _of_guide(
        self, group: Group, sampling_params: dict[str, Any], columns: dict[str, Any], traces: dict[str, Any]
    ) -> list[AgentLoopOutput]:
        """Score the guide's response for a session that waits, and rename the session; empty where it is the
        policy's.
        """
        session, reserve = columns["session_id"], group.reserve
        if reserve is None or not reserve.holds(session):
            return []
        turn = await reserve.turn(session)
        if turn is None:
            return []
        theirs = columns | {"session_id": FIRST_SESSION + session}
        with group.scores(session).seat() as score:
            if self._guide.served:
                outputs = await self._of_server(group, sampling_params, theirs, turn[1])
            else:
                outputs = self._of_traces(theirs, traces, *turn)
            if outputs:
                await self._score(outputs, theirs, score)
        if not outputs or (reserve.drop_wrong and not reserve.is_correct(outputs[-1])):
            group.scores(session).expect()
            return []
        columns.clear()
        columns.update(theirs)
        return outputs

    def _of_traces(
        self, columns: dict[str, Any], traces: dict[str, Any], number: int, example: AgentLoopOutput
    ) -> list[AgentLoopOutput]:
        """The response that the training data has for a session, if it has so many."""
        columns.pop("agent_name")
        seed, limit = columns.pop(COLUMN, 0), self.config.actor_rollout_ref.rollout.response_length
        with_log_probs = self._guide.ratio == "phi"
        found = traces_of(traces, self.tokenizer, limit, derived(int(seed), "guide"), with_log_probs)
        return [as_output(found[number], example)] if number < len(found) else []

    async def _of_server(
        self, group: Group, sampling_params: dict[str, Any], columns: dict[str, Any], example: AgentLoopOutput
    ) -> list[AgentLoopOutput]:
        """A response that the guide's servers generate, by the agent loop and from the prompt of an own one."""
        whole = sampling_params | {"top_p": 1.0, "top_k": -1}
        loop = self._agent_loop(columns.pop("agent_name"), group, self.teacher_client[CLIENT])
        output = await loop.run(with_stream(whole, columns), **columns)
        outputs = output if isinstance(output, list) else [output]
        for each in outputs:
            each.extra_fields.update(versions_of(example))
        return outputs

    def _agent_loop(self, name: str, group: Group, client: Any) -> AgentLoopBase:
        assert name in _agent_loop_registry, f"no agent loop {name} among {sorted(_agent_loop_registry)}"
        config = _agent_loop_registry[name]
        construct: Any = hydra.utils.instantiate
        if set(config) <= {"name", "_target_"}:
            construct = _construct
        loop: AgentLoopBase = construct(
            config,
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )
        if type(loop) in KNOWN_LOOPS and self.processor is None:  # else the prompt may have images
            group.share_prompt(loop)
        return loop

    async def _score(self, outputs: list[AgentLoopOutput], columns: dict[str, Any], score: Any) -> None:
        """Score a response; its outputs but the last get the score of the last."""
        final = outputs[-1]
        if not self._scores_groups or len(outputs) > 1 or final.reward_score is not None:
            await self._compute_score(outputs, kwargs=columns)
        else:
            timing: dict[str, float] = {}
            with simple_timer("compute_score", timing):
                result = await score(
                    Scorable(
                        np.array(final.prompt_ids, np.int64),
                        np.array(final.response_ids, np.int64),
                        final.num_turns,
                        final.extra_fields,
                        columns,
                    )
                )
            final.reward_score = result["reward_score"]
            final.extra_fields["reward_extra_info"] = result["reward_extra_info"]
            final.metrics.compute_score = timing["compute_score"]
        if final.reward_score is not None:
            for output in outputs[:-1]:
                output.reward_score = final.reward_score
                output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]

    async def _request_scores(self, responses: list[Scorable]) -> list[Any]:
        """Deal responses to as few reward workers as get ``SCORED_TOGETHER`` each; a score or an exception for each."""
        handles = self.reward_loop_worker_handles
        workers = random.sample(handles, min(len(handles), math.ceil(len(responses) / SCORED_TOGETHER)))
        step = len(workers)
        hands = [responses[first::step] for first in range(step)]
        calls = (worker.compute_scores.remote(hand) for worker, hand in zip(workers, hands, strict=True))
        scores: list[Any] = [None] * len(responses)
        for first, found in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            scores[first::step] = found if isinstance(found, list) else [found] * len(hands[first])
        return scores

    def _rows(self, outputs: list[AgentLoopOutput], columns: dict[str, Any]) -> list[Row]:
        """The rows of a response in TransferQueue, as verl writes them."""
        rows = []
        for number, output in enumerate(outputs):
            fields = output.as_dict() | columns
            tokens = torch.cat([fields["prompts"], fields["responses"]])
            media = self._compute_multi_modal_inputs(output, tokens)
            fields.pop("multi_modal_data", None)
            fields["loss_mask"] = fields["response_mask"]
            fields["input_ids"] = tokens
            fields["position_ids"] = self._compute_position_ids(
                tokens[None], torch.ones_like(tokens)[None], media
            ).squeeze(0)
            fields["multi_modal_inputs"] = media
            prompt_length, response_length = len(fields["prompts"]), len(fields["responses"])
            tag = {
                "status": "success",
                "prompt_len": prompt_length,
                "response_len": response_length,
                "seq_len": prompt_length + response_length,
                "global_steps": columns["global_steps"],
                "min_global_steps": fields["extra_fields"].get("min_global_steps"),
                "max_global_steps": fields["extra_fields"].get("max_global_steps"),
            }
            rows.append((f"{columns['uid']}_{columns['session_id']}_{number}", fields, tag))
        return rows


class GroupAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager with workers that handle groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(GroupAgentLoopWorker)


def _construct(config: Any, **arguments: Any) -> AgentLoopBase:
    """What hydra makes of an entry that has no settings of its own."""
    own = {name: value for name, value in config.items() if name != "_target_"}
    return hydra.utils.get_object(config["_target_"])(**own, **arguments)


def _no_verdict(outputs: Sequence[AgentLoopOutput]) -> None:
    """Where nothing waits for the verdict."""


async def _put_training(lots: list[list[Row]]) -> list[None]:
    return await _put(lots, "train")


async def _put_validation(lots: list[list[Row]]) -> list[None]:
    return await _put(lots, "val")


async def _put(lots: list[list[Row]], partition_id: str) -> list[None]:
    """Write the rows of several responses, together where they have the same columns."""
    rows = [row for lot in lots for row in lot]
    for _, alike in groupby(sorted(rows, key=_columns), key=_columns):
        keys, fields, tags = zip(*alike, strict=True)
        shared = _shared(fields)
        batch = list_of_dict_to_tensordict([each | shared for each in fields])
        await tq.async_kv_batch_put(keys=list(keys), fields=batch, tags=list(tags), partition_id=partition_id)
    return [None] * len(lots)


def _shared(rows: Sequence[dict[str, Any]]) -> dict[str, NonTensorData]:
    """What all rows have in common besides tensors, such as the prompt of a group: wrapped once, not once a row."""
    first, *others = rows
    return {
        name: NonTensorData(value)
        for name, value in first.items()
        if not isinstance(value, torch.Tensor) and all(each[name] is value for each in others)
    }


def _columns(row: Row) -> Any:
    """The columns of a row: rows that differ in it do not fit into one batch."""
    return sorted(
        (name, str(value.dtype), value.dim()) if isinstance(value, torch.Tensor) else (name, "", 0)
        for name, value in row[1].items()
    )
