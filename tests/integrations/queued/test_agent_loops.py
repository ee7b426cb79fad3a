"""Our agent loop worker against verl's, on the same answers: rows, columns and failures are the same."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.agent_loops import SeededAgentLoopWorker
from gtpo_verl.integrations.guide import CLIENT, FIRST_SESSION
from gtpo_verl.integrations.reward_loop import BoundedRewardLoopManager, Scorable
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

REWARD = """import sys
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    fails = solution_str == "no" and extra_info.get("fails")
    if fails == "exit":
        sys.exit(3)
    if fails in ("1.0", "None"):
        return {"1.0": "1.0", "None": None}[fails]
    if fails:
        raise ValueError("cannot score this")
    right = solution_str.endswith(ground_truth)
    return {"score": len(solution_str) / 8, "acc": float(right)}
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
            "reward.reward_kwargs.overlong_buffer_cfg.len=1",  # a penalty of 1 for a response of 64 tokens
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
    handles: list[Any] = BoundedRewardLoopManager(config=config).reward_loop_worker_handles
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
@pytest.mark.parametrize("name", ["single_turn_agent", "own"])
@pytest.mark.parametrize("validate", [False, True])
def test_rows_are_verls(run: Callable[..., Rows], name: str, validate: bool) -> None:
    verls = run(VERL, Answers(), validate, agent_name=name, __rollout_n__=N)
    ours = run(SeededAgentLoopWorker, Answers(), validate, agent_name=name, __rollout_n__=N)
    assert verls[0] == "finished"
    assert len(verls[1]) == (6 if name == "own" else N)
    assert_same(ours, verls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "prompt"),
    [
        ((RuntimeError("the server died"), *TEXTS[1:]), {}),
        (TEXTS, {"extra_info": {"fails": True}}),
        ([RuntimeError("all servers died")] * N, {}),
    ],
)
def test_a_failed_response_leaves_what_it_leaves_in_verl(
    run: Callable[..., Rows], answers: tuple[Any, ...], prompt: dict[str, Any]
) -> None:
    verls = run(VERL, Answers(answers), **prompt)
    ours = run(SeededAgentLoopWorker, Answers(answers), **prompt)
    assert verls[0] == "failure"
    assert len(verls[1]) in (0, N - 1)
    assert_same(ours, verls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("raise", "the reward function raised ValueError: cannot score this (FILE:9)"),
        ("exit", "the reward function raised SystemExit: 3 (FILE:5)"),
        ("1.0", "the reward function returned '1.0', and the reward must be a number"),
        ("None", "the reward function returned None, and the reward must be a number"),
        (None, "RuntimeError: the server died"),
    ],
)
def test_a_response_that_failed_is_named_with_the_reason(
    run: Callable[..., Rows], config: DictConfig, fails: str | None, reason: str
) -> None:
    workers = []

    class Kept(SeededAgentLoopWorker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            workers.append(self)

    answers = TEXTS if fails else (*TEXTS[:3], RuntimeError("the server died"))
    assert run(Kept, Answers(answers), extra_info={"index": 7, "fails": fails})[0] == "failure"
    reason = reason.replace("FILE", config.reward.custom_reward_function.path)
    assert workers[0].take_failure() == f"response prompt_3 (index 0 of data_source test): {reason}"
    assert workers[0].take_failure() == ""


@pytest.mark.slow
def test_each_response_is_sampled_from_its_own_stream(run: Callable[..., Rows]) -> None:
    answers = Answers()
    _, rows, _ = run(SeededAgentLoopWorker, answers, **{COLUMN: 5})
    assert answers.seeds == [derived(5, session) for session in range(N)]
    assert all(COLUMN not in columns for columns in rows.values())


@pytest.mark.slow
def test_a_response_of_an_audit_is_scored_as_verls_agent_loop_would_have_it(
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
        prompt_ids=[5, 6, 7], response_ids=[8, 9], response_mask=[1, 1], num_turns=2, metrics=AgentLoopMetrics()
    )
    columns = {"uid": "prompt", "session_id": 1, "raw_prompt": [{"content": "3+9"}], "extra_info": {"index": 0}}

    async def verls() -> None:
        worker = VERL(config, Answers(), None, [Handle()])
        await worker._compute_score([output], kwargs=columns)

    runner.run(verls())
    batch, (expected,) = Scorable(np.array([5, 6, 7]), np.array([8, 9]), columns).as_batch(), sent
    assert set(batch.batch.keys()) == set(expected.batch.keys())
    for name, value in expected.batch.items():
        assert batch.batch[name].dtype == value.dtype
        assert torch.equal(batch.batch[name], value), name
    assert batch.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
    for name, value in expected.non_tensor_batch.items():
        assert batch.non_tensor_batch[name].dtype == value.dtype
        # verl's is the dictionary of its output, which has the verdict in it by now
        assert batch.non_tensor_batch[name].tolist() == ([{}] if name == "tool_extra_fields" else value.tolist()), name


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
    found = run(SeededAgentLoopWorker, Answers(answers), guide=guide, guide_responses=[GUIDE, f"{GUIDE};#12"])
    assert found[0] == "finished"
    assert sessions(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("ratio", ["one", "phi"])
def test_a_row_of_the_guide_has_the_columns_of_an_own_one(run: Callable[..., Rows], ratio: str) -> None:
    tokens = [*build_tokenizer().encode(GUIDE), build_tokenizer().eos_token_id]
    log_probs = [-position / 16 for position in range(len(tokens))]
    columns = {"guide_responses": [GUIDE]} | ({"guide_log_probs": [log_probs]} if ratio == "phi" else {})
    guide = {"mode": "mix", "ratio": ratio, "clip": "none"}
    status, rows, tags = run(SeededAgentLoopWorker, Answers(SOME), guide=guide, **{COLUMN: 5}, **columns)
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
@pytest.mark.parametrize("drop_wrong", [False, True])
def test_only_own_rows_have_an_overlong_penalty(run: Callable[..., Rows], drop_wrong: bool) -> None:
    longest = "9+3=12;".ljust(60, ";") + "#12"  # with the end of sequence, which an own response does not get here
    guide = {"mode": "mix", "ratio": "one", "clip": "none", "drop_wrong": drop_wrong}
    _, rows, _ = run(SeededAgentLoopWorker, Answers((f"+{longest}", "no", "7")), guide=guide, guide_responses=[longest])
    rewards = {key: (len(row["responses"]), row["rm_scores"].sum().item()) for key, row in rows.items()}
    assert rewards[f"prompt_{FIRST_SESSION + 3}_0"] == (64, 63 / 8)
    assert rewards["prompt_0_0"] == (64, 64 / 8 - 1)


@pytest.mark.slow
def test_a_wrong_response_of_the_guide_may_be_replaced(run: Callable[..., Rows]) -> None:
    for drop_wrong, expected in ((False, [0, 1, 2, -1]), (True, [0, 1, 2, 3])):
        found = run(
            SeededAgentLoopWorker, Answers(SOME), guide=MIX | {"drop_wrong": drop_wrong}, guide_responses=["9+3=13;#13"]
        )
        assert (found[0], sessions(found)) == ("finished", expected)
        assert not any(COLUMN in row or "agent_name" in row for row in found[1].values())


@pytest.mark.slow
def test_too_few_responses_of_the_guide_leave_the_rows_to_the_policy(run: Callable[..., Rows]) -> None:
    for responses, expected in (([GUIDE], [0, 1, 3, -2]), ([], [0, 1, 2, 3]), (None, [0, 1, 2, 3])):
        found = run(SeededAgentLoopWorker, Answers(ALL_WRONG), guide=BOTH, guide_responses=responses)
        assert (found[0], sessions(found)) == ("finished", expected)


@pytest.mark.slow
def test_without_own_responses_there_is_nothing_to_learn_from_the_guide(run: Callable[..., Rows]) -> None:
    """The group has failed, as without a guide, and waits for nobody."""
    answers = Answers((RuntimeError("the server died"),) * N)
    assert run(SeededAgentLoopWorker, answers, guide=MIX, guide_responses=[GUIDE])[:2] == ("failure", {})
    answers = Answers((RuntimeError("the server died"), "7", "no"))
    found = run(SeededAgentLoopWorker, answers, guide=MIX, guide_responses=[GUIDE])
    assert (found[0], sessions(found)) == ("failure", [1, 2, -1])


@pytest.mark.slow
def test_a_response_of_the_guide_that_cannot_be_used_fails_its_group(run: Callable[..., Rows]) -> None:
    """Local files are checked before the run; others are not."""
    for ratio, response in (("one", "1" * 64), ("phi", GUIDE)):  # too long; without log-probabilities
        found = run(SeededAgentLoopWorker, Answers(SOME), guide=MIX | {"ratio": ratio}, guide_responses=[response])
        assert (found[0], sessions(found)) == ("failure", [0, 1, 2])


@pytest.mark.slow
def test_a_group_as_small_as_the_guides_rows_is_the_policys(run: Callable[..., Rows]) -> None:
    found = run(SeededAgentLoopWorker, Answers(SOME), guide=BOTH, guide_responses=[GUIDE], __rollout_n__=2)
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
    found = run(SeededAgentLoopWorker, Answers(ALL_WRONG), guide=SERVER, server=server, agent_name=name, **{COLUMN: 5})
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
            SeededAgentLoopWorker, Answers(answers), validate, guide=SERVER | changes, server=server, __rollout_n__=N
        )
        assert (found[0], len(found[1]), len(server.requests)) == ("finished", N, asked)
    server = Guide(("13",))
    found = run(SeededAgentLoopWorker, Answers(ALL_WRONG), guide=SERVER | {"drop_wrong": True}, server=server)
    assert (found[0], sessions(found), len(server.requests)) == ("finished", [0, 1, 2, 3], 2)
    server = Guide((RuntimeError("the guide's server died"),))
    found = run(SeededAgentLoopWorker, Answers(ALL_WRONG), guide=SERVER, server=server)
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
    ours = run(SeededAgentLoopWorker, answers, validate, guide=guide, guide_responses=[GUIDE], __rollout_n__=N)
    assert_same(ours, verls)
    assert len(answers.seeds) == N


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_the_trainers_reward_workers_have_a_limit(monkeypatch: pytest.MonkeyPatch, mode: str, tmp_path: Path) -> None:
    made = []
    monkeypatch.setattr(get_trainer_cls(mode), "_setup", lambda self: made.append(trainer_base.RewardLoopManager))
    trainer = object.__new__(trainer_class(mode))
    trainer.config = compose_config(["algo=dapo", f"trainer.run_dir={tmp_path}"])
    trainer.guide = GuideRows(trainer.config)
    trainer._setup()
    assert made == [BoundedRewardLoopManager]
    assert trainer_base.RewardLoopManager is RewardLoopManager
