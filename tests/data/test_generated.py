"""``gtpo-verl prepare-data reasoning-gym:NAME`` and the verifier that asks the generator itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gtpo_verl.cli import main
from gtpo_verl.config import compose_config
from gtpo_verl.verifiers import reward
from gtpo_verl.verifiers.reasoning_gym import generator, judge, read_answer

SUMS = "reasoning-gym:chain_sum,min_terms=2,max_terms=2,max_digits=1"


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    yield
    reward.close_pools()


def rows(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def prepared(directory: Path, *arguments: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    assert main(["prepare-data", *arguments, "--output", str(directory)]) == 0
    return rows(directory / "train.parquet"), rows(directory / "val.parquet")


@pytest.mark.slow
def test_no_sum_is_trained_whose_operands_in_another_order_are_validated(tmp_path: Path) -> None:
    train, validation = prepared(tmp_path, SUMS)

    def operands(row: dict[str, Any]) -> tuple[str, ...]:
        *_, left, sign, right, _ = row["prompt"][-1]["content"].split()
        return sign, *sorted((left, right))

    assert len(validation) >= 64
    assert len({row["prompt"][-1]["content"] for row in train + validation}) == len(train) + len(validation) == 200
    assert not {operands(row) for row in train} & {operands(row) for row in validation}
    assert prepared(tmp_path / "again", SUMS) == (train, validation)
    record = train[0]["extra_info"]["reasoning_gym"]
    assert record["generator"] == "chain_sum"
    assert record["settings"] == '{"max_digits": 1, "max_terms": 2, "min_terms": 2, "size": 2000}'
    assert (record["seed"], record["read"]) == (0, "number")


@pytest.mark.slow
def test_the_verdict_is_the_generators_own(tmp_path: Path) -> None:
    """`word_sorting` takes a list in any spacing, and reads it between its tags, which the prompt asks for."""
    train, _ = prepared(tmp_path, "reasoning-gym:word_sorting,min_words=3,max_words=3,size=400")
    row = train[0]
    assert "<answer>" in row["prompt"][0]["content"]
    truth = row["reward_model"]["ground_truth"]
    kwargs = compose_config(["verifier=reasoning_gym"]).reward.custom_reward_function.reward_kwargs

    def verdict(response: str) -> tuple[float, float, str]:
        found = asyncio.run(reward.reasoning_gym(row["data_source"], response, truth, row["extra_info"], **kwargs))
        return found["acc"], found["score"], found["verifier_failure"]

    assert verdict(f"So <answer>{truth.replace(', ', ',')}</answer>") == (1.0, 1.0, "")
    assert verdict(truth) == (0.0, -1.0, "")
    assert verdict("<answer>no</answer>") == (0.0, -1.0, "")
    other = row["extra_info"]["reasoning_gym"] | {"question": "Sort nothing."}
    found = asyncio.run(reward.reasoning_gym("s", truth, truth, {"reasoning_gym": other}, **kwargs))
    assert found["verifier_failure"] == "error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "response", "answer"),
    [
        ("number", "3 + 4 is 7. Not -1,234.50.", "-1,234.50"),
        ("number", "seven", None),
        ("number", "The answer is \N{MINUS SIGN}5.", "-5"),
        ("number", "on pages 3-5", "5"),
        ("number", "so x=-5", "-5"),
        ("number", "it is .5", ".5"),
        ("number", "it is 1e1.", "1e1"),
        ("tags", "<answer> 7 </answer> and <answer>8</answer>", "8"),
        ("tags", "7", None),
        ("answer", "Answer: 6\nAnswer: 7 \n", "7"),
        ("boxed", r"\boxed{7}", "7"),
        ("response", " seven\n", "seven"),
    ],
)
def test_where_an_answer_is_read(reader: str, response: str, answer: str | None) -> None:
    assert read_answer(response, reader) == answer


@pytest.mark.slow
def test_a_part_of_a_score_is_wrong() -> None:
    import json

    entry = generator("chain_sum", "{}", 3)[5]
    record = {"generator": "chain_sum", "settings": "{}", "seed": 3, "index": 5, "question": entry["question"]}
    assert judge(f"It is {entry['answer']}", json.dumps(record | {"read": "number"})) == (True, entry["answer"])
    assert judge(f"It is {entry['answer']}", json.dumps(record | {"read": "response"}))[0] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning-gym:chainsum", "did you mean chain_sum?"),
        ("reasoning-gym:", "chain_sum, "),  # all that there are
        ("reasoning-gym:chain_sum,max_term=2", "did you mean max_terms?"),
        ("reasoning-gym:chain_sum,min_terms=9", "max_terms must be >= min_terms"),
        ("reasoning-gym:chain_sum,size=20", "20 different problems were drawn"),
        ("reasoning-gym:chain_sum,size=no", "seed and size are whole numbers"),
        ("reasoning-gym:chain_sum,three", "settings are written NAME,key=value"),
        ("reasoning-gym:time_intervals,min_date=2020-01-01", "min_date=2020-01-01: a value is text, a number"),
        ("sum", "did you mean sums?"),
        ("smollm", "did you mean smollm2?"),
    ],
)
def test_bad_input_is_one_line(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare-data", name, "--output", str(tmp_path / "data")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "data").exists()


SLOW = {  # a tenth of a second a problem, or more
    *("advanced_geometry", "countdown", "futoshiki", "game_of_life_halting", "intermediate_integration"),
    *("knight_swap", "puzzle24", "zebra_puzzles"),
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_generator_can_be_prepared_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from reasoning_gym.factory import DATASETS

    refused = {}
    for name in sorted(DATASETS):
        size = 96 if name in SLOW else 300
        if main(["prepare-data", f"reasoning-gym:{name},size={size}", "--output", str(tmp_path / name)]):
            (refused[name],) = capsys.readouterr().err.splitlines()
            continue
        row = rows(tmp_path / name / "train.parquet")[0]
        assert row["extra_info"]["reasoning_gym"]["generator"] == name
    assert set(refused) <= {"composite", "list_functions"}, refused  # other problems in another process
