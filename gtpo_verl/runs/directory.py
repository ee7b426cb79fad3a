"""The files of a run, by name, and how they are written and read."""

import datetime as dt
import json
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.events import CollectionEndEvent, CollectionStartEvent

from gtpo_verl.errors import UserError
from gtpo_verl.files import append_json_line, move_json_lines, read_json, read_json_lines, reading, write_json

METRICS_FILE = "metrics.jsonl"
GROUPS_FILE = "groups.jsonl"
RECORD_FILE = "run.json"
NOT_SET = "not set"  # what is said of a setting that is not there
CONFIG_FILE = "config.yaml"
DIFF_FILE = "code.diff"  # what the working tree changes in the recorded commit
SAMPLES_FILE = "credit_samples.jsonl"
SWEEP_FILE = "sweep.json"  # of a directory with a run for each combination of its axes
STOP_FILE = "STOP"
VALIDATION = "validation"  # a directory with the samples of each validation, STEP.jsonl
PHASE_FILE = "phase.json"  # what the trainer does just now
STEP_FILE = "step.json"  # in a checkpoint: what is logged of its step
DEEPEST = 100  # levels of a configuration; verl's has eight

# The one list of settings that say where a run is, what it is called and whom it talks to: they differ between any two
# trainings, and change nothing in what is trained.
_BOOKKEEPING = re.compile(
    r"(^|\.)(experiment_name|project_name|group_name|resume_mode|resume_from_path|(\w+_)?(address|port|dir|DIR))$"
)


def record_metrics(run_dir: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Append ``{"step": int, "data": {name: number}}`` to ``metrics.jsonl``; ``not_finite`` has the names of others.

    The step from which a run resumes may be written again, with its validation; readers take the later values.
    """
    append_json_line(run_dir / METRICS_FILE, _metrics_line(step, metrics))


def _metrics_line(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    numbers, not_finite = {}, []
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue  # tables and nested counts go to verl's own loggers
        if math.isfinite(number):
            numbers[name] = number
        else:
            not_finite.append(name)
    line: dict[str, Any] = {"step": int(step), "data": numbers}
    if not_finite:
        line["not_finite"] = sorted(not_finite)
    return line


def record_groups(run_dir: Path, step: int, groups: dict[str, int]) -> None:
    """Append the groups that a step trained on to ``groups.jsonl``: by uid the step that generated the responses."""
    append_json_line(run_dir / GROUPS_FILE, {"step": int(step), "groups": groups})


def keep_step(checkpoint: Path, step: int, metrics: Mapping[str, Any], groups: dict[str, int]) -> None:
    """Write what is known of a step's metrics, and its groups, into its checkpoint.

    verl logs a step after its checkpoint and validation; a run that is killed in between never repeats it.
    """
    kept = {"metrics": _metrics_line(step, metrics), "groups": {"step": int(step), "groups": groups}}
    write_json(checkpoint / STEP_FILE, kept)


def restore_step(run_dir: Path, checkpoint: Path) -> bool:
    """Append what `keep_step` kept, where the run's files lack that step; returns whether they lacked its metrics."""
    with reading(checkpoint / STEP_FILE):
        kept = read_json(checkpoint / STEP_FILE)
        lines = {METRICS_FILE: kept["metrics"], GROUPS_FILE: kept["groups"]} if kept else {}
        steps = {name: line["step"] for name, line in lines.items()}
    lacking = []
    for name, line in lines.items():
        logged = read_json_lines(run_dir / name) if (run_dir / name).is_file() else ()
        if not any(isinstance(value, dict) and value.get("step") == steps[name] for _, value in logged):
            append_json_line(run_dir / name, line)
            lacking.append(name)
    return METRICS_FILE in lacking


def set_aside(run_dir: Path, step: int) -> list[int]:
    """Move what was logged of steps behind ``step``, -1 for all, which are trained again, and lines that a crash has
    torn, to ``metrics.replaced.jsonl`` and its like, validations too; returns the steps whose metrics were moved.
    """

    def replaced(value: Any) -> bool:
        later = isinstance(value, dict) and isinstance(value.get("step"), int) and value["step"] > step
        return value is None or later

    metrics, *_ = (
        move_json_lines(run_dir / name, (run_dir / name).with_suffix(".replaced.jsonl"), replaced)
        for name in (METRICS_FILE, GROUPS_FILE, SAMPLES_FILE)
    )
    for file in (run_dir / VALIDATION).glob("*.jsonl"):
        if file.stem.isdecimal() and int(file.stem) > step:  # its step need not be validated again
            file.replace(file.with_suffix(".replaced.jsonl"))
    return sorted({value["step"] for value in metrics if value is not None})


def record_phase(run_dir: Path, step: int, phase: str) -> None:
    """Write what the trainer begins to do, for ``gtpo-verl status``."""
    write_json(run_dir / PHASE_FILE, {"step": step, "phase": phase, "since": time.time()})


def now() -> str:
    """This moment in ISO 8601, as in ``run.json``."""
    return dt.datetime.now().astimezone().isoformat(timespec="seconds")


def write_record(run_dir: Path, facts: dict[str, Any]) -> None:
    """Write ``run.json``, atomically."""
    write_json(run_dir / RECORD_FILE, facts)


def read_record(run_dir: Path) -> dict[str, Any]:
    """Read ``run.json``; empty where there is none."""
    with reading(run_dir / RECORD_FILE):
        return dict(read_json(run_dir / RECORD_FILE) or {})


def read_config(file: Path) -> Any:
    """Read ``config.yaml`` with libyaml, which is several times as fast, and overflows the stack on deeply nested YAML.

    Raises:
        ValueError, yaml.YAMLError: it is no YAML, or nested too deeply.
    """
    return parse_config(file.read_text(encoding="utf-8"))


def parse_config(text: str) -> Any:
    """What a text in YAML says; see `read_config`."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels")
    return yaml.load(text, Loader=loader)


def is_bookkeeping(key: str) -> bool:
    """Whether a dotted key says where a run is kept, not what is trained."""
    return _BOOKKEEPING.search(key) is not None


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (before, now)} of each setting that differs, in order; `NOT_SET` for one that is not there."""
    pairs = {key: (before.get(key, NOT_SET), now.get(key, NOT_SET)) for key in sorted({*before, *now})}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def in_words(found: Mapping[str, Any]) -> str:
    """``KEY was OLD, is NEW`` for each of these, {key: (before, now)}."""
    return "; ".join(f"{key} was {before}, is {now}" for key, (before, now) in found.items())


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`changed` `in_words`; empty where nothing differs."""
    return in_words(changed(before, now))


def same_settings(place: Path, what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with what a place holds under other settings, which the UserError names."""
    if changes := differences(before, json.loads(json.dumps(now))):
        raise UserError(
            f"{place} holds {what} with other settings ({changes}): name another --output, or discard it with --fresh."
        )


def within(key: str, names: Collection[str]) -> bool:
    """Whether a dotted key is one of these, or in a section that is."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested dict; an empty section is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
