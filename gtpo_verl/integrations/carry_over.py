"""What dynamic sampling keeps across a restart: the groups carried over to later steps, and the yield of the last step.

verl saves TransferQueue for its asynchronous trainers only; a synchronous checkpoint has nothing of it. Here the groups
carried over are saved beside verl's checkpoint, in ``global_step_N/sampling.pt``, with every column that the rollout
wrote.
"""

from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

from gtpo_verl.errors import UserError
from gtpo_verl.files import write_atomically
from gtpo_verl.integrations.transfer_queue import is_prompt, uid_of
from gtpo_verl.integrations.vllm.names import ENTROPIES

SAMPLING_FILE = "sampling.pt"
FORMAT = 1


def save_groups(directory: Path, partition_id: str, last_step: tuple[int, int]) -> int:
    """Save the groups that are in TransferQueue to ``directory``, atomically.

    Args:
        directory: the checkpoint of the step, made if it does not exist.
        partition_id: TransferQueue's name for the training data.
        last_step: groups with signal and groups generated in the last step, from which the next one sizes its first
            round.

    Returns:
        The number of groups written.
    """
    listed = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    prompts = {key: tag for key, tag in listed.items() if is_prompt(tag)}
    rows = {key: tag for key, tag in listed.items() if key not in prompts and uid_of(key) in prompts}
    fields: TensorDict | None = None
    if rows:
        fields = tq.kv_batch_get(keys=list(rows), partition_id=partition_id)
    state = {
        "format": FORMAT,
        "last_step": last_step,
        "prompts": prompts,
        "rows": rows,
        "fields": fields,
    }
    write_atomically(directory / SAMPLING_FILE, lambda path: torch.save(state, path))
    return len(prompts)


def restore_groups(directory: Path, partition_id: str, *, with_entropies: bool) -> tuple[int, tuple[int, int]]:
    """Put the groups of :func:`save_groups` back into TransferQueue, in their order and with their steps.

    Args:
        directory: the checkpoint from which the run resumes.
        partition_id: TransferQueue's name for the training data.
        with_entropies: whether this run's rollouts return entropies; every row of a batch must have the same columns.

    Returns:
        The number of groups, and ``last_step``; 0 and (1, 1) where the checkpoint has no such file.

    Raises:
        UserError: the file is of a newer format, or its groups and this run's have different columns.
    """
    file = directory / SAMPLING_FILE
    if not file.is_file():
        return 0, (1, 1)
    state: dict[str, Any] = torch.load(file, weights_only=False)
    if state["format"] > FORMAT:
        raise UserError(
            f"{file} was written by a newer gtpo_verl: update it, or remove the file to resume without its groups."
        )
    prompts, rows = state["prompts"], state["rows"]
    if rows and (ENTROPIES in state["fields"]) != with_entropies:
        had, has = ("actor", "rollout or both") if with_entropies else ("rollout or both", "actor")
        raise UserError(
            f"{file} holds groups made with algorithm.entropy.source={had}, and this run has {has}: keep the source, "
            "or remove the file to resume without these groups."
        )
    if prompts:
        tq.kv_batch_put(keys=list(prompts), partition_id=partition_id, tags=list(prompts.values()))
    if rows:
        tq.kv_batch_put(keys=list(rows), partition_id=partition_id, fields=state["fields"], tags=list(rows.values()))
    return len(prompts), state["last_step"]
