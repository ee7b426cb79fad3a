"""The rule of reasoning-gym: a generator's own ``score_answer``, on a problem that is generated again from its record.

``score_answer`` reads what a generator keeps of a problem, objects included; a record of it therefore has the
generator, its settings, its seed and the problem's index instead. Only a score of 1 is right: generators give part of
it to an answer that contains the true one.
"""

import json
import re
import warnings
from functools import lru_cache
from typing import Any

from gtpo_verl.errors import UserError, choose_from, did_you_mean, first_line
from gtpo_verl.verifiers.answer import ANSWER, last_box

with warnings.catch_warnings():  # its requirements compile with warnings
    warnings.simplefilter("ignore")
    from reasoning_gym import factory, utils

NUMBER = re.compile(r"(?:(?<!\w)[-+])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
MINUS = "\N{MINUS SIGN}"


def judge(response: str, truth: str) -> tuple[bool, str]:
    """Whether the generator scores the answer in a response with 1, and the answer as read, empty for none.

    truth: the record as JSON: `generator`, `settings`, `seed`, `index`, `question` and `read`. Raises ValueError: the
    generator makes another problem of it.
    """
    record = json.loads(truth)
    problems = generator(record["generator"], record["settings"], record["seed"])
    entry = problems[record["index"]]
    if entry["question"] != record["question"]:
        raise ValueError(f"{record['generator']} makes another problem of this record: prepare the data again")
    answer = read_answer(response, record["read"])
    return answer is not None and problems.score_answer(answer, entry) >= 1, answer or ""


def read_answer(response: str, reader: str) -> str | None:
    """The answer in a response, None where there is none; the prompt asks for it in the same way (`data.generated`).

    reader: `number`, the last number; `tags`, between the last <answer> and </answer>; `answer`, behind the last
    "Answer:" on its line; `boxed`, the last \\boxed{}; `response`, all of it.
    """
    if reader == "number":
        numbers = NUMBER.findall(response.replace(MINUS, "-"))
        return numbers[-1].rstrip(",") if numbers else None
    if reader == "tags":
        return utils.extract_answer(response)
    if reader == "answer":
        found = ANSWER.findall(response)
        return found[-1].strip() if found else None
    return last_box(response) if reader == "boxed" else response.strip()


@lru_cache(maxsize=8)
def generator(name: str, settings: str, seed: int) -> Any:
    """A generator of reasoning-gym, whose problems are its items; settings: of its configuration, as JSON. Raises
    UserError: there is no such generator or setting.
    """
    if name not in factory.DATASETS:
        names = did_you_mean(name, factory.DATASETS) or f". It has: {', '.join(sorted(factory.DATASETS))}."
        raise UserError(f"reasoning-gym has no generator {name!r}{names}")
    given, known = json.loads(settings), factory.DATASETS[name][1].__dataclass_fields__
    for key in given:
        if key not in known:
            raise UserError(f"{key}: {name} has no such setting{choose_from(key, known)}")
    try:
        return factory.create_dataset(name, **given, seed=seed)
    except Exception as error:  # each generator checks its settings in its own way, most by assertions
        raise UserError(f"{name} refuses {settings}: {first_line(error)}") from error
