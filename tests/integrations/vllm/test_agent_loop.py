"""Entropies through verl's own agent loops: aligned with the tokens that the policy wrote, whatever stands between
them.
"""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
)
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult
from verl.workers.rollout.replica import TokenOutput

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.continuations import Prompts
from gtpo_verl.integrations.vllm.agent_loop import (
    EntropySingleTurnAgentLoop,
    EntropyToolAgentLoop,
    RolloutEntropyMixin,
)
from gtpo_verl.tasks.model import build_tokenizer


class ScriptedServers:
    """Answers like the policy's servers, with words that are known beforehand; tool calls need particular words."""

    def __init__(self, turns):
        self.turns = iter(turns)

    async def generate(self, request_id, **request):
        return next(self.turns)


def turn(text, step, first):
    """One answer of a server; its entropies count up from ``first``."""
    tokens = build_tokenizer().encode(text)
    return TokenOutput(
        token_ids=tokens,
        log_probs=[-1.0] * len(tokens),
        stop_reason="completed",
        extra_fields={
            "global_steps": step,
            "min_global_steps": step,
            "max_global_steps": step,
            "rollout_entropies": np.arange(first, first + len(tokens), dtype=np.float32) / 8,
            "rollout_versions": np.full(len(tokens), step, np.int32),
        },
    )


def add(a: int, b: int) -> str:
    return str(a + b)


ADD = FunctionTool(
    name="add",
    fn=add,
    tool_schema=OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds.",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "required": ["a", "b"],
                },
            },
        }
    ),
)
CALL = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 2, 'b': 3}})}</tool_call>"


class TrimmingBuilder(ContinuousTokenBuilder):
    """Takes the last token of a turn away before it appends a tool's answer, as the builder of GLM does with
    `<|observation|>`.
    """

    def _merge_context_token_ids(self, runtime_token_ids, appended_token_ids, **kwargs):
        return MergeResult(
            token_ids=[*runtime_token_ids[:-1], *appended_token_ids],
            appended_token_count=len(appended_token_ids),
            removed_prefix_token_count=1,
        )


def run(loop_class, turns, response_length=512, tools=(), builder=None):
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "prompt_length": 256,
                    "response_length": response_length,
                    "full_determinism": False,
                    "multi_turn": {
                        "max_user_turns": 4,
                        "max_assistant_turns": 4,
                        "max_parallel_calls": 1,
                        "max_tool_response_length": 64,
                        "tool_response_truncate_side": "middle",
                        "format": "hermes",
                    },
                }
            }
        }
    )

    async def go():
        loop = loop_class(
            trainer_config=DictConfigWrap(config),
            server_manager=ScriptedServers(turns),
            tokenizer=build_tokenizer(),
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(OmegaConf.create({})),
            tools=ToolListWrap(list(tools)),
        )
        if builder is not None:
            loop.continuous_token_builder = builder(loop.tokenizer)
        return await loop.run({"logprobs": True}, raw_prompt=[{"role": "user", "content": "2+3\n"}])

    return asyncio.run(go())


def test_one_turn_keeps_every_entropy():
    columns = run(EntropySingleTurnAgentLoop, [turn("the answer", step=3, first=1)]).as_dict()
    assert columns["rollout_entropies"].dtype == torch.float32
    assert columns["rollout_entropies"].tolist() == [i / 8 for i in range(1, 11)]
    assert columns["rollout_versions"].tolist() == [3] * 10
    assert columns["rollout_versions"].dtype == torch.int32
    assert len(columns["responses"]) == 10


def test_truncation_to_the_response_length_truncates_entropies():
    columns = run(EntropySingleTurnAgentLoop, [turn("the answer", step=3, first=1)], response_length=4).as_dict()
    assert columns["rollout_entropies"].tolist() == [i / 8 for i in range(1, 5)]
    assert len(columns["responses"]) == len(columns["rollout_versions"]) == 4


def test_raw_arrays_do_not_travel_twice():
    columns = run(EntropySingleTurnAgentLoop, [turn("the answer", step=3, first=1)]).as_dict()
    assert not {"rollout_entropies", "rollout_versions"} & columns["extra_fields"].keys()
    assert columns["extra_fields"]["max_global_steps"] == 3


def test_tool_output_lies_outside_the_mask_and_has_no_entropy():
    turns = [turn(CALL, step=3, first=1), turn("so it is 5", step=4, first=100)]
    columns = run(EntropyToolAgentLoop, turns, tools=[ADD]).as_dict()
    mask = columns["response_mask"].bool()
    assert not mask.all()  # the tool wrote something
    assert len(columns["rollout_entropies"]) == len(columns["responses"]) == len(mask)
    written = [len(each.token_ids) for each in turns]
    expected = [i / 8 for i in range(1, 1 + written[0])] + [i / 8 for i in range(100, 100 + written[1])]
    assert columns["rollout_entropies"][mask].tolist() == expected
    assert columns["rollout_versions"][mask].tolist() == [3] * written[0] + [4] * written[1]
    assert columns["rollout_entropies"][~mask].eq(0).all()
    assert columns["rollout_versions"][~mask].eq(-1).all()
    text = build_tokenizer().decode(columns["responses"])
    assert text.startswith(CALL)
    assert text.endswith("so it is 5")


@pytest.mark.parametrize("spare", [0, 1])
def test_a_tool_answer_that_does_not_fit_is_dropped_with_its_place(spare):
    first = turn(CALL, step=3, first=1)
    limit = len(first.token_ids) + spare
    columns = run(EntropyToolAgentLoop, [first], response_length=limit, tools=[ADD]).as_dict()
    assert columns["rollout_entropies"].tolist() == [i / 8 for i in range(1, 1 + len(first.token_ids))]
    assert len(columns["responses"]) == len(columns["rollout_entropies"]) == len(columns["rollout_versions"])


def test_a_tool_answer_that_does_not_fit_gives_back_the_token_that_it_replaced():
    first = turn(CALL.replace("2", "200"), step=3, first=1)  # whose answer, 203, is three tokens
    columns = run(EntropyToolAgentLoop, [first], len(first.token_ids) + 1, [ADD], TrimmingBuilder).as_dict()
    assert columns["response_mask"].all()
    assert columns["rollout_entropies"].tolist() == [i / 8 for i in range(1, 1 + len(first.token_ids))]
    assert columns["rollout_versions"].tolist() == [3] * len(first.token_ids)


def test_a_tool_answer_that_fits_replaces_the_token_that_it_takes_away():
    turns = [turn(CALL, step=3, first=1), turn("so it is 5", step=4, first=100)]
    columns = run(EntropyToolAgentLoop, turns, tools=[ADD], builder=TrimmingBuilder).as_dict()
    mask = columns["response_mask"].bool()
    written = [len(each.token_ids) for each in turns]
    expected = [i / 8 for i in range(1, written[0])] + [i / 8 for i in range(100, 100 + written[1])]
    assert columns["rollout_entropies"][mask].tolist() == expected
    assert columns["rollout_entropies"][~mask].eq(0).all()


def test_the_limit_in_the_middle_of_the_second_turn_truncates_all_columns_there():
    turns = [turn(CALL, step=3, first=1), turn("so it is 5", step=4, first=100)]
    whole = run(EntropyToolAgentLoop, turns, tools=[ADD]).as_dict()
    limit = len(whole["responses"]) - 4
    columns = run(EntropyToolAgentLoop, turns, response_length=limit, tools=[ADD]).as_dict()
    for name in ("responses", "response_mask", "rollout_entropies", "rollout_versions"):
        assert columns[name].tolist() == whole[name][:limit].tolist(), name
    assert columns["rollout_versions"][-1] == 4


class OneTurn(AgentLoopBase):
    """Asks so many times, merges the first answer, and does something to the output at its end."""

    async def run(self, sampling_params, **kwargs):
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        answers = [await self.server_manager.generate(str(i), prompt_ids=prompt) for i in range(self.answers)]
        chosen = answers[0].token_ids
        _, mask, _ = await self.ct_merge_assistant_token(prompt, chosen, [])
        output = AgentLoopOutput(
            prompt_ids=prompt, response_ids=chosen, response_mask=mask, num_turns=2, metrics=AgentLoopMetrics()
        )
        return self.end(output)


def own(answers=1, end=lambda output: output):
    """A loop of a user's own, as docs/guides/entropies.md says to write one."""
    members = {"answers": answers, "end": staticmethod(end)}
    return type("OwnLoop", (RolloutEntropyMixin, OneTurn), members)


def test_a_loop_of_ones_own_keeps_the_fields_it_fills():
    def filled(output):
        output.extra_fields["reward_extra_info"] = {"acc": 1}  # the default dict: no field is set
        return output

    columns = run(own(end=filled), [turn("the answer", step=3, first=1)]).as_dict()
    assert columns["extra_fields"]["reward_extra_info"] == {"acc": 1}
    assert columns["rollout_entropies"].tolist() == [i / 8 for i in range(1, 11)]


def test_a_loop_of_ones_own_may_take_tokens_out_of_the_mask():
    def masked(output):
        output.response_mask = [0, 0, *output.response_mask[2:]]
        return output

    columns = run(own(end=masked), [turn("the answer", step=3, first=1)]).as_dict()
    assert columns["rollout_entropies"].tolist() == [0, 0, *(i / 8 for i in range(3, 11))]


class TwoTurns(AgentLoopBase):
    """Asks twice and does something to the mask between the turns and to what a merge gives."""

    async def ct_merge_assistant_token(self, *args, **kwargs):
        merge, mask, log_probs = await super().ct_merge_assistant_token(*args, **kwargs)
        return merge, self.merged(mask), log_probs

    async def run(self, sampling_params, **kwargs):
        prompt = tokens = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        mask = []
        for number in range(2):
            answer = await self.server_manager.generate(str(number), prompt_ids=tokens)
            merge, mask, _ = await self.ct_merge_assistant_token(tokens, answer.token_ids, self.between(mask))
            tokens = merge.token_ids[: len(prompt) + len(mask)]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens[len(prompt) :],
            response_mask=self.end(mask),
            num_turns=4,
            metrics=AgentLoopMetrics(),
        )


def two_turns(merged=lambda mask: mask, between=lambda mask: mask, end=lambda mask: mask):
    members = {"merged": staticmethod(merged), "between": staticmethod(between), "end": staticmethod(end)}
    return type("OwnLoop", (RolloutEntropyMixin, TwoTurns), members)


def test_a_turn_that_a_loop_takes_out_of_the_mask_before_the_next_has_no_entropy():
    loop = two_turns(between=lambda mask: [0] * len(mask))
    columns = run(loop, [turn("ab", step=3, first=1), turn("cd", step=4, first=50)]).as_dict()
    assert columns["response_mask"].tolist() == [0, 0, 1, 1]
    assert columns["rollout_entropies"].tolist() == [0, 0, 50 / 8, 51 / 8]
    assert columns["rollout_versions"].tolist() == [-1, -1, 4, 4]


def test_a_turn_that_a_loop_takes_out_of_the_mask_and_puts_back_has_its_entropy():
    loop = two_turns(between=lambda mask: [0] * len(mask), end=lambda mask: [1] * len(mask))
    columns = run(loop, [turn("ab", step=3, first=1), turn("cd", step=4, first=50)]).as_dict()
    assert columns["rollout_entropies"].tolist() == [1 / 8, 2 / 8, 50 / 8, 51 / 8]


def test_a_mask_may_be_an_array():
    loop = two_turns(end=np.array)
    columns = run(loop, [turn("ab", step=3, first=1), turn("cd", step=4, first=50)]).as_dict()
    assert columns["rollout_entropies"].tolist() == [1 / 8, 2 / 8, 50 / 8, 51 / 8]


def test_an_audit_cuts_a_prompt_as_the_agent_loop_does():
    prompts = object.__new__(Prompts)
    prompts._known = {0: (1, 2, 3, 4, 5, 6, 7)}
    for limit in (4, 7, 9):
        prompts._limit = limit
        loop = SimpleNamespace(rollout_config=SimpleNamespace(prompt_length=limit))
        assert list(prompts.tokens(0)) == AgentLoopBase._cap_text_prompt_length(loop, [1, 2, 3, 4, 5, 6, 7])


def test_a_merge_that_is_cut_cuts_all_columns():
    loop = two_turns(merged=lambda mask: mask[:3])
    columns = run(loop, [turn("ab", step=3, first=1), turn("cd", step=4, first=50)]).as_dict()
    assert columns["rollout_entropies"].tolist() == [1 / 8, 2 / 8, 50 / 8]
    assert columns["rollout_versions"].tolist() == [3, 3, 4]


def test_a_merge_that_adds_a_token_of_its_own_is_refused():
    loop = two_turns(merged=lambda mask: [*mask, 0])
    with pytest.raises(UserError, match="OwnLoop added tokens by other ways"):
        run(loop, [turn("ab", step=3, first=1), turn("cd", step=4, first=50)])


def test_columns_have_their_types_whatever_those_of_the_server():
    answer = turn("the answer", step=3, first=1)
    answer.extra_fields["rollout_entropies"] = answer.extra_fields["rollout_entropies"].astype(np.float64)
    answer.extra_fields["rollout_versions"] = answer.extra_fields["rollout_versions"].tolist()
    columns = run(EntropySingleTurnAgentLoop, [answer]).as_dict()
    assert columns["rollout_entropies"].dtype == torch.float32
    assert columns["rollout_versions"].dtype == torch.int32


def longer(output):
    output.response_mask = [*output.response_mask, 1]
    return output


@pytest.mark.parametrize(
    ("answers", "end", "message"),
    [
        (2, lambda output: output, "merged tokens that are not the server's last answer"),
        (1, lambda output: [output, output], "returned several outputs"),
        (1, longer, "added tokens by other ways"),
    ],
)
def test_a_loop_that_cannot_be_followed_is_refused_with_the_reason(answers, end, message):
    turns = [turn("the answer", step=3, first=1), turn("another one", step=3, first=50)]
    with pytest.raises(UserError, match=f"OwnLoop {message}.*entropy.source=actor"):
        run(own(answers, end), turns)


def test_an_answer_without_tokens_still_has_the_columns():
    columns = run(EntropySingleTurnAgentLoop, [turn("", step=3, first=1)]).as_dict()
    assert columns["rollout_entropies"].shape == columns["rollout_versions"].shape == (0,)
    assert columns["rollout_entropies"].dtype == torch.float32


def test_rows_of_both_loops_make_one_batch():
    single = run(EntropySingleTurnAgentLoop, [turn("the answer", step=3, first=1)])
    tool = run(EntropyToolAgentLoop, [turn(CALL, 3, 1), turn("5", 4, 100)], tools=[ADD])
    names = ("responses", "response_mask", "rollout_entropies", "rollout_versions")
    rows = [{name: output.as_dict()[name] for name in names} for output in (single, tool)]
    batch = list_of_dict_to_tensordict(rows)
    assert batch["rollout_entropies"].is_nested
    assert batch["rollout_entropies"].offsets().tolist() == batch["responses"].offsets().tolist()


def test_a_server_without_entropies_is_found_out():
    plain = turn("the answer", step=3, first=1)
    plain.extra_fields.pop("rollout_entropies")
    with pytest.raises(UserError, match="the rollout server returned no entropies"):
        run(EntropySingleTurnAgentLoop, [plain])


@pytest.mark.parametrize(("entropies", "versions"), [(9, 10), (10, 9), (0, 0)])
def test_a_server_that_returns_too_few_is_found_out(entropies, versions):
    short = turn("the answer", step=3, first=1)
    short.extra_fields["rollout_entropies"] = short.extra_fields["rollout_entropies"][:entropies]
    short.extra_fields["rollout_versions"] = short.extra_fields["rollout_versions"][:versions]
    with pytest.raises(UserError, match=f"returned {entropies} entropies and {versions} versions for 10 tokens"):
        run(EntropySingleTurnAgentLoop, [short])


def test_the_shipped_list_names_loops_that_exist():
    from hydra.utils import get_class

    from gtpo_verl.integrations.vllm.wiring import AGENT_LOOPS

    listed = {entry.name: get_class(entry._target_) for entry in OmegaConf.load(AGENT_LOOPS)}
    assert listed == {"single_turn_agent": EntropySingleTurnAgentLoop, "tool_agent": EntropyToolAgentLoop}


def test_the_client_stays_reachable_behind_the_recorder():
    servers = SimpleNamespace(tokenizer="t", generate=None)
    from gtpo_verl.integrations.vllm.agent_loop import _TurnRecorder

    assert _TurnRecorder(servers).tokenizer == "t"
