"""Small files in the schemas of the real data sets. The problems are this project's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, Any]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Rows], Path]:
    """Write rows as the name says, .parquet or .jsonl."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(name: str, rows: Rows) -> Path:
        file = tmp_path / name
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


@pytest.fixture
def dapo_row() -> Callable[..., dict[str, Any]]:
    """A row of DAPO-Math-17k: its columns, its instruction."""

    def row(problem: str, answer: str, index: str = "0", source: str = "math_dapo") -> dict[str, Any]:
        before = (
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        )
        behind = '\n\nRemember to put your answer on its own line after "Answer:".'
        return {
            "data_source": source,
            "prompt": [{"content": before + problem + behind, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": index},
        }

    return row
