"""Loaded by ``import verl`` in every process (entry-point group ``verl.plugins``): makes our names known to verl.

A process of a run of ``gtpo-verl`` has the environment variable `RUN`: there verl's weight sync, TransferQueue,
warnings, log lines and random state are also made those of the run. In any other process that imports verl nothing is
touched.
verl imports this module, calls nothing, and swallows exceptions. So importing registers, an exception is printed before
it is raised again, and ``actor_rollout_ref.model.external_lib`` imports the module a second time where verl raises.
Everything here is light: vLLM workers load it too.
"""

import logging
import os
import sys
import warnings
from collections.abc import Sequence

from gtpo_verl.errors import UserError
from gtpo_verl.runs.terminal import LOG_FORMAT
from gtpo_verl.seeds import seed_process
from gtpo_verl.versions import check_verl

RUN = "GTPO_VERL_RUN"  # set in configs/base.yaml, and handed on to every process by Ray
MAIN = "verl.trainer.main_ppo"


def register() -> None:
    """Register platform, estimators and losses, and give a process of a run its seed, log lines, TransferQueue and
    weight sync.

    Raises UserError: verl is outside the supported range.
    """
    check_verl()
    # importing registers platform and losses
    from gtpo_verl.integrations import cpu_platform, estimators, losses  # noqa: F401

    estimators.register()
    if os.environ.get(RUN) != "1":
        return
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    from gtpo_verl.integrations import queue_namespace

    # verl warns in every process about every training engine that is not installed
    warnings.filterwarnings("ignore", message=".* engine is not available")
    log_by_name()
    seed_process()
    queue_namespace.register()
    _ROLLOUT_REGISTRY["vllm", "async"] = "gtpo_verl.integrations.vllm.weight_socket.NamedSocketAdapter"


def refuse_verls_main(command: Sequence[str]) -> None:
    """End a process of verl's own main that names an estimator of ours, which would fail after the first generation.

    verl swallows exceptions of plugins, and not SystemExit. A name in a YAML file is not seen here.

    command: of the process, with Python's own arguments.
    """
    from gtpo_verl.algorithms import algorithms

    if MAIN not in command:
        return
    ours = {entry.estimator for entry in algorithms().values() if entry.verl_estimator is None}
    for argument in command:
        key, _, name = argument.lstrip("+").partition("=")
        if key == "algorithm.adv_estimator" and name in ours:
            print(
                f"error: {argument}: verl's own trainer has no entropies and verdicts to give it. Run `python -m "
                "gtpo_verl.main_ppo` with the same arguments.",
                file=sys.stderr,
                flush=True,
            )
            raise SystemExit(2)


def log_by_name() -> None:
    """In a process of a run, begin our log lines with our name: its terminal shows them, and no other package's."""
    import ray

    if not ray.is_initialized():
        return
    ours = logging.getLogger("gtpo_verl")
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    ours.handlers = [handler]
    ours.setLevel(logging.WARNING)  # as verl for its own: another package may change the root logger's level
    ours.propagate = False


class _ToStandardError(logging.StreamHandler):
    """Writes to what standard error is when a line is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def known_estimators() -> list[str]:
    """The names of all estimators that are registered in this process."""
    from verl.trainer.ppo import core_algos

    return [str(getattr(name, "value", name)) for name in core_algos.ADV_ESTIMATOR_REGISTRY]


def check_registered() -> list[str]:
    """Our names that are registered in this process; raises a UserError where one is missing."""
    from verl.trainer.ppo import core_algos

    from gtpo_verl.algorithms import algorithms

    entries = algorithms().values()
    found = {
        f"estimator {entry.estimator}": core_algos.ADV_ESTIMATOR_REGISTRY.get(entry.estimator) for entry in entries
    }
    found |= {f"policy loss {entry.loss}": core_algos.POLICY_LOSS_REGISTRY.get(entry.loss) for entry in entries}
    missing = [what for what, function in found.items() if function is None]
    if missing:
        raise UserError(
            f"verl does not know {', '.join(missing)}: the plugin gtpo_verl.integrations.plugin was not loaded here."
        )
    return [what for what, function in found.items() if function.__module__.startswith("gtpo_verl")]


refuse_verls_main(sys.orig_argv)
try:
    register()
except Exception as error:
    print(
        f"gtpo_verl: the verl plugin could not be loaded in process {os.getpid()}: {error}", file=sys.stderr, flush=True
    )
    raise
