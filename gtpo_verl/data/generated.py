"""Problems of a generator of reasoning-gym in verl's schema: training and validation, disjoint by problem."""

import functools
import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from gtpo_verl.data.prompts import wrap
from gtpo_verl.errors import UserError
from gtpo_verl.files import write_atomically
from gtpo_verl.verifiers.reasoning_gym import NUMBER, generator, utils

TRAIN, VALIDATION = "train.parquet", "val.parquet"
DRAWN = 2000  # problems, of which many may be equal, where the settings name no `size`
LEAST, MOST = 64, 256  # problems for validation: a quarter of all, within these bounds

_SETTING = re.compile(r",(?=\w+=)")  # a comma in a list separates no settings


def parse(text: str) -> tuple[str, dict[str, Any], int]:
    """Generator, settings and seed of ``NAME,key=value``; `seed` is 0 and `size` 2,000 if not given. Raises UserError:
    a part is not key=value.
    """
    name, *parts = _SETTING.split(text)
    if "," in name:
        raise UserError(f"{name}: settings are written NAME,key=value.")
    settings: dict[str, Any] = {"size": DRAWN}
    for part in parts:
        key, _, value = part.partition("=")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{name}: {part} is not key=value.") from error
    seed = settings.pop("seed", 0)
    if not isinstance(seed, int) or not isinstance(settings["size"], int) or settings["size"] < 1:
        raise UserError(f"{name}: seed and size are whole numbers, size at least 1.")
    return name, settings, seed


def prepare_generated(text: str, directory: Path, reader: str | None = None) -> tuple[Path, Path, int, int]:
    """Draw the problems of ``NAME,key=value`` and write them to two files in a directory. Those with the same words,
    signs and numbers, in whatever order, are in the same file. Returns both files, and how many problems each has.

    reader: how the answer is asked for and read, as in `read_answer`; by default the last number where all answers are
    numbers, else reasoning-gym's tags. Raises UserError: no such generator or setting; too few different problems, or
    none whose true answer it accepts.
    """
    from pyarrow import Table, parquet

    name, settings, seed = parse(text)
    written = json.dumps(settings, sort_keys=True)
    problems = generator(name, written, seed)
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for index in range(settings["size"]):
        entry = problems[index]
        first.setdefault(entry["question"], (index, entry))
    if problems[0]["question"] != generator.__wrapped__(name, written, seed)[0]["question"]:
        raise UserError(f"{name} makes other problems of the same seed, so that no verifier could know them.")
    usable = {
        question: found
        for question, found in first.items()
        if found[1]["answer"] is None or problems.score_answer(found[1]["answer"], found[1]) >= 1
    }
    clusters: dict[str, list[str]] = defaultdict(list)
    for question in usable:
        clusters[cluster(question)].append(question)
    wanted = min(max(LEAST, len(usable) // 4), MOST)
    validation: list[str] = []
    in_order = sorted(clusters, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    while in_order and len(validation) < wanted:
        validation += clusters[in_order.pop()]
    train = [question for key in in_order for question in clusters[key]]
    if len(validation) < LEAST or not train:
        raise UserError(
            f"{name}: {len(usable)} different problems were drawn, and validation alone needs {LEAST}: raise "
            "size, or widen its settings."
        )
    answers = [entry["answer"] for _, entry in usable.values()]
    numbers = all(answer is not None and NUMBER.fullmatch(str(answer)) for answer in answers)
    reader = reader or ("number" if numbers else "tags")
    record = {"generator": name, "settings": written, "seed": seed, "read": reader}
    files = directory / TRAIN, directory / VALIDATION
    for file, split, questions in zip(files, ("train", "val"), (train, validation), strict=True):
        table = Table.from_pylist([_row(*usable[question], record, split) for question in questions])
        write_atomically(file, functools.partial(parquet.write_table, table))
    return *files, len(train), len(validation)


def cluster(question: str) -> str:
    """What all orders of the words, signs and numbers of a problem have in common."""
    return " ".join(sorted(re.findall(r"\w+|[^\w\s]", question.casefold())))


def _row(index: int, entry: dict[str, Any], record: dict[str, Any], split: str) -> dict[str, Any]:
    question, reader = entry["question"], record["read"]
    prompt = [{"role": "user", "content": wrap(question, reader) if reader in ("answer", "boxed") else question}]
    if reader == "tags":
        prompt.insert(0, {"role": "system", "content": utils.SYSTEM_PROMPTS["simple"]})
    return {
        "data_source": f"reasoning_gym/{record['generator']}",
        "prompt": prompt,
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": "" if entry["answer"] is None else str(entry["answer"])},
        "extra_info": {
            "index": index,
            "split": split,
            "cluster": cluster(question),
            "reasoning_gym": record | {"index": index, "question": question},
        },
    }
