"""What the runs of a sweep cost, as `gtpo-verl plan` estimates it."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.experiments.launchers import gpus_of
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.planning.step import total_steps


@dataclass(frozen=True)
class Cost:
    """Devices of a run (ranks on a CPU), its steps, and hours on them where they can be estimated."""

    devices: int
    on_cpu: bool
    steps: int | None
    hours: float | None

    def __str__(self) -> str:
        plural, where = "s" * (self.devices > 1), " on CPUs" if self.on_cpu else ""
        time = "" if self.hours is None else f", {self.hours:,.1f} h"
        devices = f"{self.devices} {'rank' if self.on_cpu else 'GPU'}{plural}{where}"
        return f"{devices}, {self.steps or 'an unknown number of'} steps{time}"


def cost_of(config: DictConfig, *, gpu: str, measured: Path | None) -> Cost:
    """The cost of one run; on a CPU there is no estimate without a ``measured`` one. See `make_plan`."""
    try:
        plan = make_plan(config, gpu=gpu, measured=measured)
        hours = None if plan.time is None else plan.time.total * plan.total_steps / 3600
    except UserError:  # the shape of its model is not known here, or its number of steps
        hours = None
    return Cost(gpus_of(config), config.trainer.device == "cpu", total_steps(config), hours)


def total(costs: list[Cost]) -> str:
    """One line on all runs together."""
    if any(cost.hours is None for cost in costs):
        return f"{len(costs)} runs; their time is not estimated: --measured RUN takes it from a run."
    hours = sum(cost.hours * cost.devices for cost in costs if cost.hours is not None)
    unit = "rank-hours" if costs[0].on_cpu else "GPU-hours"
    return f"{len(costs)} runs, {hours:,.0f} {unit}, without validation and verifier."
