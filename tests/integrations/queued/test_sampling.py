"""Dynamic sampling on a real TransferQueue: it ends, it keeps to its budget, it loses and repeats nothing, and what it
chooses
follows from the order of the prompts and their verdicts."""

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from step_trainer import clear
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.sampling import BoundedFailures, BudgetedReplayBuffer
from gtpo_verl.integrations.step.checkpoints import restore_groups, save_groups

pytestmark = pytest.mark.slow

BATCH = 4
MIXED, ALL_CORRECT, ALL_WRONG = (1, 0, 1), (1, 1, 1), (0, 0, 0)
GROUP = len(MIXED)


class Prompts:
    """Stands for data and engines: the verdicts of each prompt come from ``pattern``, in the order of the data.

    A prompt is answered at once, or, with ``order``, some time later and in that random order.
    """

    def __init__(self, pattern: Iterator[tuple[float, ...]], order: random.Random | None = None) -> None:
        self.pattern = pattern
        self.order = order
        self.step = 1
        self.submitted: list[str] = []
        self.mixed: list[str] = []
        self.running: list[tuple[str, tuple[float, ...]]] = []

    def submit(self, count: int) -> int:
        for _ in range(count):
            uid, verdicts = f"prompt{len(self.submitted):04d}", next(self.pattern)
            self.submitted.append(uid)
            if len(set(verdicts)) > 1:
                self.mixed.append(uid)
            self._tag(uid, "running")
            self.running.append((uid, verdicts))
        if self.order is None:
            self.answer(len(self.running))
        return count

    def answer(self, count: int) -> None:
        """Finish so many of the prompts that are running; verdicts of -1 stand for a session that failed."""
        if self.order is not None:
            self.order.shuffle(self.running)
        for uid, verdicts in self.running[:count]:
            written = {session: verdict for session, verdict in enumerate(verdicts) if verdict >= 0}
            if written:
                tq.kv_batch_put(
                    keys=[f"{uid}_{session}_0" for session in written],
                    partition_id="train",
                    fields=list_of_dict_to_tensordict(
                        [
                            {
                                "responses": torch.arange(2 + session),
                                "rollout_log_probs": torch.full((2 + session,), -0.5),
                                "extra_fields": {"reward_extra_info": {"acc": float(verdict)}},
                            }
                            for session, verdict in written.items()
                        ]
                    ),
                    tags=[{"status": "success", "global_steps": self.step, "seq_len": 9} for _ in written],
                )
            self._tag(uid, "failure" if len(written) < len(verdicts) else "finished")
        del self.running[:count]

    def _tag(self, uid: str, status: str) -> None:
        tags = [{"is_prompt": True, "status": status, "global_steps": self.step}]
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=tags)


class Run:
    """A trainer's steps without a trainer: submit, sample, and clear what was trained on."""

    def __init__(self, buffer: BudgetedReplayBuffer, prompts: Prompts) -> None:
        self.buffer = buffer
        self.prompts = prompts
        self.trained: list[str] = []

    def step(self, number: int = 1) -> tuple[list[str], dict[str, Any]]:
        self.prompts.step = number
        first = self.buffer.begin_step(number, BATCH)
        if first:
            self.prompts.submit(first)
        batch, metrics = self.buffer.sample(global_steps=number, partition_id="train", batch_size=BATCH)
        tq.kv_clear(keys=batch.keys, partition_id="train")
        uids = list(dict.fromkeys(key.split("_")[0] for key in batch.keys))
        sessions = [f"{uid}_{session}_0" for uid in uids for session in range(GROUP)]
        assert batch.keys == [key for key in sessions if key in batch.keys], "rows are not in order"
        self.trained += uids
        return uids, {name.rsplit("/", 1)[-1]: value for name, value in metrics.items()}


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> Iterator[MakeRun]:
    def make(
        pattern: Iterator[tuple[float, ...]],
        *,
        budget: int = 5,
        on_budget: str = "train_smaller",
        window: int = 1,
        max_age: int = 0,
        mini_batch: int = 1,
        order: random.Random | None = None,
        max_failed_share: float = 1.0,
    ) -> Run:
        prompts = Prompts(pattern, order)
        stock = ReplayBuffer(
            trainer_mode="sync",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({"poll_interval": 0.01}),
            refill_fn=prompts.submit,
            filter_groups_metric="acc",
            train_batch_size=BATCH,
            gen_batch_size=1,
            max_inflight_gen_batches=window,
        )
        limits = {"max_num_gen_batches": budget, "on_budget": on_budget, "carry_over": {"max_age": max_age}}
        config = {
            "algorithm": {"filter_groups": limits, "correct_threshold": 1.0},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini_batch}, "rollout": {"n": GROUP}},
            "guards": {"max_failed_share": max_failed_share},
        }
        buffer = BudgetedReplayBuffer(stock, OmegaConf.create(config))
        if order is not None:
            wait = buffer._wait_for_next_poll

            def progress(partition_id: str, last_debug: float) -> float:
                prompts.answer(order.randint(1, 3))
                return wait(partition_id, last_debug)

            buffer._wait_for_next_poll = progress  # type: ignore[method-assign]
        return Run(buffer, prompts)

    yield make
    clear()


def waiting() -> list[str]:
    return [key for key, tag in tq.kv_list("train").get("train", {}).items() if tag.get("is_prompt")]


# -------------------------------------------------------------------- the filter


def test_mixed_groups_pass_at_once(make_run: MakeRun) -> None:
    run = make_run(itertools.repeat(MIXED))
    uids, metrics = run.step()
    assert uids == run.prompts.submitted
    assert metrics["yield"] == 1.0
    assert metrics["carried_share"] == 0.0


def test_groups_without_contrast_are_replaced_in_the_order_of_the_prompts(make_run: MakeRun) -> None:
    run = make_run(itertools.cycle([MIXED, ALL_CORRECT, ALL_WRONG, MIXED]))
    uids, metrics = run.step()
    assert uids == run.prompts.mixed[:BATCH]
    generated = len(run.prompts.submitted)
    assert metrics["generated_groups"] == generated > BATCH
    assert metrics["yield"] == len(run.prompts.mixed) / generated
    assert metrics["solve_all_share"] + metrics["solve_none_share"] == pytest.approx(1 - metrics["yield"])
    assert metrics["solve_all_share"] == pytest.approx(0.25, abs=0.13)
    assert metrics["_dapo_filtered_reward_counts"] == {
        1.0: round(metrics["solve_all_share"] * generated),
        0.0: round(metrics["solve_none_share"] * generated),
    }


def test_the_verdict_divides_a_group_and_not_the_number(make_run: MakeRun) -> None:
    """Partial credit below `correct_threshold` is wrong: a group of such answers holds no correct one."""
    run = make_run(itertools.chain([(0.2, 0.7, 0.2)], itertools.repeat((0.2, 1.0, 0.7))))
    uids, metrics = run.step()
    assert run.prompts.submitted[0] not in uids
    assert metrics["solve_none_share"] == 1 / metrics["generated_groups"]


def test_a_group_with_a_failed_rollout_is_judged_by_what_is_left_of_it(make_run: MakeRun) -> None:
    run = make_run(itertools.chain([(1, -1, 0), (1, -1, 1), (-1, -1, -1)], itertools.repeat(MIXED)))
    uids, metrics = run.step()
    assert uids[0] == run.prompts.submitted[0]
    assert set(run.prompts.submitted[1:3]).isdisjoint(uids)
    assert metrics["failed_groups"] == 2
    assert metrics["failed_responses"] == 5


@pytest.mark.parametrize("filters", [True, False])
def test_responses_that_failed_are_counted_and_named(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture, filters: bool
) -> None:
    """A group is trained on with what is left of it, and nobody sees what is not there."""
    run = make_run(itertools.chain([(1, -1, 0), (1, 0, -1)], itertools.repeat(MIXED)), max_failed_share=0.2)
    run.buffer.why = lambda: "response prompt0000_1: the reward function raised"
    if not filters:
        run.buffer.filter_groups_metric = None
        run.prompts.submit(BATCH)
    with caplog.at_level(logging.WARNING, logger="gtpo_verl"):
        if filters:
            metrics = run.step()[1]
        else:
            _, metrics = run.buffer.sample(global_steps=1, partition_id="train", batch_size=BATCH)
    assert {name.rsplit("/", 1)[-1]: value for name, value in metrics.items()}["failed_responses"] == 2
    assert "2 of 12 responses failed and are left out; the last one: response prompt0000_1" in caplog.text


@pytest.mark.parametrize("verdicts", [(-1, -1, -1), (1, -1, -1)])
def test_without_a_filter_too_many_failed_responses_end_the_run_before_the_update(
    make_run: MakeRun, verdicts: tuple[int, ...]
) -> None:
    run = make_run(itertools.repeat(verdicts), max_failed_share=0.5)
    run.buffer.filter_groups_metric = None
    run.buffer.why = lambda: "the reward function raised ValueError"
    run.prompts.submit(BATCH)
    with pytest.raises(UserError, match=r"of 12 responses of the step failed, .*=0\.5\. The last one: the reward func"):
        run.buffer.sample(global_steps=1, partition_id="train", batch_size=BATCH)


def test_rollouts_that_all_fail_end_the_run_without_a_budget_too(make_run: MakeRun) -> None:
    run = make_run(itertools.repeat((-1, -1, -1)), budget=0)
    with pytest.raises(UserError, match=r"4 of 4 groups of the step failed, .*in the run's log\. Nothing"):
        run.step()


@pytest.mark.parametrize(("share", "ends"), [(0.5, True), (0.8, False)])
def test_a_step_whose_rollouts_mostly_fail_ends_the_run_before_its_update(
    make_run: MakeRun, share: float, ends: bool
) -> None:
    """A dead reward worker fails every group that it gets."""
    failed = (-1, -1, -1)
    run = make_run(itertools.cycle([failed, failed, failed, MIXED]), budget=0, max_failed_share=share)
    if not ends:
        assert len(run.step()[0]) == BATCH
        return
    with pytest.raises(UserError, match=r"3 of 4 groups of the step failed, .*max_failed_share=0\.5\."):
        run.step()


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ([(-1, -1, -1)], "4 of 4 groups"),
        ([MIXED, (1, 0, -1), (1, -1, -1)], "4 of 6 groups"),  # verl drops a group with a failed response
        ([MIXED, MIXED, (1, 0, -1)], None),
    ],
)
def test_an_asynchronous_trainer_does_not_replace_failed_groups_without_end(
    pattern: list[tuple[int, ...]], said: str | None
) -> None:
    prompts = Prompts(itertools.cycle(pattern))
    buffer = ReplayBufferAsync(
        trainer_mode="colocate_async",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        refill_fn=prompts.submit,
    )
    config = {"guards": {"max_failed_share": 0.5}, "data": {"train_batch_size": BATCH}}
    BoundedFailures(buffer, OmegaConf.create(config), lambda: "the reward function raised ValueError")
    try:
        for step in (1, 2, 3):
            prompts.submit(BATCH)
            if said is None:
                batch, _ = buffer.sample(step, "train", BATCH)
                assert len({key.split("_")[0] for key in batch.keys}) == BATCH
                continue
            with pytest.raises(UserError, match=rf"^{said} of the step failed, .* The last one: the reward function"):
                buffer.sample(step, "train", BATCH)
            break
    finally:
        clear()


def test_a_reward_without_the_verdict_is_named(make_run: MakeRun) -> None:
    run = make_run(itertools.repeat(MIXED))
    run.buffer.filter_groups_metric = "accuracy"
    with pytest.raises(UserError, match="filters on 'accuracy', and the reward function did not return it"):
        run.step()


# -------------------------------------------------------------------- the budget


@pytest.mark.parametrize("pattern", [ALL_CORRECT, ALL_WRONG])
@pytest.mark.parametrize("on_budget", ["train_smaller", "stop"])
def test_a_task_without_contrast_ends_with_the_counts(
    make_run: MakeRun, pattern: tuple[int, ...], on_budget: str
) -> None:
    run = make_run(itertools.repeat(pattern), budget=3, on_budget=on_budget)
    with pytest.raises(UserError) as caught:
        run.step()
    assert len(run.prompts.submitted) == 3 * BATCH
    correct, wrong = (12, 0) if pattern == ALL_CORRECT else (0, 12)
    counts = f"12 groups generated: 0 mixed, {correct} all correct, {wrong} all wrong, 0 failed"
    assert counts in str(caught.value)


def test_a_spent_budget_trains_on_what_there_is(make_run: MakeRun) -> None:
    run = make_run(itertools.chain([MIXED, MIXED], itertools.repeat(ALL_CORRECT)), budget=2)
    uids, metrics = run.step()
    assert uids == run.prompts.mixed
    assert metrics["kept_groups"] == 2
    assert len(run.prompts.submitted) == 2 * BATCH


@pytest.mark.parametrize("max_age", [0, 1])
def test_a_smaller_batch_is_cut_to_whole_mini_batches(
    make_run: MakeRun, max_age: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Three groups of four, in mini-batches of two: a second update of one group would weigh its tokens more, and cost
    as much.
    """
    verdicts = itertools.chain([MIXED] * 3, itertools.repeat(ALL_CORRECT))
    run = make_run(verdicts, budget=2, mini_batch=2, max_age=max_age)
    with caplog.at_level(logging.WARNING, logger="gtpo_verl"):
        uids, metrics = run.step()
    assert uids == run.prompts.mixed[:2]
    assert metrics["kept_groups"] == 2
    assert "training on 2 of 4 groups" in caplog.text
    counts = (metrics["carried_over_groups"], metrics["discarded_surplus_groups"])
    assert counts == ((1, 0) if max_age else (0, 1))
    assert waiting() == (run.prompts.mixed[2:] if max_age else [])
    if max_age:
        run.prompts.pattern = itertools.repeat(MIXED)
        uids, metrics = run.step(2)
        assert uids[0] == run.prompts.mixed[2], "the group that waited comes first"


def test_less_than_a_mini_batch_is_one_smaller_update(make_run: MakeRun) -> None:
    run = make_run(itertools.chain([MIXED] * 3, itertools.repeat(ALL_CORRECT)), budget=2, mini_batch=4)
    uids, metrics = run.step()
    assert uids == run.prompts.mixed
    assert metrics["discarded_surplus_groups"] == 0


def test_a_spent_budget_stops_when_asked_to(make_run: MakeRun) -> None:
    run = make_run(itertools.chain([MIXED, MIXED], itertools.repeat(ALL_CORRECT)), budget=2, on_budget="stop")
    with pytest.raises(UserError, match="8 groups generated: 2 mixed, 6 all correct"):
        run.step()


def test_the_yield_of_a_step_sizes_the_first_round_of_the_next(make_run: MakeRun) -> None:
    run = make_run(itertools.cycle([MIXED, ALL_WRONG]), window=4)
    assert run.buffer.begin_step(1, BATCH) == BATCH
    _, metrics = run.step(1)
    assert metrics["yield"] < 1
    first = run.buffer.begin_step(2, BATCH)
    assert BATCH / metrics["yield"] < first <= 4 * BATCH
    before = len(run.prompts.submitted)
    _, metrics = run.step(2)
    assert len(run.prompts.submitted) - before == first, "one round was to be enough"


# -------------------------------------------------------------------- the choice


@pytest.mark.parametrize("orders", [range(3), pytest.param(range(3, 6), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("budget", "max_age"), [(0, 3), (3, 0)])
def test_who_finishes_first_has_no_part_in_what_is_generated_and_chosen(
    make_run: MakeRun, max_age: int, budget: int, orders: range
) -> None:
    """With the same data and verdicts the same prompts are drawn and the same groups chosen, in every step, whatever
    the order of finishing.
    """
    verdicts = random.Random(0).choices([MIXED, ALL_CORRECT, ALL_WRONG, (-1, -1, -1)], [6, 6, 6, 1], k=500)
    runs = []
    for order in [None, *map(random.Random, orders)]:
        run = make_run(iter(verdicts), window=2, max_age=max_age, budget=budget, order=order)
        history = []
        for step in range(1, 5):
            uids, metrics = run.step(step)
            history.append((uids, len(run.prompts.submitted), metrics["yield"], waiting()))
        runs.append(history)
        clear()
    assert all(history == runs[0] for history in runs)


def test_a_slow_prompt_does_not_hold_up_those_that_are_needed_whatever_it_brings(make_run: MakeRun) -> None:
    """The first of four has not ended, the others have no signal: with it three are missing at least."""
    run = make_run(
        itertools.chain([MIXED, *[ALL_WRONG] * 3], itertools.repeat(MIXED)), window=2, order=random.Random(0)
    )
    prompts = run.prompts
    prompts.submit(run.buffer.begin_step(1, BATCH))
    first = prompts.running.pop(0)
    prompts.answer(3)
    inflight = []

    def end_all(partition_id: str, last_debug: float) -> float:
        inflight.append(len(prompts.running))
        if len(inflight) == 1:
            prompts.running.append(first)
        prompts.answer(len(prompts.running))
        return last_debug

    run.buffer._wait_for_next_poll = end_all  # type: ignore[method-assign]
    batch, _ = run.buffer.sample(global_steps=1, partition_id="train", batch_size=BATCH)
    assert inflight[0] >= 3
    assert batch.keys[0] == f"{first[0]}_0_0"


def test_without_a_filter_the_rows_are_in_order_too(make_run: MakeRun) -> None:
    run = make_run(itertools.cycle([MIXED, ALL_WRONG]), order=random.Random(1))
    run.buffer.filter_groups_metric = None
    run.prompts.submit(BATCH)
    batch, _ = run.buffer.sample(global_steps=1, partition_id="train", batch_size=BATCH)
    assert batch.keys == [f"{uid}_{session}_0" for uid in run.prompts.submitted for session in range(GROUP)]


def test_nothing_is_left_in_the_queue_and_nothing_is_taken_twice(make_run: MakeRun) -> None:
    run = make_run(itertools.cycle([ALL_WRONG, MIXED]))
    for step in (1, 2, 3):
        run.step(step)
        assert tq.kv_list("train").get("train", {}) == {}
    assert len(set(run.trained)) == len(run.trained) == 3 * BATCH


# -------------------------------------------------------------------- carry-over


def random_verdicts() -> Iterator[tuple[int, ...]]:
    generator = random.Random(7)
    while True:
        yield generator.choice([MIXED, ALL_CORRECT, ALL_WRONG])


def test_surplus_groups_are_trained_on_later_once_and_spare_generation(make_run: MakeRun) -> None:
    steps, generated = 12, {}
    for max_age in (0, 2):
        run = make_run(random_verdicts(), window=2, max_age=max_age, order=random.Random(1))
        history = [run.step(step)[1] for step in range(1, steps + 1)]
        assert len(set(run.trained)) == len(run.trained) == steps * BATCH
        generated[max_age] = sum(metrics["generated_groups"] for metrics in history)
        assert generated[max_age] == len(run.prompts.submitted)
        lost = sum(metrics["discarded_surplus_groups"] + metrics["expired_groups"] for metrics in history)
        assert len(run.prompts.mixed) == len(run.trained) + len(waiting()) + lost, "a group is unaccounted for"
        if max_age == 0:
            assert lost > 0
            assert waiting() == []
            assert all(metrics["carried_share"] == metrics["carried_age_max"] == 0 for metrics in history)
        else:
            assert lost == 0
            assert run.trained == run.prompts.mixed[: len(run.trained)], "older groups come first"
            for before, metrics in itertools.pairwise(history):
                assert metrics["carried_share"] * BATCH == min(BATCH, before["carried_over_groups"])
            assert max(metrics["carried_age_max"] for metrics in history) in (1, 2)
        clear()
    assert generated[2] < generated[0]


def test_groups_carried_over_expire_with_a_count(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(itertools.repeat(MIXED), window=4, max_age=2)
    run.buffer.last_step = (5, 20)  # so that the first step generates far too much
    _, metrics = run.step(1)
    surplus = metrics["carried_over_groups"]
    assert surplus == len(run.prompts.submitted) - BATCH > BATCH
    uids, metrics = run.step(3)
    assert (metrics["carried_share"], metrics["carried_age_mean"], metrics["carried_age_max"]) == (1.0, 2.0, 2)
    assert metrics["generated_groups"] == metrics["expired_groups"] == 0
    assert "yield" not in metrics
    with caplog.at_level(logging.WARNING, logger="gtpo_verl"):
        uids, metrics = run.step(4)
    assert metrics["expired_groups"] == surplus - BATCH
    assert f"{surplus - BATCH} groups carried over are older than" in caplog.text
    assert metrics["carried_share"] == 0.0
    assert metrics["generated_groups"] == len(uids) == BATCH


def test_a_spent_budget_counts_the_groups_carried_over(make_run: MakeRun) -> None:
    verdicts = itertools.chain([MIXED] * 5, itertools.repeat(ALL_WRONG))
    run = make_run(verdicts, window=2, budget=2, max_age=1, on_budget="stop")
    run.buffer.last_step = (8, 10)
    run.step(1)
    with pytest.raises(
        UserError, match=r"8 groups generated: 0 mixed, 0 all correct, 8 all wrong, 0 failed, and 1 carried over"
    ):
        run.step(2)


def test_groups_carried_over_outlive_a_restart_as_they_were(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(random_verdicts(), window=2, max_age=2, order=random.Random(3))
    step = 0
    while not waiting():
        step += 1
        run.step(step)
    prompts = waiting()
    before = tq.kv_list("train")["train"]
    rows = [key for key in before if key not in prompts]
    columns = tq.kv_batch_get(keys=rows, partition_id="train")
    assert save_groups(tmp_path / "global_step_9", run.buffer.last_step) == len(prompts)

    clear()
    groups, last_step = restore_groups(tmp_path / "global_step_9", with_entropies=False)
    assert (groups, last_step) == (len(prompts), run.buffer.last_step)
    assert tq.kv_list("train")["train"] == before
    assert waiting() == prompts
    back = tq.kv_batch_get(keys=rows, partition_id="train")
    assert set(back.keys()) == set(columns.keys()) == {"responses", "rollout_log_probs", "extra_fields"}
    for name in ("responses", "rollout_log_probs"):
        for one, other in zip(back[name].unbind(), columns[name].unbind(), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert list(back["extra_fields"]) == list(columns["extra_fields"])

    resumed = make_run(run.prompts.pattern, window=2, max_age=2)
    resumed.prompts.submitted, resumed.prompts.mixed = run.prompts.submitted, run.prompts.mixed
    uids, metrics = resumed.step(step + 1)
    assert uids[: len(prompts)] == prompts[:BATCH]
    assert metrics["carried_age_max"] == 1
    assert run.trained + uids == run.prompts.mixed[: len(run.trained) + BATCH], "repeated, lost or out of order"


def test_a_restart_without_carry_over_drops_what_waits_with_a_count(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(itertools.repeat(MIXED), window=2, max_age=1)
    run.buffer.last_step = (5, 10)
    _, metrics = run.step(1)
    save_groups(tmp_path, run.buffer.last_step)
    clear()
    restore_groups(tmp_path, with_entropies=False)
    resumed = make_run(itertools.repeat(MIXED))
    resumed.prompts.submitted = run.prompts.submitted
    uids, after = resumed.step(2)
    assert after["expired_groups"] == metrics["carried_over_groups"] > 0
    assert set(uids).isdisjoint(run.prompts.submitted[: -len(uids)])


def test_a_checkpoint_of_another_kind_of_run_restores_nothing(tmp_path: Path) -> None:
    assert restore_groups(tmp_path, with_entropies=False) == (0, (1, 1))
    assert save_groups(tmp_path, (5, 20)) == 0
    assert restore_groups(tmp_path, with_entropies=False) == (0, (5, 20))
    assert tq.kv_list("train").get("train", {}) == {}


def test_groups_without_the_columns_of_this_run_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(itertools.repeat(MIXED), window=2, max_age=1)
    run.buffer.last_step = (5, 10)
    run.step(1)
    save_groups(tmp_path, run.buffer.last_step)
    with pytest.raises(
        UserError, match=r"made with algorithm\.entropy\.source=actor, and this run has rollout or both"
    ):
        restore_groups(tmp_path, with_entropies=True)
