"""Bounds of logged metrics: what is outside for several steps in a row is a warning, or ends the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_verl.errors import UserError

ACTIONS = ("warn", "stop")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One entry of ``guards.bounds``."""

    metric: str  # its name in metrics.jsonl; steps that do not log it are skipped
    min: float | None = None
    max: float | None = None
    unchanged: bool = False  # whether a value equal to the last step's is outside as well
    steps: int = 1  # how many in a row it must be outside
    action: str = "warn"  # once until it is inside again, or "stop"

    def outside(self, value: float, last: float | None) -> bool:
        """Whether a value is outside, after the last step's; NaN is outside of every limit."""
        low, high = self.min is not None and not value >= self.min, self.max is not None and not value <= self.max
        return low or high or (self.unchanged and value == last)

    def describe(self) -> str:
        """What it allows, in words."""
        limits = {"at least": self.min, "at most": self.max}
        parts = [f"{word} {limit}" for word, limit in limits.items() if limit is not None]
        return " and ".join([*parts, *["changing"] * self.unchanged])


def read_bounds(settings: Mapping[str, Any]) -> dict[str, Bound]:
    """{name: bound} of ``guards.bounds``; entries that are null are off. UserError: an entry is not as it must be."""
    bounds = {}
    for name, entry in settings.items():
        if entry is None:
            continue
        key = f"guards.bounds.{name}"
        try:
            bound = Bound(**entry)
        except TypeError as error:
            known = ", ".join(Bound.__annotations__)
            raise UserError(f"{key}={entry}: it takes {known}, metric at least; or null to switch it off.") from error
        if bound.action not in ACTIONS:
            raise UserError(f"{key}.action={bound.action}: choose {' or '.join(ACTIONS)}.")
        if isinstance(bound.steps, bool) or not isinstance(bound.steps, int) or bound.steps < 1:
            raise UserError(f"{key}.steps={bound.steps}: it must be a whole number, at least 1.")
        for limit in (bound.min, bound.max):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
                raise UserError(f"{key}: {limit!r} is not a number.")
        if bound.min is None and bound.max is None and not bound.unchanged:
            raise UserError(f"{key}: set min, max or unchanged=true, or {key}=null to switch it off.")
        bounds[name] = bound
    return bounds


class Guards:
    """Compares the metrics of each step with bounds, by name."""

    def __init__(self, bounds: Mapping[str, Bound]) -> None:
        self._bounds = bounds
        self._last: dict[str, float] = {}
        self._outside = dict.fromkeys(bounds, 0)  # steps in a row

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Returns what to warn about. UserError: a bound with the action ``stop`` is violated."""
        warnings = []
        for name, bound in self._bounds.items():
            if bound.metric not in metrics:
                continue
            value = float(metrics[bound.metric])
            self._outside[name] = self._outside[name] + 1 if bound.outside(value, self._last.get(name)) else 0
            self._last[name] = value
            if self._outside[name] < bound.steps:
                continue
            text = (
                f"step {step}: {bound.metric} is {value:.4g}, and guards.bounds.{name} expects it {bound.describe()}; "
                f"outside for {self._outside[name]} steps in a row"
            )
            if bound.action == "stop":
                raise UserError(
                    f"{text}. `gtpo-verl status` shows the run; guards.bounds.{name}=null switches the bound off."
                )
            if self._outside[name] == bound.steps:
                warnings.append(f"{text}.")
        return warnings
