"""Which arm and which seed a training is, and whether trainings may be compared.

An arm is an algorithm with its settings and, in a sweep, the values of the other axes; directories' names say nothing.
Trainings may be compared where they differ in nothing but what makes the arms and in the seed: settings, code,
versions, machine, data and model are checked, as far as they were recorded. Several models that a sweep crosses with
other axes are starts, not arms: arms are paired by start and seed.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.algorithms.registry import algorithms
from gtpo_verl.config import option_keys
from gtpo_verl.errors import UserError, did_you_mean
from gtpo_verl.report.results import Arm, TrainingResult
from gtpo_verl.runs.directory import NOT_SET, is_bookkeeping, within
from gtpo_verl.runs.provenance import FILE_KEYS
from gtpo_verl.runs.reader import Run, Training
from gtpo_verl.runs.sweep import Sweep

ALGORITHM = "algorithm"  # the axis of runs outside of a sweep
SEED = "seed"
START = "actor_rollout_ref.model.path"

_SEED_KEY = re.compile(r"(?i)seed$")
_FOLLOWING = ("critic.loss_agg_mode",)  # verl interpolates the actor's, which is a method's
_RECORDED = ("checksums", "code", "hardware", "versions")  # sections of the record; all else are settings
_MOST_NAMED = 5  # differences in one error message
ANY_SETTING = "*"


@dataclass(frozen=True)
class _Key:
    """What makes an arm: values of the axes, and settings of its method that tell it from the method's others.

    start: the model that the training began from, where those of the sweep are starts.
    """

    values: Mapping[str, str]
    settings: Mapping[str, str]
    start: str | None

    @property
    def identity(self) -> frozenset[tuple[str, str]]:
        return frozenset({**self.values, **self.settings}.items())


@dataclass(frozen=True)
class Design:
    """Every arm, the arms that are compared, and what had to be allowed."""

    arms: tuple[Arm, ...]
    pairs: tuple[tuple[Arm, Arm], ...]  # (arm, baseline)
    allowed: Mapping[str, Mapping[str, int]]  # of each key of --allow, how many trainings have each value
    unknown: tuple[str, ...]  # facts that some trainings did not record, which could not be compared


def design(runs: Sequence[Run], allow: Sequence[str] = ()) -> Design:
    """Sort trainings into arms and seeds, and check that they differ in nothing else.

    allow: keys in which the trainings may differ. A setting becomes an axis: arms that differ in it are different arms.
    A fact of the record (``code``, ``versions``, ``hardware``, ``checksums``) is tolerated. Raises UserError: two
    trainings are the same arm and seed, or they differ in more; the keys are named.
    """
    sweeps = [run.sweep for run in runs if run.sweep]
    trainings = [training for run in runs for training in run.trainings]
    arms_of_models = START in allow or any(START in (sweep.baseline or ()) for sweep in sweeps)
    keys = _arm_keys(trainings, allow, {} if arms_of_models else _starts(trainings))
    facts = {training: _facts(training) for training in trainings}
    known = {*_RECORDED, *(key for training in trainings for key in (*facts[training], *training.config))}
    for key in allow:
        if not any(within(one, [key]) for one in known):
            hint = did_you_mean(key, known) or ": name one in which they differ."
            raise UserError(f"--allow {key}: no run has such a setting{hint}")
    _refuse_differences(facts, keys, allow, _explained(trainings, sweeps))
    arms = _arms(keys, {training: run.name for run in runs for training in run.trainings})
    baseline = next((sweep.baseline for sweep in sweeps if sweep.baseline), None)
    if baseline is None:
        baseline = arms[0].values if not sweeps else {}
        several = len({arm.values.get(ALGORITHM) for arm in arms}) > 1
        baseline = {ALGORITHM: baseline[ALGORITHM]} if several and ALGORITHM in baseline else baseline
    recorded = [facts[training] for training in trainings]
    allowed = {
        key: dict(Counter(one[key] for one in recorded if key in one))
        for key in sorted({key for one in recorded for key in one})
        if within(key, allow) and len({one.get(key, NOT_SET) for one in recorded}) > 1
    }
    return Design(arms, _pairs(arms, baseline), allowed, _unknown(trainings))


def setting_differences(trainings: Sequence[Training]) -> tuple[dict[str, list[str]], dict[str, list[str]]] | None:
    """Settings that differ between trainings, and names, directories and addresses that do: {key: one value each}.

    None where fewer than two trainings have left their configuration; one without counts for nothing.
    """
    configs = [training.config for training in trainings]
    if sum(map(bool, configs)) < 2:
        return None
    settings: dict[str, list[str]] = {}
    bookkeeping: dict[str, list[str]] = {}
    for key in sorted({key for config in configs for key in config}):
        values = [_shown(config, key) if config else "not known" for config in configs]
        if len({value for value, config in zip(values, configs, strict=True) if config}) > 1:
            (bookkeeping if is_bookkeeping(key) else settings)[key] = values
    return settings, bookkeeping


# ---------------------------------------------------------------- arms


def _arm_keys(trainings: Sequence[Training], allow: Sequence[str], starts: Mapping[str, str]) -> dict[Training, _Key]:
    keys: dict[Training, _Key] = {}
    for training in trainings:
        values = {key: value for key, value in training.axes.items() if key != SEED and not (starts and key == START)}
        if not training.axes:
            values[ALGORITHM] = training.method.name if training.method else training.name
        tolerated = {key for key in training.config if within(key, allow) and not is_bookkeeping(key)}
        values |= {key: _shown(training.config, key) for key in tolerated if key not in values}
        method_keys = training.method.keys if training.method and not training.axes else ()
        settings = {key: _shown(training.config, key) for key in training.config if _listed(key, method_keys)}
        keys[training] = _Key(values, settings, starts.get(training.axes.get(START, "")))
    varying = _varying([key.values for key in keys.values()])
    trimmed = {}
    for training, key in keys.items():
        # of the settings of a method, those in which its trainings differ
        of_method = _varying([other.settings for one, other in keys.items() if one.method is training.method])
        kept = {*varying, *training.axes, ALGORITHM}
        trimmed[training] = _Key(
            {name: value for name, value in key.values.items() if name in kept},
            {name: value for name, value in key.settings.items() if name in of_method and name not in key.values},
            key.start,
        )
    return trimmed


def _starts(trainings: Sequence[Training]) -> dict[str, str]:
    """{model: its name} of the models that are crossed with other axes: the end of each path that tells it apart."""
    paths = list(dict.fromkeys(training.axes.get(START, "") for training in trainings))
    if len(paths) < 2 or "" in paths or not _varying([training.axes for training in trainings]) - {START, SEED}:
        return {}
    return {path: "/".join(end) for path, end in zip(paths, distinct_ends(list(map(Path, paths))), strict=True)}


def distinct_ends(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """Of each path as many of its last parts as tell all different ones apart."""
    parts, length = [path.parts for path in paths], 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    return [part[-length:] for part in parts]


def _varying(rows: Sequence[Mapping[str, str]]) -> set[str]:
    """The keys that do not have one value in all rows."""
    names = {name for row in rows for name in row}
    return {name for name in names if len({row.get(name, NOT_SET) for row in rows}) > 1}


def _arms(keys: Mapping[Training, _Key], runs: Mapping[Training, str]) -> tuple[Arm, ...]:
    grouped: dict[frozenset[tuple[str, str]], list[Training]] = {}
    for training, key in keys.items():
        grouped.setdefault(key.identity, []).append(training)
    arms = []
    names = _names({trainings[0]: keys[trainings[0]] for trainings in grouped.values()})
    for name, trainings in zip(names, grouped.values(), strict=True):
        by_seed: dict[str | None, Training] = {}
        for training in sorted(trainings, key=lambda one: (keys[one].start, str(one.seed).zfill(20))):  # as numbers
            start = keys[training].start
            twin = by_seed.setdefault(training.seed if start is None else f"{training.seed} from {start}", training)
            if twin is not training:
                seed = f"seed {training.seed}" if training.seed is not None else "without a recorded seed"
                raise UserError(
                    f"{twin.path} and {training.path} are both {name}, {seed}: give one of them. A setting in "
                    "which they differ makes two arms: --allow KEY."
                )
        titles = [f"{name}, seed {seed}" if len(by_seed) > 1 else name for seed in by_seed]
        results = [
            TrainingResult(title, runs[training], training, seed, keys[training].start)
            for title, (seed, training) in zip(titles, by_seed.items(), strict=True)
        ]
        arms.append(Arm(name, keys[trainings[0]].values, tuple(results)))
    order = {name: place for place, name in enumerate(algorithms())}  # the baseline first
    return tuple(sorted(arms, key=lambda arm: order.get(str(arm.method), len(order))))


def _names(keys: Mapping[Training, _Key]) -> list[str]:
    """The label of the method, and what else tells the arms apart; each with one of its trainings."""
    choices = {training: key.values.get("algo") or key.values.get(ALGORITHM) for training, key in keys.items()}
    varying = _varying([key.values for key in keys.values()]) - {"algo", ALGORITHM}
    names = []
    for training, key in keys.items():
        method, label = training.method, choices[training]
        if method and len({choices[one] for one in keys if one.method is method}) == 1:
            label = method.label  # of its presets, or of itself, there is one
        told = {name: value for name, value in key.values.items() if name in varying} | dict(key.settings)
        parts = [f"{name.rsplit('.', 1)[-1]}={value}" for name, value in told.items()]
        names.append(", ".join([label or training.name, *parts]))
    return names


def _pairs(arms: Sequence[Arm], baseline: Mapping[str, str]) -> tuple[tuple[Arm, Arm], ...]:
    """Each arm with the arm that has its values but for those of the baseline."""
    if not baseline:
        return ()
    partners = [next((one for one in arms if one.values == {**arm.values, **baseline}), None) for arm in arms]
    return tuple((arm, one) for arm, one in zip(arms, partners, strict=True) if one is not None and one is not arm)


# ---------------------------------------------------------------- what differs


def _facts(training: Training) -> dict[str, str]:
    """Everything recorded of a training that decides its result, as text, by key; places and names are left out."""
    sums = {key: value for key, value in training.recorded("checksums").items() if value}
    # the content decides, not the path; other settings name the same path, for example that of the tokenizer
    places = {_shown(training.config, key): f"as {key}" for key in sums}
    shown = {key: _shown(training.config, key) for key in training.config if not is_bookkeeping(key)}
    facts = {key: places.get(value, value) for key, value in shown.items() if key not in sums}
    facts |= {f"checksums.{key}": str(value) for key, value in sums.items()}
    code = training.recorded("code")
    facts |= {f"code.{key}": str(code[key]) for key in ("commit", "diff") if code.get("commit") and key in code}
    facts |= {f"versions.{key}": str(value) for key, value in training.recorded("versions").items()}
    return facts | ({"hardware": str(training.record["hardware"])} if training.record.get("hardware") else {})


def _explained(trainings: Sequence[Training], sweeps: Sequence[Sweep]) -> tuple[str, ...]:
    """Keys, and prefixes that end with a dot, in which arms may differ; `ANY_SETTING` where a sweep has other axes."""
    explained = [key for training in trainings if training.method for key in training.method.keys]
    explained += _FOLLOWING
    for sweep in sweeps if all(training.axes for training in trainings) else ():
        for key, options in sweep.axes.items():
            axis = key.lstrip("+")
            if axis == "algo":
                explained += [key for option in options for key in option_keys(axis, option)]
            elif axis != SEED:  # what settings follow from it, such as a length limit, only the composition knew
                explained += [ANY_SETTING, f"checksums.{axis}"]
    return tuple(dict.fromkeys(explained))


def _refuse_differences(
    facts: Mapping[Training, Mapping[str, str]],
    keys: Mapping[Training, _Key],
    allow: Sequence[str],
    explained: Sequence[str],
) -> None:
    found = {
        key: values
        for key in sorted({key for one in facts.values() for key in one})
        if key != SEED and not within(key, allow) and (values := _differing(key, facts, keys, explained))
    }
    for training in facts:
        seed = training.config.get(SEED)
        if seed is not None and training.seed != str(seed):
            found[SEED] = {training: f"{seed} in {training.path.name}, which is seed {training.seed} of the sweep"}
    if not found:
        return
    shown = [f"{key} ({_who(values)})" for key, values in list(found.items())[:_MOST_NAMED]]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    options = " ".join(f"--allow {key}" for key in list(found)[:_MOST_NAMED])
    raise UserError(
        f"these runs differ in more than the arm and the seed: {'; '.join(shown)}{more}. Leave out the odd ones, or "
        f"accept the difference, which the report will state: {options}."
    )


def _differing(
    key: str, facts: Mapping[Training, Mapping[str, str]], keys: Mapping[Training, _Key], explained: Sequence[str]
) -> dict[Training, str]:
    """The value of a fact in each training, where some differ that must not; else empty."""
    alike: Mapping[Training, Any]  # trainings with the same value here must have the same value of the fact
    if _SEED_KEY.search(key):
        alike = {training: training.seed for training in facts}
    elif _listed(key, explained) or (ANY_SETTING in explained and key.split(".", 1)[0] not in _RECORDED):
        alike = {training: (keys[training].identity, keys[training].start) for training in facts}
    elif key == f"checksums.{START}" and _share_seeds(keys):
        alike = {training: training.seed for training in facts}  # a seed may have its own start
    else:
        alike = dict.fromkeys(facts)
    values = {one: facts[one].get(key, NOT_SET) for one in facts if key in facts[one] or _says(one, key)}
    different = {(alike[training], value) for training, value in values.items()}
    return values if len(different) > len({alike[training] for training in values}) else {}


def _share_seeds(keys: Mapping[Training, _Key]) -> bool:
    """Whether the arms have seeds in common."""
    seeds: dict[Any, set[str | None]] = {}
    for training, arm in keys.items():
        seeds.setdefault(arm.identity, set()).add(training.seed)
    return bool(set.intersection(*seeds.values()))


def _says(training: Training, key: str) -> bool:
    """Whether the absence of a key is a statement: facts that were never recorded differ from nothing."""
    known = {"checksums": False, "hardware": False, "versions": bool(training.recorded("versions"))}
    known["code"] = bool(training.recorded("code").get("commit"))
    return known.get(key.split(".", 1)[0], bool(training.config))


def _who(values: Mapping[Training, str]) -> str:
    """``1e-06, but 2e-06 in gtpo-3``: the most frequent value, and the others with their trainings."""
    if len(values) == 1:
        return next(iter(values.values()))
    usual = Counter(values.values()).most_common(1)[0][0]
    odd: dict[str, list[str]] = {}
    for training, value in values.items():
        if value != usual:
            odd.setdefault(value, []).append(training.path.name)
    parts = [f"{_cut(value)} in {', '.join(names[:3])}{' …' * (len(names) > 3)}" for value, names in odd.items()]
    return f"{_cut(usual)}, but {'; '.join(parts[:3])}"


def _cut(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:37]}…"


def _unknown(trainings: Sequence[Training]) -> tuple[str, ...]:
    """What could not be compared because it was not recorded, a sentence each."""
    if len(trainings) < 2:
        return ()
    lacking = {
        "the configuration": [training for training in trainings if not training.config],
        "the commit": [one for one in trainings if not one.recorded("code").get("commit")],
        "versions": [training for training in trainings if not training.recorded("versions")],
        "checksums of model and data": [one for one in trainings if _lacks_checksums(one)],
    }
    sentences = []
    for what, without in lacking.items():
        more = f" and {len(without) - 3} more" * (len(without) > 3)
        names = ", ".join(one.path.name for one in without[:3]) + more
        if len(without) == len(trainings):
            names = "all runs" if len(trainings) > 2 else "both runs"
        if without:
            sentences.append(f"Not recorded by {names}, so not compared: {what}")
    return tuple(sentences)


def _lacks_checksums(training: Training) -> bool:
    sums = training.recorded("checksums")
    return not sums or any(training.config.get(key) and not sums.get(key) for key in FILE_KEYS)


def _listed(key: str, keys: Sequence[str]) -> bool:
    """Whether a key is in a list of exact keys and of prefixes that end with a dot."""
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in keys)


def _shown(config: Mapping[str, Any], key: str) -> str:
    if key not in config:
        return NOT_SET
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
