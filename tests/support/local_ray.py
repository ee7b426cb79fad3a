"""A Ray on this machine for tests that need a few actors."""

from typing import Any

import ray


def start_ray(**options: Any) -> None:
    """``ray.init`` without dashboard and output, once more where it fails: beside two trainings its processes may take
    longer than the 30 seconds that Ray waits for them.
    """
    options |= {"include_dashboard": False, "log_to_driver": False}
    try:
        ray.init(**options)
    except Exception:
        ray.shutdown()
        ray.init(**options)
