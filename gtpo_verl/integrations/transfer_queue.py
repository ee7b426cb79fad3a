"""TransferQueue as verl's V1 trainers use it: keys and tags of rows, columns of them, ragged.

A response is a row under the key ``uid_session_output``: the group (one prompt), the rollout in it, and the number of
the output where an agent loop writes several. A prompt is a row under its uid alone, without columns. verl fills a
batch with rows tagged ``is_padding``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta


class RowKey(NamedTuple):
    """The parts of a response's key."""

    uid: str
    session: int
    output: int


def parse_key(key: str) -> RowKey:
    """The parts of ``uid_session_output``."""
    uid, session, output = key.rsplit("_", 2)
    return RowKey(uid, int(session), int(output))


def uid_of(key: str) -> str:
    """The group of a response's key; of a prompt's, the key itself."""
    return key.rsplit("_", 2)[0]


def is_prompt(tag: Mapping[str, Any]) -> bool:
    """Whether a row with this tag is a prompt."""
    return bool(tag.get("is_prompt", False))


def prompt_keys(partition_id: str) -> list[str]:
    """Uids of the prompts in TransferQueue, in the order in which they were submitted."""
    listed = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    return [key for key, tag in listed.items() if is_prompt(tag)]


def group_names(keys: Iterable[str]) -> np.ndarray:
    """(B,) object array of the groups of these responses."""
    return np.array([uid_of(key) for key in keys], dtype=object)


def real_rows(batch: KVBatchMeta) -> dict[str, dict[str, Any]]:
    """{key: tag} of the batch without padding rows, in its order."""
    return {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)}


def lone_responses(batch: KVBatchMeta) -> list[str]:
    """Keys of the responses that are the only one of their group: the other rollouts failed."""
    sessions: dict[str, set[int]] = {}
    for key in real_rows(batch):
        row = parse_key(key)
        sessions.setdefault(row.uid, set()).add(row.session)
    return [key for key in real_rows(batch) if len(sessions[uid_of(key)]) == 1]


# -------------------------------------------------------------------- columns


def fetch_rows(batch: KVBatchMeta, column: str, keys: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """{key: (T_i,) tensor} of one column, ragged as TransferQueue keeps it, for these keys or the whole batch."""
    keys = batch.keys if keys is None else list(keys)
    if not keys:
        return {}
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[column])
    return dict(zip(keys, data[column].unbind(), strict=True))


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


@contextmanager
def replaced_rows(
    partition_id: str, column: str, rows: Mapping[str, torch.Tensor], inside: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Write ``inside`` to a column for the duration of a block, and ``rows`` back, also when the block fails."""
    put_rows(partition_id, column, inside)
    try:
        yield
    finally:
        put_rows(partition_id, column, rows)


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
