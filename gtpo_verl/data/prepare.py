"""``gtpo-verl prepare-data``: a data set from the hub or from files to a parquet file in verl's schema, checked and recorded."""

import argparse
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gtpo_verl import __version__
from gtpo_verl.data.prompts import STYLES, restyle, wrap
from gtpo_verl.data.sources import DATASETS, Dataset, Row, read, row_count
from gtpo_verl.errors import UserError

MANIFEST_FORMAT = 1
HUB_TIMEOUT = 10.0  # seconds

EPILOG = """\
examples:
  gtpo-verl prepare-data aime-2024                                  from the hub to data/aime-2024.parquet
  gtpo-verl prepare-data dapo-math-17k --against data/aime-2024.parquet
  gtpo-verl prepare-data aime-2025 --from aime2025-I.jsonl aime2025-II.jsonl      without a network
  gtpo-verl prepare-data parquet mine.parquet --problem-column text --answer-column label --style boxed

Rows that repeat a problem with the same answer are collapsed to the first (DAPO's files hold every problem about 100 times, its
AIME file 32 times: draw 32 samples with actor_rollout_ref.rollout.val_kwargs.n=32 instead). Problems that occur with different
answers, and rows without an answer, are left out. FILE.manifest.json beside the output holds checksums of what went in and came
out; a second call with nothing changed does nothing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("name", choices=[*DATASETS, "parquet"], help="a data set, or `parquet` for files of your own")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="with `parquet`: .parquet or .jsonl files")
    parser.add_argument(
        "--from", dest="source", nargs="+", type=Path, metavar="FILE", help="local files in place of the hub's"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: data/NAME.parquet")
    parser.add_argument(
        "--style",
        choices=list(STYLES),
        help="how the prompt asks for the answer, to match the verifier: a last line `Answer: ...` or a \\boxed{} one "
        "(default: prompts that have an instruction keep it, others get `answer`)",
    )
    parser.add_argument(
        "--against", nargs="+", type=Path, default=[], metavar="FILE", help="leave out problems that are in these files"
    )
    parser.add_argument(
        "--conflicts",
        choices=("drop", "first"),
        default="drop",
        help="problems with different answers: leave them out, or keep the first (default: %(default)s)",
    )
    parser.add_argument("--data-source", metavar="NAME", help="the name under which figures are logged")
    parser.add_argument("--problem-column", metavar="NAME", help="default: problem or question")
    parser.add_argument("--answer-column", metavar="NAME", help="default: answer")
    parser.add_argument("--revision", default="main", metavar="COMMIT", help="of the hub's repository")
    parser.add_argument("--force", action="store_true", help="prepare again even if nothing has changed")


def run(args: argparse.Namespace) -> int:
    """Prepare a data set; returns the exit code."""
    dataset = DATASETS.get(args.name)
    files = _local_files(args)
    output = (args.output or Path("data") / f"{args.name if dataset else files[0].stem}.parquet").resolve()
    if output in [file.resolve() for file in [*files, *args.against]]:
        raise UserError(f"--output {output} is one of the files that are read: give another name.")
    request = {
        "format": MANIFEST_FORMAT,
        "name": args.name,
        "style": args.style,
        "conflicts": args.conflicts,
        "data_source": args.data_source,
        "columns": [args.problem_column, args.answer_column],
        "revision": None if files else args.revision,
    }
    inputs = [_checksum(file) for file in files]
    against = [_checksum(file) for file in args.against]
    manifest_file = output.with_name(output.name + ".manifest.json")
    if not args.force and _is_current(manifest_file, output, request, inputs, against):
        print(f"{output} is up to date (--force prepares it again).")
        return 0

    commit = None
    if not files:
        assert dataset is not None
        files, commit = download(dataset, args.revision)
        inputs = [_checksum(file) for file in files]
    rows = (
        row
        for file in files
        for row in _with_progress(file, args.problem_column, args.answer_column, dataset is not None and dataset.aime)
    )
    seen = {loose_key(row.problem) for file in args.against for row in read(file)}
    prepared, summary = select(rows, seen, conflicts=args.conflicts)
    if not prepared:
        raise UserError(f"{args.name}: no problem is left of {summary.rows} rows; nothing was written.")
    name = args.data_source or (dataset.data_source if dataset else None)
    summary.style, table = _table(prepared, name or files[0].stem, args.style, rename=name is not None)
    _write(table, output)
    facts = {
        "request": request,
        "gtpo_verl": __version__,
        "hub": {"repository": dataset.repository, "commit": commit} if dataset and commit else None,
        "inputs": inputs,
        "against": against,
        "output": _checksum(output),
        "summary": asdict(summary),
    }
    _write_text(manifest_file, json.dumps(facts, indent=2) + "\n")
    _report(output, summary, dataset, args.conflicts)
    return 0


def _local_files(args: argparse.Namespace) -> list[Path]:
    if args.name == "parquet":
        if args.source:
            raise UserError("--from is for a data set of the hub: with `parquet`, name the files behind it.")
        if not args.files:
            raise UserError("prepare-data parquet: name the files to prepare.")
        files: list[Path] = args.files
    else:
        if args.files:
            raise UserError(f"prepare-data {args.name}: local files are given with --from {args.files[0]}.")
        files = args.source or []
    for file in [*files, *args.against]:
        if not file.is_file():
            raise UserError(f"{file}: no such file.")
    return files


def download(dataset: Dataset, revision: str) -> tuple[list[Path], str]:
    """The files of a data set from the hub's cache or the hub, and the commit they belong to.

    Raises:
        UserError: the hub cannot be reached or refuses.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    files = []
    for name in dataset.files:
        try:
            files.append(
                Path(
                    hf_hub_download(
                        dataset.repository, name, repo_type="dataset", revision=revision, etag_timeout=HUB_TIMEOUT
                    )
                )
            )
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            wanted = " and ".join(dataset.files)
            raise UserError(
                f"{dataset.repository} could not be downloaded ({str(error).strip().splitlines()[0]}): get {wanted} of "
                f"huggingface.co/datasets/{dataset.repository} where there is a network, and pass --from FILE."
            ) from error
    return files, files[0].parts[files[0].parts.index("snapshots") + 1]


# -------------------------------------------------------------------- checks


def strict_key(problem: str) -> str:
    """Equal for texts that differ in white space or in how Unicode composes a letter."""
    return " ".join(unicodedata.normalize("NFC", problem).split())


def loose_key(problem: str) -> str:
    """Equal for texts that also differ in case, dollar signs, and LaTeX's spacing and sizing: for overlaps between data sets."""
    text = unicodedata.normalize("NFKC", problem).casefold()
    text = re.sub(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:! ]", "", text)
    return re.sub(r"[\s$]|\\[()\[\]]", "", text)


@dataclass
class Summary:
    """What the checks found. ``repetitions``: the fewest and the most rows of a kept problem."""

    rows: int = 0
    problems: int = 0
    repetitions: tuple[int, int] = (1, 1)
    without_answer: int = 0
    conflicting: int = 0
    overlapping: int = 0
    style: dict[str, int] = field(default_factory=dict)
    conflict_examples: list[str] = field(default_factory=list)


def select(rows: Iterable[Row], seen: set[str], *, conflicts: str) -> tuple[list[Row], Summary]:
    """Keep the first row of every problem, leave out what the checks reject, and count.

    Args:
        rows: read once, never all in memory.
        seen: loose keys of the problems that must not be in it.
        conflicts: ``drop`` or ``first``, what to do with a problem that occurs with different answers.
    """
    summary = Summary()
    first: dict[str, Row] = {}
    times: dict[str, int] = {}
    conflicting: set[str] = set()
    for row in rows:
        summary.rows += 1
        if row.answer is None or (isinstance(row.answer, str) and not row.answer.strip()):
            summary.without_answer += 1
            continue
        key = strict_key(row.problem)
        times[key] = times.get(key, 0) + 1
        if first.setdefault(key, row).answer != row.answer:
            conflicting.add(key)
    overlapping = {key for key in first if seen and loose_key(key) in seen}
    summary.overlapping = len(overlapping)
    summary.conflicting = len(conflicting)
    summary.conflict_examples = sorted(key[:100] for key in conflicting)[:3]
    dropped = overlapping | (conflicting if conflicts == "drop" else set())
    kept = [key for key in first if key not in dropped]
    summary.problems = len(kept)
    if kept:
        summary.repetitions = (min(times[key] for key in kept), max(times[key] for key in kept))
    return [first[key] for key in kept], summary


# -------------------------------------------------------------------- output


def _table(
    rows: Sequence[Row], data_source: str, style: str | None, *, rename: bool
) -> tuple[dict[str, int], dict[str, list[Any]]]:
    """Columns of verl's schema, and how many prompts ask for the answer in which style."""
    from gtpo_verl.data.prompts import unwrap

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
            if rename:
                record["data_source"] = data_source
            extra = dict(row.rest.get("extra_info") or {})
        question = next(message["content"] for message in reversed(prompt) if message["role"] == "user")
        styles[unwrap(question)[1] or "their own"] += 1
        record["reward_model"] = {"style": "rule"} | (row.rest.get("reward_model") or {}) | {"ground_truth": row.answer}
        # verl's index is this row's number; what the source called it is kept beside it
        record["extra_info"] = extra | {"index": index} | ({"id": row.identity} if named else {})
        records.append(record)
    names = list(dict.fromkeys(name for record in records for name in record))
    return (
        {name: count for name, count in styles.items() if count},
        {name: [record.get(name) for record in records] for name in names},
    )


def _write(columns: dict[str, list[Any]], output: Path) -> None:
    """Write the parquet file, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(pa.table(columns), temporary)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _write_text(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(file)


def _checksum(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return {"file": file.name, "bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _is_current(
    manifest_file: Path, output: Path, request: dict[str, Any], inputs: list[Any], against: list[Any]
) -> bool:
    if not (manifest_file.is_file() and output.is_file()):
        return False
    facts = json.loads(manifest_file.read_text())
    # without local files the hub is not asked again: the manifest names the commit it was prepared from
    same_inputs = facts["inputs"] == inputs or not inputs
    wanted = (request, against, _checksum(output))
    return same_inputs and (facts["request"], facts["against"], facts["output"]) == wanted


def _with_progress(file: Path, problem: str | None, answer: str | None, aime: bool) -> Iterator[Row]:
    from rich.progress import track

    rows = read(file, problem, answer, aime=aime)
    return iter(track(rows, f"Reading {file.name}", total=row_count(file), transient=True))


def _report(output: Path, summary: Summary, dataset: Dataset | None, conflicts: str) -> None:
    from rich.console import Console
    from rich.table import Table

    low, high = summary.repetitions
    repeated = "once each" if high == 1 else f"{low} times each" if low == high else f"{low} to {high} times each"
    table = Table("", "", title=str(output), show_header=False, title_justify="left")
    table.add_row("rows read", f"{summary.rows:,}")
    table.add_row("problems kept", f"{summary.problems:,}, {repeated} in what was read")
    table.add_row("left out: rows without an answer", f"{summary.without_answer:,}")
    label = "left out: problems" if conflicts == "drop" else "first row kept: problems"
    table.add_row(f"{label} with different answers", f"{summary.conflicting:,}")
    table.add_row("left out: problems in --against", f"{summary.overlapping:,}")
    table.add_row("prompts ask for", ", ".join(f"{name}: {count:,}" for name, count in summary.style.items()))
    console = Console(soft_wrap=True)
    console.print(table)
    if high > 1 and dataset is not None and dataset.problems is not None:
        console.print(
            f"Each problem is kept once. For avg@{high}, draw {high} samples: "
            f"actor_rollout_ref.rollout.val_kwargs.n={high}",
            markup=False,
        )
    for example in summary.conflict_examples:
        console.print(f"different answers: {example}", markup=False)
    if dataset is not None and dataset.problems not in (None, summary.problems):
        console.print(f"warning: {dataset.repository} has {dataset.problems} problems, {summary.problems} were kept.")
