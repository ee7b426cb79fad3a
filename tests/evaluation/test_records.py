"""The files of an evaluation: nothing finished is lost, nothing is mixed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.records import (
    PROBLEMS_FILE,
    RECORD_FILE,
    ProblemFile,
    ProblemRecord,
    open_evaluation,
    problem_key,
)
from gtpo_verl.evaluation.summary import summarize
from gtpo_verl.runs.directory import differences

Make = Callable[..., ProblemRecord]
SETTINGS = {"actor_rollout_ref.rollout.val_kwargs.n": 8, "model": "abc"}


def test_what_is_added_is_read_again(tmp_path: Path, record: Make) -> None:
    file = ProblemFile(tmp_path / "p.jsonl")
    records = [record(0, [1.0, 0.0]), record(7, [None], failed=1)]
    for each in records:
        file.add(each)
    assert ProblemFile(tmp_path / "p.jsonl").records == {0: records[0], 7: records[1]}


def test_a_torn_line_is_dropped_and_the_file_goes_on(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "p.jsonl"
    file = ProblemFile(path)
    file.add(record(0, [1.0]))
    file.add(record(1, [1.0]))
    path.write_bytes(path.read_bytes()[:-20])
    again = ProblemFile(path)
    assert set(again.records) == {0}
    again.add(record(1, [0.0]))
    assert set(ProblemFile(path).records) == {0, 1}
    assert len(path.read_text().splitlines()) == 2


def test_the_verdict_on_a_response(record: Make) -> None:
    samples = record(0, [1.0, 0.4, 0.6, None], failed=2, length=30).samples(limit=30, threshold=0.5)
    assert [sample.correct for sample in samples] == [True, False, True, False, False, False]
    assert [sample.failed for sample in samples] == [False] * 4 + [True] * 2
    assert all(sample.truncated for sample in samples[:4])
    assert not any(sample.truncated for sample in record(0, [1.0], length=29).samples(limit=30, threshold=0.5))


def test_a_response_that_the_verifier_could_not_judge_is_wrong_and_counted(tmp_path: Path, record: Make) -> None:
    hung = record(0, [0.0, 1.0])
    first, second = hung.responses
    hung = replace(hung, responses=(replace(first, verifier_failure="timeout"), second))
    ProblemFile(tmp_path / "p.jsonl").add(hung)
    (read,) = ProblemFile(tmp_path / "p.jsonl").records.values()
    assert read == hung
    (summary,) = summarize(read.samples(limit=30, threshold=1.0))
    assert (summary.unjudged, summary.failed, summary.mean.value) == (1, 0, 0.5)


def test_equal_problems_share_a_key() -> None:
    prompt = [{"role": "user", "content": "1+1?"}]
    assert problem_key(prompt, "2") == problem_key([{"content": "1+1?", "role": "user"}], "2")
    assert problem_key(prompt, "2") != problem_key(prompt, "3")


def test_the_same_settings_go_on(tmp_path: Path, record: Make) -> None:
    open_evaluation(tmp_path, {"settings": SETTINGS}, fresh=False).add(record(3, [1.0]))
    assert set(open_evaluation(tmp_path, {"settings": SETTINGS}, fresh=False).records) == {3}


def test_other_settings_are_refused_by_name_unless_a_fresh_start_is_asked_for(tmp_path: Path, record: Make) -> None:
    open_evaluation(tmp_path, {"settings": SETTINGS}, fresh=False).add(record(3, [1.0]))
    changed = {**SETTINGS, "actor_rollout_ref.rollout.val_kwargs.n": 32}
    with pytest.raises(UserError, match=r"rollout\.val_kwargs\.n was 8, is 32\).*--fresh"):
        open_evaluation(tmp_path, {"settings": changed}, fresh=False)
    assert set(ProblemFile(tmp_path / PROBLEMS_FILE).records) == {3}, "a refusal must not touch what is there"
    assert json.loads((tmp_path / "evaluation.json").read_text())["settings"] == SETTINGS
    assert open_evaluation(tmp_path, {"settings": changed}, fresh=True).records == {}


def test_differences_are_named() -> None:
    found = differences({"a": 1, "b": None, "c": 3}, {"b": None, "c": 4, "d": 5})
    assert found == "a was 1, is not set; c was 3, is 4; d was not set, is 5"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (PROBLEMS_FILE, '{"problem": 1}\n'),
        (PROBLEMS_FILE, '{"row": [1]}\n'),
        (PROBLEMS_FILE, "[1]\n"),
        (RECORD_FILE, "{}"),
        (RECORD_FILE, '["settings"]'),
        (RECORD_FILE, '{"settings": 5}'),
    ],
)
def test_a_damaged_evaluation_is_one_line(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / PROBLEMS_FILE).touch()
    (tmp_path / RECORD_FILE).write_text('{"settings": {}}')
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} is damaged") as caught:
        open_evaluation(tmp_path, {"settings": {}}, fresh=False)
    assert "\n" not in str(caught.value)
