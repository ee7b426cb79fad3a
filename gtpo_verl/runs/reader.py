"""Reads what trainings left on disk: metrics, validation samples, composed configuration and the record of the run.

A run is read from a training's directory, from a sweep's, or, without samples and record, from the logs of verl's own
loggers: a JSONL file, TensorBoard's event files, an offline run of Weights & Biases.

Data sources are kept apart. A validation sample belongs to the ``data_source`` that its line names. verl 0.9.1 writes
none: a line without one belongs to the only data source that the metrics name; where they name several, the validation
is left out with a note, and only the logged mean of each data source is known.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json_lines, reading
from gtpo_verl.runs.continuation import changed_settings
from gtpo_verl.runs.correctness import is_correct
from gtpo_verl.runs.directory import (
    CONFIG_FILE,
    METRICS_FILE,
    RECORD_FILE,
    SWEEP_FILE,
    VALIDATION,
    flatten,
    read_config,
    read_record,
)
from gtpo_verl.runs.lock import OWNER_FILE, live_owner
from gtpo_verl.runs.loggers import read_logger
from gtpo_verl.runs.statistics import Floats, cluster_means
from gtpo_verl.runs.sweep import Sweep, load

if TYPE_CHECKING:  # the registry imports torch, and most readers need no method
    from gtpo_verl.algorithms.registry import Algorithm

# what a report reads of a record
_RECORDED: dict[str, Any] = {
    **dict.fromkeys(("versions", "settings", "checksums", "code"), dict),
    **dict.fromkeys(("notes", "attempts", "overrides"), list),
    **dict.fromkeys(("name", "status", "created", "command", "reason", "hardware"), str),
    "seed": int | str,
}
UNKNOWN_SOURCE = "unknown"  # as verl names the source of rows without one

_LARGEST = 1e100  # of a metric; what is above, such as ±1e308, overflows in differences and axes
_LAST_STEP = 10**12
_THRESHOLD = "algorithm.correct_threshold"
_KEY = re.compile(r"(?P<session>.+_\d+)_\d+")  # of a line in verl's dump, uid_session_output
_SAMPLES = "actor_rollout_ref.rollout.val_kwargs.n"
_LOGGED_ACCURACY = (
    re.compile(r"^val/(?P<source>.+)/mean@(?P<samples>\d+)$"),  # this package's: the share of correct samples
    re.compile(r"^val-core/(?P<source>.+)/acc/mean@(?P<samples>\d+)$"),  # verl's: the mean of acc
)


@dataclass(frozen=True, eq=False)  # arrays have no single truth value: compared by identity
class Validation:
    """One validation on one data source, of P prompts."""

    step: int
    source: str
    prompts: tuple[str, ...]  # P sorted keys, one per pair of prompt and ground truth
    clusters: tuple[str, ...]  # P names: prompts that the bootstrap resamples together, their keys without any
    accuracy: Floats  # (P,), the share of correct samples
    counts: NDArray[np.int64]  # (P,), of samples
    mean_acc: float  # mean over prompts of the verifier's acc, which is what verl logs

    def rows(self, prompts: Sequence[str]) -> NDArray[np.int64]:
        """Indices of the given prompts, all of which must be in this validation."""
        return np.searchsorted(self.prompts, prompts)

    def clusters_of(self, prompts: Sequence[str]) -> list[str]:
        """The clusters of the given prompts, likewise."""
        return [self.clusters[row] for row in self.rows(prompts)]


@dataclass(frozen=True, eq=False)  # arrays have no single truth value: compared by identity
class Training:
    """One training, as it left its files."""

    name: str
    path: Path
    metrics: Mapping[int, Mapping[str, float]]  # by step
    validations: Mapping[str, tuple[Validation, ...]]  # by data source, in order of steps
    config: Mapping[str, Any]  # flattened
    method: "Algorithm | None"  # registered, of the configuration
    notes: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json, empty where there is none
    axes: Mapping[str, str] = field(default_factory=dict)  # the values of a sweep's axes

    @property
    def last_step(self) -> int:
        return max(self.metrics)

    @property
    def keys(self) -> set[str]:
        return {key for data in self.metrics.values() for key in data}

    @property
    def sources(self) -> list[str]:
        """Every data source that was validated, whether its samples were kept or only its mean was logged."""
        return sorted({*self.validations, *logged_accuracies(self.keys)})

    @property
    def seed(self) -> str | None:
        """The training's seed as text: of the sweep's axis, the configuration, or the record; None where none says."""
        known = (self.axes.get("seed"), self.config.get("seed"), self.record.get("seed"))
        return next((str(seed) for seed in known if seed is not None), None)

    @property
    def status(self) -> str | None:
        """``complete``, ``interrupted``, ``failed`` or ``running``; None where it was not recorded."""
        return self.record.get("status")

    def recorded(self, section: str) -> Mapping[str, Any]:
        """A section of the record, such as ``versions``; empty where there is none."""
        return self.record.get(section) or {}

    def series(self, key: str) -> tuple[NDArray[np.int64], Floats]:
        """Steps and values of a metric, in order of steps; both empty where it was never logged."""
        points = [(step, data[key]) for step, data in sorted(self.metrics.items()) if key in data]
        return np.array([s for s, _ in points], dtype=np.int64), np.array([v for _, v in points], dtype=np.float64)


@dataclass(frozen=True)
class Run:
    """One or several trainings of one command or one sweep."""

    name: str
    path: Path
    trainings: tuple[Training, ...]
    record: Mapping[str, Any]  # run.json of the whole, or what sweep.json says about it; empty where there is none
    missing: tuple[str, ...] = ()  # trainings that were planned and logged no step
    sweep: Sweep | None = None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run, see `read_run`. UserError: none is given, one is given twice, or one cannot be read."""
    if not paths:
        raise UserError(
            "no run is given: name a run directory, for example `gtpo-verl report outputs/gtpo-seed0-20260101-120000`."
        )
    resolved = [path.resolve() for path in paths]
    for path, place in zip(paths, resolved, strict=True):
        if resolved.count(place) > 1:
            raise UserError(f"{path} is given more than once: name each run once.")
    return [read_run(path) for path in paths]


def read_run(path: Path) -> Run:
    """Read a run directory, a sweep's, a single training's, or the log of one of verl's loggers.

    UserError: the path does not exist, or holds no metrics, or a file in it is not what it should be.
    """
    path = Path(path)
    name = path.stem if path.is_file() else path.resolve().name
    if not path.exists():
        raise UserError(f"{path} does not exist: give the directory of a run, the one that holds its {METRICS_FILE}")
    if (path / METRICS_FILE).is_file() or path.suffix == ".jsonl":
        directory, metrics_file = (path.parent, path) if path.is_file() else (path, path / METRICS_FILE)
        if training := _read_training(directory, metrics_file, name):
            return Run(str(training.record.get("name") or name), path, (training,), training.record)
        raise UserError(f"{metrics_file} holds no readable line: has the training logged its first step yet?")
    if logged := read_logger(path):
        metrics, content = logged
        config = dict(flatten(content))
        training = Training(name, path, metrics, {}, config, _method(config))
        return Run(name, path, (training,), record={})
    if path.is_file():
        raise UserError(f"{path} is not a run: give a run's directory, or a .jsonl file of verl's file logger")
    sweep = load(path) if (path / SWEEP_FILE).is_file() else None
    names = list(sweep.runs) if sweep else sorted(file.parent.name for file in path.glob(f"*/{METRICS_FILE}"))
    read = {one: _read_training(path / one, path / one / METRICS_FILE, one) for one in names}
    trainings = [training for training in read.values() if training]
    if not trainings:
        raise UserError(
            f"no {METRICS_FILE} with a readable line in {path} or in a directory of it: has a training logged its "
            "first step yet?"
        )
    missing = tuple(one for one, training in read.items() if not training)
    if sweep is None:
        return Run(name, path, tuple(trainings), {}, missing)
    _check_types(path / SWEEP_FILE, sweep.about)
    axes = [key.lstrip("+") for key in sweep.axes]
    placed = []
    for training in trainings:
        overrides = sweep.runs[training.name]
        values = dict(override.lstrip("+~").split("=", 1) for override in overrides if "=" in override)
        placed.append(replace(training, axes={axis: values[axis] for axis in axes if axis in values}))
    complete = not missing and all(training.status == "complete" for training in trainings)
    record = {**sweep.about, "name": sweep.name, "status": "complete" if complete else None}
    return Run(sweep.name, path, tuple(placed), record, missing, sweep)


def _check_types(file: Path, record: Mapping[str, Any]) -> None:
    """Check what a report reads of a record."""
    for name, kinds in _RECORDED.items():
        value = record.get(name)
        if not isinstance(value, kinds | None) or (
            name == "attempts" and not all(isinstance(one, dict) for one in value or ())
        ):
            raise UserError(f"{file}: {name} is {value!r:.40}: repair it, or remove the file to report without it")


def _read_training(directory: Path, metrics_file: Path, name: str) -> Training | None:
    """None where no step was logged yet."""
    metrics, notes = read_metrics(metrics_file) if metrics_file.is_file() else ({}, [])
    if not metrics:
        return None
    config: dict[str, Any] = {}
    if (directory / CONFIG_FILE).is_file():
        with reading(directory / CONFIG_FILE):
            content = read_config(directory / CONFIG_FILE)
            json.dumps(content, default=str)  # a ValueError where a list holds itself
            config = dict(flatten(content)) if isinstance(content, dict) else {}
    record = read_record(directory)
    _check_types(directory / RECORD_FILE, record)
    if record.get("status") == "running" and (directory / OWNER_FILE).exists() and not live_owner(directory):
        record |= {"status": "interrupted", "reason": "it was killed, or its machine is gone"}
    with reading(directory / RECORD_FILE):
        notes += changed_settings(record)
    validations, validation_notes = _read_validations(directory / VALIDATION, metrics, config)
    return Training(
        name=name,
        path=directory,
        metrics=metrics,
        validations=validations,
        config=config,
        method=_method(config),
        notes=(*notes, *validation_notes),
        record=record,
    )


def _method(config: Mapping[str, Any]) -> "Algorithm | None":
    """The registered method of a flattened configuration; None where none was recorded."""
    from gtpo_verl.algorithms.registry import algorithm_of

    estimator = config.get("algorithm.adv_estimator")
    if estimator is None:
        return None
    actor = "actor_rollout_ref.actor"
    loss = {"loss_mode": config.get(f"{actor}.policy_loss.loss_mode")}
    objective = {"policy_loss": loss, "loss_agg_mode": config.get(f"{actor}.loss_agg_mode")}
    return algorithm_of({"algorithm": {"adv_estimator": estimator}, "actor_rollout_ref": {"actor": objective}})


def threshold_of(config: Mapping[str, Any]) -> float:
    """The ``acc`` from which on a sample is correct; full marks where no configuration was recorded."""
    return float(config.get(_THRESHOLD, 1.0))


def logged_accuracies(keys: Collection[str]) -> dict[str, str]:
    """The key of the logged accuracy of each data source: the share of correct samples, else verl's mean of ``acc``.

    Of several, the one with most samples per prompt.
    """
    found = sorted(
        (match["source"], rank, int(match["samples"]), key)
        for rank, pattern in enumerate(reversed(_LOGGED_ACCURACY))
        for key in keys
        if (match := pattern.match(key))
    )
    return {source: key for source, _, _, key in found}  # of each source the last


def read_metrics(file: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Read metrics by step, without those of attempts that a resume has replaced.

    Of a step logged again after a resume the last value of each key wins (a resumed training validates first, and logs
    only that for the step it starts from). Where the steps jump back, the later steps of the abandoned attempt are
    dropped. Lines torn by a crash, and values that are not finite numbers, are left out.

    Returns {step: {key: value}}, empty where no line can be read, and notes about what was left out. UserError: a line
    is JSON of another form.
    """
    metrics: dict[int, dict[str, float]] = {}
    torn = dropped = not_finite = 0
    for number, entry in read_json_lines(file):
        if entry is None:
            torn += 1
            continue
        step, data = (entry.get("step"), entry.get("data")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(step, int) and 0 <= step <= _LAST_STEP and isinstance(data, dict)):
            raise UserError(f'{file}, line {number}: expected {{"step": ..., "data": {{...}}}} as verl logs it')
        abandoned = [later for later in metrics if later > step]
        for later in abandoned:
            del metrics[later]
        dropped += len(abandoned)
        values = {key: value for key, value in data.items() if isinstance(value, int | float)}
        finite = {key: float(value) for key, value in values.items() if abs(value) <= _LARGEST}
        not_finite += len(values) - len(finite) + len(entry.get("not_finite") or ())
        metrics.setdefault(step, {}).update(finite)
    left_out = {
        f"{_count(torn, 'line')} of {file.name} could not be read (torn by a crash) and left out": torn,
        f"{_count(dropped, 'step')} logged before a resume from an earlier checkpoint left out": dropped,
        f"{_count(not_finite, 'metric value')} not finite (NaN, infinite or beyond 1e100) and left out": not_finite,
    }
    return metrics, [note for note, number in left_out.items() if number]


def _read_validations(
    directory: Path, metrics: Mapping[int, Mapping[str, float]], config: Mapping[str, Any]
) -> tuple[dict[str, tuple[Validation, ...]], list[str]]:
    """Validations by data source, and notes about what was left out."""
    threshold = threshold_of(config)
    last_step = max(metrics)
    logged = list(logged_accuracies({key for data in metrics.values() for key in data}))
    files = {int(file.stem): file for file in directory.glob("*.jsonl") if file.stem.isdecimal() and file.is_file()}
    validations: dict[str, list[Validation]] = {}
    notes: list[str] = []
    unassigned = []
    partial_credit = 0
    read: dict[int, list[_Sample]] = {}
    for step, file in sorted(files.items()):
        if step > last_step:
            notes.append(f"validation of step {step} left out: the metrics end at step {last_step}")
            continue
        samples, file_notes = _read_samples(file, step, default=logged)
        notes += file_notes
        if any(sample.source is None for sample in samples):
            unassigned.append(str(step))
            continue
        partial_credit += sum(sample.acc not in (0, 1, None) for sample in samples)
        read[step] = samples
    known = {sample.prompt: sample for samples in read.values() for sample in samples}
    per_prompt = int(config.get(_SAMPLES) or 1)
    for step, samples in read.items():
        lost, left = _that_never_came(samples, known.values(), metrics.get(step, {}), per_prompt)
        if lost:
            notes.append(f"{_count(len(lost), 'sample')} of the validation of step {step} that failed counted as wrong")
        if left:
            notes.append(f"{_count(left, 'sample')} of the validation of step {step} that failed left out")
        for validation in _by_source([*samples, *lost], step, threshold):
            validations.setdefault(validation.source, []).append(validation)
    if unassigned:
        notes.append(
            f"the validation samples of step{'s' * (len(unassigned) > 1)} {', '.join(unassigned)} do not name their "
            f"data source, and several were logged ({', '.join(logged)}): only the logged mean of each is shown"
        )
    if partial_credit:
        notes.append(
            f"{_count(partial_credit, 'validation sample')} with an acc other than 0 and 1: correct from {threshold:g} "
            f"on ({_THRESHOLD}{'' if _THRESHOLD in config else ', which was not recorded'})"
        )
    return {source: tuple(found) for source, found in sorted(validations.items())}, notes


class _Sample(NamedTuple):
    source: str | None
    prompt: str
    cluster: str
    acc: float | None


def _read_samples(file: Path, step: int, default: Sequence[str]) -> tuple[list[_Sample], list[str]]:
    """The samples of a validation, none where no sample has a verdict; ``default``: the logged data sources."""
    fallback = UNKNOWN_SOURCE if not default else default[0] if len(default) == 1 else None
    samples = []
    sessions = set()
    torn = without = 0
    for number, line in read_json_lines(file):
        if line is None:
            torn += 1
            continue
        if not isinstance(line, dict) or "input" not in line:
            raise UserError(f"{file}, line {number}: expected a validation sample as verl dumps it, with input and acc")
        if match := _KEY.fullmatch(str(line.get("uid"))):
            if match["session"] in sessions:  # a later output: the first has the prompt, and all have the verdict
                continue
            sessions.add(match["session"])
        acc = line.get("acc")
        if not isinstance(acc, int | float | None):
            raise UserError(f"{file}, line {number}: acc is {acc!r}, expected the verifier's verdict, a number")
        if acc is None or not abs(acc) <= _LARGEST:
            acc = None
            without += 1
        source, cluster = line.get("data_source"), line.get("cluster")
        # prompt and ground truth: equal in every validation of every arm
        identity = json.dumps([line["input"], line.get("gts")], sort_keys=True)
        prompt = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        of_cluster = prompt if cluster is None else str(cluster)
        samples.append(_Sample(fallback if source is None else str(source), prompt, of_cluster, acc))
    notes = []
    if torn:
        notes.append(f"{_count(torn, 'sample')} of the validation of step {step} could not be read and left out")
    if without == len(samples):
        reason = "its samples have no verdict (acc)" if samples else "it holds no sample"
        return [], [*notes, f"validation of step {step} left out: {reason}"]
    if without:
        # verl counts a sample whose generation or verification failed as wrong, and so do we
        notes.append(f"{_count(without, 'sample')} of the validation of step {step} without a verdict counted as wrong")
    return samples, notes


def _that_never_came(
    samples: Sequence[_Sample], known: Collection[_Sample], logged: Mapping[str, float], per_prompt: int
) -> tuple[list[_Sample], int]:
    """The samples of a validation that failed, of which verl writes no line, as wrong ones; and how many of them belong
    to no prompt that is known.

    known: a sample of each prompt of the run. logged: metrics of the step. per_prompt: samples asked for.
    """
    lost, left = [], 0
    came = Counter(sample.prompt for sample in samples)
    for source in {sample.source for sample in known}:
        failed = int(logged.get(f"val/{source}/failed_samples", 0))
        if not failed:
            continue
        missing = []
        for sample in known:
            if sample.source == source:  # a prompt that the data repeats has several times the number of samples
                wanted = per_prompt * max(math.ceil(came[sample.prompt] / per_prompt), 1)
                missing += [sample._replace(acc=None)] * (wanted - came[sample.prompt])
        if len(missing) == failed:
            lost += missing
        else:
            left += failed
    return lost, left


def _by_source(samples: Sequence[_Sample], step: int, threshold: float) -> Iterator[Validation]:
    """A validation for each data source; every sample must have one."""
    for source in sorted({sample.source for sample in samples if sample.source is not None}):
        of_source = [sample for sample in samples if sample.source == source]
        prompts = [sample.prompt for sample in of_source]
        names, accuracy, counts = cluster_means(prompts, [is_correct(sample.acc, threshold) for sample in of_source])
        _, mean_acc, _ = cluster_means(prompts, [sample.acc or 0 for sample in of_source])
        clusters = {sample.prompt: sample.cluster for sample in of_source}
        of_prompts = tuple(clusters[name] for name in names)
        yield Validation(step, source, names, of_prompts, accuracy, counts, float(mean_acc.mean()))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
