"""Responses that a guiding policy gave to the prompts of a file, kept as they come in ``FILE.sampled.jsonl`` (settings,
then a prompt a line), from which an interrupted command goes on; and the file with them as columns.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.data.traces import LOG_PROBS, RESPONSES
from gtpo_verl.files import append_json_line, read_json_lines, reading, write_atomically, write_text
from gtpo_verl.runs.directory import same_settings


@dataclass(frozen=True)
class Answers:
    """What the guide answered to the prompt of a row: token ids with the end, and their log-probs, of those responses
    that are kept; and how many were sampled, correct, and cut off by the limit.
    """

    row: int
    responses: list[list[int]]
    log_probs: list[list[float]]
    sampled: int
    correct: int
    truncated: int


class TraceFile:
    """The answers that were sampled so far with these settings, in a file that is made if need be; fresh: discard them.

    Raises UserError: the file has other settings, which are named; or it is damaged.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.file = file
        self.answers: dict[int, Answers] = {}
        if file.is_file() and not fresh:
            with reading(file):
                lines = [line for _, line in read_json_lines(file) if line is not None]
                same_settings(file, "responses", lines[0]["settings"], settings)
                self.answers = {line["row"]: Answers(**line) for line in lines[1:]}
        else:
            write_text(file, json.dumps({"settings": dict(settings)}) + "\n")

    def add(self, answers: Answers) -> None:
        """Keep the answers to a prompt."""
        append_json_line(self.file, asdict(answers))
        self.answers[answers.row] = answers


def write_with_traces(source: Path, output: Path, answers: Iterable[Answers]) -> None:
    """Write the rows of a parquet file with the columns `guide_responses` and `guide_log_probs`, atomically.

    Columns of these names that it has are replaced; a row without answers gets empty lists.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    by_row = {each.row: each for each in answers}
    columns = ((RESPONSES, "responses", pa.int32()), (LOG_PROBS, "log_probs", pa.float32()))
    for name, field, kind in columns:
        values = [getattr(by_row[row], field) if row in by_row else [] for row in range(len(table))]
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pa.array(values, type=pa.list_(pa.list_(kind))))
    write_atomically(output, lambda path: pq.write_table(table, path))
