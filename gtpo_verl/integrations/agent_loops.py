"""verl's agent loop worker with a random stream for every response (`streams`), the rows of a guide (`guide`), and the
reason of the last response that failed.

With `algorithm.guide`, the last responses of a group wait for the verdicts on the others, and are the guide's or the
policy's.
"""

from contextlib import nullcontext
from typing import Any, cast

import hydra
import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from gtpo_verl.data.traces import LOG_PROBS, RESPONSES, traces_of
from gtpo_verl.errors import UserError, first_line
from gtpo_verl.integrations.context import overlong
from gtpo_verl.integrations.guide import CLIENT, FIRST_SESSION, Reserve, as_output, versions_of
from gtpo_verl.integrations.health import ANSWER_TIMEOUT
from gtpo_verl.integrations.standalone import guide_of
from gtpo_verl.integrations.streams import COLUMN, with_stream
from gtpo_verl.runs.correctness import score
from gtpo_verl.seeds import derived

_AgentLoopWorker: Any = cast(Any, AgentLoopWorkerTQ).__ray_actor_class__  # verl's name is that of the Ray actor


class SeededAgentLoopWorker(_AgentLoopWorker):
    """verl's agent loop worker; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guide = guide_of(self.config)
        self._reserves: dict[str, Reserve] = {}  # of the groups in flight, by uid
        self._failure = ""

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        reserve = None if trajectory["validate"] else self._reserve(prompt, trajectory["step"])
        if reserve is not None:
            self._reserves[prompt["uid"]] = reserve
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            self._reserves.pop(prompt["uid"], None)

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

    def take_failure(self) -> str:
        """Which response failed last since this was asked, and why; empty where none did."""
        failure, self._failure = self._failure, ""
        return failure

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, trace: bool = True, **columns: Any
    ) -> None:
        try:
            await self._one_response(sampling_params, trajectory, trace, dict(columns))
        except Exception as error:
            cause = getattr(error, "cause", None) or error  # Ray wraps the error of a reward worker
            what = first_line(cause) if isinstance(cause, UserError) else f"{type(cause).__name__}: {first_line(cause)}"
            place = f"index {columns.get('index')} of data_source {columns.get('data_source')}"
            self._failure = f"response {columns['uid']}_{columns['session_id']} ({place}): {what}"
            raise

    async def _one_response(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool, columns: dict[str, Any]
    ) -> None:
        # also where there is no guide: no row carries them
        traces = {column: columns.pop(column, None) for column in (RESPONSES, LOG_PROBS)}
        reserve = self._reserves.get(columns["uid"])
        if reserve and await self._of_guide(reserve, sampling_params, trajectory, columns, traces):
            return
        with reserve.awaited(columns["session_id"]) if reserve else nullcontext():
            await super()._run_agent_loop(with_stream(sampling_params, columns), trajectory, trace=trace, **columns)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        of_guide = kwargs["session_id"] >= FIRST_SESSION and outputs[-1].reward_score is None
        await super()._compute_score(outputs, kwargs)
        if of_guide and overlong(self.config) is not None:  # verl's reward has the penalty, and the score has not
            outputs[-1].reward_score = score(outputs[-1].extra_fields["reward_extra_info"])
        reserve = self._reserves.get(kwargs["uid"])
        if reserve is not None:
            reserve.judge(kwargs["session_id"], outputs)

    async def _of_guide(
        self,
        reserve: Reserve,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        columns: dict[str, Any],
        traces: dict[str, Any],
    ) -> bool:
        """Score and write the guide's response for a session that waits; False where it is to be the policy's."""
        session = columns["session_id"]
        turn = await reserve.turn(session) if reserve.holds(session) else None
        if turn is None:
            return False
        number, example = turn
        theirs = columns | {"session_id": FIRST_SESSION + session}
        if self._guide.served:
            outputs = await self._of_server(sampling_params, theirs, example)
        else:
            theirs.pop("agent_name")
            limit = self.config.actor_rollout_ref.rollout.response_length
            seed = derived(int(theirs.pop(COLUMN, 0)), "guide")
            found = traces_of(traces, self.tokenizer, limit, seed, self._guide.ratio == "phi")
            outputs = [as_output(found[number], example)] if number < len(found) else []
        if outputs and reserve.drop_wrong:
            await self._compute_score(outputs, theirs)
        if not outputs or (reserve.drop_wrong and not reserve.is_correct(outputs[-1])):
            return False
        await self._agent_loop_postprocess(outputs, trajectory["validate"], **theirs)
        return True

    async def _of_server(
        self, sampling_params: dict[str, Any], columns: dict[str, Any], example: AgentLoopOutput
    ) -> list[AgentLoopOutput]:
        """A response that the guide's servers generate, by the agent loop and from the prompt of an own one."""
        loop: Any = hydra.utils.instantiate(
            config=_agent_loop_registry[columns.pop("agent_name")],
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=self.teacher_client[CLIENT],
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )
        whole = sampling_params | {"top_p": 1.0, "top_k": -1}
        output = await loop.run(with_stream(whole, columns), **columns)
        outputs: list[AgentLoopOutput] = output if isinstance(output, list) else [output]
        for each in outputs:
            each.extra_fields.update(versions_of(example))
        return outputs


def last_failure(manager: Any) -> str:
    """Which response failed last, and why, as the workers of an agent loop manager say; or where to look."""
    unknown = "its traceback is in the run's log"
    asked = [worker.take_failure.remote() for worker in manager.agent_loop_workers if hasattr(worker, "take_failure")]
    if not asked:
        return unknown
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_TIMEOUT)
    return next(filter(None, ray.get(answered)), unknown)


class SeededAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager with our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeededAgentLoopWorker)
