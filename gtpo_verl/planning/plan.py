"""A plan: everything that follows from one configuration, as data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.algorithms.registry import Algorithm, algorithms
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.planning.measured import measured_assumptions
from gtpo_verl.planning.memory import FP32, GIB, HostMemory, Memory, engine_of, host_memory, memory_of
from gtpo_verl.planning.parallel import Parallelism, parallelism
from gtpo_verl.planning.shapes import ModelShape, load_shape
from gtpo_verl.planning.step import Lengths, Step, skips_old_log_prob, step_of, total_steps
from gtpo_verl.planning.timing import (
    Assumptions,
    StepTime,
    check_assumptions,
    default_assumptions,
    given_assumptions,
    step_time,
)

ROLLOUT_COLUMNS = 8  # bytes a token: float32 entropy and int32 version of the weights


@dataclass(frozen=True)
class ArmCost:
    """What an arm adds to one step beyond generation and updates: bytes of the actor's and the rollout's entropies in
    TransferQueue, and seconds of the actor's forward pass before the updates, None where its time is not known, and of
    the advantages.
    """

    arm: str
    entropy_bytes: int
    rollout_bytes: int
    pass_seconds: float | None
    advantage_seconds: float


@dataclass(frozen=True)
class Plan:
    """Everything about one configuration. On a CPU ``memory`` is None, and ``time`` too unless it was measured; with
    GPUs ``host_memory`` is None.
    """

    algorithm: str
    shape: ModelShape
    parallel: Parallelism
    step: Step
    total_steps: int
    memory: Memory | None
    host_memory: HostMemory | None
    time: StepTime | None
    arms: list[ArmCost]
    assumptions: Assumptions

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes are GiB where the name says so, times are seconds."""
        return {
            "algorithm": self.algorithm,
            "model": asdict(self.shape),
            "parallelism": asdict(self.parallel),
            "step": asdict(self.step),
            "total_steps": self.total_steps,
            "memory": None if self.memory is None else self.memory.to_dict(),
            "host_memory_gib": self.host_memory
            and {name: {part: size / GIB for part, size in parts.items()} for name, parts in self.host_memory.items()},
            "time_s": None if self.time is None else self.time.to_dict(),
            "arms": [asdict(arm) for arm in self.arms],
            "assumptions": {name: asdict(item) for name, item in sorted(self.assumptions.items())},
        }


def make_plan(
    config: DictConfig, *, gpu: str = "h100", given: dict[str, float] | None = None, measured: Path | None = None
) -> Plan:
    """Work out what a composed configuration means.

    Args:
        config: composed, prepared as for a run, and with sizes that divide (`rules.sizes`).
        gpu: a name in ``timing.GPUS``.
        given: assumptions by name; they win over measured ones.
        measured: directory of a run to take assumptions from.

    Raises:
        UserError: an unknown model or number of steps, sizes that do not divide, an assumption out of range.
    """
    steps = total_steps(config)
    if steps is None:
        raise UserError(
            f"trainer.total_epochs={config.trainer.total_epochs}: how many steps that is depends on data.train_files, "
            "which are not here: add trainer.total_training_steps=N to plan with."
        )
    if steps == 0:
        raise UserError(
            "data.train_files has fewer prompts than a step, "
            f"data.train_batch_size={config.data.train_batch_size}: there is nothing to plan."
        )
    parallel = parallelism(config)
    shape = load_shape(config.actor_rollout_ref.model.path)
    assumptions = default_assumptions(config, gpu)
    if measured is not None:
        assumptions = measured_assumptions(assumptions, measured, config)
    assumptions = given_assumptions(assumptions, given or {})
    check_assumptions(assumptions, config)
    lengths = Lengths(assumptions["prompt_length"].value, assumptions["response_length"].value)
    step = step_of(config, parallel, lengths, assumptions["sampling_yield"].value)
    capacity = assumptions["gpu_memory"].value * GIB
    on_gpu = config.trainer.device != "cpu"
    time = None
    if on_gpu or measured is not None:
        time = step_time(config, shape, parallel, step, engine_of(config, shape, capacity), assumptions)
    return Plan(
        algorithm=config.algorithm.adv_estimator,
        shape=shape,
        parallel=parallel,
        step=step,
        total_steps=steps,
        memory=memory_of(config, shape, parallel, capacity) if on_gpu else None,
        host_memory=None if on_gpu else host_memory(config, shape, parallel),
        time=time,
        arms=_arms(config, step, assumptions, time),
        assumptions=assumptions,
    )


def _arms(config: DictConfig, step: Step, assumptions: Assumptions, time: StepTime | None) -> list[ArmCost]:
    """Every registered method on the same batch, with the same source of entropies.

    All of them fetch the entropies: those that do not need them for their advantages log the same credit metrics.
    """
    tokens = round(step.responses * assumptions["response_length"].value)
    seconds = time.old_log_prob if time else None
    rollout = ROLLOUT_COLUMNS * tokens if entropy_source(config).from_rollout else 0
    actor = 0 if skips_old_log_prob(config) else FP32 * tokens
    first: dict[str, Algorithm] = {}  # of the methods that share an advantage estimator
    for method in algorithms().values():
        first.setdefault(method.estimator, method)
    return [
        ArmCost(method.name, actor, rollout, seconds, tokens * method.advantage_ns * 1e-9) for method in first.values()
    ]
