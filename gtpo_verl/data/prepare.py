"""Converts a data set to a parquet file in verl's schema, checked for repetitions, conflicts and overlap."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gtpo_verl import __version__
from gtpo_verl.data.prompts import restyle, unwrap, wrap
from gtpo_verl.data.sources import Dataset, Row, is_missing, read
from gtpo_verl.data.table import ParquetFile
from gtpo_verl.data.traces import RESPONSES
from gtpo_verl.errors import UserError, first_line
from gtpo_verl.files import read_json, sha256_of, write_atomically, write_json

MANIFEST_FORMAT = 1
HUB_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class Request:
    """What to prepare.

    ``files``: local files; without any, those of ``dataset`` from the hub, at ``revision``. ``against``: files whose
    problems are left out. ``style``: see :mod:`gtpo_verl.data.prompts`, None leaves prompts unchanged. ``conflicts``:
    ``drop`` or ``first``, for a problem that occurs with different answers. ``guide_column``: of responses of a guiding
    policy, which becomes ``guide_responses``.
    """

    name: str
    dataset: Dataset | None
    files: tuple[Path, ...]
    output: Path
    against: tuple[Path, ...] = ()
    style: str | None = None
    conflicts: str = "drop"
    data_source: str | None = None
    problem_column: str | None = None
    answer_column: str | None = None
    guide_column: str | None = None
    revision: str = "main"

    @property
    def manifest(self) -> Path:
        return self.output.with_name(self.output.name + ".manifest.json")

    def options(self) -> dict[str, Any]:
        """What the manifest records of the request besides the files."""
        return {
            "format": MANIFEST_FORMAT,
            "name": self.name,
            "style": self.style,
            "conflicts": self.conflicts,
            "data_source": self.data_source,
            "columns": [self.problem_column, self.answer_column],
            "revision": None if self.files else self.revision,
            **({"guide_column": self.guide_column} if self.guide_column else {}),
        }


def prepare(request: Request) -> "Summary":
    """Write the parquet file and its manifest. Raises UserError: the hub cannot be reached, a file is not what it
    should be, or no problem is left.
    """
    dataset, files, commit = request.dataset, list(request.files), None
    if request.output.exists() and _facts(request) is None:
        raise UserError(
            f"{request.output} exists, and was not written by prepare-data: remove it, or choose another --output."
        )
    if not files:
        assert dataset is not None
        files, commit = download(dataset, request.revision)
    columns = {name: getattr(request, name) for name in ("problem_column", "answer_column", "guide_column")}
    aime = dataset is not None and dataset.aime
    rows = (row for file in files for row in _with_progress(file, read(file, **columns, aime=aime)))
    others = (row for file in request.against for row in read(file, request.problem_column, answers=False))
    seen, whole = set(), 0
    for row in others:  # of which there may be millions
        seen.add(loose_key(row.problem))
        whole += row.prompt is not None and _style(row.prompt) is None
    prepared, summary = select(rows, seen, conflicts=request.conflicts)
    summary.whole_prompts = whole
    if not prepared:
        raise UserError(f"{request.name}: no problem is left of {summary.rows} rows; nothing was written.")
    name = request.data_source or (dataset.data_source if dataset else None)
    summary.style, table = _table(prepared, name or files[0].stem, request.style, rename=name is not None)
    _write_parquet(request.output, table)
    facts = {
        "request": request.options(),
        "gtpo_verl": __version__,
        "hub": {"repository": dataset.repository, "commit": commit} if dataset and commit else None,
        "inputs": [_checksum(file) for file in files],
        "against": [_checksum(file) for file in request.against],
        "output": _checksum(request.output),
        "summary": asdict(summary),
    }
    write_json(request.manifest, facts)
    return summary


def is_current(request: Request) -> bool:
    """Whether the output was prepared by the same request from the same files, and has not changed since."""
    facts = _facts(request)
    if facts is None or not request.output.is_file():
        return False
    inputs = [_checksum(file) for file in request.files]
    # without local files the hub is not asked again: the manifest names the commit that was read
    same_inputs = facts["inputs"] == inputs or not inputs
    wanted = (request.options(), [_checksum(file) for file in request.against], _checksum(request.output))
    return same_inputs and (facts["request"], facts["against"], facts["output"]) == wanted


def _facts(request: Request) -> dict[str, Any] | None:
    """The manifest of the last time; None where there is none, or another file of its name."""
    with suppress(ValueError):
        found = read_json(request.manifest)
        if isinstance(found, dict) and {"request", "inputs", "against", "output"} <= set(found):
            return found
    return None


def download(dataset: Dataset, revision: str) -> tuple[list[Path], str]:
    """Get the files of a data set from the hub or its cache, and the commit they belong to. Raises UserError: the hub
    cannot be reached, or refuses the request.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "etag_timeout": HUB_TIMEOUT}
    try:
        files = [Path(hf_hub_download(dataset.repository, name, **options)) for name in dataset.files]
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{dataset.repository} could not be downloaded ({first_line(error)}): get {' and '.join(dataset.files)} "
            f"from huggingface.co/datasets/{dataset.repository} on a machine with a network, and pass --from FILE."
        ) from error
    return files, files[0].parts[files[0].parts.index("snapshots") + 1]


def loose_key(problem: str) -> str:
    """A key in which case, dollar signs, and LaTeX's spacing and sizing do not count either, to find overlaps."""
    text = unicodedata.normalize("NFKC", problem).casefold()
    text = re.sub(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:! ]", "", text)
    return re.sub(r"[\s$]|\\[()\[\]]", "", text)


@dataclass
class Summary:
    """What the checks found. ``repetitions``: the smallest and the largest number of rows of a kept problem.
    ``incomplete``: rows without a problem or an answer. ``whole_prompts``: rows of ``--against`` whose instruction is
    not known, and is compared as part of the problem.
    """

    rows: int = 0
    problems: int = 0
    repetitions: tuple[int, int] = (1, 1)
    incomplete: int = 0
    conflicting: int = 0
    overlapping: int = 0
    whole_prompts: int = 0
    style: dict[str, int] = field(default_factory=dict)
    conflict_examples: list[str] = field(default_factory=list)


def select(rows: Iterable[Row], seen: set[str], *, conflicts: str) -> tuple[list[Row], Summary]:
    """Keep the first row of every problem (white space and Unicode composition do not count, system messages do),
    except for what is rejected; ``seen``: loose keys of the problems to leave out, under any system message.
    """
    summary = Summary()
    first: dict[tuple[str, str], Row] = {}
    times: dict[tuple[str, str], int] = {}
    conflicting: set[tuple[str, str]] = set()
    for row in rows:
        summary.rows += 1
        if is_missing(row.answer) or is_missing(row.problem):
            summary.incomplete += 1
            continue
        problem = " ".join(unicodedata.normalize("NFC", row.problem).split())
        key = (problem, row.system)
        times[key] = times.get(key, 0) + 1
        if first.setdefault(key, row).answer != row.answer:
            conflicting.add(key)
    overlapping = {key for key in first if seen and loose_key(key[0]) in seen}
    summary.overlapping, summary.conflicting = len(overlapping), len(conflicting)
    summary.conflict_examples = sorted(problem[:100] for problem, _ in conflicting)[:3]
    dropped = overlapping | (conflicting if conflicts == "drop" else set())
    kept = [key for key in first if key not in dropped]
    summary.problems = len(kept)
    if kept:
        summary.repetitions = (min(times[key] for key in kept), max(times[key] for key in kept))
    return [first[key] for key in kept], summary


def _table(
    rows: Sequence[Row], data_source: str, style: str | None, *, rename: bool
) -> tuple[dict[str, int], dict[str, list[Any]]]:
    """The number of prompts by the style in which they ask for the answer, and the columns of verl's schema."""
    records, styles = [], {"answer": 0, "boxed": 0, "their own": 0}
    named = any(row.identity is not None for row in rows)
    for index, row in enumerate(rows):
        if row.prompt is None:
            prompt = [{"role": "user", "content": wrap(row.problem, style or "answer")}]
            record: dict[str, Any] = {"data_source": data_source, "prompt": prompt, "ability": "math"}
            extra: dict[str, Any] = {}
        else:
            last = max(i for i, message in enumerate(row.prompt) if message["role"] == "user")
            prompt = [dict(message) for message in row.prompt]
            prompt[last]["content"] = restyle(prompt[last]["content"], style)
            record = {"data_source": data_source, "ability": "math"} | row.rest | {"prompt": prompt}
            record |= {"data_source": data_source} if rename else {}
            extra = dict(row.rest.get("extra_info") or {})
        styles[_style(prompt) or "their own"] += 1
        if row.guide is not None:
            record[RESPONSES] = row.guide
        record["reward_model"] = {"style": "rule"} | (row.rest.get("reward_model") or {}) | {"ground_truth": row.answer}
        # index is the row number, as in verl's own data sets; the identifier of the source is kept as id
        record["extra_info"] = extra | {"index": index} | ({"id": row.identity} if named else {})
        records.append(record)
    names = list(dict.fromkeys(name for record in records for name in record))
    found = {name: count for name, count in styles.items() if count}
    return found, {name: [record.get(name) for record in records] for name in names}


def _style(prompt: Sequence[dict[str, Any]]) -> str | None:
    """The style in which the last message of the user asks for the answer, None where it is not known."""
    return unwrap(next(message["content"] for message in reversed(prompt) if message["role"] == "user"))[1]


def _write_parquet(output: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise UserError(
                f"the column {name} cannot be written: {first_line(error)}. All its values need one type, such as text."
            ) from error
    try:
        write_atomically(output, lambda path: pq.write_table(pa.table(arrays), path))
    except pa.ArrowNotImplementedError as error:  # an object without a field
        raise UserError(f"{output} cannot be written: {first_line(error).rstrip('.')}.") from error


def _checksum(file: Path) -> dict[str, Any]:
    return {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}


def _with_progress(file: Path, rows: Iterable[Row]) -> Iterable[Row]:
    """The rows of a file, under a progress bar."""
    from rich.progress import track

    total = len(ParquetFile(str(file))) if file.suffix == ".parquet" else None
    return track(rows, f"Reading {file.name}", total=total, transient=True)
