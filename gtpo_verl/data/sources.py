"""The data sets known by name, and readers for the layouts they come in."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any

from gtpo_verl.data.prompts import unwrap
from gtpo_verl.data.table import ParquetFile
from gtpo_verl.errors import UserError

PROBLEM_COLUMNS = ("problem", "question")  # case-insensitive; the first that exists
ANSWER_COLUMNS = ("answer",)
ID_COLUMNS = ("unique_id", "id", "problem_idx")

_AIME_ANSWER = re.compile(r"\$?0*([0-9]{1,3})(?:\^\\circ|\^\{\\circ\}|°)?\$?")


@dataclass(frozen=True)
class Dataset:
    """A data set on the hub; ``problems``: how many different ones it has, None where not known for certain; ``aime``:
    answers are integers from 0 to 999, written without leading zeros or units.
    """

    repository: str
    files: tuple[str, ...]
    data_source: str
    problems: int | None = None
    aime: bool = False


# verl has verifiers for math_dapo and aime*; math_500 has answers in LaTeX and needs verifier=boxed.
DATASETS = {
    "dapo-math-17k": Dataset("BytedTsinghua-SIA/DAPO-Math-17k", ("data/dapo-math-17k.parquet",), "math_dapo"),
    "aime-2024": Dataset("BytedTsinghua-SIA/AIME-2024", ("data/aime-2024.parquet",), "aime_2024", 30, aime=True),
    "aime-2025": Dataset("opencompass/AIME2025", ("aime2025-I.jsonl", "aime2025-II.jsonl"), "aime_2025", 30, aime=True),
    "math-500": Dataset("HuggingFaceH4/MATH-500", ("test.jsonl",), "math_500", 500),
}


@dataclass
class Row:
    """One row: the problem, which is the whole dialogue where there is one, its answer, its identifier in the source;
    ``prompt``, ``system`` (its messages of that role) and ``rest`` (all its columns) of a row in verl's schema only;
    ``guide``: responses of a guiding policy, None where there is no column of them.
    """

    problem: str
    answer: Any
    identity: str | None
    prompt: list[dict[str, Any]] | None = None
    system: str = ""
    rest: dict[str, Any] = field(default_factory=dict)
    guide: list[Any] | None = None


def read(
    file: Path,
    problem_column: str | None = None,
    answer_column: str | None = None,
    *,
    aime: bool = False,
    guide_column: str | None = None,
    answers: bool = True,
) -> Iterator[Row]:
    """Read the rows of a parquet or JSONL file, one at a time; ``guide_column`` has responses of a guiding policy.
    Without ``answers`` the problems alone are wanted, and the columns named may be those of another file.

    Raises UserError: the file has another format or is incomplete; a row does not match the layout.
    """
    wanted = "verl's schema: prompt, a list of {role, content}, and reward_model with ground_truth"
    for number, values in enumerate(_records(file)):
        place = f"{file}, row {number}"
        if number == 0:
            columns = _columns(file, list(values), problem_column, answer_column, answers=answers)
            if columns:
                wanted = f"the columns {columns[0]} and {columns[1]}"
        try:
            row = _from_columns(values, *columns) if columns else _from_verl(values)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise UserError(f"{place}: {type(error).__name__}: {error}; expected {wanted}.") from error
        if guide_column is not None:
            row.guide = _responses(values, guide_column, place)
            row.rest.pop(guide_column, None)  # under its new name alone
        if aime:
            match = _AIME_ANSWER.fullmatch(_text(row.answer))
            if match is None:
                what = "the answer of an AIME problem is an integer from 0 to 999"
                raise UserError(f"{place}: {what}, this is {row.answer!r}.")
            row.answer = match[1]
        yield row


def _columns(
    file: Path, columns: Sequence[str], problem: str | None, answer: str | None, *, answers: bool
) -> tuple[str, str | None, str | None] | None:
    """The columns of the problem, the answer and the identifier, the first two perhaps given; None: verl's schema."""
    if not answers:
        problem, answer = problem if problem in columns else None, None
    if problem is None and answer is None and {"prompt", "reward_model"} <= set(columns):
        return None
    for option, name in (("--problem-column", problem), ("--answer-column", answer)):
        if name is not None and name not in columns:
            raise UserError(f"{option} {name}: {file} has no such column; it has {', '.join(columns)}.")
    problem = problem or _find(columns, PROBLEM_COLUMNS)
    answer = answer or _find(columns, ANSWER_COLUMNS)
    if problem is None or (answer is None and answers):
        raise UserError(
            f"{file} has neither verl's columns (prompt, reward_model) nor a problem and an answer: name them with "
            f"--problem-column and --answer-column. It has {', '.join(columns)}."
        )
    return problem, answer, _find(columns, ID_COLUMNS)


def _find(columns: Sequence[str], wanted: Sequence[str]) -> str | None:
    by_name = {column.lower(): column for column in columns}
    return next((by_name[name] for name in wanted if name in by_name), None)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        table = ParquetFile(str(file))
        yield from table.rows(table.schema.names)
        return
    if file.suffix != ".jsonl":
        raise UserError(f"{file}: expected a .parquet or a .jsonl file.")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:  # a replacement would be in prompts and answers
                raise UserError(f"{file}, line {number} is not UTF-8 ({error.reason}): convert the file.") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, line {number} is not JSON.") from error
            if not isinstance(values, dict):
                raise UserError(f"{file}, line {number}: expected an object, the values of a row by column name.")
            yield values


def _from_verl(values: dict[str, Any]) -> Row:
    # a parquet file has every field that any message has
    prompt = [{name: value for name, value in message.items() if value is not None} for message in values["prompt"]]
    # where a tool is called there is none
    texts: list[Any] = [message.get("content", None if message["role"] == "user" else "") for message in prompt]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a content is {type(text).__name__}, and not text")
    last = max((number for number, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        raise TypeError("prompt has no message of role user")
    texts[last] = unwrap(texts[last])[0]
    system = [text for message, text in zip(prompt, texts, strict=True) if message["role"] == "system"]
    dialogue = [text for message, text in zip(prompt, texts, strict=True) if message["role"] != "system"]
    index = (values.get("extra_info") or {}).get("index")
    identity, truth = None if index is None else str(index), values["reward_model"]["ground_truth"]
    return Row("\n".join(dialogue), truth, identity, prompt, "\n".join(system), dict(values))


def _from_columns(values: dict[str, Any], problem: str, answer: str | None, identity: str | None) -> Row:
    if not isinstance(values[problem], str):
        raise TypeError(f"{problem} is {type(values[problem]).__name__}")
    name = values.get(identity) if identity else None
    return Row(values[problem].strip(), _text(values[answer]) if answer else "", None if name is None else str(name))


def _responses(values: dict[str, Any], column: str, place: str) -> list[Any]:
    """Responses of a guiding policy: texts, or lists of token ids; a text alone is a list of one."""
    if column not in values:
        raise UserError(f"--guide-column {column}: {place} has no such column; it has {', '.join(values)}.")
    found = values[column]
    responses = [] if is_missing(found) else [found] if isinstance(found, str) else found
    if not isinstance(responses, list) or {type(each) for each in responses} not in (set(), {str}, {list}):
        raise UserError(
            f"--guide-column {column}: {place} must hold a text, a list of texts, or a list of lists of token ids."
        )
    return [response for response in responses if not is_missing(response)]


def _text(answer: Any) -> str:
    if is_missing(answer):
        return ""
    if not isinstance(answer, str | Number):
        raise TypeError(f"an answer is {type(answer).__name__}, and neither text nor a number")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # a column of integers with missing values is read as floats
    return str(answer).strip()


def is_missing(answer: Any) -> bool:
    """Whether an answer is none: null, NaN, as tables without null have it, or text without a character."""
    return answer is None or answer != answer or (isinstance(answer, str) and not answer.strip())
