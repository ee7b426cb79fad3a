"""Dynamic sampling with a budget and without waste, on verl's V1 replay buffer (DAPO eq. 11).

verl refills every group that its filter evicts without limit, so a step never ends on a task that the model has
saturated, or cannot do at all; and what it generated beyond a batch is discarded. Here a step generates at most
``max_num_gen_batches`` batches of prompts and then does what ``on_budget`` says, and groups left over may wait for a
later step (``carry_over_max_age``).

Which prompts a step generates, and which groups it trains on, follows from the order of the data and from the verdicts.
Everything in flight is finished first, and the groups with signal are taken in the order of their prompts. Who finished
first, and with it the length of the responses, has no part in either choice.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.transfer_queue import parse_key, reward_infos, uid_of
from gtpo_verl.runs.correctness import is_correct, verdict

logger = logging.getLogger(__name__)

VERDICT = "acc"
REWARD = "reward"  # verl's name for the sum of `rm_scores`


class BudgetSpentError(UserError):
    """A step has generated all that it may and found too few groups with signal."""


Outcome = Literal["mixed", "all_correct", "all_wrong", "failed"]


class _Verdict(NamedTuple):
    """What became of a group; ``value`` is what its responses share, where they have one and no signal."""

    outcome: Outcome
    value: float | None = None


@dataclass
class _Tally:
    """Groups of one sampling call, by what became of them; a group is the responses to one prompt."""

    generated: int = 0
    mixed: int = 0
    all_correct: int = 0
    all_wrong: int = 0
    failed: int = 0
    carried_in: int = 0

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
        carried_in: groups that waited when it began.
        missing: groups with signal to be found beside them.
        prompts: those submitted in this step, in the order of the data.
        verdicts: of those that have ended.
        unfiltered_until, ended_at: when the last prompt ended that a step without a filter would have generated, and
            the last of all (seconds).
    """

    number: int
    partition_id: str
    carried_in: int
    missing: int
    prompts: list[str] = field(default_factory=list)
    verdicts: dict[str, _Verdict] = field(default_factory=dict)
    unfiltered_until: float | None = None
    ended_at: float = 0.0

    @property
    def inflight(self) -> int:
        return len(self.prompts) - len(self.verdicts)

    def tally(self) -> _Tally:
        """Of the groups that have ended by now."""
        ended: Counter[str] = Counter(verdict.outcome for verdict in self.verdicts.values())
        return _Tally(generated=len(self.prompts), carried_in=self.carried_in, **ended)

    def may_have_signal(self, uid: str) -> bool:
        """Whether a group has signal, or has not ended."""
        return uid not in self.verdicts or self.verdicts[uid].outcome == "mixed"

    def note_time(self) -> None:
        """Note which prompts have ended by now."""
        self.ended_at = time.time()
        if self.unfiltered_until is None and self.verdicts.keys() >= set(self.prompts[: self.missing]):
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
        max_failed_share: of the groups of a step; when the rollouts of more have failed, the run ends.
    """

    def __init__(
        self,
        *args: Any,
        max_num_gen_batches: int,
        on_budget: str,
        carry_over_max_age: int,
        correct_threshold: float,
        mini_batch_size: int,
        max_failed_share: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_gen_batches = max_num_gen_batches
        self.on_budget = on_budget
        self.carry_over_max_age = carry_over_max_age
        self.correct_threshold = correct_threshold
        self.mini_batch_size = mini_batch_size
        self.max_failed_share = max_failed_share
        self.last_step = (1, 1)  # groups with signal, groups generated, in the last step that generated any
        self._expired = 0  # groups that grew too old since the last sampling
        self._with_signal: set[str] = set()  # groups whose verdicts have been read
        self._step: _Step | None = None

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
        max_failed_share: float,
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
            max_failed_share=max_failed_share,
        )

    @property
    def filters(self) -> bool:
        """Whether dynamic sampling is on."""
        return self.filter_groups_metric is not None

    def begin_step(self, global_steps: int, partition_id: str, batch_size: int) -> int:
        """Begin a step; returns the prompts to submit: for the groups that are missing, at the last step's yield."""
        self._sync_metadata_from_transfer_queue()
        self._expire(global_steps, partition_id)
        self._judge(partition_id)  # groups restored from a checkpoint
        waiting = len(self._terminal(partition_id))
        self._step = _Step(global_steps, partition_id, waiting, missing=batch_size - waiting)
        return self._target(self._step)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return ``batch_size`` groups with signal, or fewer when the budget is spent; validation is left to verl.

        With dynamic sampling it follows :meth:`begin_step`, once the prompts are submitted.
        """
        if partition_id == "val" or not self.filters:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        assert self._step is not None
        assert self._step.number == global_steps
        return self._sample_filtered(self._step, batch_size)

    def _sample_filtered(self, step: _Step, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        partition_id = step.partition_id
        kept = self._generate(step)
        tally = step.tally()
        if tally.generated:
            self.last_step = (max(tally.mixed, 1), tally.generated)
        size = groups_to_train(len(kept), batch_size, self.mini_batch_size)
        if len(kept) < batch_size:
            self._spend(tally, size, len(kept), batch_size)
        in_order = self._in_order(partition_id, kept)
        chosen, surplus = in_order[:size], in_order[size:]
        ages = [step.number - self.prompt_global_steps[partition_id][uid] for uid in chosen]
        carried, discarded = self._keep_or_discard(partition_id, surplus)
        self._with_signal -= set(chosen)

        metrics = self._metrics(tally, ages)
        metrics["training/filter_groups/carried_over_groups"] = carried
        metrics["training/filter_groups/discarded_surplus_groups"] = discarded
        metrics["training/filter_groups/extra_generation_s"] = step.extra_seconds
        # verl's table of what the filter took out: {metric value: groups}
        shared = Counter(verdict.value for verdict in step.verdicts.values() if verdict.value is not None)
        metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] = dict(shared)
        return self._materialize_batch(partition_id, chosen, self.partitions[partition_id]), metrics

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        """verl's, with the rows prompt by prompt and session by session: the queue lists them as they arrived."""
        place = {uid: number for number, uid in enumerate(self._in_order(partition_id, set(selected_prompt_uids)))}

        def order(key: str) -> tuple[int, int, int]:
            row = parse_key(key)
            return place[row.uid], row.session, row.output

        rows = sorted((key for key in partition_snapshot if uid_of(key) in place), key=order)
        return super()._materialize_batch(partition_id, list(place), {key: partition_snapshot[key] for key in rows})

    # ---------------------------------------------------------------- one step

    def _generate(self, step: _Step) -> set[str]:
        """Generate until the batch is full, or the budget spent, and nothing is in flight; returns the groups kept."""
        last_debug = time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            self._note_prompts(step)
            step.verdicts |= self._judge(step.partition_id)
            self._check_failures(step)
            step.note_time()
            more = min(self._target(step) - len(step.prompts), self._window - step.inflight)
            if more > 0:
                assert self.refill_fn is not None
                self.refill_fn(more)
            elif not step.inflight:
                return self._terminal(step.partition_id)
            else:
                last_debug = self._wait_for_next_poll(step.partition_id, last_debug)

    def _note_prompts(self, step: _Step) -> None:
        """Note the names of the prompts submitted since the last time; the queue lists prompts in that order."""
        known = set(step.prompts) | self._with_signal
        step.prompts += [uid for uid in self.prompt_global_steps[step.partition_id] if uid not in known]

    def _target(self, step: _Step) -> int:
        """Prompts that the step submits in all, as far as is known by now.

        After each prompt, in the order of the data, as many more are called for as are expected to fill the batch at
        the yield up to there; the step submits the most that is called for after any of them. Groups that have not
        ended are taken to have signal, so verdicts can only raise the number, and where it ends does not depend on
        the order in which they come.
        """
        with_signal, target = 0, self._called_for(step.missing, 0, 0)
        for count, uid in enumerate(step.prompts, start=1):
            with_signal += step.may_have_signal(uid)
            target = max(target, count + self._called_for(step.missing - with_signal, with_signal, count))
        return target if self._budget is None else min(target, self._budget)

    def _called_for(self, missing: int, with_signal: int, generated: int) -> int:
        """Prompts to fill the batch, at the yield of this step so far and of the last one: a few are not enough."""
        if missing <= 0:
            return 0
        last_with_signal, last_generated = self.last_step
        expected_yield = (with_signal + last_with_signal) / (generated + last_generated)
        return min(groups_to_generate(missing, expected_yield), self._window)

    def _check_failures(self, step: _Step) -> None:
        assert self.train_batch_size is not None
        failed, ended = step.tally().failed, len(step.verdicts)
        if ended < self.train_batch_size:
            return
        if failed == ended:
            raise UserError(
                f"step {step.number}: the rollouts of all {failed} groups failed; see their traceback above."
            )
        if failed > self.max_failed_share * ended:
            raise UserError(
                f"step {step.number}: the rollouts of {failed} of {ended} groups failed, more than "
                f"guards.max_failed_share={self.max_failed_share}: see their traceback in the run's log. Nothing was "
                "trained on this step; the same command resumes from the last checkpoint."
            )

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

    def _judge(self, partition_id: str) -> dict[str, _Verdict]:
        """Read the verdicts of the groups that have ended since the last time, and clear those without signal."""
        unread = self._terminal(partition_id) - self._with_signal
        failed = self.failure_keys[partition_id] & unread
        verdicts = {uid: _verdict(values, uid in failed) for uid, values in self._read(partition_id, unread).items()}
        with_signal = {uid for uid, verdict in verdicts.items() if verdict.outcome == "mixed"}
        self._with_signal |= with_signal
        self._clear_groups(partition_id, unread - with_signal)
        return verdicts

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
            if self.filter_groups_metric == VERDICT:
                value = float(is_correct(verdict(info, f"on response {key}"), self.correct_threshold))
            else:
                value = float(info[self.filter_groups_metric])
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


def _verdict(values: list[float], failed: bool) -> _Verdict:
    """Of the values of a group's responses; ``failed`` when one of its rollouts did."""
    if len(set(values)) > 1:
        return _Verdict("mixed")
    if failed or not values:
        return _Verdict("failed")
    return _Verdict("all_correct" if values[0] > 0 else "all_wrong", values[0])


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
