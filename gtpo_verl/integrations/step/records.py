"""What a run writes about its steps: metrics, groups, and the bounds that metrics must keep."""

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta

from gtpo_verl.integrations.transfer_queue import real_rows, uid_of
from gtpo_verl.runs.directory import keep_step, record_groups, record_metrics
from gtpo_verl.runs.guards import Guards, read_bounds

logger = logging.getLogger(__name__)


class Records:
    """The files of a run's steps. Its batches are those that all updates of a step were made on."""

    def __init__(self, config: DictConfig) -> None:
        self._run_dir = Path(config.trainer.run_dir)
        self._limit = config.data.max_response_length
        bounds: Any = OmegaConf.to_container(config.guards.bounds)
        self._bounds = Guards(read_bounds(bounds))
        self._trained: tuple[dict[str, Any], dict[str, int]] | None = None  # of a step that is not logged yet

    def trained(self, metrics: dict[str, Any], batch: KVBatchMeta) -> None:
        """Take note of a step that was trained and is not logged yet; its checkpoint may come first."""
        self._trained = metrics, _groups(batch)

    def keep_in(self, checkpoint: Path, number: int) -> None:
        """Write what is known of a step that is not logged yet into its checkpoint."""
        if self._trained is not None:
            keep_step(checkpoint, number, *self._trained)

    def log(self, number: int, metrics: dict[str, Any], batch: KVBatchMeta) -> None:
        """Log a step; raises UserError where a metric is outside its ``guards.bounds`` and the run is to stop."""
        lengths = [tag["response_len"] for tag in real_rows(batch).values()]
        truncated = sum(length >= self._limit for length in lengths)
        metrics["response_length/truncated_share"] = truncated / len(lengths)
        record_metrics(self._run_dir, number, metrics)
        record_groups(self._run_dir, number, _groups(batch))
        self._trained = None
        for warning in self._bounds.check(number, metrics):
            logger.warning("%s", warning)


def _groups(batch: KVBatchMeta) -> dict[str, int]:
    """{uid: the step in which its responses were generated} of the groups of a batch."""
    return {uid_of(key): tag["global_steps"] for key, tag in real_rows(batch).items()}
