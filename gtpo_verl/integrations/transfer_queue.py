"""TransferQueue as verl's V1 trainers use it: keys and tags of rows, columns of them, ragged.

A response is a row under the key ``uid_session_output``: the group (one prompt), the rollout in it, and the number of
the output where an agent loop writes several. A prompt is a row under its uid alone, with columns in asynchronous
modes only. verl fills a batch with rows tagged ``is_padding``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

TRAIN, VALIDATION = "train", "val"  # verl's partitions


class RowKey(NamedTuple):
    """The parts of a response's key."""

    uid: str
    session: int
    output: int


def parse_key(key: str) -> RowKey:
    """The parts of ``uid_session_output``."""
    uid, session, output = key.rsplit("_", 2)
    return RowKey(uid, int(session), int(output))


def last_outputs(keys: Sequence[str]) -> list[int]:
    """For each response the number, in these keys, of the last output of its session: its own where there is one."""
    last: dict[tuple[str, int], tuple[int, int]] = {}
    rows = [parse_key(key) for key in keys]
    for number, row in enumerate(rows):
        last[row[:2]] = max(last.get(row[:2], (-1, -1)), (row.output, number))
    return [last[row[:2]][1] for row in rows]


def uid_of(key: str) -> str:
    """The group of a response's key; of a prompt's, the key itself."""
    return key.rsplit("_", 2)[0]


def is_prompt(tag: Mapping[str, Any]) -> bool:
    """Whether a row with this tag is a prompt."""
    return bool(tag.get("is_prompt", False))


def listed(partition_id: str) -> dict[str, dict[str, Any]]:
    """{key: tag} of the rows in TransferQueue; prompts are in the order in which they were submitted."""
    return dict((tq.kv_list(partition_id) or {}).get(partition_id, {}))


def real_rows(batch: KVBatchMeta) -> dict[str, dict[str, Any]]:
    """{key: tag} of the batch without padding rows, in its order."""
    return {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)}


# -------------------------------------------------------------------- columns


def put_rows(partition_id: str, column: str, rows: Mapping[str, torch.Tensor]) -> None:
    """Write {key: (T_i,) tensor} to one column."""
    if not rows:
        return
    values = torch.nested.as_nested_tensor(list(rows.values()), layout=torch.jagged)
    fields = TensorDict({column: values}, batch_size=len(rows))
    tq.kv_batch_put(keys=list(rows), partition_id=partition_id, fields=fields)


def put_zeros(batch: KVBatchMeta, *columns: str) -> None:
    """Write zeros, one for each token of each response, to columns of a batch."""
    rows = {key: torch.zeros(tag["response_len"]) for key, tag in zip(batch.keys, batch.tags, strict=True)}
    for column in columns:
        put_rows(batch.partition_id, column, rows)


def reward_infos(partition_id: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    """What the reward function returned for these responses, a dict each."""
    if not keys:
        return []
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=["extra_fields"])
    return [reward_info(extra) for extra in data["extra_fields"]]


def reward_info(extra: Any) -> dict[str, Any]:
    """What the reward function returned, from a row's ``extra_fields``: a dict, or TensorDict's wrapper of one."""
    info: dict[str, Any] = getattr(extra, "data", extra).get("reward_extra_info", {})
    return info
