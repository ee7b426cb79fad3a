"""Loaded by ``import verl`` in every process (entry-point group ``verl.plugins``): makes our names known to verl, and
seeds the process.

verl imports this module, calls nothing, and swallows exceptions. So importing registers, an exception is printed before
it is raised again, and ``actor_rollout_ref.model.external_lib`` imports the module a second time where verl raises.
Everything here is light: vLLM workers load it too.
"""

import logging
import os
import sys
import warnings

from gtpo_verl.errors import UserError
from gtpo_verl.runs.terminal import LOG_FORMAT
from gtpo_verl.seeds import seed_process
from gtpo_verl.versions import check_verl


def register() -> None:
    """Register platform, estimators, losses, weight sync and the job's TransferQueue in this process, and seed it.

    Raises:
        UserError: verl is outside the supported range.
    """
    # verl warns in every process about every training engine that is not installed
    warnings.filterwarnings("ignore", message=".* engine is not available")
    log_by_name()
    check_verl()
    seed_process()
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    # importing registers platform and losses
    from gtpo_verl.integrations import cpu_platform, estimators, losses, queue_namespace  # noqa: F401

    estimators.register()
    queue_namespace.register()
    _ROLLOUT_REGISTRY["vllm", "async"] = "gtpo_verl.integrations.vllm.weight_socket.NamedSocketAdapter"


def log_by_name() -> None:
    """In a process of a run, begin our log lines with our name: its terminal shows them, and no other package's."""
    import ray

    if not ray.is_initialized():
        return
    ours = logging.getLogger("gtpo_verl")
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    ours.handlers = [handler]
    ours.propagate = False


class _ToStandardError(logging.StreamHandler):
    """Writes to what standard error is when a line is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def check_registered() -> list[str]:
    """Check that our names are registered in this process, and return them.

    Raises:
        UserError: one of them is missing.
    """
    from verl.trainer.ppo import core_algos

    from gtpo_verl.algorithms import algorithms

    entries = algorithms().values()
    ours = {f"estimator {entry.estimator}": entry.estimator in core_algos.ADV_ESTIMATOR_REGISTRY for entry in entries}
    ours |= {f"policy loss {entry.loss}": entry.loss in core_algos.POLICY_LOSS_REGISTRY for entry in entries}
    missing = [what for what, known in ours.items() if not known]
    if missing:
        raise UserError(
            f"verl does not know {', '.join(missing)}: the plugin gtpo_verl.integrations.plugin was not loaded here."
        )
    return list(ours)


try:
    register()
except Exception as error:
    print(
        f"gtpo_verl: the verl plugin could not be loaded in process {os.getpid()}: {error}", file=sys.stderr, flush=True
    )
    raise
