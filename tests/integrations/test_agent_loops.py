"""The worker that handles groups against verl's own, on the same answers: rows, columns and failures are the same."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    _agent_loop_registry,
)
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1 import AgentLoopWorkerTQ, trainer_base
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.agent_loops import Gathering, GroupAgentLoopWorker, StatesTogether
from gtpo_verl.integrations.guide import FIRST_SESSION
from gtpo_verl.integrations.guide_server import CLIENT
from gtpo_verl.integrations.reward_loop import GroupRewardLoopManager, Scorable
from gtpo_verl.integrations.starting import Started
from gtpo_verl.integrations.step.guide import GuideRows
from gtpo_verl.integrations.streams import COLUMN
from gtpo_verl.integrations.trainer import trainer_class
from gtpo_verl.integrations.vllm.wiring import AGENT_LOOPS
from gtpo_verl.seeds import derived
from gtpo_verl.tasks.model import build_model, build_tokenizer, save

VERL = AgentLoopWorkerTQ.__ray_actor_class__
N = 4
CALL = '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
TEXTS = ("#12", "7", "1+2=3;#12", "no")  # the answers to a group, in the order of its responses

COLUMNS = {
    "raw_prompt": [{"role": "user", "content": "3+9"}],
    "data_source": "test",
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"index": 0},
    "index": 0,
    "uid": "prompt",
    "global_steps": 3,
    "agent_name": "single_turn_agent",
}

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    if solution_str == "no" and extra_info.get("fails"):
        raise ValueError("cannot score this")
    extra_info["seen"] = extra_info.get("seen", 0) + 1  # of its own copy
    right = solution_str.endswith(ground_truth)
    return {"score": len(solution_str) / 8, "acc": float(right), "seen": extra_info["seen"]}
"""


class Answers:
    """A client of servers that answers the requests of a group in turn."""

    def __init__(self, texts: tuple[str | Exception, ...] = TEXTS) -> None:
        self.texts = itertools.cycle(texts)
        self.seeds: list[Any] = []

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **request: Any) -> TokenOutput:
        text = next(self.texts)
        self.seeds.append(sampling_params.get("seed"))
        await asyncio.sleep(0)
        if isinstance(text, Exception):
            raise text
        tokens = build_tokenizer().encode(text)
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-i / 8 for i in range(len(tokens))],
            stop_reason="completed",
            extra_fields={
                "global_steps": 3,
                "min_global_steps": 3,
                "max_global_steps": 3,
                "rollout_entropies": np.arange(len(tokens), dtype=np.float32) / 8,
                "rollout_versions": np.full(len(tokens), 3, np.int32),
            },
        )


class Own(AgentLoopBase):
    """A loop of a user's: several outputs for some responses, a score of its own for others, columns as they come."""

    numbers = itertools.count()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        number = kwargs["session_id"]
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        outputs = []
        for i in range(number):  # none for the first response
            answer = [50 + i] * (1 + number)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=answer,
                    response_mask=[1] * len(answer),
                    response_logprobs=[-0.5] * len(answer) if number == 3 else None,
                    reward_score=0.25 if number == 2 and i == 1 else None,
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={"reward_extra_info": {"acc": 1.0}} if number == 2 else {},
                )
            )
        return outputs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = build_tokenizer()
    save(build_model(len(tokenizer), seed=0, hidden_size=32, num_hidden_layers=1), tokenizer, folder)
    (folder / "reward.py").write_text(REWARD)
    config = compose_config(
        [
            "algo=gtpo",
            "setting=quickstart",
            "hardware=cpu",
            f"actor_rollout_ref.model.path={folder}",
            f"data.train_files={folder}",
            f"data.val_files={folder}",
            "data.max_prompt_length=64",
            "data.max_response_length=64",
            f"actor_rollout_ref.rollout.n={N}",
            f"+actor_rollout_ref.rollout.agent.agent_loop_config_path={AGENT_LOOPS}",
            f"reward.custom_reward_function.path={folder / 'reward.py'}",
            "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
            f"trainer.run_dir={folder}",
        ]
    )
    _agent_loop_registry["own"] = {"_target_": f"{__name__}.Own"}
    return config


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop, of which TransferQueue's client keeps connections; one thread, so that responses keep their order
    while their prompts are tokenised.
    """
    with asyncio.Runner() as runner, ThreadPoolExecutor(1) as executor:
        runner.get_loop().set_default_executor(executor)
        yield runner


@pytest.fixture(scope="module")
def reward(queue: None, config: DictConfig) -> list[Any]:
    handles: list[Any] = GroupRewardLoopManager(config=config).reward_loop_worker_handles
    return handles


Rows = tuple[str, dict[str, dict[str, Any]], dict[str, dict[str, Any]]]


@pytest.fixture
def run(config: DictConfig, reward: list[Any], runner: asyncio.Runner) -> Callable[..., Rows]:
    """Send one prompt through a worker: the status of its group, and the columns and tags of its rows by key."""

    def run(
        worker_class: Any,
        answers: Answers,
        validate: bool = False,
        guide: dict[str, Any] | None = None,
        server: Any = None,
        **prompt: Any,
    ) -> Rows:
        async def go() -> Rows:
            of_run = OmegaConf.merge(config, {"algorithm": {"guide": guide or {}}})
            worker = worker_class(of_run, answers, None if server is None else {CLIENT: server}, reward)
            partition = "val" if validate else "train"
            trajectory = {"step": 3, "sample_index": 0, "rollout_n": 0, "validate": validate}
            params = {"temperature": 1.0, "logprobs": True}
            await worker._run_prompt(COLUMNS | prompt, params, trajectory=trajectory)
            tags = (await tq.async_kv_list(partition_id=partition))[partition]
            status = tags.pop("prompt")["status"]
            rows = {}
            for key in tags:
                data = await tq.async_kv_batch_get(keys=[key], partition_id=partition)
                rows[key] = {name: plain(data[name][0]) for name in sorted(data.keys())}
            await tq.async_kv_clear(keys=["prompt", *tags], partition_id=partition)
            return status, rows, tags

        return runner.run(go())

    return run


def plain(value: Any) -> Any:
    """A value of TransferQueue without TensorDict's wrappers."""
    return getattr(value, "data", value) if not isinstance(value, torch.Tensor) else value


def assert_same(ours: Rows, verls: Rows) -> None:
    """Bit for bit, but for the seconds that were measured."""
    assert ours[0] == verls[0]
    assert ours[2] == verls[2]
    assert sorted(ours[1]) == sorted(verls[1])
    for key, row in verls[1].items():
        assert sorted(ours[1][key]) == sorted(row)
        for name, value in row.items():
            found = ours[1][key][name]
            if name == "metrics":
                assert found.keys() == value.keys()
            elif isinstance(value, torch.Tensor):
                assert (found.dtype, found.shape) == (value.dtype, value.shape), name
                assert torch.equal(found, value), name
            else:
                np.testing.assert_equal(found, value, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single_turn_agent", "tool_agent", "stock", "own"])
@pytest.mark.parametrize("validate", [False, True])
def test_rows_are_verls(run: Callable[..., Rows], name: str, validate: bool) -> None:
    _agent_loop_registry["stock"] = {
        "_target_": "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"
    }
    verls = run(VERL, Answers(), validate, agent_name=name, __rollout_n__=N)
    ours = run(GroupAgentLoopWorker, Answers(), validate, agent_name=name, __rollout_n__=N)
    assert verls[0] == "finished"
    assert len(verls[1]) == (6 if name == "own" else N)
    assert_same(ours, verls)
    if name == "single_turn_agent":
        assert {row["extra_fields"]["reward_extra_info"]["seen"] for row in ours[1].values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "prompt"),
    [
        ((RuntimeError("the server died"), *TEXTS[1:]), {}),
        ((*TEXTS[:3], RuntimeError("the server died")), {}),
        (TEXTS, {"extra_info": {"fails": True}}),
        (("", *TEXTS[1:]), {}),  # a score has no token to stand on
        ([RuntimeError("all servers died")] * N, {}),
        (TEXTS, {"agent_name": "unknown"}),
    ],
)
def test_a_failed_response_leaves_what_it_leaves_in_verl(
    run: Callable[..., Rows], answers: tuple[Any, ...], prompt: dict[str, Any]
) -> None:
    verls = run(VERL, Answers(answers), **prompt)
    ours = run(GroupAgentLoopWorker, Answers(answers), **prompt)
    assert verls[0] == "failure"
    assert len(verls[1]) in (0, N - 1)
    assert_same(ours, verls)


@pytest.mark.slow
def test_what_is_the_same_for_a_group_is_done_once(run: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(ContinuousTokenBuilder, "build_initial_tokens")
    counted(GroupAgentLoopWorker, "_request_scores")
    counted(tq, "async_kv_batch_put")
    run(GroupAgentLoopWorker, Answers())
    # rows once, and the state of the prompt twice
    assert sorted(calls) == ["_request_scores", *["async_kv_batch_put"] * 3, "build_initial_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single_turn_agent", "tool_agent"])
def test_no_loop_outlives_its_response(run: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loops = []
    construct = GroupAgentLoopWorker._agent_loop

    def constructed(*args: Any) -> AgentLoopBase:
        loop = construct(*args)
        loops.append(weakref.ref(loop))
        return loop

    monkeypatch.setattr(GroupAgentLoopWorker, "_agent_loop", constructed)
    gc.disable()  # it would find one that refers to itself, some hundred megabytes of responses later
    try:
        run(GroupAgentLoopWorker, Answers(), agent_name=name)
        assert [loop() for loop in loops] == [None] * N
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_prompts_of_a_validation_are_scored_and_written_together(
    config: DictConfig, reward: list[Any], runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Answers):
        async def generate(self, request_id: str, **request: Any) -> TokenOutput:
            await asyncio.sleep(0.3)  # all prompts have started by then
            return await super().generate(request_id, **request)

    lots = []
    scored = GroupAgentLoopWorker._request_scores

    async def counted(self: Any, responses: list[Any]) -> list[Any]:
        lots.append(len(responses))
        return await scored(self, responses)

    monkeypatch.setattr(GroupAgentLoopWorker, "_request_scores", counted)
    written: list[list[str]] = []
    put = tq.async_kv_batch_put

    async def watched(keys: list[str], **arguments: Any) -> Any:
        written.append(sorted(keys))
        return await put(keys=keys, **arguments)

    monkeypatch.setattr(tq, "async_kv_batch_put", watched)

    async def go() -> list[str]:
        worker = GroupAgentLoopWorker(config, Slow(), None, reward)
        trajectory = {"step": 3, "sample_index": 0, "rollout_n": 0, "validate": True}
        await asyncio.gather(
            *(worker._run_prompt(COLUMNS | {"uid": uid, "__rollout_n__": 1}, {}, trajectory) for uid in "abc")
        )
        tags = (await tq.async_kv_list(partition_id="val"))["val"]
        await tq.async_kv_clear(keys=list(tags), partition_id="val")
        return sorted(f"{key} {tag['status']}" for key, tag in tags.items())

    expected = [f"{uid} finished" for uid in "abc"] + [f"{uid}_0_0 success" for uid in "abc"]
    assert runner.run(go()) == sorted(expected)
    assert lots == [3]
    assert written == [["a", "b", "c"], ["a_0_0", "b_0_0", "c_0_0"], ["a", "b", "c"]], "running, rows, finished"


@pytest.mark.slow
def test_each_response_is_sampled_from_its_own_stream(run: Callable[..., Rows]) -> None:
    answers = Answers()
    _, rows, _ = run(GroupAgentLoopWorker, answers, **{COLUMN: 5})
    assert answers.seeds == [derived(5, session) for session in range(N)]
    assert all(COLUMN not in columns for columns in rows.values())


@pytest.mark.slow
def test_a_response_travels_to_the_reward_worker_as_verl_sends_it(
    config: DictConfig, queue: None, runner: asyncio.Runner
) -> None:
    sent = []

    class Remote:
        async def remote(self, data: Any) -> dict[str, Any]:
            sent.append(data)
            return {"reward_score": 1.0, "reward_extra_info": {}}

    class Handle:
        compute_score = Remote()

    output = AgentLoopOutput(
        prompt_ids=[5, 6, 7],
        response_ids=[8, 9],
        response_mask=[1, 1],
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"turn_scores": [], "global_steps": 3},
    )
    columns = {"uid": "prompt", "session_id": 1, "raw_prompt": [{"content": "3+9"}], "extra_info": {"index": 0}}

    async def verls() -> None:
        worker = VERL(config, Answers(), None, [Handle()])
        await worker._compute_score([output], kwargs=columns)

    runner.run(verls())
    ours = Scorable(np.array([5, 6, 7]), np.array([8, 9]), 2, {"turn_scores": [], "global_steps": 3}, columns)
    batch, (expected,) = ours.as_batch(), sent
    assert set(batch.batch.keys()) == set(expected.batch.keys())
    for name, value in expected.batch.items():
        assert batch.batch[name].dtype == value.dtype
        assert torch.equal(batch.batch[name], value), name
    assert batch.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
    for name, value in expected.non_tensor_batch.items():
        assert batch.non_tensor_batch[name].dtype == value.dtype
        expected_extra = {"turn_scores": [], "global_steps": 3} if name == "tool_extra_fields" else None
        assert batch.non_tensor_batch[name].tolist() == ([expected_extra] if expected_extra else value.tolist()), name


# -------------------------------------------------------------------- rows of a guide


GUIDE = "9+3=12;#12"
ALL_WRONG, SOME, ALL_CORRECT = ("7", "no", "8", "9"), ("#12", "7", "no", "9"), ("#12", "3;#12", "12", "9")
MIX = {"mode": "mix", "ratio": "one", "clip": "none"}
BOTH = MIX | {"mode": "both"}


def sessions(rows: Rows) -> list[int]:
    """Of the rows of a group, those of the guide as -1, -2, ... from the last session of the group."""
    numbers = sorted(int(key.rsplit("_", 2)[1]) for key in rows[1])
    return [number - FIRST_SESSION - N if number >= FIRST_SESSION else number for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "answers", "expected"),
    [
        (MIX, SOME, [0, 1, 2, -1]),
        (MIX, ALL_WRONG, [0, 1, 2, -1]),
        (MIX, ALL_CORRECT, [0, 1, 2, 3]),
        (MIX | {"n_off": 2}, SOME, [0, 1, -2, -1]),
        (MIX | {"mode": "zero"}, ALL_WRONG, [0, 1, 2, -1]),
        (MIX | {"mode": "zero"}, SOME, [0, 1, 2, 3]),
        (MIX | {"mode": "zero"}, ALL_CORRECT, [0, 1, 2, 3]),
        (BOTH, ALL_WRONG, [0, 1, -2, -1]),
        (BOTH, SOME, [0, 1, 3, -2]),
        (BOTH, ALL_CORRECT, [0, 1, 2, 3]),
        (MIX | {"last_step": 2}, SOME, [0, 1, 2, 3]),
        (MIX | {"last_step": 3}, SOME, [0, 1, 2, -1]),
        ({"mode": "off"}, ALL_WRONG, [0, 1, 2, 3]),
    ],
)
def test_which_rows_of_a_group_are_the_guides(
    run: Callable[..., Rows], guide: dict[str, Any], answers: tuple[str, ...], expected: list[int]
) -> None:
    """A group has as many rows as ever, and the verdicts on the policy's own decide."""
    found = run(GroupAgentLoopWorker, Answers(answers), guide=guide, guide_responses=[GUIDE, f"{GUIDE};#12"])
    assert found[0] == "finished"
    assert sessions(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("ratio", ["one", "phi"])
def test_a_row_of_the_guide_has_the_columns_of_an_own_one(run: Callable[..., Rows], ratio: str) -> None:
    tokens = [*build_tokenizer().encode(GUIDE), build_tokenizer().eos_token_id]
    log_probs = [-position / 16 for position in range(len(tokens))]
    columns = {"guide_responses": [GUIDE]} | ({"guide_log_probs": [log_probs]} if ratio == "phi" else {})
    guide = {"mode": "mix", "ratio": ratio, "clip": "none"}
    status, rows, tags = run(GroupAgentLoopWorker, Answers(SOME), guide=guide, **{COLUMN: 5}, **columns)
    key = f"prompt_{FIRST_SESSION + 3}_0"
    assert (status, len(rows)) == ("finished", N)
    row, own = rows[key], rows["prompt_0_0"]
    assert {name: getattr(value, "dtype", None) for name, value in row.items()} == {
        name: getattr(value, "dtype", None) for name, value in own.items()
    }
    assert not {"guide_responses", "guide_log_probs", COLUMN} & {name for row in rows.values() for name in row}
    assert row["responses"].tolist() == tokens
    assert row["response_mask"].tolist() == row["loss_mask"].tolist() == [1] * len(tokens)
    assert torch.equal(row["prompts"], own["prompts"])
    assert row["input_ids"].tolist() == [*own["prompts"].tolist(), *tokens]
    assert row["rollout_log_probs"].tolist() == (log_probs if ratio == "phi" else [0.0] * len(tokens))
    assert row["rollout_entropies"].tolist() == [0.0] * len(tokens)
    assert row["rollout_versions"].tolist() == [-1] * len(tokens)
    assert row["rm_scores"].tolist() == [0.0] * (len(tokens) - 1) + [1.25], "the same reward function"
    assert row["extra_fields"]["reward_extra_info"]["acc"] == 1.0
    assert {name: value for name, value in tags[key].items() if not name.endswith("_len")} == {
        name: value for name, value in tags["prompt_0_0"].items() if not name.endswith("_len")
    }, "verl's metrics need the versions of the weights as numbers"
    assert tags[key]["response_len"] == len(tokens)


@pytest.mark.slow
def test_a_wrong_response_of_the_guide_may_be_replaced(run: Callable[..., Rows]) -> None:
    for drop_wrong, expected in ((False, [0, 1, 2, -1]), (True, [0, 1, 2, 3])):
        found = run(
            GroupAgentLoopWorker, Answers(SOME), guide=MIX | {"drop_wrong": drop_wrong}, guide_responses=["9+3=13;#13"]
        )
        assert (found[0], sessions(found)) == ("finished", expected)
        assert not any(COLUMN in row or "agent_name" in row for row in found[1].values())


@pytest.mark.slow
def test_too_few_responses_of_the_guide_leave_the_rows_to_the_policy(run: Callable[..., Rows]) -> None:
    for responses, expected in (([GUIDE], [0, 1, 3, -2]), ([], [0, 1, 2, 3]), (None, [0, 1, 2, 3])):
        found = run(GroupAgentLoopWorker, Answers(ALL_WRONG), guide=BOTH, guide_responses=responses)
        assert (found[0], sessions(found)) == ("finished", expected)


@pytest.mark.slow
def test_without_own_responses_there_is_nothing_to_learn_from_the_guide(run: Callable[..., Rows]) -> None:
    """The group has failed, as without a guide, and waits for nobody."""
    answers = Answers((RuntimeError("the server died"),) * N)
    assert run(GroupAgentLoopWorker, answers, guide=MIX, guide_responses=[GUIDE])[:2] == ("failure", {})
    answers = Answers((RuntimeError("the server died"), "7", "no"))
    found = run(GroupAgentLoopWorker, answers, guide=MIX, guide_responses=[GUIDE])
    assert (found[0], sessions(found)) == ("failure", [1, 2, -1])


@pytest.mark.slow
def test_a_response_of_the_guide_that_cannot_be_used_fails_its_group(run: Callable[..., Rows]) -> None:
    """Local files are checked before the run; others are not."""
    for ratio, response in (("one", "1" * 64), ("phi", GUIDE)):  # too long; without log-probabilities
        found = run(GroupAgentLoopWorker, Answers(SOME), guide=MIX | {"ratio": ratio}, guide_responses=[response])
        assert (found[0], sessions(found)) == ("failure", [0, 1, 2])


@pytest.mark.slow
def test_a_group_as_small_as_the_guides_rows_is_the_policys(run: Callable[..., Rows]) -> None:
    found = run(GroupAgentLoopWorker, Answers(SOME), guide=BOTH, guide_responses=[GUIDE], __rollout_n__=2)
    assert (found[0], sessions(found)) == ("finished", [0, 1])


class Guide(Answers):
    """A client of the guide's servers, which have no version of the weights."""

    def __init__(self, texts: tuple[str | Exception, ...]) -> None:
        super().__init__(texts)
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **request: Any) -> TokenOutput:
        self.requests.append(request | {"sampling_params": sampling_params})
        output = await super().generate(request_id, sampling_params=sampling_params, **request)
        output.log_probs = [-3.0 - position for position in range(len(output.token_ids))]
        versions = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"))
        output.extra_fields |= versions | {"rollout_versions": np.full(len(output.token_ids), -1, np.int32)}
        return output


SERVER = {"mode": "both", "source": "server", "model": "guide"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single_turn_agent", "tool_agent"])
def test_a_server_of_the_guide_answers_the_prompt_of_the_group(run: Callable[..., Rows], name: str) -> None:
    server = Guide((GUIDE, "13"))
    found = run(GroupAgentLoopWorker, Answers(ALL_WRONG), guide=SERVER, server=server, agent_name=name, **{COLUMN: 5})
    status, rows, tags = found
    assert (status, sessions(found)) == ("finished", [0, 1, -2, -1])
    own = rows["prompt_0_0"]
    for request in server.requests:
        assert list(request["prompt_ids"]) == own["prompts"].tolist()
        sampling = request["sampling_params"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, -1)
    seeds = [derived(5, FIRST_SESSION + session) for session in (2, 3)]
    assert sorted(server.seeds) == sorted(seeds), "a stream for each response, none of the policy's"
    for session, (text, correct) in zip((2, 3), ((GUIDE, 1.0), ("13", 0.0)), strict=True):
        key = f"prompt_{FIRST_SESSION + session}_0"
        row, tokens = rows[key], build_tokenizer().encode(text)
        assert {name: getattr(value, "dtype", None) for name, value in row.items()} == {
            name: getattr(value, "dtype", None) for name, value in own.items()
        }
        assert row["responses"].tolist() == tokens
        assert row["rollout_log_probs"].tolist() == [-3.0 - position for position in range(len(tokens))]
        assert row["extra_fields"]["reward_extra_info"]["acc"] == correct, "the same reward function"
        assert {tags[key][name] for name in ("min_global_steps", "max_global_steps")} == {3}, "verl averages them"


@pytest.mark.slow
def test_a_server_of_the_guide_is_asked_where_its_rows_are_wanted_alone(run: Callable[..., Rows]) -> None:
    for answers, validate, changes, asked in (
        (ALL_CORRECT, False, {}, 0),
        (SOME, False, {}, 1),
        (SOME, False, {"last_step": 2}, 0),
        (ALL_WRONG, True, {}, 0),
    ):
        server = Guide((GUIDE,))
        found = run(
            GroupAgentLoopWorker, Answers(answers), validate, guide=SERVER | changes, server=server, __rollout_n__=N
        )
        assert (found[0], len(found[1]), len(server.requests)) == ("finished", N, asked)
    server = Guide(("13",))
    found = run(GroupAgentLoopWorker, Answers(ALL_WRONG), guide=SERVER | {"drop_wrong": True}, server=server)
    assert (found[0], sessions(found), len(server.requests)) == ("finished", [0, 1, 2, 3], 2)
    server = Guide((RuntimeError("the guide's server died"),))
    found = run(GroupAgentLoopWorker, Answers(ALL_WRONG), guide=SERVER, server=server)
    assert (found[0], sessions(found)) == ("failure", [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "validate"), [({"mode": "off"}, False), (BOTH, True)], ids=["no guide", "a validation"]
)
def test_without_a_guide_and_in_a_validation_rows_are_verls(
    run: Callable[..., Rows], guide: dict[str, Any], validate: bool
) -> None:
    verls = run(VERL, Answers(ALL_WRONG), validate, __rollout_n__=N)
    answers = Answers(ALL_WRONG)
    ours = run(GroupAgentLoopWorker, answers, validate, guide=guide, guide_responses=[GUIDE], __rollout_n__=N)
    assert_same(ours, verls)
    assert len(answers.seeds) == N


@pytest.mark.parametrize(("count", "calls"), [(1, [1]), (8, [8]), (9, [4, 5]), (100, [33, 33, 34])])
def test_many_responses_are_dealt_to_the_reward_workers(count: int, calls: list[int]) -> None:
    class Calls:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        async def remote(self, responses: list[int]) -> list[int]:
            self.sizes.append(len(responses))
            if -1 in responses:
                raise RuntimeError("this worker died")
            return [10 * response for response in responses]

    worker = object.__new__(GroupAgentLoopWorker)
    worker.reward_loop_worker_handles = [SimpleNamespace(compute_scores=Calls()) for _ in range(3)]
    assert asyncio.run(worker._request_scores(list(range(count)))) == [10 * i for i in range(count)]
    assert sorted(size for handle in worker.reward_loop_worker_handles for size in handle.compute_scores.sizes) == calls
    scores = asyncio.run(worker._request_scores([-1, *range(8)]))
    assert [type(score) for score in scores] == [RuntimeError, int] * 4 + [RuntimeError]


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_the_trainers_reward_workers_score_groups(monkeypatch: pytest.MonkeyPatch, mode: str, tmp_path: Path) -> None:
    made = []
    monkeypatch.setattr(get_trainer_cls(mode), "_setup", lambda self: made.append(trainer_base.RewardLoopManager))
    trainer = object.__new__(trainer_class(mode))
    trainer.run_dir = tmp_path
    trainer.config = compose_config(["algo=dapo", "reward.reward_model.enable=true"])  # so nothing is started before
    trainer.guide = GuideRows(trainer.config)
    with Started(trainer.config).in_place():
        trainer._setup()
    assert made == [GroupRewardLoopManager]
    assert trainer_base.RewardLoopManager is RewardLoopManager


# -------------------------------------------------------------------- gathering


def gathered(
    members: list[Callable[..., Any]], patience: float | None = None, lots: list[list[Any]] | None = None
) -> tuple[list[list[Any]], list[Any]]:
    """What was handled together, and what each member got; a member takes the function that brings something."""
    lots = [] if lots is None else lots

    async def handle(lot: list[Any]) -> list[Any]:
        lots.append(lot)
        if "all" in lot:
            raise RuntimeError("nobody gets anything")
        return [ValueError(thing) if thing == "bad" else f"{thing}!" for thing in lot]

    async def go() -> list[Any]:
        gathering = Gathering(handle, patience)

        async def sit(member: Callable[..., Any]) -> Any:
            with gathering.seat() as bring:
                return await member(bring)

        for _ in members:
            gathering.expect()
        return await asyncio.gather(*map(sit, members), return_exceptions=True)

    return lots, asyncio.run(go())


def brings(thing: str, after: float = 0.0) -> Callable[..., Any]:
    async def member(bring: Callable[[str], Any]) -> Any:
        await asyncio.sleep(after)
        return await bring(thing)

    return member


async def leaves(bring: object) -> None:
    await asyncio.sleep(0.02)


async def fails(bring: object) -> None:
    raise KeyError("mine alone")


def test_all_are_handled_together_when_the_last_has_come() -> None:
    assert gathered([brings("a", 0.01), brings("b"), brings("c", 0.02)]) == ([["b", "a", "c"]], ["a!", "b!", "c!"])


@pytest.mark.parametrize("absent", [leaves, fails])
def test_nobody_waits_for_one_that_left(absent: Callable[..., Any]) -> None:
    lots, results = gathered([brings("a"), absent, brings("b")])
    assert lots == [["a", "b"]]
    assert (results[0], results[2]) == ("a!", "b!")


def test_nothing_is_handled_if_nobody_brings_anything() -> None:
    assert gathered([leaves, leaves]) == ([], [None, None])


def test_those_who_wait_too_long_go_first() -> None:
    lots: list[list[Any]] = []

    async def late(bring: Callable[[str], Any]) -> Any:
        while not lots:
            await asyncio.sleep(0.01)
        return await bring("c")

    _, results = gathered([brings("a"), brings("b"), late], patience=0.01, lots=lots)
    assert lots == [["a", "b"], ["c"]]
    assert results == ["a!", "b!", "c!"]


def test_an_exception_is_its_members_own() -> None:
    _, (first, second) = gathered([brings("a"), brings("bad")])
    assert first == "a!"
    assert isinstance(second, ValueError)


def test_states_of_another_partition_are_written_apart_and_a_failure_reaches_all_of_a_call() -> None:
    calls: list[tuple[Any, ...]] = []

    class Queue:
        name = "TransferQueue"

        async def async_kv_batch_put(self, keys: list[str], partition_id: str, tags: list[dict[str, str]]) -> None:
            calls.append((partition_id, keys, [tag["status"] for tag in tags]))
            if "bad" in keys:
                raise RuntimeError("the storage is gone")

    states = StatesTogether(Queue())
    assert states.name == "TransferQueue"

    async def go(*prompts: tuple[str, str]) -> list[Any]:
        puts = (states.async_kv_put(key=key, partition_id=part, tag={"status": key * 2}) for key, part in prompts)
        return await asyncio.gather(*puts, return_exceptions=True)

    assert asyncio.run(go(("a", "train"), ("b", "val"), ("c", "train"))) == [None] * 3
    assert calls == [("train", ["a", "c"], ["aa", "cc"]), ("val", ["b"], ["bb"])]
    assert [type(result) for result in asyncio.run(go(("a", "val"), ("bad", "val")))] == [RuntimeError] * 2


@pytest.mark.slow
def test_if_the_call_fails_all_fail() -> None:
    lots, results = gathered([brings("a"), brings("all")])
    assert lots == [["a", "all"]]
    assert [type(result) for result in results] == [RuntimeError] * 2
