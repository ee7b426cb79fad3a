"""Whether a training goes on: what it does just now, for how long, and whether its processes live.

verl's buffers poll TransferQueue without a limit, and its other calls of other processes have none either: waits for
rollouts (`BoundedWait`) and the phases of a step (`Health`) have one here.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from gtpo_verl.errors import StepGivenUpError, UserError
from gtpo_verl.integrations.health import dead_servers, ended_actors
from gtpo_verl.integrations.transfer_queue import VALIDATION
from gtpo_verl.runs.directory import STOP_FILE, record_phase

logger = logging.getLogger(__name__)

STOP_PATIENCE = 60.0  # seconds without a response after which a request to stop gives the step up
NOT_POLLED = 60.0  # seconds between two polls of one wait at most: what is longer was no waiting
SAID_AT = (1 / 16, 1 / 4, 1 / 2)  # of the limit: when it is said what is waited for
WORKERS = {  # beside engines and TransferQueue: where the trainer keeps their Ray actors
    "reward worker": ("reward_loop_manager", "reward_loop_workers"),
    "agent loop worker": ("agent_loop_manager", "agent_loop_workers"),
    "actor rank": ("actor_rollout_wg", "_workers"),
}


class Health:
    """Of one training; the trainer's processes are looked up at every check, as they are made one after the other."""

    def __init__(self, config: DictConfig, trainer: Any) -> None:
        self._run_dir = Path(config.trainer.run_dir)
        self._guide_model = config.algorithm.guide.model
        self._limit = config.guards.phase_timeout
        self._go_on = f"The same command with trainer.run_dir={self._run_dir} resumes from the last checkpoint."
        self._trainer = trainer
        self._phase, self._since = "starting", time.monotonic()

    def begin(self, step: int, phase: str) -> None:
        """Record what the trainer begins to do, and start its time."""
        record_phase(self._run_dir, step, phase)
        self._phase, self._since = f"step {step}: {phase}", time.monotonic()

    def polled(self) -> None:
        """Start the time of the phase again: its wait for rollouts has a limit of its own."""
        self._since = time.monotonic()

    def stopping(self) -> bool:
        """Whether the training was asked to stop."""
        return (self._run_dir / STOP_FILE).exists()

    def check(self) -> None:
        """Raise UserError, from another thread, where an engine, agent loop, reward worker or actor rank is dead, or a
        phase lasts too long.
        """
        self.check_servers()
        asked: dict[str, Any] = {}
        for kind, (owner, workers) in WORKERS.items():
            actors = getattr(getattr(self._trainer, owner, None), workers, None) or ()
            asked |= {f"{kind} {number}": actor.__ray_ready__.remote() for number, actor in enumerate(actors)}
        dead = ended_actors(asked)
        if dead:
            raise UserError(
                f"{'; '.join(dead)}. It was killed, for lack of memory or by hand, or its node is gone; the run's log "
                f"may say more. {self._go_on}"
            )
        lasts = time.monotonic() - self._since
        if self._limit is not None and lasts > self._limit:
            raise UserError(
                f"{self._phase} for {lasts:.0f} s, the limit of guards.phase_timeout: a process, the network or a file "
                "system hangs, or it takes longer than expected (then raise the limit). The same command resumes from "
                "the last checkpoint."
            )

    def check_servers(self) -> None:
        """Raise UserError where the engine of a rollout server, or of a server of the guide, is dead."""
        managers = self._trainer._rollout_server_managers()
        self._check_servers("vLLM died", [server for manager in managers for server in manager.server_handles])
        guide = self._trainer.guide_servers
        if guide is not None:
            model = f"algorithm.guide.model={self._guide_model}"
            self._check_servers("the guide's vLLM died", guide.server_handles, model)

    def _check_servers(self, what: str, servers: Sequence[Any], *more: str) -> None:
        dead = dead_servers(servers)
        if dead:
            raise UserError(
                f"{what} ({'; '.join([*dead, *more])}). See the engine's traceback in the run's log; if there is none, "
                f"it was probably killed for lack of memory. {self._go_on}"
            )


class BoundedWait:
    """Takes the place of a buffer's ``_wait_for_next_poll``; every change in TransferQueue starts the time again.

    limit: seconds without a response or an ended group after which the run ends; None for no limit.
    """

    def __init__(self, buffer: ReplayBuffer, health: Health, limit: float | None) -> None:
        self._buffer = buffer
        self._health = health
        self._limit = limit
        self._wait = buffer._wait_for_next_poll
        self._seen: tuple[Any, ...] = ()
        self._since = self._polled = time.monotonic()
        self._said = 0
        vars(buffer)["_wait_for_next_poll"] = self

    def __call__(self, partition_id: str, last_debug_time: float) -> float:
        """Wait for the next poll; raises UserError where nothing has changed for the limit, and StepGivenUpError where
        the run was asked to stop and nothing has for `STOP_PATIENCE`.
        """
        self._health.polled()
        buffer, now = self._buffer, time.monotonic()
        counted = (buffer.finished_keys, buffer.failure_keys, buffer.partitions)
        seen = (partition_id, *(len(keys[partition_id]) for keys in counted))
        if seen != self._seen or now - self._polled > NOT_POLLED:
            self._seen, self._since, self._said = seen, now, 0
        self._polled = now
        self._check(partition_id, now - self._since)
        return self._wait(partition_id, last_debug_time)

    def _check(self, partition_id: str, quiet: float) -> None:
        running = sorted(self._buffer.running_keys[partition_id] | self._buffer.pending_keys[partition_id])
        named = ", ".join(running[:3]) + (", ..." if len(running) > 3 else "")
        what = "validation" if partition_id == VALIDATION else "training"
        waits = f"waiting for {len(running)} groups of the {what} ({named}): no response has arrived for {quiet:.0f} s"
        if quiet > STOP_PATIENCE and self._health.stopping():
            raise StepGivenUpError(f"{waits}, and the run was asked to stop: the step was given up.")
        if self._limit is None:
            return
        if quiet > self._limit:
            raise UserError(
                f"{waits}, the limit of guards.stall_timeout: a reward function or a tool that never returns, an "
                "engine that hangs, or a longer generation than expected (then raise the limit). The same command "
                "resumes from the last checkpoint."
            )
        if self._said < len(SAID_AT) and quiet > SAID_AT[self._said] * self._limit:
            self._said += 1
            logger.warning("%s.", waits)
