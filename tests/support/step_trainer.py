"""Steps of a real trainer on a real TransferQueue, without Ray workers: the trainer of ``gtpo-verl train`` as it is
constructed in a run, batches as verl's agent loops write them, and an actor whose passes are columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gtpo_verl.config import compose_config, prepare
from gtpo_verl.integrations.trainer import trainer_class

PROMPT = 2  # tokens


@dataclass
class Row:
    """A response: T tokens, the verdict, the tokens that are the policy's, and what actor and rollout say of them."""

    length: int
    correct: bool = False
    mask: list[int] | None = None
    reward: float | None = None
    entropy: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    rollout_entropies: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    version: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    def column(self, name: str, value: float) -> torch.Tensor:
        given = getattr(self, name)
        return torch.full((self.length,), value) if given is None else given.clone()


def composed(run_dir: Path, *overrides: str) -> DictConfig:
    overrides = ("setting=quickstart", "hardware=cpu", f"trainer.run_dir={run_dir}", "trainer.test_freq=-1", *overrides)
    config = compose_config(overrides)
    for key in ("actor_rollout_ref.model.path", "data.train_files", "data.val_files"):
        OmegaConf.update(config, key, str(run_dir))
    prepare(config, overrides)
    return config


def run_trainer(run_dir: Path, *overrides: str, mode: str = "sync") -> Any:
    config = composed(run_dir, *overrides)
    config.trainer.v1.trainer_mode = mode
    OmegaConf.resolve(config)
    trainer: Any = trainer_class(mode)(config=config)
    trainer.global_steps, trainer.total_training_steps = 1, 10
    trainer.on_sample_end = lambda: None
    trainer.tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
    return trainer


def put(trainer: Any, rows: Mapping[str, Row]) -> KVBatchMeta:
    """Write responses as the agent loops do, and let the trainer's actor answer for them. Keys that begin with ``pad``
    are rows that verl adds to fill a batch.
    """
    written, tags = [], []
    for key, row in rows.items():
        padding = key.startswith("pad")
        score = 1.0 if row.correct else -1.0
        reward = score if row.reward is None else row.reward
        written.append(
            {
                "uid": key.rsplit("_", 2)[0],
                "prompts": torch.ones(PROMPT, dtype=torch.int64),
                "responses": torch.ones(row.length, dtype=torch.int64),
                "response_mask": torch.tensor([0] * row.length if padding else row.mask or [1] * row.length),
                "rm_scores": torch.tensor([0.0] * (row.length - 1) + [0.0 if padding else reward]),
                "rollout_log_probs": row.column("rollout_log_probs", -1.0),
                "rollout_entropies": row.column("rollout_entropies", 0.5),
                "rollout_versions": torch.full((row.length,), row.version, dtype=torch.int32),
                "extra_fields": {"reward_extra_info": {"acc": float(row.correct), "score": score} | row.info},
            }
        )
        tags.append(
            {
                "global_steps": trainer.global_steps,
                "is_padding": padding,
                "prompt_len": PROMPT,
                "response_len": row.length,
                "seq_len": PROMPT + row.length,
            }
        )
    keys = list(rows)
    tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(written), tags=tags)
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=lambda batch: _actor_pass(batch, rows))
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


def _actor_pass(batch: KVBatchMeta, rows: Mapping[str, Row]) -> KVBatchMeta:
    """What a worker writes: a value for each token of prompt and response, one place early."""

    def whole(row: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(PROMPT - 1), row, torch.zeros(1)])

    written = [
        {"log_probs": whole(row.column("log_probs", -1.0)), "entropy": whole(row.column("entropy", 0.5))}
        for row in (rows[key] for key in batch.keys)
    ]
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(written))
    return batch


def to_advantages(trainer: Any, batch: KVBatchMeta) -> tuple[KVBatchMeta, dict[str, Any]]:
    """The trainer's steps from old log-probs to advantages; returns the batch, and the metrics."""
    metrics: dict[str, Any] = {}
    batch = trainer._compute_old_log_prob(batch, metrics)
    return trainer._compute_advantage(batch, metrics), metrics


def read(batch: KVBatchMeta, *columns: str) -> tuple[torch.Tensor, ...]:
    """Columns of a batch and, last, the response mask, (B, T) each."""
    names = [*columns, "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    *values, mask = (data[name].to_padded_tensor(0) for name in names)
    return *values, mask.bool()


def clear() -> None:
    left = tq.kv_list("train").get("train", {})
    if left:
        tq.kv_clear(keys=list(left), partition_id="train")
