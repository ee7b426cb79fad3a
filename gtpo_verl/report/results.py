"""What the report says of each arm: name, accuracy by data source, step time, and settings that differ."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_verl.report.accuracy import Accuracy, Change, Difference, accuracies, difference, mean_change
from gtpo_verl.runs.reader import Arm, Run

# the phases within verl's `timing_s/step`, in the order they happen; validation is timed outside of it
STEP_PHASES = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "critic values",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "update_weights": "weights to vLLM",
    "save_checkpoint": "checkpoint",
}
OTHER_PHASE = "other"
VALIDATION_PHASE = "validation"

# settings that differ between any two trainings, whatever is compared
_BOOKKEEPING = re.compile(r"(^|\.)(experiment_name|project_name|\w+_dir|\w+_DIR)$")


@dataclass(frozen=True)
class ArmResult:
    """What the report says of one arm.

    label: the shortest tail of its path that no other arm has. name: for the page and the figures.
    accuracies: by data source.
    step_seconds: mean seconds per training step of each phase, in the order they happen.
    """

    label: str
    name: str
    run: str
    arm: Arm
    accuracies: Mapping[str, Accuracy]
    step_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """An arm minus the first one on one data source."""

    arm: ArmResult
    baseline: ArmResult
    source: str
    difference: Difference


def arm_results(runs: Sequence[Run]) -> tuple[ArmResult, ...]:
    """A result for each arm of each run, in the order given."""
    pairs = [(run, arm) for run in runs for arm in run.arms]
    labels = distinct_names([arm.path if arm.path.name == arm.name else arm.path / arm.name for _, arm in pairs])
    count = Counter(arm.method.name for _, arm in pairs if arm.method)
    return tuple(
        ArmResult(
            label=label,
            name=_name(label, arm, alone=arm.method is not None and count[arm.method.name] == 1),
            run=run.name,
            arm=arm,
            accuracies=accuracies(arm),
            step_seconds=_step_seconds(arm),
        )
        for label, (run, arm) in zip(labels, pairs, strict=True)
    )


def _name(label: str, arm: Arm, alone: bool) -> str:
    """The label of its method where no other arm has that method; else with, or only, the directory's name."""
    if arm.method and alone:
        return arm.method.label
    short = label if len(label) <= 30 else f"{label[:12]}…{label[-17:]}"
    if arm.method is None or arm.name == arm.method.name:
        return short
    return f"{arm.method.label} ({short})"


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest tails of the paths that tell them apart, all with the same number of parts."""
    parts = [path.resolve().parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def data_sources(results: Sequence[ArmResult]) -> list[str]:
    """Every data source that an arm validated."""
    return sorted({source for result in results for source in result.accuracies})


def mean_changes(results: Sequence[ArmResult]) -> dict[str, Change]:
    """The change averaged over the arms, for each data source where all have prompts and the last step in common."""
    changes = {}
    for source in data_sources(results):
        arms = [result.accuracies[source] for result in results if source in result.accuracies]
        change = mean_change(arms) if len(arms) == len(results) else None
        if change:
            changes[source] = change
    return changes


def comparisons(results: Sequence[ArmResult]) -> tuple[Comparison, ...]:
    """Every later arm against the first on each data source, where they have a validated step and prompts in common."""
    baseline = results[0]
    found = []
    for result in results[1:]:
        for source in data_sources([result]):
            if source not in baseline.accuracies:
                continue
            change = difference(result.accuracies[source], baseline.accuracies[source])
            if change:
                found.append(Comparison(result, baseline, source, change))
    return tuple(found)


def _step_seconds(arm: Arm) -> dict[str, float]:
    steps = [data for data in arm.metrics.values() if "timing_s/step" in data]
    if not steps:
        return {}

    def mean(phase: str) -> float:
        return float(np.mean([data.get(f"timing_s/{phase}", 0.0) for data in steps]))

    seconds = {title: mean(phase) for phase, title in STEP_PHASES.items()}
    seconds[OTHER_PHASE] = mean("step") - sum(seconds.values())
    seconds[VALIDATION_PHASE] = mean("testing")
    return {title: value for title, value in seconds.items() if value > 0}


def config_differences(results: Sequence[ArmResult]) -> tuple[dict[str, list[str]], dict[str, list[str]]] | None:
    """Settings that differ between the arms, and names and directories that do: {key: one value per arm}.

    None where fewer than two arms have left their configuration; an arm without one counts for nothing.
    """
    configs = [result.arm.config for result in results]
    if sum(map(bool, configs)) < 2:
        return None
    settings: dict[str, list[str]] = {}
    bookkeeping: dict[str, list[str]] = {}
    for key in sorted({key for config in configs for key in config}):
        values = [_shown(config, key) for config in configs]
        if len({value for value, config in zip(values, configs, strict=True) if config}) > 1:
            (bookkeeping if _BOOKKEEPING.search(key) else settings)[key] = values
    return settings, bookkeeping


def _shown(config: Mapping[str, Any], key: str) -> str:
    if not config:
        return "not known"
    if key not in config:
        return "not set"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
