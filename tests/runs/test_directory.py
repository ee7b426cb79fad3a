"""What a run keeps on disk survives crashes, resumes and numbers that are none."""

import json
from pathlib import Path

import numpy as np
import torch

from gtpo_verl.files import append_json_line, read_json_lines_from
from gtpo_verl.runs.directory import (
    read_record,
    record_groups,
    record_metrics,
    set_aside,
    write_record,
)


def test_metrics_are_appended_one_line_a_step(tmp_path: Path) -> None:
    record_metrics(tmp_path / "run", 1, {"a": 1, "b": np.float64(0.5), "c": torch.tensor(2.0)})
    record_metrics(tmp_path / "run", 2, {"a": 3})
    lines, _ = read_json_lines_from(tmp_path / "run" / "metrics.jsonl", 0)
    assert lines == [{"step": 1, "data": {"a": 1.0, "b": 0.5, "c": 2.0}}, {"step": 2, "data": {"a": 3.0}}]


def test_steps_that_are_trained_again_are_set_aside(tmp_path: Path) -> None:
    for step in range(4):
        record_metrics(tmp_path, step, {"a": step})
        record_groups(tmp_path, step, {"uid": step})
        append_json_line(tmp_path / "credit_samples.jsonl", {"step": step, "samples": []})
    (tmp_path / "validation").mkdir()
    for step in (0, 2):
        (tmp_path / "validation" / f"{step}.jsonl").touch()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "da')
    assert set_aside(tmp_path, 3) == []
    (tmp_path / "metrics.replaced.jsonl").unlink()
    assert set_aside(tmp_path, 1) == [2, 3]
    assert set_aside(tmp_path, 1) == []
    assert sorted(file.name for file in (tmp_path / "validation").iterdir()) == ["0.jsonl", "2.replaced.jsonl"]
    for name in ("metrics", "groups", "credit_samples"):
        kept, moved = (tmp_path / f"{name}{end}" for end in (".jsonl", ".replaced.jsonl"))
        steps = [[json.loads(line)["step"] for line in file.read_text().splitlines()] for file in (kept, moved)]
        assert steps == [[0, 1], [2, 3]]
    assert set_aside(tmp_path, -1) == [0, 1]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_numbers_that_are_not_finite_are_named_and_the_line_stays_json(tmp_path: Path) -> None:
    record_metrics(tmp_path, 1, {"good": 1.0, "bad": float("nan"), "worse": float("inf"), "table": {"x": 1}})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: 1 / 0)
    assert line == {"step": 1, "data": {"good": 1.0}, "not_finite": ["bad", "worse"]}


def test_a_line_torn_by_a_crash_takes_no_other_with_it(tmp_path: Path) -> None:
    record_metrics(tmp_path, 1, {"a": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "da')
    record_metrics(tmp_path, 2, {"a": 2})
    lines, _ = read_json_lines_from(tmp_path / "metrics.jsonl", 0)
    assert [line["step"] for line in lines] == [1, 2]


def test_the_groups_of_a_step_survive_a_torn_line(tmp_path: Path) -> None:
    record_groups(tmp_path, 1, {"a": 1})
    with (tmp_path / "groups.jsonl").open("a") as file:
        file.write('{"step": 2, "gro')
    record_groups(tmp_path, 2, {"b": 1, "c": 2})
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert [json.loads(lines[0]), json.loads(lines[2])] == [
        {"step": 1, "groups": {"a": 1}},
        {"step": 2, "groups": {"b": 1, "c": 2}},
    ]


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert read_json_lines_from(tmp_path / "metrics.jsonl", 0) == ([], 0)
    record_metrics(tmp_path, 1, {"a": 1})
    first, offset = read_json_lines_from(tmp_path / "metrics.jsonl", 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, ')  # not yet whole
    assert read_json_lines_from(tmp_path / "metrics.jsonl", offset) == ([], offset)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('"data": {}}\n')
    second, _ = read_json_lines_from(tmp_path / "metrics.jsonl", offset)
    assert [line["step"] for line in first + second] == [1, 2]


def test_a_record_is_replaced_whole(tmp_path: Path) -> None:
    assert read_record(tmp_path) == {}
    write_record(tmp_path, {"status": "running"})
    write_record(tmp_path, {"status": "complete"})
    assert read_record(tmp_path) == {"status": "complete"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
