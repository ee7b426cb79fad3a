"""Old log-probs as `algorithm.entropy.source` says: the actor's pass, the rollout's own, or both to compare them."""

import time
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta

from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.integrations.step.metrics import ActorPass, agreement
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.vllm.names import ENTROPIES, VERSIONS


class OldLogProbs:
    """Runs verl's old-log-prob pass, once or twice.

    Attributes:
        source: of the run's entropies.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self.source = entropy_source(config)
        self.actor_pass = ActorPass(OmegaConf.select(config, "algorithm.entropy.check_every", default=0))

    def compute(
        self, verls: Callable[[], KVBatchMeta], step: Step, number: int, metrics: dict[str, Any]
    ) -> KVBatchMeta:
        """Write ``old_log_probs``, and the actor's ``entropy`` where its pass is run.

        Args:
            verls: verl's pass; in bypass mode it takes the rollout's log-probs.
            step: the responses of an update.
            number: of the training step, from 1.
            metrics: of the update.
        """
        if not self.source.from_rollout:
            return verls()
        if self.source.compares:
            return self._compared(verls, step, number, metrics)
        if not self.actor_pass.is_due(number):
            metrics.update(self.actor_pass.skipped(_tokens(step)))
            return verls()
        with temporarily(self._config.algorithm.rollout_correction, "bypass_mode", False):
            self._compared(verls, step, number, metrics)
        # This step too trains on the rollout's log-probs: this overwrites the actor's with them.
        return verls()

    def _compared(
        self, verls: Callable[[], KVBatchMeta], step: Step, number: int, metrics: dict[str, Any]
    ) -> KVBatchMeta:
        """Run the actor's pass, time it, and compare its entropies with the rollout's."""
        started = time.perf_counter()
        batch = verls()
        metrics.update(self.actor_pass.ran(time.perf_counter() - started, _tokens(step)))
        actor, rollout, versions = step.fetch("entropy", ENTROPIES, VERSIONS)
        own = step.mask & ~step.of_tokens(step.of_guide) if step.of_guide.any() else step.mask
        # Weights are sent at the end of a step, with its number; old log-probs are always of those weights.
        metrics.update(agreement(rollout, actor, own, current=versions == number - 1))
        return batch


def _tokens(step: Step) -> int:
    """Tokens of prompts and responses in a batch, padding included."""
    return sum(tag["seq_len"] for tag in step.batch.tags)
