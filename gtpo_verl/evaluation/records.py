"""The files of an evaluation: its settings, one line per finished problem, and its summary."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.evaluation.summary import Figure, Sample, paired_changes
from gtpo_verl.files import append_json_line, read_json, read_json_lines, reading, write_json, write_text
from gtpo_verl.runs.correctness import is_correct
from gtpo_verl.runs.directory import differences, same_settings

PROBLEMS_FILE = "problems.jsonl"
RECORD_FILE = "evaluation.json"


@dataclass(frozen=True)
class Problem:
    """What a prompt asks: a digest that equal problems share, and the cluster of related problems it belongs to, which
    is ``extra_info["cluster"]`` of the row of the data.
    """

    key: str
    cluster: str | None = None

    @classmethod
    def of(cls, prompt: Any, ground_truth: Any, extra_info: Any) -> "Problem":
        """The problem of a row of the data."""
        cluster = (extra_info or {}).get("cluster")
        return cls(problem_key(list(prompt), ground_truth), None if cluster is None else str(cluster))


@dataclass(frozen=True)
class Response:
    """One response with its verdict; ``length`` in tokens, ``problem`` and ``cluster`` as in `Problem`.

    ``acc`` is None where the verifier returned none, ``answer`` where it extracted none. ``verifier_failure`` says why
    the verifier failed on it (the project's own verifiers do), and is empty where it did not.
    """

    problem: str
    data_source: str
    acc: float | None
    answer: str | None
    length: int
    text: str | None = None
    verifier_failure: str = ""
    cluster: str | None = None


def problem_key(prompt: Any, ground_truth: Any) -> str:
    """A digest of prompt and ground truth: rows that agree in both are the same problem, in any file."""
    identity = json.dumps([prompt, ground_truth], sort_keys=True, default=str)
    return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()


def to_sample(response: Response, *, limit: int, threshold: float) -> Sample:
    """Score a response: correct from ``acc`` >= ``threshold``, truncated from ``limit`` tokens."""
    return Sample(
        problem=response.problem,
        data_source=response.data_source,
        correct=is_correct(response.acc, threshold),
        answer=response.answer,
        length=response.length,
        truncated=response.length >= limit,
        unjudged=bool(response.verifier_failure),
        cluster=response.cluster,
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
    cluster: str | None = None

    def samples(self, *, limit: int, threshold: float) -> list[Sample]:
        """The samples of this row, failed ones included."""
        failed = Sample(self.problem, self.data_source, correct=False, failed=True, cluster=self.cluster)
        samples = [to_sample(response, limit=limit, threshold=threshold) for response in self.responses]
        return samples + [failed] * self.failed


class ProblemFile:
    """``problems.jsonl``, to which finished problems are appended; opening it drops a line that a crash has torn."""

    def __init__(self, file: Path) -> None:
        self.file = file
        if not file.is_file():
            self.records: dict[int, ProblemRecord] = {}
            return
        lines = [value for _, value in read_json_lines(file)]
        with reading(file):
            self.records = {value["row"]: _record(value) for value in lines if value is not None}
        if len(lines) != len(self.records):
            write_text(file, "".join(json.dumps(_values(record)) + "\n" for record in self.records.values()))

    def add(self, record: ProblemRecord) -> None:
        """Keep a finished problem, on disk when this returns."""
        append_json_line(self.file, _values(record))
        self.records[record.row] = record

    def samples(self, *, limit: int, threshold: float) -> list[Sample]:
        """The samples of all rows."""
        records = self.records.values()
        return [sample for record in records for sample in record.samples(limit=limit, threshold=threshold)]


def _values(record: ProblemRecord) -> Any:
    """A record as plain JSON; what a data set holds besides (dates, decimals) is written as text."""
    responses = [
        {"acc": each.acc, "answer": each.answer, "length": each.length, "response": each.text}
        | ({"verifier_failure": each.verifier_failure} if each.verifier_failure else {})
        for each in record.responses
    ]
    return json.loads(json.dumps(asdict(record) | {"responses": responses}, default=str))


def _record(values: Mapping[str, Any]) -> ProblemRecord:
    of_row = {name: values[name] for name in ("problem", "data_source", "cluster")}
    responses = tuple(Response(**of_row, text=each.pop("response"), **each) for each in values["responses"])
    return ProblemRecord(**(dict(values) | {"responses": responses}))


def open_evaluation(directory: Path, facts: Mapping[str, Any], *, fresh: bool) -> ProblemFile:
    """Start an evaluation in a directory, or resume the one that is there, which `fresh` discards. facts: written to
    ``evaluation.json``; ``settings`` is a flat dict of all that the responses depend on. Raises UserError where the
    earlier evaluation has other settings, which it names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    record, problems = directory / RECORD_FILE, directory / PROBLEMS_FILE
    if fresh:
        problems.unlink(missing_ok=True)
    elif record.is_file() and problems.is_file():
        same_settings(directory, "an evaluation", _recorded_settings(directory), facts["settings"])
        former = read_json(record)
        if other := differences(former.get("versions") or {}, facts.get("versions") or {}):
            print(f"note: this evaluation goes on with other versions ({other}); --fresh begins it anew.", flush=True)
        attempt = {name: former.get(name) for name in ("created", "command", "versions", "hardware")}
        facts = {**facts, "earlier": [*former.get("earlier", []), attempt]}
    write_json(record, facts)
    return ProblemFile(problems)


def _recorded_settings(directory: Path) -> dict[str, Any]:
    with reading(directory / RECORD_FILE):
        return dict(read_json(directory / RECORD_FILE)["settings"])


def changes_since(
    directory: Path, settings: Mapping[str, Any], samples: Sequence[Sample], *, limit: int, threshold: float
) -> dict[str, Figure]:
    """The change in accuracy, by data source, from the evaluation in ``directory`` to ``samples``; empty where there is
    none, where it lacks a problem of these, or where it has other settings (another model aside).
    """
    if not (directory / PROBLEMS_FILE).is_file():
        return {}
    other_model = {"model": None}
    now = json.loads(json.dumps(settings))
    if differences(_recorded_settings(directory) | other_model, now | other_model):
        return {}
    before = ProblemFile(directory / PROBLEMS_FILE).samples(limit=limit, threshold=threshold)
    if lacking := {sample.problem for sample in samples} - {sample.problem for sample in before}:
        print(f"note: {directory} lacks {len(lacking)} of these problems, so the change since then is not shown.")
        return {}
    return paired_changes(before, samples)
