"""The axes of a sweep, in Hydra's sweep syntax and read by Hydra's parser, and the runs that they make."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from hydra.core.override_parser.types import Override, RangeSweep

from gtpo_verl.config import hydra_app, line_of, parse_overrides
from gtpo_verl.errors import UserError

SEED = "seed"
LONGEST_NAME = 160  # bytes; a file system's limit is 255, and trackers and job ids add to the name


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in which a value may be a sweep: `a,b`, `choice(a,b)`, `range(8)` or `glob(*)`; or UserError."""
    with hydra_app() as hydra:
        return parse_overrides(overrides, hydra)


def split(parsed: Sequence[Override], most: int) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Separate the axes, {key: values}, which may make ``most`` runs, from the overrides that every run has.

    UserError: a key has several axes, or an axis and a value, or an axis has one value twice, or infinitely many; or
    there are too many runs.
    """
    swept = {item.get_key_element(): item for item in parsed if item.is_sweep_override()}
    count = Counter((item.key_or_group, item.package) for item in parsed)  # without the + or ++ before it
    for key, item in sorted(swept.items()):
        if (times := count[item.key_or_group, item.package]) > 1:
            raise UserError(f"{key} is given {times} times: write the values of an axis once, as {key}=A,B.")
    runs = math.prod(max(1.0, _count(item)) for item in swept.values())
    if not runs <= most:  # before the values are listed
        raise UserError(
            f"{' '.join(map(line_of, swept.values()))}: {runs:,.0f} runs, and at most sweep.max_runs={most:,} are "
            "begun. Leave some out, or raise sweep.max_runs."
        )
    axes = {key: _values(item) for key, item in swept.items()}
    return axes, [line_of(item) for item in parsed if not item.is_sweep_override()]


def _count(item: Override) -> float:
    """How many values an axis has, without listing them."""
    if not item.is_discrete_sweep():
        raise UserError(f"{item.input_line}: an interval has no end of values. Write the values, or range(A,B,STEP).")
    values: Any = item.value()
    if not isinstance(values, RangeSweep):
        return sum(1 for _ in item.sweep_iterator())
    if not float(values.step):
        raise UserError(f"{item.input_line}: the step of a range must not be 0.")
    return abs(float(values.stop or 0) - float(values.start or 0)) / abs(float(values.step))


def _values(item: Override) -> tuple[str, ...]:
    """The values of an axis, as Hydra's parser writes them."""
    found, texts = list(item.sweep_iterator()), list(item.sweep_string_iterator())
    for value, text in zip(found, texts, strict=True):
        if found.count(value) > 1:
            raise UserError(f"{item.input_line}: the axis has the value {text} more than once.")
    if not texts:
        raise UserError(f"{item.input_line}: the axis has no value.")
    return tuple(texts)


def combinations(axes: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Every combination of values, as the overrides of a run by its name, which depends on nothing but the axes.

    The seed varies slowest: a sweep that is stopped early has whole comparisons. UserError: two names are the same.
    """
    # the last part of each dotted key, or all of it where another axis has the same last part
    tails = {key: re.split(r"[./+]", key)[-1] for key in axes}
    keys = {key: tail if list(tails.values()).count(tail) == 1 else _safe(key) for key, tail in tails.items()}
    ordered = sorted(axes, key=lambda key: key != SEED)
    found: dict[str, tuple[str, ...]] = {}
    for values in itertools.product(*(axes[key] for key in ordered)):
        chosen = dict(zip(ordered, values, strict=True))
        overrides = tuple(f"{key}={chosen[key]}" for key in axes)
        name = ",".join(f"{keys[key]}={_safe(chosen[key])}" for key in axes)
        if len(name.encode()) > LONGEST_NAME:
            digest = blake2b(name.encode(), digest_size=4).hexdigest()
            name = f"{name.encode()[: LONGEST_NAME - 9].decode(errors='ignore')}-{digest}"
        if name in found:
            raise UserError(
                f"{' '.join(overrides)} and {' '.join(found[name])} would both be the run {name}: values must differ "
                "in more than punctuation."
            )
        found[name] = overrides
    return found


def _safe(text: str) -> str:
    """What a file system, a tracker and a shell take as part of a name."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "empty"
