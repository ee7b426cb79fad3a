"""What the report says of each arm and of each of its trainings: names, accuracy by data source, cost, step time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gtpo_verl.report.accuracy import Accuracy, Comparison, accuracies, comparison
from gtpo_verl.runs.reader import Training

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


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What the report says of one training: its arm's name, with the seed where the arm has several.

    ``run``: the name of the run that it is of.
    """

    name: str
    run: str
    training: Training

    @property
    def seed(self) -> str | None:
        return self.training.seed

    @cached_property
    def accuracies(self) -> Mapping[str, Accuracy]:
        """By data source."""
        return accuracies(self.training)

    @property
    def step_seconds(self) -> dict[str, float]:
        """Mean seconds per training step of each phase, in the order they happen; empty where they were not logged."""
        steps = [data for data in self.training.metrics.values() if "timing_s/step" in data]
        if not steps:
            return {}

        def mean(phase: str) -> float:
            return float(np.mean([data.get(f"timing_s/{phase}", 0.0) for data in steps]))

        seconds = {title: mean(phase) for phase, title in STEP_PHASES.items()}
        seconds[OTHER_PHASE] = mean("step") - sum(seconds.values())
        seconds[VALIDATION_PHASE] = mean("testing")
        return {title: value for title, value in seconds.items() if value > 0}

    @property
    def complete(self) -> bool:
        """Whether it counts in statistics over seeds: complete, or of a logger that does not say."""
        return self.training.status in (None, "complete")


@dataclass(frozen=True, eq=False)
class Arm:
    """Trainings that differ in their seed alone, in the order of the seeds.

    ``values``: of the axes; arms of one baseline agree in them but for the axes of the baseline.
    """

    name: str
    values: Mapping[str, str]
    trainings: tuple[TrainingResult, ...]

    @property
    def method(self) -> str | None:
        """The name of the registered method, or None."""
        method = self.trainings[0].training.method
        return method.name if method else None

    @property
    def counted(self) -> tuple[TrainingResult, ...]:
        """The trainings that its curves show: the complete ones; where there is none, all."""
        return tuple(result for result in self.trainings if result.complete) or self.trainings


def trainings_of(arms: Iterable[Arm]) -> list[TrainingResult]:
    return [training for arm in arms for training in arm.trainings]


def has_seeds(arms: Iterable[Arm]) -> bool:
    """Whether any arm was trained with several seeds, so that there is something to say over seeds."""
    return any(len(arm.trainings) > 1 for arm in arms)


def data_sources(arms: Iterable[Arm]) -> list[str]:
    """Every data source that an arm validated."""
    return sorted({source for result in trainings_of(arms) for source in result.accuracies})


def comparisons(pairs: Iterable[tuple[Arm, Arm]]) -> tuple[Comparison, ...]:
    """Every arm against its baseline, seed by seed, on each data source with a validated step and prompts in common."""
    found = []
    for arm, baseline in pairs:
        partners = {one.seed: one for one in baseline.trainings}
        for result in arm.trainings:
            if partner := partners.get(result.seed):
                found += [
                    comparison(result.name, result.accuracies[source], partner.name, partner.accuracies[source])
                    for source in sorted(result.accuracies.keys() & partner.accuracies.keys())
                ]
    return tuple(filter(None, found))


def cost_until(training: Training, what: str) -> Mapping[int, float] | None:
    """What had been spent when each step ended, step 0 included; None where it was not logged at every step.

    ``what``: ``seconds`` of training, validations left out, or ``responses`` generated for it: those of the groups that
    dynamic sampling rejects as well, those of validations not.
    """
    per_group = training.config.get("actor_rollout_ref.rollout.n")
    total, spent = {0: 0.0}, 0.0
    for step, data in sorted(training.metrics.items()):
        if step == 0:
            continue
        value = data.get("timing_s/step" if what == "seconds" else "credit/responses")
        groups = data.get("training/filter_groups/generated_groups")
        if what == "responses" and groups is not None and per_group:
            value = groups * float(per_group)
        if value is None:
            return None
        spent += value
        total[step] = spent
    return total if len(total) > 1 else None
