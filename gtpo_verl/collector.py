"""Python's garbage collector, kept away from the million objects that torch, transformers, verl and vLLM load."""

import atexit
import gc
import threading

REST = 30.0  # seconds


def rest_at_start() -> None:
    """Let the collector rest for the first seconds of a process, which are imports, and exempt what they have loaded.

    It would walk through all that is loaded again and again: a sixth of the CPU time of importing verl or vLLM.
    """
    gc.disable()
    end = threading.Timer(REST, _end_rest)
    end.daemon = True
    end.start()


def _end_rest() -> None:
    _exempt()  # to the collector all of it is new, and would be walked through next
    gc.enable()


def never_collect_what_is_loaded() -> None:
    """Exempt what is in memory now from garbage collection.

    Every full collection walks through it: in an agent loop a fifth of the CPU time.
    """
    gc.collect()
    _exempt()


def _exempt() -> None:
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is not freed at the end Triton reports as leaks, in a hundred lines
