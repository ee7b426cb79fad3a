"""The problems: three parts without a common multiset, demonstrations whose errors are exactly what was asked for."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.errors import UserError
from gtpo_verl.tasks import prepare
from gtpo_verl.tasks.sums.task import (
    MAX_PROMPT_LENGTH,
    MAX_RESPONSE_LENGTH,
    PROBLEMS,
    TASK,
    Problem,
    answer,
    cluster,
    demonstration,
    prompt,
)

problems = st.sampled_from(PROBLEMS)


def partition(seed: int, train: int, val: int) -> prepare.Partition:
    return prepare.partition(replace(TASK, train_prompts=train, val_prompts=val), seed)


def demonstration_stream(of: Sequence[Problem], error_rate: float, seed: int) -> Iterator[tuple[Problem, str]]:
    return prepare.demonstration_stream(TASK, of, error_rate, seed)


def steps(text: str) -> list[tuple[int, int, int]]:
    """(total before, digit added, total written) of each step of a demonstration."""
    *written, _ = text.split(";")
    return [tuple(map(int, re.fullmatch(r"(\d+)\+(\d)=(\d+)", step).groups())) for step in written]


def test_all_problems_are_there_once():
    assert len(PROBLEMS) == len(set(PROBLEMS)) == 9**3 + 9**4
    assert len({prompt(problem) for problem in PROBLEMS}) == len(PROBLEMS)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), train=st.integers(24, 5000), val=st.integers(1, 2000))
def test_parts_are_complete_and_share_no_multiset_of_operands(seed: int, train: int, val: int):
    parts = partition(seed, train, val)
    sizes = len(parts.train), len(parts.validation)
    assert all(0 <= asked - size < 24 for asked, size in zip((train, val), sizes, strict=True))
    assert len(parts.warm_start) == len(PROBLEMS) - sum(sizes)
    assert {*parts.validation, *parts.train, *parts.warm_start} == set(PROBLEMS)
    multisets = [{cluster(problem) for problem in part} for part in (parts.validation, parts.train, parts.warm_start)]
    assert sum(map(len, multisets)) == len(set.union(*multisets)) == 660


def test_the_task_has_the_sizes_that_were_asked_for():
    parts = partition(0, 3584, 1024)
    assert (len(parts.train), len(parts.validation)) == (3584, 1024)


def test_a_cluster_is_the_multiset_of_the_operands():
    assert cluster((3, 9, 2, 7)) == cluster((9, 7, 3, 2)) == "2+3+7+9"
    assert cluster((3, 9, 2)) != cluster((3, 9, 2, 2))


def test_partition_follows_the_seed_alone():
    assert partition(3, 4096, 512) == partition(3, 4096, 512)
    assert partition(3, 4096, 512) != partition(4, 4096, 512)


def test_validation_stays_the_same_when_the_training_part_grows():
    assert partition(0, 100, 512).validation == partition(0, 4096, 512).validation


def test_each_part_has_both_lengths_in_their_proportion():
    parts = partition(0, 4096, 512)
    for part in (parts.validation, parts.train, parts.warm_start):
        assert 0.07 < sum(len(problem) == 3 for problem in part) / len(part) < 0.13  # 729 of 7,290


@pytest.mark.parametrize(("train", "val"), [(0, 1), (1, 0), (-1, 5), (7290 - 512, 512), (10**6, 1)])
def test_sizes_that_leave_a_part_empty_are_refused(train: int, val: int):
    with pytest.raises(UserError, match="7290 problems"):
        partition(0, train, val)


def test_a_faultless_demonstration_is_the_written_out_sum():
    assert prompt((3, 9, 2, 7)) == "3+9+2+7\n"
    assert demonstration((3, 9, 2, 7), 0.0, random.Random(0)) == "3+9=12;12+2=14;14+7=21;#21"
    assert answer((3, 9, 2, 7)) == "21"


@given(problem=problems, error_rate=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_steps_are_consistent_and_off_by_at_most_one(problem, error_rate: float, seed: int):
    text = demonstration(problem, error_rate, random.Random(seed))
    total = problem[0]
    for (before, added, after), term in zip(steps(text), problem[1:], strict=True):
        assert (before, added) == (total, term)
        assert after - before - added in (-1, 0, 1)
        total = after
    assert text.endswith(f";#{total}")


@given(problem=problems, seed=st.integers(0, 2**32))
def test_at_error_rate_one_every_step_is_wrong(problem, seed: int):
    assert all(
        after != before + added for before, added, after in steps(demonstration(problem, 1.0, random.Random(seed)))
    )


def test_a_quarter_of_the_steps_is_wrong_and_both_ways():
    stream = islice(demonstration_stream(PROBLEMS, 0.25, seed=0), 10_000)
    errors = [after - before - added for _, text in stream for before, added, after in steps(text)]
    assert len(errors) > 28_000
    assert errors.count(0) / len(errors) == pytest.approx(0.75, abs=0.01)
    assert errors.count(1) / len(errors) == pytest.approx(0.125, abs=0.01)


def test_the_stream_draws_from_its_problems_and_covers_them():
    warm_start = partition(0, 4096, 512).warm_start
    drawn = [problem for problem, _ in islice(demonstration_stream(warm_start, 0.25, seed=1), 51_200)]
    assert set(drawn) <= set(warm_start)
    assert len(set(drawn)) == len(warm_start)


def test_the_stream_repeats_by_its_seed():
    first, again, other = (list(islice(demonstration_stream(PROBLEMS, 0.25, seed), 50)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_length_limits_fit():
    assert max(len(prompt(problem)) for problem in PROBLEMS) == MAX_PROMPT_LENGTH
    rng = random.Random(0)
    longest = max(len(demonstration(problem, rate, rng)) for problem in PROBLEMS for rate in (0.0, 0.5, 1.0))
    assert longest == len("9+9=18;18+9=27;27+9=36;#36") == 26
    assert longest + 1 < MAX_RESPONSE_LENGTH  # the end of sequence is a token too
