"""The guide's responses as columns of the training data: how they are read, and what is refused before a run."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gtpo_verl.data.traces import Trace, check_traces, token_ids, traces_of
from gtpo_verl.errors import UserError

END = 99


class Tokenizer:
    """A token for each character, by its code; the end is a character of its own."""

    eos_token_id = END

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [END if character == "$" else ord(character) - ord("a") for character in text]

    def __len__(self) -> int:
        return 100


TOKENIZER = Tokenizer()


def test_a_text_gets_the_students_end_once_and_ids_are_taken_as_they_are() -> None:
    assert token_ids("abc", TOKENIZER) == [0, 1, 2, END]
    assert token_ids("ab$", TOKENIZER) == [0, 1, END]
    assert token_ids([4, 5], TOKENIZER) == [4, 5]


def test_the_responses_to_a_prompt() -> None:
    columns = {"guide_responses": ["ab", [4, 5]], "guide_log_probs": [[-1.0, -0.5, 0.0], [-2.0, 0.0]]}
    found = traces_of(columns, TOKENIZER, limit=3, seed=0)
    assert sorted(found, key=lambda trace: trace.ids) == [
        Trace([0, 1, END], [-1.0, -0.5, 0.0]),
        Trace([4, 5], [-2.0, 0.0]),
    ]
    assert [trace.log_probs for trace in traces_of({"guide_responses": ["ab"]}, TOKENIZER, 3, 0)] == [None]
    for nothing in ({}, {"guide_responses": None}, {"guide_responses": []}, {"guide_responses": ["", " "]}):
        assert traces_of(nothing, TOKENIZER, 3, 0) == []


def test_the_order_follows_from_the_seed() -> None:
    columns = {"guide_responses": [[number] for number in range(8)]}
    orders = [[trace.ids[0] for trace in traces_of(columns, TOKENIZER, 3, seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(8))


def file_of(directory: Path, **columns: Any) -> str:
    path = directory / "train.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_prompts_with_a_response_are_counted(tmp_path: Path) -> None:
    file = file_of(tmp_path, guide_responses=[["ab", "abc"], None, [], ["a"]])
    assert check_traces(file, limit=4, with_log_probs=False, tokenizer=TOKENIZER) == (4, 2)


REFUSED = [
    ({"prompt": ["a"]}, False, r"has no column guide_responses, .* set algorithm\.guide\.mode=off"),
    ({"guide_responses": [["a"]]}, True, r"has no column guide_log_probs, .* algorithm\.guide\.ratio=one"),
    ({"guide_responses": ["a"]}, False, "guide_responses must be a list of texts or of lists of token ids .* string"),
    ({"guide_responses": [[1.5]]}, False, "guide_responses must be a list of texts"),
    ({"guide_responses": [["a"]], "guide_log_probs": [[-1.0]]}, True, "guide_log_probs must be a list of lists of num"),
    ({"guide_responses": [["a"], ["abcd"]]}, False, r"row 1: .*has 5 tokens, and data\.max_response_length is 4"),
    ({"guide_responses": [[[1, 2, 3, 4, 5]]]}, False, "row 0: .*has 5 tokens"),
    ({"guide_responses": [[[1], []]]}, False, "row 0: .*has no token"),
    ({"guide_responses": [[[1, 100]]]}, False, "row 0: .*token id 100, and the model's tokenizer has 100"),
    ({"guide_responses": [["a"]], "guide_log_probs": [[[-1.0]]]}, True, "has 2 tokens with its end, and 1 log-prob"),
    ({"guide_responses": [["a", "b"]], "guide_log_probs": [[[-1.0, 0.0]]]}, True, "has 1 lists for 2 responses"),
    ({"guide_responses": [["a"]], "guide_log_probs": [[[0.5, 0.0]]]}, True, "not finite or above 0"),
    ({"guide_responses": [["a"]], "guide_log_probs": [[[float("nan"), 0.0]]]}, True, "not finite or above 0"),
    ({"guide_responses": [["a"], ["a"]], "guide_log_probs": [[[-1.0, 0.0]], None]}, True, "row 1: .* has no log-prob"),
    ({"guide_responses": [["a", "a"]], "guide_log_probs": [[[-1.0, 0.0], None]]}, True, "row 0: .* has no log-prob"),
    ({"guide_responses": pa.array([None, []], pa.list_(pa.string()))}, False, "guide_responses is empty in every row"),
]


@pytest.mark.parametrize(("columns", "with_log_probs", "message"), REFUSED)
def test_what_cannot_be_used_is_refused_with_its_row(
    tmp_path: Path, columns: dict[str, Any], with_log_probs: bool, message: str
) -> None:
    file = file_of(tmp_path, **columns)
    with pytest.raises(UserError, match=message) as caught:
        check_traces(file, limit=4, with_log_probs=with_log_probs, tokenizer=TOKENIZER)
    assert str(caught.value).startswith(f"data.train_files={file}")
    assert "\n" not in str(caught.value)


def test_columns_and_types_need_no_tokenizer(tmp_path: Path) -> None:
    assert check_traces(file_of(tmp_path, guide_responses=[["abcdef"]]), limit=4, with_log_probs=False) == (0, 0)


@pytest.mark.slow
def test_verls_data_set_brings_them_to_the_agent_loops(tmp_path: Path) -> None:
    """Lists of different lengths, and prompts without any, by the way a batch takes to the workers."""
    import pickle

    import numpy as np
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
    from verl.utils.tensordict_utils import get_tensordict

    from gtpo_verl.tasks.model import build_tokenizer

    responses: list[Any] = [["ab", "abc"], None, ["a"]]
    log_probs = [texts and [[-0.5] * (len(text) + 1) for text in texts] for texts in responses]
    prompts = [[{"role": "user", "content": "1+1"}]] * 3
    file = file_of(tmp_path, prompt=prompts, guide_responses=responses, guide_log_probs=log_probs)
    settings = OmegaConf.create({"cache_dir": str(tmp_path), "filter_overlong_prompts": False})
    data = RLHFDataset(data_files=[file], tokenizer=build_tokenizer(), config=settings)
    batch = collate_fn([data[row] for row in range(3)]) | {"uid": np.array(list("abc"), dtype=object)}
    found = []
    for part in get_tensordict(batch).chunk(2):
        sent = pickle.loads(pickle.dumps(part))
        columns = {name: column for name, column in sent.items() if isinstance(column, NonTensorStack)}
        for row in range(len(sent)):
            prompt = {name: column[row].data for name, column in columns.items()}  # as verl's worker has it
            found.append(traces_of(prompt, TOKENIZER, 4, seed=0))
    assert [sorted(len(trace.ids) for trace in traces) for traces in found] == [[3, 4], [], [2]]
    assert found[2] == [Trace([0, END], [-0.5, -0.5])]
