"""Python's garbage collector, kept away from the million objects that torch, transformers, verl and vLLM load."""

import gc
import threading

REST = 30.0  # seconds


def rest_at_start() -> None:
    """Let the collector rest for the first seconds of a process, which are imports.

    It would walk through all that is loaded again and again: a sixth of the CPU time of importing verl or vLLM.
    """
    gc.disable()
    end = threading.Timer(REST, gc.enable)
    end.daemon = True
    end.start()


def never_collect_what_is_loaded() -> None:
    """Exempt what is in memory now from garbage collection.

    Every full collection walks through it: in an agent loop a fifth of the CPU time.
    """
    gc.collect()
    gc.freeze()
