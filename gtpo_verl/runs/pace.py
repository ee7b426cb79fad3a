"""How far several trainings of the same length are, and how long they will still take."""

import math
import time
from collections.abc import Callable


class Pace:
    """Progress of trainings, from the steps of those that run.

    Args:
        steps: of one training.
        trainings: how many there are.
        done: of these, were complete before.
        at_once: of these, run at the same time.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        steps: int,
        *,
        trainings: int = 1,
        done: int = 0,
        at_once: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self._trainings = trainings
        self._done = done
        self._at_once = at_once
        self._clock = clock
        self._last: dict[str, tuple[int, float]] = {}  # of each training, its last step, and when it was seen
        self._first: dict[str, tuple[int, float]] = {}
        self._latest = clock()  # when anything was seen
        self._set_up = 0.0  # seconds of a training before its first step
        self._step: float | None = None  # seconds of a step

    def saw(self, training: str, step: int) -> None:
        """A training has ended a step; 0 is the validation before the first one."""
        now = self._clock()
        if training not in self._first:
            if all(last >= self.steps for last, _ in self._last.values()):  # it alone was waited for
                self._set_up = now - self._latest
            self._first[training] = (step, now)
        elif step > self._last[training][0]:
            first, since = self._first[training]
            self._step = (now - since) / (step - first)
        else:
            return
        self._last[training] = (step, now)
        self._latest = now

    @property
    def share(self) -> float:
        """Of all steps of all trainings, those that have ended: 0 to 1."""
        return (self._done + sum(min(1.0, step / self.steps) for step, _ in self._last.values())) / self._trainings

    @property
    def seconds_left(self) -> float | None:
        """For all trainings, where those to come set up and step as fast as the last ones; None before a step."""
        if self._step is None:
            return None
        running = [(self.steps - step) * self._step - (self._latest - seen) for step, seen in self._last.values()]
        rounds = math.ceil((self._trainings - self._done - len(self._last)) / self._at_once)
        left = max(0.0, *running) + rounds * (self._set_up + self.steps * self._step)
        return max(0.0, left - (self._clock() - self._latest))


def in_words(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
