"""Seeds of prompts, responses and requests: the same in a repetition, and one for each."""

import asyncio
import contextvars
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.integrations import streams
from gtpo_verl.integrations.streams import (
    PromptNames,
    SeedingClient,
    SeedingFullyAsyncClient,
    assign_streams,
    with_stream,
)
from gtpo_verl.integrations.vllm.client import EntropyFullyAsyncClient
from gtpo_verl.seeds import derived, seed_process


def run_with(seed: int, *, seed_requests: bool = True, engine: str = "vllm") -> DictConfig:
    rollout = {"rollout": {"name": engine}}
    return OmegaConf.create({"seed": seed, "trainer": {"seed_requests": seed_requests}, "actor_rollout_ref": rollout})


def prompts(seed: int, names: list[str], partition: str = "train") -> list[int]:
    batch = get_tensordict({"uid": names})
    assign_streams(batch, run_with(seed), partition, names)
    return [int(value) for value in batch[streams.COLUMN]]


def test_a_prompts_seed_follows_from_run_partition_and_name_alone() -> None:
    assert prompts(1, ["a", "b"]) == prompts(1, ["b", "a"])[::-1]
    everything = prompts(1, ["a", "b"]) + prompts(2, ["a", "b"]) + prompts(1, ["a", "b"], "val")
    assert len(set(everything)) == 6
    assert all(0 <= seed < 2**63 for seed in everything)
    assert derived(1, "a") == 1515775267073163690, "a run could not be repeated with another version"


@pytest.mark.parametrize("config", [run_with(1, seed_requests=False), run_with(1, engine="sglang")])
def test_without_seed_requests_or_vllm_no_prompt_has_a_seed(config: DictConfig) -> None:
    batch = get_tensordict({"uid": ["a", "b"]})
    assign_streams(batch, config, "train", ["a", "b"])
    assert streams.COLUMN not in list(batch.keys())


def test_a_step_that_is_repeated_finds_its_names_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not give the name of a group that waits, found by a first attempt before the budget was spent."""
    waiting: list[str] = ["000002-000009"]
    monkeypatch.setattr(streams, "listed", lambda partition_id: {key: {"is_prompt": True} for key in waiting})

    def names(run: PromptNames, step: int, *counts: int) -> list[str]:
        return [name for count in counts for name in run.names(count, step)]

    def run() -> PromptNames:
        return PromptNames(OmegaConf.create({"seed": 1}))

    first = run()
    assert names(first, 3, 2, 1) == names(run(), 3, 1, 2) == ["000003-000000", "000003-000001", "000003-000002"]
    assert names(first, 4, 1) == ["000004-000000"]
    waiting.append("000003-000001")
    assert names(run(), 3, 2) == ["000003-000002", "000003-000003"]


def test_each_response_of_a_group_has_a_seed_of_its_own() -> None:
    shared = {"temperature": 1.0}

    def seeds(seed: int) -> list[int]:
        found = []
        for session in range(4):
            columns = {"session_id": session, "uid": "a", streams.COLUMN: torch.tensor(seed)}
            found.append(with_stream(shared, columns)["seed"])
            assert columns == {"session_id": session, "uid": "a"}, "the seed would be a column of the batch"
        return found

    assert seeds(5) == seeds(5)
    assert len({*seeds(5), *seeds(6)}) == 8
    assert shared == {"temperature": 1.0}
    assert with_stream(shared, {"session_id": 0}) == shared, "verl's own manager gives no seed"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The sampling parameters of every request that reaches a server; the first is interrupted after two tokens."""
    seen: list[dict[str, Any]] = []

    async def generate(self: Any, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **_: Any) -> TokenOutput:
        seen.append(sampling_params)
        reason = "aborted" if len(seen) == 1 else "completed"
        return TokenOutput(token_ids=[1, 2], log_probs=[0.0, 0.0], stop_reason=reason, extra_fields={})

    async def at_once(seconds: float) -> None:
        return None

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    monkeypatch.setattr(asyncio, "sleep", at_once)
    return seen


def client(kind: type[LLMServerClient]) -> LLMServerClient:
    return kind(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 8}}}))


def respond(kind: type[LLMServerClient], *prompts: list[int], session: int = 0) -> None:
    """Ask for these answers at once, as an agent loop does for one response, in a task of its own."""

    async def run() -> None:
        params = with_stream({"temperature": 1.0}, {"session_id": session, streams.COLUMN: 3})
        given = dict(params)
        await asyncio.gather(*(client(kind).generate("a", prompt_ids=ids, sampling_params=params) for ids in prompts))
        assert params == given

    contextvars.Context().run(asyncio.run, run())


def test_a_turn_and_a_segment_have_streams_of_their_own(requests: list[dict[str, Any]]) -> None:
    """vLLM starts the stream of a request at its seed."""
    respond(SeedingFullyAsyncClient, [7])
    assert len({request["seed"] for request in requests}) == len(requests) == 2
    respond(SeedingClient, [7])
    respond(SeedingClient, [7], [7, 8])
    first, _, again, turn, later = (request["seed"] for request in requests)
    assert first == again == turn
    assert later == derived(derived(3, 0), 2), "a run could not be repeated with another version"


@pytest.mark.parametrize("kind", [SeedingClient, SeedingFullyAsyncClient, EntropyFullyAsyncClient])
def test_answers_to_one_prompt_have_streams_of_their_own(
    requests: list[dict[str, Any]], kind: type[LLMServerClient]
) -> None:
    """An agent loop may sample several times from one prompt. The first is what it would be alone."""
    requests.append({})  # none is interrupted
    respond(kind, [7], [8], [7], [7, 8], [9])
    first, *others = [request["seed"] for request in requests[1:]]
    assert first == derived(derived(3, 0), 1)
    assert len({first, *others}) == 5
    respond(kind, [7], [8], session=1)
    assert len({request["seed"] for request in requests[1:]}) == 7, "of another response"


def test_an_interrupted_answer_goes_on_with_the_stream_that_it_would_have_had(requests: list[dict[str, Any]]) -> None:
    """Also one of which nothing was there yet, and the second answer to a prompt."""
    respond(SeedingFullyAsyncClient, [7], [8])
    _, resumed, second = (request["seed"] for request in requests)
    assert resumed == derived(derived(3, 0), 3), "after two tokens"
    assert second == derived(derived(derived(3, 0), "again", 1), 1)


def test_a_request_without_a_seed_keeps_none(requests: list[dict[str, Any]]) -> None:
    asyncio.run(client(SeedingClient).generate("a", prompt_ids=[7], sampling_params={"temperature": 0}))
    assert requests == [{"temperature": 0, "detokenize": False}]


def test_text_is_decoded_only_where_a_string_ends_a_response(requests: list[dict[str, Any]]) -> None:
    for wanted in ({"stop": ["\n\n"]}, {"stop": None}, {"stop": [], "detokenize": True}):
        asyncio.run(client(SeedingClient).generate("a", prompt_ids=[7], sampling_params=wanted))
    assert [request.get("detokenize") for request in requests] == [None, False, True]
    other = client(SeedingClient)
    other.config.actor_rollout_ref.rollout.name = "sglang"
    asyncio.run(other.generate("a", prompt_ids=[7], sampling_params={}))
    assert requests[-1] == {}, "of vLLM alone"


def test_a_process_of_a_run_is_seeded_and_another_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    def drawn() -> tuple[float, float]:
        return torch.rand(()).item(), float(np.random.rand())

    with torch.random.fork_rng():
        monkeypatch.setenv("GTPO_VERL_SEED", "5")
        seed_process()
        first, second = drawn(), drawn()
        seed_process()
        assert drawn() == first
        monkeypatch.delenv("GTPO_VERL_SEED")
        seed_process()
        assert drawn() == second
