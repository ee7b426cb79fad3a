"""Reads what a training run left on disk: metrics, validation samples, resolved configuration and the run's own record."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from gtpo_verl.errors import UserError
from gtpo_verl.runs.statistics import Floats, cluster_means

METRICS = "metrics.jsonl"
RECORD = "run.json"

_KNOWN_ORDER = ("dapo", "gtpo", "grpo_s")  # the baseline first; other arms follow by name


@dataclass(frozen=True, eq=False)  # arrays have no single truth value: compared by identity
class Validation:
    """One validation: the mean verdict of each prompt.

    ``prompts`` are P sorted keys, one a prompt with its ground truth; ``accuracy`` and ``counts`` have shape (P,):
    the mean verdict of a prompt's samples, and how many there are.
    """

    step: int
    prompts: tuple[str, ...]
    accuracy: Floats
    counts: NDArray[np.int64]

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def rows(self, prompts: Sequence[str]) -> NDArray[np.int64]:
        """Where the given prompts, all of which must be there, stand in this validation."""
        return np.searchsorted(self.prompts, prompts)

    def samples_of(self, prompts: Sequence[str]) -> int:
        return int(self.counts[self.rows(prompts)].sum())


@dataclass(frozen=True, eq=False)  # arrays have no single truth value: compared by identity
class Arm:
    """One training: its metrics by step, its validations in order of steps, its flattened configuration."""

    name: str
    path: Path
    metrics: Mapping[int, Mapping[str, float]]
    validations: tuple[Validation, ...]
    config: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def last_step(self) -> int:
        return max(self.metrics)

    @property
    def keys(self) -> set[str]:
        return {key for data in self.metrics.values() for key in data}

    def series(self, key: str) -> tuple[NDArray[np.int64], Floats]:
        """Steps and values of a metric, in order of steps; both empty where it was never logged."""
        points = [(step, data[key]) for step, data in sorted(self.metrics.items()) if key in data]
        return np.array([s for s, _ in points], dtype=np.int64), np.array([v for _, v in points], dtype=np.float64)


@dataclass(frozen=True)
class Run:
    """A run: one or several arms trained by one command. What ``run.json`` does not tell is None or empty."""

    name: str
    path: Path
    arms: tuple[Arm, ...]
    status: str | None
    created: str | None
    command: str | None
    versions: Mapping[str, str]
    hardware: str | None
    seed: int | None
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    missing_arms: tuple[str, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every given run; see `read_run`.

    Raises:
        UserError: no path is given, one is given twice, or one cannot be read as a run.
    """
    if not paths:
        raise UserError("no run is given: name a run directory, for example `gtpo-verl report outputs/quickstart`")
    resolved = [path.resolve() for path in paths]
    for path, place in zip(paths, resolved, strict=True):
        if resolved.count(place) > 1:
            raise UserError(f"{path} is given more than once: name each run once")
    return [read_run(path) for path in paths]


def read_run(path: Path) -> Run:
    """Read a run directory, a single arm's directory, or a JSONL file as verl's `file` logger writes it.

    Raises:
        UserError: the path does not exist, or holds no metrics, or a file in it is not what it should be.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist: give the directory of a run, the one that holds its {METRICS}")
    if path.is_file():
        if path.suffix != ".jsonl":
            raise UserError(f"{path} is not a run: give a run's directory, or a .jsonl file of verl's file logger")
        return _run(path, [_read_single_arm(path.parent, path, name=path.stem)], record={})
    if (path / METRICS).is_file():
        arm = _read_single_arm(path, path / METRICS, name=path.resolve().name)
        parent = _read_record(path.resolve().parent)
        return _run(path, [arm], record=parent if arm.name in parent.get("arms", []) else {}, single=True)
    return _read_run_directory(path)


def _read_single_arm(directory: Path, metrics_file: Path, name: str) -> Arm:
    arm = _read_arm(directory, metrics_file, name)
    if arm is None:
        raise UserError(f"{metrics_file} holds no readable line: has the training logged its first step yet?")
    return arm


def _read_run_directory(path: Path) -> Run:
    record = _read_record(path)
    found = {entry.name for entry in path.iterdir() if (entry / METRICS).is_file()}
    planned = [str(name) for name in record.get("arms", [])]
    others = sorted(found - set(planned), key=lambda name: (_rank(name), name))
    order = [*dict.fromkeys(planned), *others]
    if not found:
        raise UserError(f"no {METRICS} in {path} or in a directory of it: has the training logged its first step yet?")
    # an arm that was stopped before its first step has no line yet: it is missing, not broken
    read = {name: _read_arm(path / name, path / name / METRICS, name) for name in order if name in found}
    arms = [arm for arm in read.values() if arm is not None]
    if not arms:
        raise UserError(f"no {METRICS} in {path} holds a readable line: has the training logged its first step yet?")
    return _run(path, arms, record, missing=[name for name in order if read.get(name) is None])


def _rank(name: str) -> int:
    return _KNOWN_ORDER.index(name) if name in _KNOWN_ORDER else len(_KNOWN_ORDER)


def _run(
    path: Path, arms: list[Arm], record: Mapping[str, Any], missing: Sequence[str] = (), single: bool = False
) -> Run:
    directory_name = path.stem if path.is_file() else path.resolve().name
    recorded_name = record.get("name")
    name = f"{recorded_name}/{arms[0].name}" if single and recorded_name else recorded_name or directory_name
    return Run(
        name=str(name),
        path=path,
        arms=tuple(arms),
        status=record.get("status"),
        created=record.get("created"),
        command=record.get("command"),
        versions=record.get("versions") or {},
        hardware=record.get("hardware"),
        seed=record.get("seed"),
        settings=record.get("settings") or {},
        notes=tuple(record.get("notes") or ()),
        missing_arms=tuple(missing),
    )


def _read_record(path: Path) -> dict[str, Any]:
    file = path / RECORD
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}): repair it, or remove it to report without it") from error
    if not isinstance(record, dict):
        raise UserError(f"{file} holds no JSON object: repair it, or remove it to report without it")
    return record


def _read_arm(directory: Path, metrics_file: Path, name: str) -> Arm | None:
    """None where no step was logged yet."""
    metrics, notes = read_metrics(metrics_file)
    if not metrics:
        return None
    validations, validation_notes = _read_validations(directory / "validation", last_step=max(metrics))
    return Arm(
        name=name,
        path=directory,
        metrics=metrics,
        validations=validations,
        config=_read_config(directory / "config.yaml"),
        notes=(*notes, *validation_notes),
    )


def read_metrics(file: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Read metrics by step, keeping only what belongs to the training that goes on.

    Of a step logged again after a resume the last value of each key wins (a resumed training validates first, and logs
    that alone for the step it starts from). When the steps jump back, the later steps of the abandoned attempt are
    dropped. Lines torn by a crash, and values that are no finite numbers, are left out.

    Returns:
        {step: {key: value}}, empty where no line can be read, and notes for the reader about what was left out.

    Raises:
        UserError: a line is JSON of another form.
    """
    metrics: dict[int, dict[str, float]] = {}
    torn = dropped = not_finite = 0
    for number, entry in _json_lines(file):
        if entry is None:
            torn += 1
            continue
        if not (isinstance(entry, dict) and isinstance(entry.get("step"), int) and isinstance(entry.get("data"), dict)):
            raise UserError(f'{file}, line {number}: expected {{"step": ..., "data": {{...}}}} as verl logs it')
        step = entry["step"]
        abandoned = [later for later in metrics if later > step]
        for later in abandoned:
            del metrics[later]
        dropped += len(abandoned)
        values = {key: value for key, value in entry["data"].items() if isinstance(value, int | float)}
        finite = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        not_finite += len(values) - len(finite)
        metrics.setdefault(step, {}).update(finite)
    notes = []
    if torn:
        notes.append(f"{_count(torn, 'line')} of {file.name} could not be read (torn by a crash) and left out")
    if dropped:
        notes.append(f"{_count(dropped, 'step')} logged before a resume from an earlier checkpoint left out")
    if not_finite:
        notes.append(f"{_count(not_finite, 'metric value')} not finite (NaN or infinite) and left out")
    return metrics, notes


def _read_validations(directory: Path, last_step: int) -> tuple[tuple[Validation, ...], list[str]]:
    files = {int(file.stem): file for file in directory.glob("*.jsonl") if file.stem.isdecimal()}
    validations, notes = [], []
    for step, file in sorted(files.items()):
        if step > last_step:
            notes.append(f"validation of step {step} left out: the metrics end at step {last_step}")
            continue
        validation, file_notes = _read_validation(file, step)
        notes += file_notes
        if validation is not None:
            validations.append(validation)
    return tuple(validations), notes


def _read_validation(file: Path, step: int) -> tuple[Validation | None, list[str]]:
    clusters: list[str] = []
    verdicts: list[float] = []
    torn = without = 0
    for number, sample in _json_lines(file):
        if sample is None:
            torn += 1
            continue
        if not isinstance(sample, dict) or "input" not in sample:
            raise UserError(f"{file}, line {number}: expected a validation sample as verl dumps it, with input and acc")
        verdict = sample.get("acc")
        if verdict is None:
            without += 1
        elif not isinstance(verdict, int | float) or not 0 <= verdict <= 1:
            raise UserError(
                f"{file}, line {number}: acc is {verdict!r}, expected the verifier's verdict between 0 and 1"
            )
        clusters.append(_prompt_key(sample))
        verdicts.append(float(verdict or 0))
    notes = []
    if torn:
        notes.append(f"{_count(torn, 'sample')} of the validation of step {step} could not be read and left out")
    if without == len(verdicts):
        reason = "its samples have no verdict (acc)" if verdicts else "it holds no sample"
        return None, [*notes, f"validation of step {step} left out: {reason}"]
    if without:
        # verl counts a sample whose generation or verification failed as wrong, and so do we
        notes.append(f"{_count(without, 'sample')} of the validation of step {step} without a verdict counted as wrong")
    return Validation(step, *cluster_means(clusters, verdicts)), notes


def _prompt_key(sample: Mapping[str, Any]) -> str:
    """The same prompt with the same ground truth is the same task, in every validation of every arm."""
    identity = json.dumps([sample["input"], sample.get("gts")], sort_keys=True)
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: repair it, or remove it to report without it") from error
    return dict(flatten(config)) if isinstance(config, dict) else {}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested dict; an empty section is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers and parsed lines; None for a line that is no JSON. Blank lines are skipped."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError:
                yield number, None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
