"""Whether a training goes on: what it does just now, for how long, and whether its processes live."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.health import PhaseLimit, dead_servers, ended_actors
from gtpo_verl.runs.directory import STOP_FILE, record_phase


class Health:
    """Of one training.

    Args:
        config: composed.
        trainer: verl's, whose processes are looked up at every check: they are made one after the other.
    """

    def __init__(self, config: DictConfig, trainer: Any) -> None:
        self._run_dir = Path(config.trainer.run_dir)
        self._guide_model = config.algorithm.guide.model
        self._trainer = trainer
        self.limit = PhaseLimit(config.guards.phase_timeout)

    def begin(self, step: int, phase: str) -> None:
        """Record what the trainer begins to do, and start its time."""
        record_phase(self._run_dir, step, phase)
        self.limit.begin(f"step {step}: {phase}")

    def stopping(self) -> bool:
        """Whether the training was asked to stop."""
        return (self._run_dir / STOP_FILE).exists()

    def check(self) -> None:
        """Check that the engines, the agent loops, the reward workers and actor ranks are alive, and that no phase
        lasts too long.

        Raises:
            UserError: one is dead, or a phase does.
        """
        self.check_servers()
        dead = ended_actors({name: actor.__ray_ready__.remote() for name, actor in self._workers().items()})
        if dead:
            raise UserError(
                f"{'; '.join(f'{name}: {why}' for name, why in dead.items())}. It was killed, for lack of memory or by "
                f"hand, or its node is gone; the run's log may say more. {self._go_on()}"
            )
        self.limit.check()

    def check_servers(self) -> None:
        """Check that the engine of every rollout server, and of every server of the guide, is alive.

        Raises:
            UserError: one is dead.
        """
        managers = self._trainer._rollout_server_managers()
        self._check_servers("vLLM died", [server for manager in managers for server in manager.server_handles])
        guide = self._trainer.guide_servers
        if guide is not None:
            model = f"algorithm.guide.model={self._guide_model}"
            self._check_servers("the guide's vLLM died", guide.server_handles, model)

    def _check_servers(self, what: str, servers: list[Any], *more: str) -> None:
        dead = dead_servers(servers)
        if dead:
            raise UserError(
                f"{what} ({'; '.join([*dead, *more])}). See the engine's traceback in the run's log; if there is none, "
                f"it was probably killed for lack of memory. {self._go_on()}"
            )

    def _workers(self) -> dict[str, Any]:
        """The Ray actors that there are by now, beside the engines and TransferQueue, by name."""
        owners = {
            "reward worker": ("reward_loop_manager", "reward_loop_workers"),
            "agent loop worker": ("agent_loop_manager", "agent_loop_workers"),
            "actor rank": ("actor_rollout_wg", "_workers"),
        }
        found: dict[str, Any] = {}
        for kind, (owner, workers) in owners.items():
            actors = getattr(getattr(self._trainer, owner, None), workers, None) or ()
            found |= {f"{kind} {number}": actor for number, actor in enumerate(actors)}
        return found

    def _go_on(self) -> str:
        return f"The same command with trainer.run_dir={self._run_dir} resumes from the last checkpoint."
