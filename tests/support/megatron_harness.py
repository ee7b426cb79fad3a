"""verl's Megatron engine on a CPU, for tests: how models are split, and what its processes need in their environment.

What makes Megatron run there is in ``megatron_cpu/``; docs/inside/megatron.md says what that proves and what not.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtpo_verl.commands.setup import MEGATRON_DIRECTORY

SUPPORT = Path(__file__).parent
ACTOR = "actor_rollout_ref.actor"


def environment() -> dict[str, str]:
    """The environment of this process and, for Python's start in another one, Megatron with what makes it run."""
    megatron = Path(sys.prefix) / MEGATRON_DIRECTORY
    for part in ("core", "bridge"):
        assert (megatron / "megatron" / part).is_dir(), f"{megatron} has no {part}: run `gtpo-verl setup --cpu --dev`"
    path = [SUPPORT / "megatron_cpu", SUPPORT, megatron, os.environ.get("PYTHONPATH")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(part) for part in path if part),
        "TORCH_COMPILE_DISABLE": "1",  # otherwise a C++ compiler runs in every process, for a few products
    }


@dataclass(frozen=True)
class Layout:
    """How a model is split over processes.

    ranks: of the actor; those that the sizes do not need are data-parallel. sizes: Megatron's parallel sizes above 1;
    tensor parallelism brings sequence parallelism with it. packed: sequences one after the other (thd), or padded
    (bshd). per_token: Megatron divides gradients by the number of tokens. tied: input and output embedding are one.
    """

    ranks: int
    sizes: dict[str, int] = field(default_factory=dict)
    packed: bool = True
    per_token: bool = False
    tied: bool = False
    backend: str = "megatron"

    @property
    def data_parallel(self) -> int:
        ranks = self.ranks
        for size in self.sizes.values():
            ranks //= size
        return ranks

    def settings(self) -> dict[str, Any]:
        """What it sets under ``actor.megatron``: float32, and nothing offloaded, for there is one memory."""
        settings: dict[str, Any] = {"dtype": "float32", "param_offload": False, "optimizer_offload": False}
        transformer = {"attention_backend": "unfused", "calculate_per_token_loss": self.per_token}
        return (
            settings | self.sizes | {f"override_transformer_config.{key}": value for key, value in transformer.items()}
        )


TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
LAYOUTS = {
    "fsdp dp1": Layout(1, backend="fsdp"),
    "fsdp dp1 tied": Layout(1, backend="fsdp", tied=True),
    "fsdp dp2": Layout(2, backend="fsdp"),
    "dp1": Layout(1),
    "dp1 padded": Layout(1, packed=False),
    "dp2": Layout(2),
    "tp2": Layout(2, TENSOR),
    "tp2 padded": Layout(2, TENSOR, packed=False),
    "tp2 tied": Layout(2, TENSOR, tied=True),
    "pp2": Layout(2, PIPELINE),
    "pp2 padded": Layout(2, PIPELINE, packed=False),
    "pp2 tied": Layout(2, PIPELINE, tied=True),
    "cp2": Layout(2, CONTEXT),
    "cp2 padded": Layout(2, CONTEXT, packed=False),
    "cp2 per token": Layout(2, CONTEXT, per_token=True),
    "dp2 tp2": Layout(4, TENSOR),
    "dp2 cp2": Layout(4, CONTEXT),
    "dp2 cp2 per token": Layout(4, CONTEXT, per_token=True),
    "tp2 pp2": Layout(4, TENSOR | PIPELINE),
    "tp2 cp2": Layout(4, TENSOR | CONTEXT),
    "pp2 cp2": Layout(4, PIPELINE | CONTEXT),
}
