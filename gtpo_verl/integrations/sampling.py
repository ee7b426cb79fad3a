"""Dynamic sampling with a budget and without waste, on verl's V1 replay buffer (DAPO eq. 11).

verl refills every group that its filter evicts without limit, so a step never ends on a task that the model has
saturated, or cannot do at all; and what it generated beyond a batch is discarded. Here a step generates at most
``max_num_gen_batches`` batches of prompts and then does what ``on_budget`` says, and groups left over may wait for a
later step (``carry_over_max_age``).

Which groups a step trains on follows from the order of the data and from the verdicts: everything in flight is finished
first, then the groups with signal are taken in the order in which their prompts were submitted. Who finished first, and
with it the length of the responses, has no part in the choice.
"""

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.transfer_queue import parse_key, reward_infos, uid_of
from gtpo_verl.runs.correctness import is_correct

logger = logging.getLogger(__name__)

VERDICT = "acc"
REWARD = "reward"  # verl's name for the sum of `rm_scores`


class BudgetSpentError(UserError):
    """A step has generated all that it may and found too few groups with signal."""


@dataclass
class _Tally:
    """Groups of one sampling call, by what became of them; a group is the responses to one prompt."""

    generated: int = 0
    mixed: int = 0
    all_correct: int = 0
    all_wrong: int = 0
    failed: int = 0
    carried_in: int = 0

    @property
    def ended(self) -> int:
        return self.mixed + self.all_correct + self.all_wrong + self.failed

    def describe(self) -> str:
        carried = f", and {self.carried_in} carried over" if self.carried_in else ""
        return (
            f"{self.generated} groups generated: {self.mixed} mixed, {self.all_correct} all correct, "
            f"{self.all_wrong} all wrong, {self.failed} failed{carried}"
        )


@dataclass
class _Step:
    """One sampling call.

    Attributes:
        number: the training step.
        unfiltered: the prompts that a step without a filter would have generated.
        filtered: {metric value: groups without signal}, verl's table.
        unfiltered_until, ended_at: when the last of ``unfiltered`` ended, and the last group of all (seconds).
    """

    number: int
    partition_id: str
    batch_size: int
    tally: _Tally
    unfiltered: set[str]
    filtered: dict[float, int] = field(default_factory=dict)
    unfiltered_until: float | None = None
    ended_at: float = 0.0

    def note_time(self, inflight: set[str]) -> None:
        """Note that these prompts are still in generation."""
        self.ended_at = time.time()
        if self.unfiltered_until is None and not self.unfiltered & inflight:
            self.unfiltered_until = self.ended_at

    @property
    def extra_seconds(self) -> float:
        """Seconds of generation that the filter added."""
        assert self.unfiltered_until is not None
        return self.ended_at - self.unfiltered_until


class BudgetedReplayBuffer(ReplayBuffer):
    """verl's synchronous replay buffer with a budget for dynamic sampling; every group that it discards is counted.

    Args:
        max_num_gen_batches: prompts a step may generate, in units of ``train_batch_size``; 0 is no limit.
        on_budget: ``train_smaller`` trains on the mixed groups there are, ``stop`` ends the run. With no mixed group at
            all there is nothing to train on, and both end the run.
        carry_over_max_age: steps that a group with signal may wait for its turn; 0 discards what a step leaves over.
        correct_threshold: a response is correct when its ``acc`` reaches this. With the metric ``acc`` it is this
            verdict in which the responses of a group must differ, not the number.
        mini_batch_size: prompts of one update; a batch that the budget leaves short is cut to whole updates.
    """

    def __init__(
        self,
        *args: Any,
        max_num_gen_batches: int,
        on_budget: str,
        carry_over_max_age: int,
        correct_threshold: float,
        mini_batch_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_gen_batches = max_num_gen_batches
        self.on_budget = on_budget
        self.carry_over_max_age = carry_over_max_age
        self.correct_threshold = correct_threshold
        self.mini_batch_size = mini_batch_size
        self.last_step = (1, 1)  # groups with signal, groups generated, in the last step that generated any
        self._expired = 0  # groups that grew too old since the last sampling
        self._with_signal: set[str] = set()  # groups whose verdicts have been read

    @classmethod
    def like(
        cls,
        stock: ReplayBuffer,
        *,
        max_num_gen_batches: int,
        on_budget: str,
        carry_over_max_age: int,
        correct_threshold: float,
        mini_batch_size: int,
    ) -> "BudgetedReplayBuffer":
        """The same buffer as verl built, with a budget; ``sampler_kwargs.poll_interval`` (seconds) is honoured here."""
        options: Any = stock.sampler_kwargs
        return cls(
            trainer_mode=stock.trainer_mode,
            trainer_config=stock.trainer_config,
            max_off_policy_threshold=stock.max_off_policy_threshold,
            max_off_policy_strategy=stock.max_off_policy_strategy,
            sampler_kwargs=options,
            poll_interval=float(options.get("poll_interval", stock.poll_interval)),
            refill_fn=stock.refill_fn,
            filter_groups_metric=stock.filter_groups_metric,
            train_batch_size=stock.train_batch_size,
            gen_batch_size=stock.gen_batch_size,
            max_inflight_gen_batches=stock.max_inflight_gen_batches,
            sync_refill_failed_groups=stock.sync_refill_failed_groups,
            max_num_gen_batches=max_num_gen_batches,
            on_budget=on_budget,
            carry_over_max_age=carry_over_max_age,
            correct_threshold=correct_threshold,
            mini_batch_size=mini_batch_size,
        )

    @property
    def filters(self) -> bool:
        """Whether dynamic sampling is on."""
        return self.filter_groups_metric is not None

    def first_round(self, global_steps: int, partition_id: str, batch_size: int) -> int:
        """Prompts to submit when a step begins: for the groups that are missing, at the last step's yield."""
        self._sync_metadata_from_transfer_queue()
        self._expire(global_steps, partition_id)
        missing = batch_size - len(self._terminal(partition_id))
        if missing <= 0:
            return 0
        expected_yield = self._expected_yield(_Tally())
        return min(groups_to_generate(missing, expected_yield), self._window, self._budget or self._window)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return ``batch_size`` groups with signal, or fewer when the budget is spent; validation is left to verl."""
        if partition_id == "val" or not self.filters:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        return self._sample_filtered(global_steps, partition_id, batch_size)

    def _sample_filtered(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        step = self._begin(global_steps, partition_id, batch_size)
        kept = self._generate(step)
        if step.tally.generated:
            self.last_step = (max(step.tally.mixed, 1), step.tally.generated)
        size = groups_to_train(len(kept), batch_size, self.mini_batch_size)
        if len(kept) < batch_size:
            self._spend(step.tally, size, len(kept), batch_size)
        in_order = self._in_order(partition_id, kept)
        chosen, surplus = in_order[:size], in_order[size:]
        ages = [global_steps - self.prompt_global_steps[partition_id][uid] for uid in chosen]
        rows = self._rows_in_order(partition_id, chosen)
        carried, discarded = self._keep_or_discard(partition_id, surplus)
        self._with_signal -= set(chosen)

        metrics = self._metrics(step.tally, ages)
        metrics["training/filter_groups/carried_over_groups"] = carried
        metrics["training/filter_groups/discarded_surplus_groups"] = discarded
        metrics["training/filter_groups/extra_generation_s"] = step.extra_seconds
        metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] = step.filtered  # verl's table of what the filter took out
        return self._materialize_batch(partition_id, chosen, rows), metrics

    # ---------------------------------------------------------------- one step

    def _begin(self, global_steps: int, partition_id: str, batch_size: int) -> "_Step":
        """Take stock: the prompts of this step that were submitted already, and the groups carried over."""
        self._sync_metadata_from_transfer_queue()
        self._expire(global_steps, partition_id)
        submitted_at = self.prompt_global_steps[partition_id]
        fresh = [uid for uid, step in submitted_at.items() if step == global_steps]
        carried = len(submitted_at) - len(fresh)
        return _Step(
            number=global_steps,
            partition_id=partition_id,
            batch_size=batch_size,
            tally=_Tally(generated=len(fresh), carried_in=carried),
            unfiltered=set(fresh[: max(0, batch_size - carried)]),
        )

    def _generate(self, step: "_Step") -> set[str]:
        """Generate until the batch is full, or the budget spent, and nothing is in flight; returns the groups kept."""
        last_debug = time.time()
        while True:
            self._evict(step)
            self._check_failures(step)
            kept = self._terminal(step.partition_id)
            inflight = self.pending_keys[step.partition_id] | self.running_keys[step.partition_id]
            step.note_time(inflight)
            missing = step.batch_size - len(kept)
            left = self._window if self._budget is None else self._budget - step.tally.generated
            if not inflight and (missing <= 0 or left <= 0):
                return kept
            if not self._refill(step, missing, len(inflight), left):
                last_debug = self._wait_for_next_poll(step.partition_id, last_debug)
            self._sync_metadata_from_transfer_queue()

    def _check_failures(self, step: "_Step") -> None:
        if step.tally.failed == step.tally.ended >= step.batch_size:
            raise UserError(
                f"step {step.number}: the rollouts of all {step.tally.failed} groups failed; see their traceback above."
            )

    def _refill(self, step: "_Step", missing: int, inflight: int, left: int) -> bool:
        """Submit the prompts expected to fill the batch, within window and budget; returns whether there were any."""
        if missing <= 0:
            return False
        wanted = groups_to_generate(missing, self._expected_yield(step.tally)) - inflight
        prompts = min(wanted, self._window - inflight, left)
        if prompts <= 0:
            return False
        assert self.refill_fn is not None
        self.refill_fn(prompts)
        step.tally.generated += prompts
        return True

    def _keep_or_discard(self, partition_id: str, surplus: list[str]) -> tuple[int, int]:
        """Leave surplus groups for later steps, or clear them; returns how many of each."""
        if self.carry_over_max_age > 0:
            return len(surplus), 0
        self._clear_groups(partition_id, set(surplus))
        self._with_signal -= set(surplus)
        return 0, len(surplus)

    # ---------------------------------------------------------------- groups

    def _in_order(self, partition_id: str, uids: set[str]) -> list[str]:
        """These groups in the order in which their prompts were submitted, oldest step first."""
        # The queue lists prompts in the order of their submission; those of a checkpoint were put back first.
        steps = {uid: step for uid, step in self.prompt_global_steps[partition_id].items() if uid in uids}
        return sorted(steps, key=lambda uid: steps[uid])

    def _rows_in_order(self, partition_id: str, uids: list[str]) -> dict[str, dict[str, Any]]:
        """The rows of these groups, group by group and session by session: the queue lists them as they arrived."""
        place = {uid: number for number, uid in enumerate(uids)}

        def order(key: str) -> tuple[int, int, int]:
            row = parse_key(key)
            return place[row.uid], row.session, row.output

        rows = self.partitions[partition_id]
        return {key: rows[key] for key in sorted((key for key in rows if uid_of(key) in place), key=order)}

    def _terminal(self, partition_id: str) -> set[str]:
        return self.finished_keys[partition_id] | self.failure_keys[partition_id]

    def _expire(self, global_steps: int, partition_id: str) -> None:
        """Clear the groups that have waited too long, with a warning; the next metrics count them."""
        steps = self.prompt_global_steps[partition_id]
        old = {uid for uid, step in steps.items() if global_steps - step > self.carry_over_max_age}
        if not old:
            return
        self._clear_groups(partition_id, old)
        self._with_signal -= old
        self._expired += len(old)
        logger.warning(
            "%d groups carried over are older than algorithm.filter_groups.carry_over.max_age=%d and were dropped.",
            len(old),
            self.carry_over_max_age,
        )

    def _evict(self, step: _Step) -> None:
        """Read the verdicts of the groups that have ended since the last time, and clear those without signal."""
        partition_id, tally = step.partition_id, step.tally
        steps = self.prompt_global_steps[partition_id]
        without_signal = set()
        for uid, values in self._read(partition_id, self._terminal(partition_id) - self._with_signal).items():
            if len(set(values)) > 1:
                self._with_signal.add(uid)
                tally.mixed += steps[uid] == step.number
                continue
            without_signal.add(uid)
            if uid in self.failure_keys[partition_id] or not values:
                tally.failed += 1
                continue
            step.filtered[values[0]] = step.filtered.get(values[0], 0) + 1
            if values[0] > 0:
                tally.all_correct += 1
            else:
                tally.all_wrong += 1
        self._clear_groups(partition_id, without_signal)

    def _read(self, partition_id: str, uids: set[str]) -> dict[str, list[float]]:
        """What the filter reads: {uid: a value per response}; with the metric ``acc`` these are verdicts, 0 or 1."""
        values: dict[str, list[float]] = {uid: [] for uid in uids}
        if not uids:
            return values
        keys = [key for key in self.partitions[partition_id] if uid_of(key) in uids]
        if not keys:
            return values
        if self.filter_groups_metric == REWARD:
            scores = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores"])["rm_scores"]
            for key, row in zip(keys, scores, strict=True):
                values[uid_of(key)].append(float(row.sum()))
            return values
        for key, info in zip(keys, reward_infos(partition_id, keys), strict=True):
            if self.filter_groups_metric not in info:
                raise UserError(
                    f"dynamic sampling filters on {self.filter_groups_metric!r}, and the reward function did not "
                    f"return it for response {key}: add it to the dict that it returns, or set "
                    "algorithm.filter_groups.enable=false."
                )
            value = float(info[self.filter_groups_metric])
            if self.filter_groups_metric == VERDICT:
                value = float(is_correct(value, self.correct_threshold))
            values[uid_of(key)].append(value)
        return values

    # ---------------------------------------------------------------- how much to generate

    @property
    def _window(self) -> int:
        assert self.train_batch_size is not None
        return self.max_inflight_gen_batches * self.train_batch_size

    @property
    def _budget(self) -> int | None:
        assert self.train_batch_size is not None
        return self.max_num_gen_batches * self.train_batch_size or None

    def _expected_yield(self, tally: _Tally) -> float:
        """The yield of this step so far and of the last one: the first few groups to end are not representative."""
        with_signal, generated = self.last_step
        return (tally.mixed + with_signal) / (tally.ended + generated)

    def _spend(self, tally: _Tally, size: int, kept: int, batch_size: int) -> None:
        """End the run, or say how much smaller its batch is: ``size`` of the ``kept`` groups with signal."""
        spent = (
            f"dynamic sampling spent its budget of {self.max_num_gen_batches} generation batches; {tally.describe()}"
        )
        if self.on_budget == "stop" or kept == 0:
            raise BudgetSpentError(
                f"{spent}. Choose prompts that the model solves sometimes, raise "
                "algorithm.filter_groups.max_num_gen_batches, or switch dynamic sampling off with "
                "algorithm.filter_groups.enable=false."
            )
        logger.warning("%s: training on %d of %d groups.", spent, size, batch_size)
        if size < kept:
            logger.warning(
                "%d more groups do not fill a mini-batch of %d and %s.",
                kept - size,
                self.mini_batch_size,
                "are carried over" if self.carry_over_max_age > 0 else "were dropped",
            )

    def _metrics(self, tally: _Tally, ages: Iterable[int]) -> dict[str, Any]:
        ages = list(ages)
        carried = [age for age in ages if age > 0]
        metrics: dict[str, Any] = {
            "generated_groups": tally.generated,
            "kept_groups": len(ages),
            "failed_groups": tally.failed,
            "expired_groups": self._expired,
            "carried_share": len(carried) / len(ages),
            "carried_age_mean": sum(carried) / len(carried) if carried else 0.0,
            "carried_age_max": max(carried, default=0),
        }
        if tally.generated:  # a step that lives on carried groups alone has no yield
            metrics["yield"] = tally.mixed / tally.generated
            metrics["solve_all_share"] = tally.all_correct / tally.generated
            metrics["solve_none_share"] = tally.all_wrong / tally.generated
        self._expired = 0
        return {f"training/filter_groups/{name}": value for name, value in metrics.items()}


def groups_to_train(kept: int, batch_size: int, mini_batch_size: int) -> int:
    """How many of the groups with signal a step trains on.

    verl fills a batch up to whole mini-batches with padding rows. A mini-batch of one group and padding would be an
    optimizer step like any other, and under a token mean each of its tokens would weigh many times as much. So a short
    batch is cut to whole mini-batches; only where there is not even one of them, all groups make one update.

    Args:
        kept: groups with signal.
        batch_size: groups of a full batch.
        mini_batch_size: groups of one update.
    """
    if kept >= batch_size:
        return batch_size
    if kept < mini_batch_size:
        return kept
    return kept - kept % mini_batch_size


def groups_to_generate(missing: int, expected_yield: float) -> int:
    """How many groups to generate so that, more than four times in five, ``missing`` of them have signal.

    The number with signal among n has mean n·y and standard deviation √(n·y·(1-y)); n is the least for which the mean
    is one standard deviation above ``missing``. A second round of generation costs a step the time of its longest
    response, a few groups too many cost little.

    Args:
        missing: groups with signal still to be found, 1 or more.
        expected_yield: their share y among all, in (0, 1].
    """
    root = (math.sqrt(1 - expected_yield) + math.sqrt(1 - expected_yield + 4 * missing)) / 2
    return math.ceil(root**2 / expected_yield - 1e-9)
