"""How far several trainings of the same length are, and how long they will still take."""

import time
from collections.abc import Callable


class Pace:
    """Progress of trainings that run one after the other, from the steps of the one that is running.

    Args:
        steps: of one training.
        before: trainings that are complete.
        after: trainings that are still to come.
        clock: seconds, monotonic.
    """

    def __init__(self, steps: int, *, before: int = 0, after: int = 0, clock: Callable[[], float] = time.monotonic):
        self.steps = steps
        self._before = before
        self._after = after
        self._clock = clock
        self._started = clock()
        self._first: tuple[int, float] | None = None
        self._last = (0, self._started)

    def saw(self, step: int) -> None:
        """A step has ended; 0 is the validation before the first one."""
        self._last = (step, self._clock())
        self._first = self._first or self._last

    @property
    def share(self) -> float:
        """Of all steps of all trainings, those that have ended: 0 to 1."""
        return (self._before + min(1.0, self._last[0] / self.steps)) / (self._before + 1 + self._after)

    @property
    def seconds_left(self) -> float | None:
        """For the rest of this training and those to come, which set up and step as fast as this one; None before two
        steps have been seen.
        """
        if self._first is None or self._last[0] <= self._first[0]:
            return None
        (first, first_at), (last, last_at) = self._first, self._last
        step = (last_at - first_at) / (last - first)
        set_up = first_at - self._started
        left = step * (self.steps - last) + self._after * (set_up + step * self.steps)
        return max(0.0, left - (self._clock() - last_at))


def in_words(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
