"""Rows of data sets and what reward functions return."""

import math
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from fuzzing import PASSED, check, refused
from fuzzing.values import as_json, changed, odd, torn
from gtpo_verl.data.prepare import Request, is_current, prepare
from gtpo_verl.data.prompts import STYLES
from gtpo_verl.data.sources import DATASETS
from gtpo_verl.errors import UserError
from gtpo_verl.problems import refuse
from gtpo_verl.rules.data import data as data_files
from gtpo_verl.runs.correctness import is_correct, verdict
from gtpo_verl.verifiers.answer import judge
from gtpo_verl.verifiers.reward import truth_text

PROBLEMS = ("1+1?", "1+1?", " 1+1? ", "", "  ", "x" * 10_000, "\\frac{1}{2}", "é", "\u202e", "2+2?", "\n")
ANSWERS = ("2", "2", "3", "4", 2, 2.0, 0.5, "", None, ["2", "3"], {"a": 1}, True, "\\$36", "+5", "nan", 10**30)


def _plain(rng: Random) -> dict[str, Any]:
    row = {"problem": rng.choice(PROBLEMS), "answer": rng.choice(ANSWERS)}
    return row | ({"id": rng.choice((1, "1", None, 1.5))} if rng.random() < 0.5 else {})


def _of_verl(rng: Random) -> dict[str, Any]:
    messages = [{"role": rng.choice(("user", "user", "system", "tool")), "content": rng.choice(PROBLEMS)}]
    return {
        "data_source": rng.choice(("a", "b", "")),
        "prompt": messages * rng.choice((1, 1, 1, 2, 0)),
        "reward_model": {"style": "rule", "ground_truth": rng.choice(ANSWERS)},
        "extra_info": rng.choice(({"index": 0}, {"index": "x"}, {}, None)),
    }


def rows(rng: Random, directory: Path) -> str:
    """`prepare-data` on random rows: the file it writes is one that a training accepts, or there is one line."""
    directory.mkdir(parents=True)
    make = rng.choice((_plain, _of_verl))
    table = [make(rng) for _ in range(rng.randrange(1, 8) if rng.random() < 0.97 else 0)]
    if rng.random() < 0.3 and table:
        table[rng.randrange(len(table))] = changed(rng, table[0])
    file = _written(rng, directory, table)
    dataset = rng.choice((None, None, None, DATASETS["math-500"], DATASETS["aime-2024"]))
    request = Request(
        name="fuzz",
        dataset=dataset,
        files=(file,) * rng.choice((1, 1, 2)),
        output=directory / "out.parquet",
        against=(file,) if rng.random() < 0.1 else (),
        style=rng.choice((None,) * 6 + tuple(STYLES)),
        conflicts=rng.choice(("drop", "first")),
        data_source=rng.choice((None, "named", "")),
        problem_column=rng.choice((None,) * 9 + ("problem", "nope")),
        answer_column=rng.choice((None,) * 9 + ("answer",)),
    )
    try:
        summary = prepare(request)
    except UserError as error:
        check(not request.output.exists(), "a refused data set was written")
        return refused(error)
    check(is_current(request), "what was just prepared is not up to date")
    found = pq.read_table(request.output).to_pylist()
    check(len(found) == summary.problems > 0, f"{len(found)} rows of {summary.problems} problems")
    for row in found:
        check(row["prompt"] and all(isinstance(one["content"], str) for one in row["prompt"]), f"prompt of {row}")
        check(row["reward_model"]["ground_truth"] not in (None, ""), f"no truth in {row}")
    data = {"prompt_key": "prompt", "reward_fn_key": "data_source", "val_files": str(request.output)}
    refuse(data_files(OmegaConf.create({"data": data | {"train_batch_size": 1}}), ("val_files",)))
    return PASSED


def _written(rng: Random, directory: Path, table: list[Any]) -> Path:
    """The rows as parquet, where Arrow takes them, else as JSON lines, which may be torn."""
    if rng.random() < 0.4:
        try:
            pq.write_table(pa.Table.from_pylist(table), directory / "in.parquet")
            return directory / "in.parquet"
        except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError):
            pass
    content = b"\n".join(map(as_json, table))
    if rng.random() < 0.15:
        content = torn(rng, content)
    file = directory / rng.choice(("in.jsonl",) * 20 + ("in.parquet", "in.json"))
    file.write_bytes(content)
    return file


def verdicts(rng: Random, directory: Path) -> str:
    """What a reward function returned becomes a verdict or one line; and DAPO's rule judges any text."""
    truth, answer = odd(rng), odd(rng)
    try:
        text = truth_text(truth)
    except UserError as error:
        refused(error)
    else:
        right, pred = judge(str(answer), text)
        check(isinstance(right, bool) and isinstance(pred, str), f"judged {answer!r} as {right!r}, {pred!r}")
    returned = rng.choice((odd(rng), {"score": odd(rng), "acc": odd(rng)}, {"score": 1.0, "acc": odd(rng)}))
    info = returned if isinstance(returned, dict) else {"acc": returned}  # as verl's reward managers keep it
    try:
        acc = verdict(info, "of a fuzzed response")
    except UserError as error:
        return refused(error)
    check(is_correct(acc, 1.0) in (True, False), f"{returned!r}")
    check(not math.isnan(acc) or not is_correct(acc, 0.0), "a verdict that is NaN is right")
    return PASSED
