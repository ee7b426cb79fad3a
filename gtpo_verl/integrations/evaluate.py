"""Evaluates a model with verl's rollout side: data set, vLLM servers, agent loops, verifier, TransferQueue; no trainer.

These are the components of a validation during training, so prompts, sampling and verdicts are the same.
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
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.rollout.llm_server import LLMServerManager

from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.records import Problem, ProblemRecord, Response
from gtpo_verl.integrations.admission import serving_bundles
from gtpo_verl.integrations.agent_loops import SeededAgentLoopManager, last_failure
from gtpo_verl.integrations.launch import enter_cluster, in_one_line, leave_to_cluster, with_last_word
from gtpo_verl.integrations.reward_loop import BoundedRewardLoopManager
from gtpo_verl.integrations.streams import SeedingClient, assign_streams
from gtpo_verl.integrations.task_runner import with_queue
from gtpo_verl.integrations.transfer_queue import VALIDATION, listed, uid_of
from gtpo_verl.integrations.validation import read_responses

POLL = 0.2  # seconds between two polls for finished prompts


class Problems:
    """The rows of a run's validation set, as verl reads them. Raises UserError: all are left out as too long."""

    def __init__(self, config: DictConfig) -> None:
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        self.tokenizer = model.tokenizer
        self.model_type = getattr(model.hf_config, "model_type", None)
        self._config = config
        data, most = config.data, config.data.get("val_max_samples", -1)
        self._rows = create_rl_dataset(
            data.val_files, data, self.tokenizer, model.processor, is_train=False, max_samples=most
        )
        if not len(self._rows):
            raise UserError(
                f"data.val_files: no prompt fits in data.max_prompt_length={data.max_prompt_length} tokens: raise it."
            )

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Mapping[str, int]) -> Any:
        """The batch for verl's agent loops, with the streams of a validation of a run with this seed.

        rows: {uid of a prompt: number of its row}.
        """
        columns = collate_fn([self._rows[row] for row in rows.values()])
        columns["uid"] = np.array(list(rows), dtype=object)
        batch = tensordict_utils.get_tensordict(columns)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", 0)
        tensordict_utils.assign_non_tensor_data(batch, "validate", True)
        assign_streams(batch, self._config, VALIDATION, rows.values())
        return batch

    def row(self, row: int) -> dict[str, Any]:
        """The columns of a row, as verl's data set gives them."""
        values: dict[str, Any] = self._rows[row]
        return values

    def record(self, row: int) -> ProblemRecord:
        """The record of a row, without responses."""
        values = self._rows[row]
        prompt, ground_truth = list(values["raw_prompt"]), values["reward_model"]["ground_truth"]
        problem = Problem.of(prompt, ground_truth, values.get("extra_info"))
        source = str(values.get("data_source", "unknown"))
        return ProblemRecord(row, problem.key, source, prompt, ground_truth, 0, (), problem.cluster)


@contextmanager
def serving(config: DictConfig, *, wait: bool) -> Iterator[tuple[LLMServerManager, BoundedRewardLoopManager]]:
    """Run Ray, TransferQueue, vLLM and the verifier for a block; yields the servers' manager and the verifier's.

    Raises UserError: the cluster has no room and ``wait`` is off, or a process or a node died.
    """
    after = "Repeat the command for the rest."
    with with_last_word(after), in_one_line(f"The stack trace is at the end of the log. {after}"):
        leave_to_cluster(config)
        environment = get_ppo_ray_runtime_env(config)
        environment["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
        own: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)  # its variables win, as in verl
        options: Any = OmegaConf.to_container(OmegaConf.merge({"runtime_env": environment}, own))
        ray.init(**options)
        try:
            enter_cluster(config, training=False, wait=wait)
            OmegaConf.resolve(config)
            with with_queue(config, serving_bundles(config), lambda: None):
                reward = BoundedRewardLoopManager(config=config)
                yield LLMServerManager.create(config=config), reward
        finally:
            ray.shutdown()


@contextmanager
def servers(config: DictConfig, *, wait: bool) -> Iterator[tuple[Any, int]]:
    """`serving` with verl's agent loops; yields them and the number of replicas."""
    with serving(config, wait=wait) as (manager, reward):
        agents = SeededAgentLoopManager.create(
            config=config,
            llm_client=manager.get_client(client_cls=SeedingClient),
            teacher_client=None,
            reward_loop_worker_handles=reward.reward_loop_worker_handles,
        )
        yield agents, len(manager.get_replicas())


def evaluate(
    config: DictConfig,
    problems: Problems,
    rows: list[int],
    keep: Callable[[ProblemRecord], None],
    *,
    failures_as_wrong: bool,
    wait: bool,
) -> None:
    """Generate and verify the responses of the given rows, and pass each row to ``keep`` when it is finished.

    Rows are submitted in order, with at most twice as many in flight as the servers run at once: an interruption loses
    few. ``wait``: until the cluster has room.

    Raises UserError: a generation or a verification failed and ``failures_as_wrong`` is off; raised when the rows in
    flight are finished and kept.
    """
    samples = config.actor_rollout_ref.rollout.val_kwargs.n
    waiting = list(reversed(rows))
    failed: list[int] = []
    with servers(config, wait=wait) as (agents, replicas):
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
            for record in _finished(problems, flying, listed(VALIDATION), samples):
                if record.failed and not failures_as_wrong:
                    failed.append(record.row)
                else:
                    keep(record)
            time.sleep(POLL)
        why = last_failure(agents) if failed else ""
    if failed:
        raise UserError(
            f"generation or verifier failed on {len(failed)} problems (rows {', '.join(map(str, failed[:5]))}), the "
            f"last one: {why}. Repeat the command to try them again, or add --failures-as-wrong to count them as wrong."
        )


def _finished(problems: Problems, flying: dict[str, int], tags: Mapping[str, Any], samples: int) -> list[ProblemRecord]:
    """Take the finished prompts out of ``flying`` and TransferQueue; returns their records, in order of submission."""
    ended = [uid for uid in flying if tags.get(uid, {}).get("status") in ("finished", "failure")]
    if not ended:
        return []
    records = {uid: problems.record(flying.pop(uid)) for uid in ended}
    keys = [key for key in tags if uid_of(key) in records and key not in records]
    batch = KVBatchMeta(partition_id=VALIDATION, keys=keys, tags=[tags[key] for key in keys])
    responses: dict[str, list[Response]] = {uid: [] for uid in ended}
    asked = {uid: Problem(record.problem, record.cluster) for uid, record in records.items()}
    for uid, response in read_responses(batch, asked, problems.tokenizer):
        responses[uid].append(response)
    tq.kv_clear(keys=[*ended, *keys], partition_id=VALIDATION)
    return [
        replace(record, failed=samples - len(responses[uid]), responses=tuple(responses[uid]))
        for uid, record in records.items()
    ]
