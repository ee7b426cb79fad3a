"""The embedded task's reward after a random delay, so that responses end in another order in every run."""

import random
import time
from typing import Any

from gtpo_verl.tasks.sums import reward

_delays = random.Random()


def compute_score(*args: Any, **kwargs: Any) -> reward.Verdict:
    """As `gtpo_verl.tasks.sums.reward.compute_score`, up to 20 ms later."""
    time.sleep(_delays.uniform(0, 0.02))
    return reward.compute_score(*args, **kwargs)
