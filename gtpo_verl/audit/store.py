"""The files of an audit: sampled responses, counts of correct continuations, and what they were sampled with.

The parquet files hold all that was sampled, so that figures are computed again without a model.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from gtpo_verl.audit.plan import Plan
from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json, write_atomically, write_json
from gtpo_verl.runs.directory import same_settings

ROLLOUTS_FILE, VALUES_FILE, BRANCHES_FILE = "rollouts.parquet", "values.parquet", "branches.parquet"
GRADIENTS_FILE = "gradients.npz"
RECORD_FILE, LOG_FILE = "audit.json", "audit.log"
OF_PROMPT = -1  # the sample of a value that belongs to the prompt, V(0)
OF_BRANCH = 3  # the stage of a count behind a branch
WRITE_EVERY = 3.0  # seconds

Record = TypeVar("Record")


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    row: of the data. place: of the prompt in the order of sampling. sample: its number among those of the prompt.
    cluster: what intervals resample. texts: of each token. entropies in nats. truncated: by the length limit.
    """

    row: int
    place: int
    sample: int
    cluster: str
    prompt: str
    tokens: list[int]
    texts: list[str]
    entropies: list[float]
    log_probs: list[float]
    correct: bool
    score: float
    truncated: bool


@dataclass(frozen=True)
class Count:
    """Correct continuations at one point of one response.

    place: tokens of the response before the point. half: 0 or 1. stage: 1, or 2 for what some responses get in
    addition; `OF_BRANCH` behind a branch from here, whose number stands for the half. decoded: tokens sampled.
    """

    row: int
    sample: int
    place: int
    half: int
    stage: int
    trials: int
    successes: int
    decoded: int
    truncated: int

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        return self.row, self.sample, self.place, self.half, self.stage


@dataclass(frozen=True)
class Branch:
    """Another step from one point of a response: as many tokens as its own step has, unless the policy ended there.

    place: tokens of the response before it. number: among those of the point. correct: the verdict, where it ended.
    """

    row: int
    sample: int
    place: int
    number: int
    tokens: list[int]
    ended: bool
    correct: bool

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.row, self.sample, self.place, self.number


class Store:
    """An audit's directory, made or opened for going on; `fresh` discards what is there.

    facts: written to ``audit.json``; ``settings`` is a flat dict of all that the samples depend on. Raises UserError
    for an audit with other settings, which it names.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.directory = directory
        before = None if fresh else read_json(directory / RECORD_FILE)
        if before is not None:
            same_settings(directory, "an audit", before["settings"], facts["settings"])
        self.facts = dict(facts) if before is None else dict(facts) | {"seconds": before["seconds"]}
        directory.mkdir(parents=True, exist_ok=True)
        if before is None:
            for name in (ROLLOUTS_FILE, VALUES_FILE, BRANCHES_FILE, GRADIENTS_FILE):
                (directory / name).unlink(missing_ok=True)
        self.rollouts = read_records(directory / ROLLOUTS_FILE, Rollout)
        self.counts = {each.key: each for each in read_records(directory / VALUES_FILE, Count)}
        self.branches = {each.key: each for each in read_records(directory / BRANCHES_FILE, Branch)}
        self._written = time.monotonic()
        write_json(directory / RECORD_FILE, self.facts)

    def add(self, *records: Rollout | Count | Branch) -> None:
        """Keep what was sampled of one prompt or point; on disk within seconds, or when `flush` returns."""
        for record in records:
            if isinstance(record, Rollout):
                self.rollouts.append(record)
            elif isinstance(record, Count):
                self.counts[record.key] = record
            else:
                self.branches[record.key] = record
        if time.monotonic() - self._written > WRITE_EVERY:
            self.flush()

    def flush(self) -> None:
        """Write everything."""
        _write(self.directory / ROLLOUTS_FILE, self.rollouts, Rollout)
        if self.counts:
            _write(self.directory / VALUES_FILE, list(self.counts.values()), Count)
        if self.branches:
            _write(self.directory / BRANCHES_FILE, list(self.branches.values()), Branch)
        self._written = time.monotonic()

    def record(self, results: Mapping[str, Any]) -> None:
        """Write the results beside the facts."""
        write_json(self.directory / RECORD_FILE, self.facts | dict(results))


def reopen(directory: Path) -> Store:
    """An audit that was made before, to compute its figures again. Raises UserError where there is none."""
    facts = read_json(directory / RECORD_FILE)
    # a command that was stopped before its gradients has left those of the one before, without their facts
    file = GRADIENTS_FILE if facts is not None and "parameters" in facts else VALUES_FILE
    if facts is None or not (directory / file).is_file():
        raise UserError(
            f"{directory} holds no finished audit: --reanalyse takes the directory that one was written to."
        )
    return Store(directory, facts)


_TYPES = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bool: pa.bool_(),
    list[int]: pa.list_(pa.int32()),
    list[float]: pa.list_(pa.float32()),
    list[str]: pa.list_(pa.string()),
}


def _write(file: Path, records: list[Any], kind: type) -> None:
    schema = pa.schema([(item.name, _TYPES[item.type]) for item in fields(kind)])  # type: ignore[index]
    table = pa.Table.from_pylist([vars(record) for record in records], schema=schema)
    write_atomically(file, lambda path: pq.write_table(table, path))


def read_records(file: Path, kind: type[Record]) -> list[Record]:
    """The records of a file; none where there is no file."""
    return [kind(**row) for row in pq.read_table(file).to_pylist()] if file.is_file() else []


def as_facts(plan: Plan) -> dict[str, Any]:
    """A plan's numbers as settings of an audit, by option."""
    return {f"--{name.replace('_', '-')}": value for name, value in asdict(plan).items()}


def plan_of(store: Store) -> Plan:
    """The plan that an audit was sampled by."""
    settings = store.facts["settings"]
    given = {item.name: settings.get(f"--{item.name.replace('_', '-')}") for item in fields(Plan)}
    return Plan(**{name: number for name, number in given.items() if number is not None})  # older ones lack some
