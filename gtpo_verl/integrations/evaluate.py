"""Evaluates a model on verl's rollout side alone: its data set, vLLM servers, agent loops, verifier and TransferQueue, no trainer.

Every part is the one that validates during training, so prompts, sampling and verdicts are the same.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.utils import create_rl_dataset
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.rollout.llm_server import LLMServerManager

from gtpo_verl.config import set_value
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.records import ProblemRecord, Response, problem_key
from gtpo_verl.integrations.transfer_queue import uid_of
from gtpo_verl.integrations.validation import read_responses

POLL = 0.2  # seconds between looks at what is finished
PARTITION = "val"


def standalone(config: DictConfig) -> None:
    """Make a training's configuration one of servers that load the model themselves; in place."""
    rollout = "actor_rollout_ref.rollout"
    settings = {
        "actor_rollout_ref.hybrid_engine": False,
        "transfer_queue.enable": True,
        # the machines that would train serve: as many replicas as fit on them
        f"{rollout}.nnodes": config.trainer.nnodes,
        f"{rollout}.n_gpus_per_node": config.trainer.n_gpus_per_node,
        f"{rollout}.load_format": "auto",  # while training, verl sends the weights
        f"{rollout}.calculate_log_probs": False,
    }
    for key, value in settings.items():
        set_value(config, key, value)


class Problems:
    """The validation set of a run, row by row, as verl reads it."""

    def __init__(self, config: DictConfig) -> None:
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        self.tokenizer = model.tokenizer
        data = config.data
        self._rows = create_rl_dataset(
            data.val_files,
            data,
            self.tokenizer,
            model.processor,
            is_train=False,
            max_samples=data.get("val_max_samples", -1),
        )

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Mapping[str, int]) -> Any:
        """The tensordict that verl's agent loops take. ``rows``: uid of the prompt to number of the row."""
        columns = collate_fn([self._rows[row] for row in rows.values()])
        columns["uid"] = np.array(list(rows), dtype=object)
        batch = tensordict_utils.get_tensordict(columns)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", 0)
        tensordict_utils.assign_non_tensor_data(batch, "validate", True)
        return batch

    def record(self, row: int) -> ProblemRecord:
        """The line of a row, without responses."""
        values = self._rows[row]
        prompt, ground_truth = list(values["raw_prompt"]), values["reward_model"]["ground_truth"]
        source = str(values.get("data_source", "unknown"))
        return ProblemRecord(row, problem_key(prompt, ground_truth), source, prompt, ground_truth, 0, ())


@contextmanager
def servers(config: DictConfig) -> Iterator[tuple[Any, int]]:
    """Ray, TransferQueue, vLLM and the verifier; yields the agent loops and the number of replicas, and ends all of it."""
    options = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    assert isinstance(options, dict)
    environment = get_ppo_ray_runtime_env(config)
    environment["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
    merged = OmegaConf.merge(environment, options.get("runtime_env") or {})  # the run's own variables win, as in verl
    ray.init(**(options | {"runtime_env": OmegaConf.to_container(merged)}))
    try:
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        reward = RewardLoopManager(config=config)
        manager = LLMServerManager.create(config=config)
        agents = AgentLoopManagerTQ.create(
            config=config,
            llm_client=manager.get_client(),
            teacher_client=None,
            reward_loop_worker_handles=reward.reward_loop_worker_handles,
        )
        yield agents, len(manager.get_replicas())
    finally:
        tq.close()
        ray.shutdown()


def evaluate(
    config: DictConfig,
    problems: Problems,
    rows: list[int],
    keep: Callable[[ProblemRecord], None],
    *,
    failures_as_wrong: bool,
) -> None:
    """Answer the given rows and hand each to ``keep`` as it is finished.

    As many prompts are in flight as fill the servers twice, in order of rows, so that an interruption loses little.

    Raises:
        UserError: a response or its verdict failed, unless ``failures_as_wrong``; what was in flight is finished and kept first.
    """
    samples = config.actor_rollout_ref.rollout.val_kwargs.n
    waiting = list(reversed(rows))
    failed: list[int] = []
    with servers(config) as (agents, replicas):
        window = max(
            config.actor_rollout_ref.rollout.agent.num_workers,
            2 * replicas * config.actor_rollout_ref.rollout.max_num_seqs // samples,
        )
        flying: dict[str, int] = {}
        while waiting or flying:
            if failed:
                waiting.clear()
            fresh = {uuid.uuid4().hex: waiting.pop() for _ in range(min(window - len(flying), len(waiting)))}
            if fresh:
                flying |= fresh
                agents.generate_sequences(problems.batch(fresh))
            tags = tq.kv_list(partition_id=PARTITION).get(PARTITION, {})
            for record in _finished(problems, flying, tags, samples):
                if record.failed and not failures_as_wrong:
                    failed.append(record.row)
                else:
                    keep(record)
            time.sleep(POLL)
    if failed:
        raise UserError(
            f"generation or verifier failed on {len(failed)} problems (rows {', '.join(map(str, failed[:5]))}; the reason is "
            "further up). The same command tries them again; --failures-as-wrong counts what does not come as wrong."
        )


def _finished(problems: Problems, flying: dict[str, int], tags: Mapping[str, Any], samples: int) -> list[ProblemRecord]:
    """Take the finished prompts out of ``flying`` and TransferQueue; their records, in order of submission."""
    ended = [uid for uid in flying if tags.get(uid, {}).get("status") in ("finished", "failure")]
    if not ended:
        return []
    keys = [key for key in tags if uid_of(key) in ended and key not in flying]
    batch = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[tags[key] for key in keys])
    responses: dict[str, list[Response]] = {uid: [] for uid in ended}
    for uid, response in read_responses(batch, problems.tokenizer):
        responses[uid].append(response)
    tq.kv_clear(keys=[*ended, *keys], partition_id=PARTITION)
    records = []
    for uid in ended:
        record, came = problems.record(flying.pop(uid)), tuple(responses[uid])
        records.append(replace(record, failed=samples - len(came), responses=came))
    return records
