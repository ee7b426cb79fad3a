"""Assumptions of a plan measured on a run: lengths, sampling yield, and the speed of each phase on its GPUs."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.files import reading
from gtpo_verl.planning.parallel import Parallelism, parallelism
from gtpo_verl.planning.shapes import ModelShape, load_shape
from gtpo_verl.planning.step import skips_old_log_prob
from gtpo_verl.planning.timing import Assumption, Assumptions, forward_flops, passes_of_update
from gtpo_verl.runs.directory import METRICS_FILE
from gtpo_verl.runs.reader import read_metrics

FILTER = "training/filter_groups/"
PHASES = ("gen", "old_log_prob", "adv", "update_actor")  # as verl names them in timing_s/


@dataclass(frozen=True)
class MeasuredStep:
    """What one training step logged."""

    logged: dict[str, float]

    def seconds(self, phase: str) -> float:
        """Wall-clock time of a phase that ran."""
        return self.logged[f"timing_s/{phase}"]

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self.logged["prompt_length/mean"]

    @property
    def response(self) -> float:
        """Mean tokens of a response."""
        return self.logged["response_length/mean"]

    @property
    def responses(self) -> float:
        """Number of responses trained on."""
        return self.logged["perf/total_num_tokens"] / (self.prompt + self.response)

    @property
    def response_tokens(self) -> float:
        """Tokens of the responses trained on."""
        return self.responses * self.response

    @property
    def generated_tokens(self) -> float:
        """Tokens of all responses generated, those of groups that were filtered out included."""
        kept = self.logged.get(f"{FILTER}kept_groups", 1.0)
        return self.response_tokens * self.logged.get(f"{FILTER}generated_groups", kept) / kept

    @property
    def other_share(self) -> float:
        """Share of the step's time outside the four phases."""
        known = sum(self.logged.get(f"timing_s/{phase}", 0.0) for phase in PHASES)
        return max(1 - known / self.seconds("step"), 0.0)


@dataclass(frozen=True)
class MeasuredRun:
    """A run with finished training steps; the first step is left out where there are others, because it warms up."""

    name: str
    config: Any
    shape: ModelShape
    parallel: Parallelism
    steps: list[MeasuredStep]

    @classmethod
    def read(cls, run_dir: Path) -> "MeasuredRun":
        """Read a run directory.

        Raises:
            UserError: it is not a run directory, or no training step is finished.
        """
        if not (run_dir / METRICS_FILE).is_file() or not (run_dir / "config.yaml").is_file():
            raise UserError(
                f"--measured {run_dir}: no {METRICS_FILE} and config.yaml there; it must be the directory of a run."
            )
        with reading(run_dir / "config.yaml"):
            config: Any = OmegaConf.load(run_dir / "config.yaml")
            model = str(config.actor_rollout_ref.model.path)
        logged, _ = read_metrics(run_dir / METRICS_FILE)
        by_step = {step: dict(data) for step, data in logged.items() if "timing_s/update_actor" in data}
        if not by_step:
            raise UserError(f"--measured {run_dir}: it has no finished training step.")
        steps = [MeasuredStep(by_step[number]) for number in sorted(by_step)]
        return cls(run_dir.name, config, load_shape(model), parallelism(config), steps[1:] or steps)

    def median(self, value: Callable[[MeasuredStep], float]) -> float:
        """Median of a value over the steps."""
        return statistics.median(value(step) for step in self.steps)

    def rate(self, phase: str) -> float:
        """Floating-point operations of one forward pass over the batch of a step, by the seconds of a phase."""
        return self.median(
            lambda step: forward_flops(self.shape, step.responses, step.prompt + step.response) / step.seconds(phase)
        )


def measured_assumptions(assumptions: Assumptions, run_dir: Path) -> Assumptions:
    """Replace assumptions by what a run measured; a value that the run did not measure stays as it was.

    The run may have another model, batch size and number of GPUs: speeds are per GPU, and operations those of the run's
    own model.

    Raises:
        UserError: it is not a run directory, or no training step is finished.
    """
    run = MeasuredRun.read(run_dir)
    gpus, passes = run.parallel.gpus, passes_of_update(run.config, run.parallel)
    peak = assumptions["gpu_tflops"].value * 1e12 * gpus
    measured = {
        "prompt_length": (run.median(lambda step: step.prompt), "tokens, mean"),
        "response_length": (run.median(lambda step: step.response), "tokens, mean"),
        "update_efficiency": (passes * run.rate("update_actor") / peak, "of peak FLOP/s"),
        "advantage_ns": (run.median(lambda step: step.seconds("adv") / step.response_tokens) * 1e9, "ns per token"),
        "generated_tokens_per_gpu": (
            run.median(lambda step: step.generated_tokens / step.seconds("gen")) / gpus,
            "tokens/s per GPU",
        ),
        "other_share": (run.median(lambda step: step.other_share), "of the step"),
    }
    # a step trained entirely on groups carried over logs no yield
    yields = [step.logged[f"{FILTER}yield"] for step in run.steps if f"{FILTER}yield" in step.logged]
    if yields:
        measured["sampling_yield"] = (statistics.median(yields), "of generated groups")
    # where the run skips the old-log-prob pass, its timer covers something else
    if not skips_old_log_prob(run.config) and "timing_s/old_log_prob" in run.steps[0].logged:
        measured["log_prob_efficiency"] = (run.rate("old_log_prob") / peak, "of peak FLOP/s")
    origin = f"measured: {run.name}, {len(run.steps)} steps on {gpus} GPUs"
    return assumptions | {name: Assumption(value, unit, origin) for name, (value, unit) in measured.items()}
