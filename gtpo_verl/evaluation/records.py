"""The files of an evaluation: what was asked for, and a line for each problem as it is finished."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.summary import Sample

PROBLEMS_FILE = "problems.jsonl"
RECORD_FILE = "evaluation.json"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class Response:
    """One response with its verdict: ``acc`` None where the verifier gave none, ``answer`` None where it read none.

    ``verifier_failure`` says why the verifier could not judge it (the project's own do), and is empty where it could.
    """

    problem: str
    data_source: str
    acc: float | None
    answer: str | None
    length: int
    text: str | None = None
    verifier_failure: str = ""


def problem_key(prompt: Any, ground_truth: Any) -> str:
    """The same prompt with the same ground truth is the same problem, in whatever row of whatever file."""
    identity = json.dumps([prompt, ground_truth], sort_keys=True, default=str)
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def to_sample(response: Response, *, limit: int, threshold: float) -> Sample:
    """The verdict on a response: correct from ``threshold`` on, truncated from ``limit`` tokens on."""
    return Sample(
        problem=response.problem,
        data_source=response.data_source,
        correct=response.acc is not None and response.acc >= threshold,
        answer=response.answer,
        length=response.length,
        truncated=response.length >= limit,
        unjudged=bool(response.verifier_failure),
    )


@dataclass(frozen=True)
class ProblemRecord:
    """A line of ``problems.jsonl``: one row of the data, its responses, and how many of them failed."""

    row: int
    problem: str
    data_source: str
    prompt: Any
    ground_truth: Any
    failed: int
    responses: tuple[Response, ...]

    def samples(self, *, limit: int, threshold: float) -> list[Sample]:
        """Samples for the summary, the failed ones among them."""
        failed = Sample(self.problem, self.data_source, correct=False, failed=True)
        return [to_sample(response, limit=limit, threshold=threshold) for response in self.responses] + [
            failed
        ] * self.failed


class ProblemFile:
    """``problems.jsonl``, appended to as problems are finished. A line that a crash tore is dropped when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.records = dict(_read(file))
        if file.is_file() and len(file.read_bytes().splitlines()) != len(self.records):
            _write_whole(file, "".join(_line(record) for record in self.records.values()))

    def add(self, record: ProblemRecord) -> None:
        """Keep a finished problem, on disk when this returns."""
        with self.file.open("a") as file:
            file.write(_line(record))
        self.records[record.row] = record


def _line(record: ProblemRecord) -> str:
    responses = [_response(response) for response in record.responses]
    return json.dumps(asdict(record) | {"responses": responses}, default=str) + "\n"


def _response(response: Response) -> dict[str, Any]:
    values = {"acc": response.acc, "answer": response.answer, "length": response.length, "response": response.text}
    return values | ({"verifier_failure": response.verifier_failure} if response.verifier_failure else {})


def _read(file: Path) -> Iterator[tuple[int, ProblemRecord]]:
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for line in lines:
            try:
                values = json.loads(line)
            except ValueError:
                continue
            responses = tuple(
                Response(
                    problem=values["problem"],
                    data_source=values["data_source"],
                    acc=r["acc"],
                    answer=r["answer"],
                    length=r["length"],
                    text=r["response"],
                    verifier_failure=r.get("verifier_failure", ""),
                )
                for r in values["responses"]
            )
            yield values["row"], ProblemRecord(**(values | {"responses": responses}))


def open_evaluation(directory: Path, facts: Mapping[str, Any], *, fresh: bool) -> ProblemFile:
    """Begin an evaluation in a directory, or go on with the one that is there.

    Args:
        directory: made if it is not there.
        facts: written to ``evaluation.json``; under ``settings`` a flat dict of all that the answers depend on.
        fresh: discard what is there.

    Raises:
        UserError: what is there was made with other settings; they are named.
    """
    directory.mkdir(parents=True, exist_ok=True)
    record, problems = directory / RECORD_FILE, directory / PROBLEMS_FILE
    if fresh:
        problems.unlink(missing_ok=True)
    elif record.is_file() and problems.is_file():
        changed = differences(json.loads(record.read_text())["settings"], json.loads(json.dumps(facts["settings"])))
        if changed:
            raise UserError(
                f"{directory} holds an evaluation with other settings ({'; '.join(changed)}): name another --output, or "
                "discard it with --fresh."
            )
    _write_whole(record, json.dumps(facts, indent=2) + "\n")
    return ProblemFile(problems)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key was old, is new`` for each setting that differs."""
    nothing = "not set"
    return [
        f"{key} was {before.get(key, nothing)}, is {now.get(key, nothing)}"
        for key in sorted({*before, *now})
        if before.get(key, nothing) != now.get(key, nothing)
    ]


def _write_whole(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text)
    temporary.replace(file)


def write_summary(directory: Path, facts: Mapping[str, Any]) -> Path:
    """Write ``summary.json``, whole or not at all."""
    file = directory / SUMMARY_FILE
    _write_whole(file, json.dumps(facts, indent=2) + "\n")
    return file
