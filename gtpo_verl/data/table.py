"""Data files as verl's data set reads them: `.parquet`, `.json` and `.jsonl`, told apart by the end of the name."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError, first_line

FORMATS = (".parquet", ".json", ".jsonl")
ROWS_AT_ONCE = 256


@contextmanager
def _reading(file: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{file} is not a parquet file, or it is damaged ({first_line(error):.120}): make it again."
        ) from error


class Table:
    """The rows of a data file, read as they are asked for, and its schema (pyarrow)."""

    schema: Any

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows, of these columns those that there are."""
        raise NotImplementedError

    def first_rows(self, kind: Callable[[dict[str, Any]], Any], columns: Sequence[str]) -> list[dict[str, Any]]:
        """The first row of each kind, of these columns those that there are."""
        found: dict[Any, dict[str, Any]] = {}
        for row in self.rows(columns):
            found.setdefault(kind(row), row)
        return list(found.values())

    def empty_row(self, column: str) -> int | None:
        """The first row, counted from 0, whose value is missing, null or an empty list; None where all have one."""
        rows = enumerate(self.rows([column]))
        return next((number for number, row in rows if row.get(column) in (None, [])), None)


class ParquetFile(Table):
    """A parquet file; rows are read as they are asked for. Raises UserError: it is damaged, or none."""

    def __init__(self, file: str) -> None:
        import pyarrow.parquet as pq

        self._name = file
        with _reading(file):
            self._file = pq.ParquetFile(file)
        self.schema = self._file.schema_arrow

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        present = [name for name in columns if name in self.schema.names]
        with _reading(self._name):
            for batch in self._file.iter_batches(batch_size=ROWS_AT_ONCE, columns=present):
                yield from batch.to_pylist()


class JsonFile(Table):
    """A JSON file, one object a line or a list of objects. Its columns are those of the first row, their types those of
    the first value that is not empty: rows need not agree, as verl's reader sees to.
    """

    def __init__(self, file: str) -> None:
        import pyarrow as pa

        text = Path(file).read_text(encoding="utf-8-sig")
        if text.startswith("["):
            self._rows = json.loads(text)
        else:
            self._rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not all(isinstance(row, dict) for row in self._rows):
            raise ValueError("a row is no object")
        columns = list(self._rows[0]) if self._rows else []
        examples = {name: next((row[name] for row in self._rows if row.get(name)), None) for name in columns}
        self.schema = pa.schema([(name, pa.array([value]).type) for name, value in examples.items()])

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        for row in self._rows:
            yield {name: row[name] for name in columns if name in row}


def open_table(file: str) -> ParquetFile | JsonFile:
    """The rows of a local data file. Raises UserError: verl does not read such files, or its content is of another."""
    if not file.endswith(FORMATS):
        raise UserError(f"{file}: verl reads files whose names end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if file.endswith(".parquet"):
        return ParquetFile(file)
    try:
        return JsonFile(file)
    except Exception as error:
        raise UserError(f"{file} is not a JSON file: {first_line(error)}") from error
