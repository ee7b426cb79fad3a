"""Seeds that follow from the one of a run (the key ``seed``)."""

import hashlib
import os

VARIABLE = "GTPO_VERL_SEED"  # environment variable that every process of a run has
LARGEST = 2**31 - 1  # vLLM adds the number of the replica, and numpy takes 32 bits


def derived(seed: int, *names: object) -> int:
    """A seed of 63 bits for what these names, compared by their ``repr``, stand for: the same in every run of ``seed``,
    unrelated to all others.
    """
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_process() -> None:
    """Seed torch and numpy in this process, where it belongs to a run.

    Python's ``random`` is left alone: verl and Ray draw names from it that must differ between runs.
    """
    if VARIABLE not in os.environ:
        return
    import numpy as np
    import torch

    seed = int(os.environ[VARIABLE])
    torch.manual_seed(seed)
    np.random.seed(seed)
