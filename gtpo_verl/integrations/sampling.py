"""Dynamic sampling with a budget and without waste, on verl's V1 replay buffer (DAPO eq. 11).

A step generates at most ``max_num_gen_batches`` batches of prompts and then does what ``on_budget`` says; groups left
over may wait for a later step (``carry_over.max_age``). Which prompts a step generates, and which groups it trains on,
follows from the order of the data and the verdicts, not from who finished first.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer, ReplayBufferAsync

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.step.generation import Generation, GroupVerdict, groups_to_train
from gtpo_verl.integrations.transfer_queue import TRAIN, VALIDATION, parse_key, reward_infos, uid_of
from gtpo_verl.runs.correctness import is_correct, verdict

logger = logging.getLogger(__name__)

FAILED = "training/failed_responses"  # metric


class BudgetSpentError(UserError):
    """A step has generated all that it may and found too few groups with contrast."""


def refuse_failures(what: str, failed: int, ended: int, share: float, why: Callable[[], str]) -> None:
    """Raise UserError where all groups, or responses, of a step have failed or more than a share, with the last one."""
    if failed and (failed == ended or failed > share * ended):
        raise UserError(
            f"{failed} of {ended} {what} of the step failed, and guards.max_failed_share={share}. The last one: "
            f"{why()}. Nothing was trained on this step; the same command resumes from the last checkpoint."
        )


class BoundedFailures:
    """Takes the place of an asynchronous buffer's ``_evict_terminal_groups``, which has another group generated for
    each that failed, without end: of those that end in a step no more than ``guards.max_failed_share`` may fail.
    """

    def __init__(self, buffer: ReplayBufferAsync, config: DictConfig, why: Callable[[], str]) -> None:
        self._buffer = buffer
        self._evict = buffer._evict_terminal_groups
        self._share, self._least = config.guards.max_failed_share, config.data.train_batch_size
        self._why = why
        self._step = 0
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        vars(buffer)["_evict_terminal_groups"] = self

    def __call__(self, global_steps: int, partition_id: str, reasons: Any) -> Any:
        """verl's; raises UserError where too many groups failed."""
        if partition_id != VALIDATION:
            if global_steps != self._step:
                self._step, self._ended, self._failed = global_steps, set(), set()
            self._failed |= self._buffer.failure_keys[partition_id]
            self._ended |= self._failed | self._buffer.finished_keys[partition_id]
            if len(self._ended) >= self._least:
                refuse_failures("groups", len(self._failed), len(self._ended), self._share, self._why)
        return self._evict(global_steps, partition_id, reasons)


class BudgetedReplayBuffer(ReplayBuffer):
    """verl's synchronous replay buffer with a budget; it takes over the state of the one that verl has built.

    It honours ``sampler_kwargs.poll_interval`` (seconds), and counts the groups that it discards and failed responses.
    """

    def __init__(self, stock: ReplayBuffer, config: DictConfig) -> None:
        vars(self).update(vars(stock))
        options: Any = self.sampler_kwargs
        self.poll_interval = float(options.get("poll_interval", self.poll_interval))
        self.last_step = (1, 1)  # groups with contrast, and groups generated, in the last step that generated any
        self.why: Callable[[], str] = lambda: "its traceback is in the run's log"  # the last response failed
        self._limits = config.algorithm.filter_groups
        self._max_age = self._limits.carry_over.max_age
        self._threshold = config.algorithm.correct_threshold
        self._mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
        self._responses = config.actor_rollout_ref.rollout.n  # of a group
        self._max_failed_share = config.guards.max_failed_share
        self._failed = 0  # responses of the groups that ended in this step
        self._with_contrast: set[str] = set()  # groups whose verdicts have been read
        self._generation: Generation | None = None

    def begin_step(self, global_steps: int, batch_size: int) -> int:
        """Begin a step; returns the prompts to submit: for the groups that are missing, at the last step's yield."""
        assert self.train_batch_size is not None
        self._sync_metadata_from_transfer_queue()
        expired = self._expire(global_steps)
        self._judge()  # groups restored from a checkpoint
        self._failed = 0
        waiting = len(self._terminal())
        self._generation = Generation(
            number=global_steps,
            carried_in=waiting,
            expired=expired,
            missing=batch_size - waiting,
            last_step=self.last_step,
            window=self.max_inflight_gen_batches * self.train_batch_size,
            budget=self._limits.max_num_gen_batches * self.train_batch_size or None,
        )
        return self._generation.target()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return ``batch_size`` groups with contrast, or fewer when the budget is spent; validation is left to verl.

        With dynamic sampling it follows :meth:`begin_step`, once the prompts are submitted.
        """
        if partition_id == VALIDATION:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if self.filter_groups_metric is None:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
            return batch, metrics | {FAILED: self._failed}
        step = self._generation
        assert step is not None
        assert step.number == global_steps
        kept = self._generate(step)
        self._check_failures("responses", self._failed, self._responses * len(step.verdicts))
        if step.prompts:
            self.last_step = (max(step.count("mixed"), 1), len(step.prompts))
        size = groups_to_train(len(kept), batch_size, self._mini_batch)
        if len(kept) < batch_size:
            self._spend(step, size, len(kept), batch_size)
        in_order = self._in_order(partition_id, kept)
        chosen, surplus = in_order[:size], in_order[size:]
        metrics = step.metrics() | self._metrics(step, chosen, surplus)
        if self._max_age == 0:
            self._clear(set(surplus))
        self._with_contrast -= set(chosen)
        named = {f"training/filter_groups/{name}": value for name, value in metrics.items()}
        batch = self._materialize_batch(partition_id, chosen, self.partitions[partition_id])
        return batch, named | {DAPO_FILTERED_REWARD_COUNTS_KEY: step.shared_values(), FAILED: self._failed}

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        """verl's, without a filter; a step is not trained on if too many of its responses have failed."""
        selected = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id != VALIDATION:
            self._failed = self._failures(set(selected[0]))
            self._check_failures("responses", self._failed, self._responses * len(selected[0]))
        return selected

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        """verl's, with the rows prompt by prompt and session by session: the queue lists them as they arrived."""
        place = {uid: number for number, uid in enumerate(self._in_order(partition_id, set(selected_prompt_uids)))}
        rows = {key: parse_key(key) for key in partition_snapshot if uid_of(key) in place}
        in_order = sorted(rows, key=lambda key: (place[rows[key].uid], *rows[key][1:]))
        return super()._materialize_batch(partition_id, list(place), {key: partition_snapshot[key] for key in in_order})

    # ---------------------------------------------------------------- one step

    def _generate(self, step: Generation) -> set[str]:
        """Generate until the batch is full, or the budget spent, and nothing is in flight; returns the groups kept."""
        assert self.train_batch_size is not None
        last_debug = time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            # the queue lists prompts in the order of their submission
            known = set(step.prompts) | self._with_contrast
            step.prompts += [uid for uid in self.prompt_global_steps[TRAIN] if uid not in known]
            step.verdicts |= self._judge()
            if len(step.verdicts) >= self.train_batch_size:
                self._check_failures("groups", step.count("failed"), len(step.verdicts))
            step.note_time()
            more = min(step.target() - len(step.prompts), step.window - step.inflight)
            if more > 0:
                assert self.refill_fn is not None
                self.refill_fn(more)
            elif not step.inflight:
                return self._terminal()
            else:
                last_debug = self._wait_for_next_poll(TRAIN, last_debug)

    def _check_failures(self, what: str, failed: int, ended: int) -> None:
        """End the run where all groups, or responses, have failed or too many; warn of responses that are left out."""
        refuse_failures(what, failed, ended, self._max_failed_share, self.why)
        if failed and what == "responses":
            logger.warning("%d of %d responses failed and are left out; the last one: %s.", failed, ended, self.why())

    def _spend(self, step: Generation, size: int, kept: int, batch_size: int) -> None:
        """End the run, or say how much smaller its batch is: ``size`` of the ``kept`` groups with contrast."""
        budget = self._limits.max_num_gen_batches
        spent = f"dynamic sampling spent its budget of {budget} generation batches; {step.describe()}"
        if self._limits.on_budget == "stop" or kept == 0:
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
                self._mini_batch,
                "are carried over" if self._max_age > 0 else "were dropped",
            )

    def _metrics(self, step: Generation, chosen: list[str], surplus: list[str]) -> dict[str, Any]:
        """Of the groups that the step trains on, and of those left over."""
        born = self.prompt_global_steps[TRAIN]
        carried = [step.number - born[uid] for uid in chosen if step.number > born[uid]]
        return {
            "kept_groups": len(chosen),
            "carried_share": len(carried) / len(chosen),
            "carried_age_mean": sum(carried) / len(carried) if carried else 0.0,
            "carried_age_max": max(carried, default=0),
            "carried_over_groups": len(surplus) if self._max_age > 0 else 0,
            "discarded_surplus_groups": 0 if self._max_age > 0 else len(surplus),
        }

    # ---------------------------------------------------------------- groups

    def _in_order(self, partition_id: str, uids: set[str]) -> list[str]:
        """These groups in the order in which their prompts were submitted, oldest step first."""
        # The queue lists prompts in the order of their submission; those of a checkpoint were put back first.
        steps = {uid: step for uid, step in self.prompt_global_steps[partition_id].items() if uid in uids}
        return sorted(steps, key=lambda uid: steps[uid])

    def _terminal(self) -> set[str]:
        return self.finished_keys[TRAIN] | self.failure_keys[TRAIN]

    def _clear(self, uids: set[str]) -> None:
        self._clear_groups(TRAIN, uids)
        self._with_contrast -= uids

    def _expire(self, global_steps: int) -> int:
        """Clear the groups that have waited too long, with a warning; returns how many."""
        steps = self.prompt_global_steps[TRAIN]
        old = {uid for uid, step in steps.items() if global_steps - step > self._max_age}
        if old:
            self._clear(old)
            logger.warning(
                "%d groups carried over are older than algorithm.filter_groups.carry_over.max_age=%d and were dropped.",
                len(old),
                self._max_age,
            )
        return len(old)

    def _judge(self) -> dict[str, GroupVerdict]:
        """Read the verdicts of the groups that have ended since the last time, and clear those without contrast."""
        unread = self._terminal() - self._with_contrast
        self._failed += self._failures(unread)
        failed = self.failure_keys[TRAIN]
        values = self._values(unread)
        verdicts = {uid: GroupVerdict.of(values[uid], failed=uid in failed) for uid in unread}
        with_contrast = {uid for uid, verdict in verdicts.items() if verdict.outcome == "mixed"}
        self._with_contrast |= with_contrast
        self._clear_groups(TRAIN, unread - with_contrast)
        return verdicts

    def _failures(self, uids: set[str]) -> int:
        """Responses of these groups that failed: verl writes no row of them."""
        failed = uids & self.failure_keys[TRAIN]
        sessions = {parse_key(key)[:2] for key in self.partitions[TRAIN] if uid_of(key) in failed}
        return self._responses * len(failed) - len(sessions)

    def _values(self, uids: set[str]) -> dict[str, list[float]]:
        """What the filter reads: {uid: a value per response}; with the metric ``acc`` these are verdicts, 0 or 1."""
        values: dict[str, list[float]] = {uid: [] for uid in uids}
        keys = [key for key in self.partitions[TRAIN] if uid_of(key) in uids]
        if keys and self.filter_groups_metric == "reward":  # verl's name for the sum of `rm_scores`
            scores = tq.kv_batch_get(keys=keys, partition_id=TRAIN, select_fields=["rm_scores"])["rm_scores"]
            found = [float(row.sum()) for row in scores]
        else:
            infos = reward_infos(TRAIN, keys)
            found = [self._value(key, info) for key, info in zip(keys, infos, strict=True)]
        for key, value in zip(keys, found, strict=True):
            values[uid_of(key)].append(value)
        return values

    def _value(self, key: str, info: dict[str, Any]) -> float:
        if self.filter_groups_metric not in info:
            raise UserError(
                f"dynamic sampling filters on {self.filter_groups_metric!r}, and the reward function did not return it "
                f"for response {key}: add it to the dict that it returns, or set algorithm.filter_groups.enable=false."
            )
        if self.filter_groups_metric == "acc":
            return float(is_correct(verdict(info, f"on response {key}"), self._threshold))
        return float(info[self.filter_groups_metric])
