"""What a guide has answered, from its samples to the columns of the data."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gtpo_verl.cli import main
from gtpo_verl.commands.traces import kept
from gtpo_verl.config import IN_RAY_JOB
from gtpo_verl.data.trace_file import Answers, TraceFile, write_with_traces
from gtpo_verl.data.traces import check_traces
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.continuations import Continuation

SETTINGS = {"model": "m", "temperature": 1.0}


def sample(tokens: list[int], *, correct: bool, truncated: bool = False) -> Continuation:
    log_probs = np.array([-0.5] * len(tokens), np.float32)
    return Continuation(
        tokens=np.array(tokens, np.int32),
        correct=correct,
        score=0.0,
        truncated=truncated,
        ended=not truncated,
        log_probs=log_probs,
    )


def test_correct_responses_are_kept_and_wrong_ones_if_asked() -> None:
    samples = [sample([1, 2], correct=True), sample([3], correct=False), sample([4, 5], correct=True, truncated=True)]
    assert kept(7, samples, keep_wrong=False) == Answers(7, [[1, 2]], [[-0.5, -0.5]], sampled=3, correct=2, truncated=1)
    assert kept(7, samples, keep_wrong=True).responses == [[1, 2], [3]]


def test_an_interrupted_file_goes_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "out.parquet.sampled.jsonl"
    first = TraceFile(file, SETTINGS)
    first.add(Answers(0, [[1]], [[-1.0]], 1, 1, 0))
    with file.open("a") as lines:
        lines.write('{"row": 1, "respon')  # a crash tears the last line
    again = TraceFile(file, SETTINGS)
    assert set(again.answers) == {0}
    again.add(Answers(2, [], [], 1, 0, 0))
    assert TraceFile(file, SETTINGS).answers == {0: first.answers[0], 2: Answers(2, [], [], 1, 0, 0)}
    with pytest.raises(UserError, match=r"other settings \(temperature was 1.0, is 0.5\)"):
        TraceFile(file, SETTINGS | {"temperature": 0.5})
    assert TraceFile(file, SETTINGS, fresh=True).answers == {}


def test_a_file_that_is_none_of_ours_is_named(tmp_path: Path) -> None:
    file = tmp_path / "out.parquet.sampled.jsonl"
    file.write_text("no JSON\n")
    with pytest.raises(UserError, match="is damaged"):
        TraceFile(file, SETTINGS)


def test_the_columns_are_what_a_training_reads(tmp_path: Path) -> None:
    source, output = tmp_path / "train.parquet", tmp_path / "with.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "guide_responses": [["x"], ["y"], ["z"]]}), source)
    write_with_traces(source, output, [Answers(2, [[5, 6], [7]], [[-0.25, -1.0], [-2.0]], 2, 2, 0)])
    rows = pq.read_table(output).to_pylist()
    assert [row["prompt"] for row in rows] == ["a", "b", "c"]
    assert [row["guide_responses"] for row in rows] == [[], [], [[5, 6], [7]]]
    assert rows[2]["guide_log_probs"] == [[-0.25, -1.0], [-2.0]]
    check_traces(str(output), limit=8, with_log_probs=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "nothing.parquet"], "nothing.parquet: no such file; FILE is the parquet file"),
        (["model", "data.parquet", "--output", "data.parquet"], "data.parquet is a file, not a directory"),
        (["model", "data.parquet", "--samples", "0"], "--samples 0: it must be at least 1"),
        (["model", "data.parquet", "--output", "data.parquet/x"], "data.parquet is a file, not a directory"),
    ],
)
def test_what_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "data.parquet")
    assert main(["traces", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_submitted_job_writes_to_an_absolute_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(IN_RAY_JOB, "{}")
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "data.parquet")
    assert main(["traces", "model", str(tmp_path / "data.parquet"), "--output", "results"]) == 2
    assert "--output=results: a job that was submitted to Ray" in capsys.readouterr().err
