"""``gtpo-verl prepare-data`` on small files in the schemas of the real data sets."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gtpo_verl.cli import main
from gtpo_verl.data.prompts import STYLES, restyle, unwrap, wrap
from gtpo_verl.errors import UserError

Rows = list[dict[str, Any]]
Write = Callable[[str, Rows], Path]
DapoRow = Callable[..., dict[str, Any]]


def prepare(*arguments: object) -> int:
    return main(["prepare-data", *map(str, arguments)])


VERL: dict[str, Any] = {"reward_model": {"ground_truth": "1"}}


def rows_of(directory: Path) -> Rows:
    (file,) = directory.glob("*.parquet")
    return pq.read_table(file).to_pylist()


def manifest(directory: Path) -> dict[str, Any]:
    (file,) = directory.glob("*.parquet.manifest.json")
    return json.loads(file.read_text())


@pytest.fixture
def math_rows() -> Rows:
    """MATH-500's columns."""
    return [
        {
            "problem": f"What is $\\frac{{{2 * i + 1}}}{{2}}$?",
            "solution": "…",
            "answer": f"\\frac{{{2 * i + 1}}}{{2}}",
            "subject": "Prealgebra",
            "level": 2,
            "unique_id": f"test/prealgebra/{i}.json",
        }
        for i in range(4)
    ]


# -------------------------------------------------------------------- the schemas


def test_dapo_rows_are_collapsed_and_keep_what_verl_needs(
    write: Write, dapo_row: DapoRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dapo_row(f"What is {i} + 1?", str(i + 1), f"uid-{i}") for i in range(5)]
    output = tmp_path / "out"
    assert prepare("dapo-math-17k", "--from", write("dapo.parquet", rows * 100), "--output", output) == 0
    prepared = rows_of(output)
    assert [row["prompt"] for row in prepared] == [row["prompt"] for row in rows]
    assert [row["reward_model"] for row in prepared] == [row["reward_model"] for row in rows]
    assert {row["data_source"] for row in prepared} == {"math_dapo"}
    assert [row["extra_info"] for row in prepared] == [{"index": i, "id": f"uid-{i}"} for i in range(5)]
    assert manifest(output)["summary"]["repetitions"] == [100, 100]
    assert "5, 100 times each" in capsys.readouterr().out


def test_the_repetition_of_aime_files_is_collapsed_so_that_avg_32_is_not_done_twice(
    write: Write, dapo_row: DapoRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dapo_row(f"Find {i}.", f"{i:03d}", str(i)) for i in range(30)]
    output = tmp_path / "out"
    assert prepare("aime-2024", "--from", write("aime.parquet", rows * 32), "--output", output) == 0
    prepared = rows_of(output)
    assert len(prepared) == 30
    assert prepared[7]["reward_model"]["ground_truth"] == "7"  # an integer has no leading zeros
    assert {row["data_source"] for row in prepared} == {"aime_2024"}
    printed = capsys.readouterr().out
    assert "val_kwargs.n=32" in printed
    assert "warning" not in printed


def test_aime_2025_of_two_files_with_a_unit_in_an_answer(write: Write, tmp_path: Path, capsys: Any) -> None:
    first = write("aime2025-I.jsonl", [{"question": "Find the angle.", "answer": "336^\\circ"}])
    second = write("aime2025-II.jsonl", [{"question": "Find $m+n$.", "answer": 70.0}])
    output = tmp_path / "out"
    assert prepare("aime-2025", "--from", first, second, "--output", output) == 0
    prepared = rows_of(output)
    assert [row["reward_model"]["ground_truth"] for row in prepared] == ["336", "70"]
    assert prepared[1]["prompt"] == [{"role": "user", "content": wrap("Find $m+n$.", "answer")}]
    assert "has 30 problems, 2 were kept" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["1000", "-3", "x", "1/2"])
def test_no_aime_answer(write: Write, tmp_path: Path, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("aime.jsonl", [{"question": "Find $x$.", "answer": answer}])
    assert prepare("aime-2025", "--from", file, "--output", tmp_path / "out") == 2
    assert "aime.jsonl, row 0: the answer of an AIME problem is an integer from 0 to 999" in capsys.readouterr().err


def test_math_500(write: Write, math_rows: Rows, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert prepare("math-500", "--from", write("t.jsonl", math_rows), "--output", output, "--style", "boxed") == 0
    row = rows_of(output)[2]
    assert row["prompt"][0]["content"].startswith("What is $\\frac{5}{2}$?\n\n")
    assert row["prompt"][0]["content"].endswith("within \\boxed{}.")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "\\frac{5}{2}"}
    assert row["extra_info"] == {"index": 2, "id": "test/prealgebra/2.json"}
    assert row["data_source"] == "math_500"


def test_files_of_ones_own(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("mine.parquet", [{"text": " 1+1? ", "label": 2}, {"text": "2+2?", "label": 4}])
    output = tmp_path / "out"
    assert prepare("parquet", file, "--output", output) == 2
    assert "--problem-column" in capsys.readouterr().err
    columns = ("--problem-column", "text", "--answer-column", "label")
    assert prepare("parquet", file, *columns, "--data-source", "sums", "--output", output) == 0
    row = rows_of(output)[0]
    assert row["prompt"][0]["content"] == wrap("1+1?", "answer")
    assert (row["reward_model"]["ground_truth"], row["data_source"]) == ("2", "sums")


def test_a_file_in_verls_schema_keeps_prompts_and_columns_of_its_own(write: Write, tmp_path: Path) -> None:
    rows: Rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"{i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": 10 + i},
            "agent_name": "tool_agent",
        }
        for i in range(3)
    ]
    output = tmp_path / "out"
    assert prepare("parquet", write("mine.parquet", rows), "--output", output) == 0
    prepared = rows_of(output)[1]
    assert prepared["prompt"] == rows[1]["prompt"]
    assert prepared["agent_name"] == "tool_agent"
    assert prepared["data_source"] == "mine"
    assert prepared["extra_info"] == {"split": "train", "index": 1, "id": "11"}
    assert manifest(output)["summary"]["style"] == {"their own": 3}


@pytest.mark.parametrize("schema", ["columns", "verl"])
def test_responses_of_a_guide_are_kept(write: Write, dapo_row: DapoRow, tmp_path: Path, schema: str) -> None:
    texts: list[Any] = ["1+1=2", ["1+1=2", "2", " "], "", None]
    rows = [{"problem": f"1+{i}", "answer": f"{1 + i}", "target": text} for i, text in enumerate(texts)]
    if schema == "verl":
        rows = [dapo_row(f"1+{i}", f"{1 + i}") | {"target": text} for i, text in enumerate(texts)]
    file, out = write("mine.jsonl", rows), tmp_path / "out"
    assert prepare("parquet", file, "--guide-column", "target", "--output", out) == 0
    assert [row["guide_responses"] for row in rows_of(out)] == [["1+1=2"], ["1+1=2", "2"], [], []]
    assert manifest(out)["request"]["guide_column"] == "target"
    assert prepare("parquet", out / "mine.parquet", "--output", tmp_path / "again") == 0
    kept = [row["guide_responses"] for row in rows_of(tmp_path / "again")]
    assert kept == [["1+1=2"], ["1+1=2", "2"], [], []], "the column of a file in verl's schema"


@pytest.mark.parametrize(
    ("value", "column", "message"),
    [
        ("a", "traget", "has no such column"),
        ([1, "a"], "target", "row 0 must hold"),
        (5, "target", "row 0 must hold"),
        ({"a": "x"}, "target", "row 0 must hold"),
    ],
)
def test_a_column_of_a_guide_that_cannot_be(
    write: Write, tmp_path: Path, value: Any, column: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("mine.jsonl", [{"problem": "1+1", "answer": "2", "target": value}])
    assert prepare("parquet", file, "--guide-column", column, "--output", tmp_path / "out") != 0
    assert f"--guide-column {column}: " in (said := capsys.readouterr().err)
    assert message in said


def test_the_output_is_what_verls_data_set_reads(write: Write, math_rows: Rows, tmp_path: Path) -> None:
    from gtpo_verl.config import compose_config
    from gtpo_verl.problems import refuse
    from gtpo_verl.rules.data import data

    output = tmp_path / "out"
    assert prepare("math-500", "--from", write("test.jsonl", math_rows), "--output", output) == 0
    file = output / "math-500.parquet"
    config = compose_config([f"data.train_files={file}", f"data.val_files={file}", "data.train_batch_size=4"])
    refuse(data(config))


# -------------------------------------------------------------------- the checks


def test_different_answers_to_one_problem(write: Write, dapo_row: DapoRow, tmp_path: Path) -> None:
    rows = [dapo_row("A?", "1"), dapo_row("B?", "2"), dapo_row("A?\n", "3")]
    file, output = write("dapo.parquet", rows), tmp_path / "out"
    assert prepare("dapo-math-17k", "--from", file, "--output", output) == 0
    assert [row["reward_model"]["ground_truth"] for row in rows_of(output)] == ["2"]
    assert manifest(output)["summary"]["conflicting"] == 1
    assert prepare("dapo-math-17k", "--from", file, "--output", output, "--conflicts", "first") == 0
    assert [row["reward_model"]["ground_truth"] for row in rows_of(output)] == ["1", "2"]


def test_rows_without_a_problem_or_an_answer_are_left_out(write: Write, tmp_path: Path) -> None:
    values = (("A", "1"), ("B", ""), ("C", None), ("D", "  "), (" ", "5"))
    rows: Rows = [{"problem": p, "answer": a} for p, a in values]
    output = tmp_path / "out"
    assert prepare("parquet", write("mine.jsonl", rows), "--output", output) == 0
    assert len(rows_of(output)) == 1
    assert manifest(output)["summary"]["incomplete"] == 4
    rows = [{"problem": p, "answer": a} for p, a in (("A", 1.5), ("B", float("nan")), ("C", None))]
    assert prepare("parquet", write("floats.parquet", rows), "--output", tmp_path / "floats") == 0
    assert [row["reward_model"]["ground_truth"] for row in rows_of(tmp_path / "floats")] == ["1.5"]


def test_a_dialogue_is_the_problem_and_its_messages_are_kept(write: Write, tmp_path: Path) -> None:
    def row(*messages: tuple[str, str], **others: Any) -> dict[str, Any]:
        prompt = [{"role": role, "content": text} | others for role, text in messages]
        return {"prompt": prompt, "reward_model": {"ground_truth": str(len(messages))}}

    ends = [("assistant", "2"), ("user", "Go on.")]
    rows: Rows = [row(("user", "Count to 9."), *ends), row(("user", "Count to 8."), *ends, name="Ann")]
    rows[1]["prompt"].insert(1, {"role": "assistant", "content": None, "name": "Ann"})  # as where it calls a tool
    rows += [row(("system", "Be brief."), ("user", "1 + 1?")), row(("system", "Think."), ("user", "1 + 1?"))] * 2
    other = write("other.jsonl", [{"question": "1+1?", "answer": None}])  # of which the problem alone is wanted
    for name in ("mine.jsonl", "mine.parquet"):
        whole, less = tmp_path / f"{name}-whole", tmp_path / f"{name}-less"
        assert prepare("parquet", write(name, rows), "--output", whole) == 0
        found = [row["prompt"] for row in rows_of(whole)]
        assert [prompt[0]["content"] for prompt in found] == ["Count to 9.", "Count to 8.", "Be brief.", "Think."]
        assert found[1][0]["name"] == "Ann"
        assert found[1][1].get("content") is None
        assert prepare("parquet", write(name, rows), "--output", less, "--against", other) == 0
        assert manifest(less)["summary"]["overlapping"] == 2


def test_a_file_that_is_not_its_own_is_not_replaced(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    foreign = write("out/mine.parquet", [{"precious": 1}])
    file = write("mine.jsonl", [{"problem": "A", "answer": "1"}])
    assert prepare("parquet", file, "--output", output) == 2
    assert "mine.parquet exists, and was not written by prepare-data" in capsys.readouterr().err
    (output / "mine.parquet.manifest.json").write_text("{")
    assert prepare("parquet", file, "--output", output) == 2
    assert pq.read_table(foreign).column_names == ["precious"]


def test_problems_of_the_test_set_are_left_out_of_the_training_set(
    write: Write, dapo_row: DapoRow, tmp_path: Path
) -> None:
    train = [dapo_row("Let  $x = 1$. Find\\, $x$.", "1"), dapo_row("Find $x-1$.", "2"), dapo_row("Find $x+1$.", "3")]
    test = write(
        "test.jsonl", [{"Problem": "let x=1. find x.", "Answer": 1}, {"Problem": "Find $X + 1$.", "Answer": 3}]
    )
    output = tmp_path / "out"
    file = write("dapo.parquet", train)
    assert prepare("dapo-math-17k", "--from", file, "--against", test, "--output", output) == 0
    assert [row["reward_model"]["ground_truth"] for row in rows_of(output)] == ["2"]
    assert manifest(output)["summary"]["overlapping"] == 2


def test_an_unknown_instruction_of_the_test_set_is_told(
    write: Write, dapo_row: DapoRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = dapo_row("Find $x+1$.", "3")
    unknown = known | {"prompt": [{"role": "user", "content": "Find $x+1$. Think, then answer in a box."}]}
    train, test = write("train.jsonl", [dapo_row("Find $x+1$.", "3"), dapo_row("2", "2")]), tmp_path / "test.jsonl"
    for name, row, found, warned in (("a", known, 1, 0), ("b", unknown, 0, 1)):
        write(test.name, [row])
        assert prepare("parquet", train, "--output", tmp_path / name, "--against", test) == 0
        summary = manifest(tmp_path / name)["summary"]
        assert (summary["overlapping"], summary["whole_prompts"]) == (found, warned)
        assert ("under another instruction is not found" in capsys.readouterr().out) == bool(warned)


def test_an_object_without_a_field_is_one_line(
    write: Write, dapo_row: DapoRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("mine.jsonl", [dapo_row("1+1", "2") | {"extra_info": {"tools_kwargs": {}}}])
    assert prepare("parquet", file, "--output", tmp_path / "out") == 2
    assert "mine.parquet cannot be written: Cannot write struct type 'tools_kwargs'" in capsys.readouterr().err
    assert not (tmp_path / "out" / "mine.parquet").exists()


def test_nothing_left(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("mine.jsonl", [{"problem": "A", "answer": ""}])
    assert prepare("parquet", file, "--output", tmp_path / "out") == 2
    assert "no problem is left of 1 rows" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------- once, and whole


def test_a_second_call_does_nothing_until_something_changes(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("mine.jsonl", [{"problem": "A", "answer": "1"}])
    output = tmp_path / "out"
    command = ("parquet", file, "--output", output)
    prepare(*command)
    facts = manifest(output)
    assert facts["inputs"][0]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    made = output / "mine.parquet"
    assert facts["output"]["sha256"] == hashlib.sha256(made.read_bytes()).hexdigest()
    capsys.readouterr()

    def is_repeated(*more: str) -> bool:
        assert prepare(*command, *more) == 0
        return "is up to date" not in capsys.readouterr().out

    assert not is_repeated()
    assert is_repeated("--force")
    assert is_repeated("--style", "boxed")
    assert is_repeated()
    write("mine.jsonl", [{"problem": "A", "answer": "2"}])
    assert is_repeated()
    assert rows_of(output)[0]["reward_model"]["ground_truth"] == "2"
    made.write_bytes(made.read_bytes()[:-1])
    assert is_repeated()
    assert not is_repeated()


def test_the_name_of_a_file_is_taken_for_one_more_release(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("mine.jsonl", [{"problem": "A", "answer": "1"}])
    assert prepare("parquet", file, "--output", tmp_path / "out" / "new.parquet") == 0
    assert len(rows_of(tmp_path / "out")) == 1
    assert "note: --output is a directory now" in capsys.readouterr().err


def test_an_error_leaves_the_last_output_whole(write: Write, tmp_path: Path) -> None:
    file = write("mine.jsonl", [{"problem": "A", "answer": "1"}])
    output = tmp_path / "out"
    prepare("parquet", file, "--output", output)
    made = output / "mine.parquet"
    before = made.read_bytes()
    file.write_text('{"problem": "A", "answer": "1"}\n{"problem"')
    assert prepare("parquet", file, "--output", output) == 2
    assert made.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_without_a_network_the_message_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert prepare("aime-2025", "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "opencompass/AIME2025 could not be downloaded" in error
    assert "get aime2025-I.jsonl and aime2025-II.jsonl" in error
    assert "--from FILE" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("parquet",), "name the files"),
        (("parquet", "missing.parquet"), "missing.parquet: no such file"),
        (("parquet", "{torn}"), "torn.parquet is not a parquet file"),
        (("parquet", "{text}"), "expected a .parquet or a .jsonl file"),
        (("parquet", "{corrupt}", "--output", "{folder}"), "corrupt.parquet is one of the input files"),
        (("parquet", "{rows}", "--output", "{text}/out"), "text.csv is a file, not a directory"),
        (("parquet", "{rows}", "--output", "/proc/x"), "--output /proc/x: nothing can be written in /proc"),
        (("sums", "--output", "/proc/x"), "--output /proc/x: nothing can be written in /proc"),
        (("parquet", "{corrupt}"), "corrupt.parquet is not a parquet file, or it is damaged"),
        (("parquet", "{folder}"), "is a directory: name its files"),
        (("parquet", "{rows}", "--problem-column", "nope"), "--problem-column nope"),
        (("parquet", "{verl}"), "row 0: AttributeError"),
        (("parquet", "{parts}"), "row 0: TypeError: a content is list, and not text"),
        (("parquet", "{listed}"), "row 0: TypeError: an answer is list, and neither text nor a number"),
        (("math-500", "{rows}"), "--from"),
        (("parquet", "--from", "{rows}"), "--from is for data sets of the hub"),
    ],
)
def test_what_is_wrong_is_said(
    write: Write, tmp_path: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "folder": tmp_path,
        "torn": tmp_path / "torn.parquet",
        "corrupt": tmp_path / "corrupt.parquet",
        "text": tmp_path / "text.csv",
        "rows": write("rows.jsonl", [{"problem": "A", "answer": "1"}]),
        "parts": write("parts.jsonl", [VERL | {"prompt": [{"role": "user", "content": [{"text": "A"}]}]}]),
        "listed": write("listed.jsonl", [{"problem": "A", "answer": ["1"]}]),
        "verl": write("verl.jsonl", [VERL | {"prompt": "A"}]),
    }
    files["torn"].write_bytes(b"PAR1")
    files["corrupt"].write_bytes(b"PAR1" + bytes(200) + b"PAR1")
    files["text"].write_text("problem,answer\n")
    given = [argument.format_map(files) for argument in arguments]
    if "--output" not in given:
        given += ["--output", str(tmp_path / "out")]
    assert prepare(*given) == 2
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------- prompts


@pytest.mark.parametrize("style", STYLES)
def test_an_instruction_is_recognised_and_exchanged(style: str) -> None:
    assert unwrap(wrap("Find $x$.", style)) == ("Find $x$.", style)
    for other in STYLES:
        assert restyle(wrap("Find $x$.", style), other) == wrap("Find $x$.", other)
    assert unwrap(" Find $x$. ") == ("Find $x$.", None)


def test_an_unknown_instruction_is_left_alone_or_refused() -> None:
    assert restyle("Find $x$. Think!", None) == "Find $x$. Think!"
    with pytest.raises(UserError, match="leave --style out"):
        restyle("Find $x$. Think!", "boxed")


SYSTEM, USER = ([{"role": role, "content": "a"}] for role in ("system", "user"))
OTHER = [{"role": "user", "content": "b"}]
TRUTH = {"ground_truth": "1"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": SYSTEM, "reward_model": TRUTH}], "no message of role user"),
        (
            [{"prompt": USER, "reward_model": TRUTH}, {"prompt": OTHER, "reward_model": {"ground_truth": 2}}],
            "the column reward_model cannot be written: .* need one type",
        ),
        ([{"prompt": USER, "reward_model": "1"}], "expected verl's schema"),
        ([{"prompt": USER, "reward_model": TRUTH, "extra_info": "x"}], "expected verl's schema"),
        ([{"prompt": USER, "reward_model": {"ground_truth": 10**30}}], "cannot be written"),
    ],
)
def test_rows_that_fit_no_table_are_one_line(
    rows: Rows, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert prepare("parquet", source, "--output", tmp_path / "out") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert re.search(message, line)
    assert not (tmp_path / "out").exists()
