"""The responses of one update and their columns in TransferQueue: fetched once, and kept ragged.

A column of N tokens is one tensor (N,), response after response; `Step.padded` makes (B, T) of it, most of it padding.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.guide import is_guide
from gtpo_verl.integrations.transfer_queue import last_outputs, put_rows, real_rows, reward_infos, uid_of
from gtpo_verl.integrations.vllm import ENTROPIES
from gtpo_verl.runs.correctness import is_correct, score, verdict

_MISSING = {
    "entropy": (
        "the actor's entropies are missing: verl's bypass mode skips the pass that computes them. "
        "Set algorithm.entropy.source=rollout, or algorithm.rollout_correction.bypass_mode=false."
    ),
    ENTROPIES: (
        "the rollout returned no entropies: its server or agent loop is not gtpo_verl's. "
        "`gtpo-verl doctor` says what is missing; algorithm.entropy.source=actor needs none."
    ),
}


class Step:
    """The R responses of one update, without the rows that verl adds to fill its batch of B.

    keys: R names of the rows, in the order of the batch. lengths: R tokens after the prompt, those of tools included; N
    in all.
    """

    def __init__(self, batch: KVBatchMeta, threshold: float) -> None:
        self.batch = batch
        self._threshold = threshold
        tags = real_rows(batch)
        self.keys = list(tags)
        self.lengths = [int(tag["response_len"]) for tag in tags.values()]
        self._places = [number for number, key in enumerate(batch.keys) if key in tags]
        self._columns: dict[str, torch.Tensor] = {}

    # ---------------------------------------------------------------- columns

    def fetch(self, *names: str) -> tuple[torch.Tensor, ...]:
        """Columns (N,), fetched once; raises UserError where one is missing, or has not a value for each token."""
        new = [name for name in names if name not in self._columns]
        if new:
            data = tq.kv_batch_get(keys=self.keys, partition_id=self.batch.partition_id, select_fields=new)
            for name in new:
                if name not in data:
                    raise UserError(_MISSING.get(name, f"TransferQueue has no column {name} for this batch."))
                if data[name].offsets().diff().tolist() != self.lengths:
                    raise UserError(f"TransferQueue's column {name} has not a value for each token of each response.")
                self._columns[name] = data[name].values()
        return tuple(self._columns[name] for name in names)

    def forget(self, *names: str) -> None:
        """Fetch these columns again when they are needed: verl has written them anew."""
        for name in names:
            self._columns.pop(name, None)

    def put(self, name: str, rows: Mapping[int, torch.Tensor]) -> None:
        """Write a column of some responses, by their number from 0, to TransferQueue."""
        put_rows(self.batch.partition_id, name, {self.keys[number]: row for number, row in rows.items()})
        if name in self._columns and rows:
            column = list(self.rows(self._columns[name]))
            for number, row in rows.items():
                column[number] = row.to(column[number].dtype)
            self._columns[name] = torch.cat(column)

    def rows(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tokens of each response, R views of (T_i,), from (N,)."""
        return values.split(self.lengths)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T) in the order of the batch, right-padded with zeros, from (N,); verl's rows of padding are zeros."""
        padded = values.new_zeros(len(self.batch.keys), max(self.lengths))
        for place, row in zip(self._places, self.rows(values), strict=True):
            padded[place, : len(row)] = row
        return padded

    def of_batch(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) in the order of the batch, zero for verl's rows of padding, from (R,)."""
        whole = values.new_zeros(len(self.batch.keys))
        whole[self._places] = values
        return whole

    def last_row_of_batch(self) -> torch.Tensor:
        """(B,) int64: for each row the row with the last output of its session; of verl's padding, the row itself."""
        rows = torch.arange(len(self.batch.keys))
        rows[self._places] = torch.tensor(self._places)[self.last_output]
        return rows

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """(N,), the value of its response for each token, from (R,)."""
        return values.repeat_interleave(torch.tensor(self.lengths))

    @property
    def mask(self) -> torch.Tensor:
        """(N,) bool: the tokens that the policy, or its guide, generated."""
        (column,) = self.fetch("response_mask")
        return column != 0

    @property
    def own_mask(self) -> torch.Tensor:
        """(N,) bool: the tokens that the policy generated."""
        return self.mask & ~self.of_tokens(self.of_guide) if self.of_guide.any() else self.mask

    # ---------------------------------------------------------------- responses

    @cached_property
    def infos(self) -> list[dict[str, Any]]:
        """What the reward function returned for each response."""
        return reward_infos(self.batch.partition_id, self.keys)

    @cached_property
    def correct(self) -> torch.Tensor:
        """(R,) bool: the verifier's verdicts; raises UserError where it gave none on a response."""
        judged = zip(self.keys, self.infos, strict=True)
        return torch.tensor([is_correct(verdict(info, f"on response {key}"), self._threshold) for key, info in judged])

    @cached_property
    def scores(self) -> torch.Tensor | None:
        """(R,) the verifier's scores, without verl's overlong penalty; None where it has none."""
        found = [value for info in self.infos if (value := score(info)) is not None]
        return torch.tensor(found) if len(found) == len(self.infos) else None

    @cached_property
    def group(self) -> torch.Tensor:
        """(R,) int64: the prompt of each response."""
        return group_ids([uid_of(key) for key in self.keys])

    @cached_property
    def lone(self) -> torch.Tensor:
        """(R,) bool: the responses of a group of which every other rollout failed."""
        return torch.bincount(self.group[self.last_output.unique()])[self.group] == 1

    @cached_property
    def of_guide(self) -> torch.Tensor:
        """(R,) bool: the responses of a guiding policy."""
        return torch.tensor([is_guide(key) for key in self.keys])

    @cached_property
    def last_output(self) -> torch.Tensor:
        """(R,) int64: for each response, the number of the last output of its session."""
        return torch.tensor(last_outputs(self.keys))
