"""``gtpo-verl verify``: the table, the share and its interval on a dump in verl's format, and errors in a dump."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gtpo_verl import cli
from gtpo_verl.commands import verify as command
from gtpo_verl.errors import UserError
from gtpo_verl.verifiers.agreement import Agreement, Sample, read_samples, threshold_of
from gtpo_verl.verifiers.pool import verdict

WriteDump = Callable[..., Path]

BOTH = ("Answer: 7", "7", 1.0)
ANSWER_ONLY = ("Answer: 7, that is 3, 4", "7,thatis3,4", 0.0)
BOXED_ONLY = (r"so \boxed{14/2}", "7", 1.0)
NEITHER = ("Answer: 8", "7", 0.0)


@pytest.fixture
def dump(tmp_path: Path) -> WriteDump:
    """Write a dump of (response, truth, acc) with two responses a prompt."""

    def write(*samples: tuple[str, object, float | None], name: str = "10.jsonl") -> Path:
        lines = [
            {"input": f"prompt {number // 2}", "output": output, "gts": truth, "score": 0.0, "step": 10, "acc": acc}
            for number, (output, truth, acc) in enumerate(samples)
        ]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.mark.slow
def test_the_table_the_share_and_the_examples(
    dump: WriteDump, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dump(*[BOTH] * 5, ANSWER_ONLY, BOXED_ONLY, NEITHER, NEITHER, NEITHER)
    report = tmp_path / "agreement.json"
    assert cli.main(["verify", str(path), "--output", str(tmp_path), "--examples", "1"]) == 0
    found = json.loads(report.read_text())
    assert found["table"] == {"both": 5, "answer_only": 1, "boxed_only": 1, "neither": 3}
    assert found["agreement"]["share"] == 0.8
    assert 0 < found["agreement"]["low"] < 0.8 < found["agreement"]["high"] <= 1
    assert (found["responses"], found["judged"], found["prompts"]) == (10, 10, 5)
    assert found["recorded"]["answer"] == {"same": 8, "other": 2}
    assert found["recorded"]["boxed"] == {"same": 10, "other": 0}
    assert found["failures"] == {"answer": {}, "boxed": {}}
    assert [example["place"] for example in found["examples"]] == [f"{path}:6"]
    printed = capsys.readouterr().out
    assert "agreement 80.00 %, the mean over 5 prompts with 10 responses" in printed
    assert "boxed: agrees with the run on 100.00 % of 10" in printed


@pytest.mark.slow
def test_a_sample_that_hangs_is_reported_and_the_rest_judged(dump: WriteDump, tmp_path: Path) -> None:
    path = dump(BOTH, (r"\boxed{9^{9^{9^9}}}", "9^{9^{9^8}}", None), BOXED_ONLY)
    report = tmp_path / "agreement.json"
    assert cli.main(["verify", str(path), "--output", str(tmp_path), "--timeout", "8"]) == 0
    found = json.loads(report.read_text())
    assert found["failures"] == {"answer": {}, "boxed": {"timeout": 1}}
    assert found["table"] == {"both": 1, "answer_only": 0, "boxed_only": 1, "neither": 1}


def test_without_fallback_a_box_is_demanded(dump: WriteDump, tmp_path: Path) -> None:
    report = tmp_path / "agreement.json"
    assert cli.main(["verify", str(dump(BOTH, BOXED_ONLY)), "--no-fallback", "--output", str(tmp_path)]) == 0
    assert json.loads(report.read_text())["table"] == {"both": 0, "answer_only": 1, "boxed_only": 1, "neither": 0}


def agreement(*agreed: tuple[str, bool]) -> Agreement:
    found = Agreement()
    for number, (prompt, same) in enumerate(agreed):
        sample = Sample(f"file:{number}", prompt, "", "", None)
        found.add(sample, verdict(True, ""), verdict(same, ""), most_examples=0)
    return found


def test_the_interval_is_over_prompts() -> None:
    """100 copies of a prompt's sample carry no more information than one; and full agreement is not certainty."""
    one = agreement(("a", True), ("b", False), ("c", True), ("d", True))
    hundred = agreement(*[(name, same) for name, same in zip("abcd", (1, 0, 1, 1), strict=True) for _ in range(100)])
    assert one.interval() == hundred.interval()
    assert one.share() == hundred.share() == 0.75
    uneven = agreement(*[("a", False)] * 100, ("b", True), ("c", True), ("d", True))
    assert uneven.share() == 0.75
    assert uneven.interval() == one.interval()
    full = agreement(*[(f"prompt {number}", True) for number in range(100)])
    assert full.interval() == (pytest.approx(0.025**0.01), 1.0)
    assert agreement(("a", False), ("b", False)).interval() == (0.0, pytest.approx(1 - 0.025**0.5))
    assert agreement(("a", True), ("a", False)).interval() == (0.0, 1.0)


def test_cells_count_every_sample_once() -> None:
    found = Agreement()
    for answer, boxed in [(True, True), (True, False), (False, True), (False, False)]:
        found.add(Sample("f:1", "p", "", "", None), verdict(answer, ""), verdict(boxed, ""), most_examples=9)
    assert found.cells == Counter(both=1, answer_only=1, boxed_only=1, neither=1)
    assert len(found.examples) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no response in"),
        ("{\n", ":1 is not JSON"),
        ('{"output": "x", "gts": "1"}\n[1]\n', ":2 has no text `output`, the response (it has: list)"),
        ('{"input": "x", "gts": "1"}\n', ":1 has no text `output`, the response (it has: input, gts)"),
        ('{"output": "x", "gts": null}\n', ":1 has no `gts`"),
        ('{"output": "x", "gts": "1", "acc": "yes"}\n', "`acc` must be a number"),
        ("[" * 100_000, ":1 is not JSON"),
    ],
)
def test_a_bad_file_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert cli.main(["verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        list(read_samples({tmp_path / "absent.jsonl": 1.0}))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=":1 is not JSON"):
        list(read_samples({tmp_path / "binary": 1.0}))


def test_a_report_that_cannot_be_written_is_said_before_the_work(dump: WriteDump, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["verify", str(dump(BOTH)), "--output", str(tmp_path / "file")]) == 2


@pytest.mark.slow
def test_the_report_is_in_the_directory_that_is_named(dump: WriteDump, tmp_path: Path) -> None:
    assert cli.main(["verify", str(dump(BOTH)), "--output", str(tmp_path / "new")]) == 0
    assert json.loads((tmp_path / "new" / "agreement.json").read_text())["responses"] == 1


@pytest.mark.slow
def test_the_run_found_correct_what_reached_its_threshold(dump: WriteDump, tmp_path: Path) -> None:
    """``acc`` of 0.6 is correct in a run with a threshold of 0.5, and in no other."""
    response, truth, _ = BOTH
    path, report = dump((response, truth, 0.6), name="run/validation/10.jsonl"), tmp_path / "agreement.json"

    def recorded(*arguments: str) -> dict[str, int]:
        assert cli.main(["verify", str(path), "--output", str(tmp_path), *arguments]) == 0
        return json.loads(report.read_text())["recorded"]["answer"]

    assert recorded() == {"same": 0, "other": 1}
    (tmp_path / "run" / "config.yaml").write_text("algorithm: {correct_threshold: 0.5}")
    assert threshold_of(path) == 1.0  # not a run's yet
    (tmp_path / "run" / "run.json").write_text("{}")
    assert recorded() == {"same": 1, "other": 0}
    assert recorded("--correct-threshold", "0.7") == {"same": 0, "other": 1}
    assert json.loads(report.read_text())["correct_thresholds"] == [0.7]


def test_ctrl_c_reports_what_was_judged(
    dump: WriteDump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = dump(*[BOTH] * 20), tmp_path / "agreement.json"
    real = command.verified

    def interrupted(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        yield from itertools.islice(real(*arguments, **keywords), 7)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "verified", interrupted)
    assert cli.main(["verify", str(path), "--output", str(tmp_path)]) == 130
    found = json.loads(report.read_text())
    assert (found["judged"], found["responses"]) == (7, 20)
    assert "interrupted: 7 of 20 responses were verified" in capsys.readouterr().out
