"""Countdown: problems that can be solved, play that keeps the rules, and a verifier that cannot be cheated."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gtpo_verl.tasks import prepare
from gtpo_verl.tasks.countdown.reward import compute_score, random_verdict
from gtpo_verl.tasks.countdown.rules import Problem, final_total, read_problem
from gtpo_verl.tasks.countdown.task import (
    MAX_PROMPT_LENGTH,
    MAX_RESPONSE_LENGTH,
    PROBLEMS,
    TASK,
    demonstration,
    prompt,
)

PROBLEM = Problem((2, 3, 8, 9), 18)
SOLUTION = "18-3=15;15-9=6;6+2=8;8-8=0"

problems = st.sampled_from(PROBLEMS)
FEWER = settings(max_examples=30, deadline=None)  # each example is many plays


def score(play: str, problem: Problem = PROBLEM) -> dict:
    return compute_score("gtpo_verl/countdown", play, str(problem), {"index": 0})


def solutions(problem: Problem) -> set[str]:
    """Every play that solves a problem, written from the rules by brute force: sequences of signed numbers."""
    found = set()
    for count in range(1, len(problem.numbers) + 1):
        for numbers in itertools.permutations(problem.numbers, count):
            for signs in itertools.product((1, -1), repeat=count):
                totals = [problem.target]
                for number, sign in zip(numbers, signs, strict=True):
                    totals.append(totals[-1] + sign * number)
                if totals[-1] == 0 and min(totals) >= 0 and 0 not in totals[:-1]:
                    steps = zip(totals, numbers, signs, totals[1:], strict=False)
                    found.add(";".join(f"{a}{'+' if sign > 0 else '-'}{n}={b}" for a, n, sign, b in steps))
    return found


# Problems and demonstrations


def test_the_problems_are_those_with_a_solution():
    assert len(PROBLEMS) == len(set(PROBLEMS)) == 1372
    assert sum(len(problem.numbers) == 3 for problem in PROBLEMS) == 258
    every = {
        Problem(numbers, target)
        for count in (3, 4)
        for numbers in itertools.combinations(range(1, 10), count)
        for target in range(10, 26)
    }
    sample = random.Random(0).sample(sorted(every), 100)
    assert [problem for problem in sample if solutions(problem)] == [p for p in sample if p in set(PROBLEMS)]


def test_a_problem_is_read_as_it_is_written():
    assert (str(PROBLEM), prompt(PROBLEM)) == ("2,3,8,9:18", "2,3,8,9:18\n")
    assert all(read_problem(str(problem)) == problem for problem in PROBLEMS)
    for text in ("", "2,3,8,9", "2,3,8,9:18\n", "2,3,8,9:018", "2,3,,9:18", "12,3:18"):
        with pytest.raises(ValueError, match="not a countdown problem"):
            read_problem(text)


@FEWER
@given(problem=problems, seed=st.integers(0, 2**32))
def test_demonstrations_keep_the_rules_at_any_noise_and_solve_the_problem_without(problem: Problem, seed: int):
    rng = random.Random(seed)
    assert final_total(problem, demonstration(problem, 1.0, rng)) is not None
    assert demonstration(problem, 0.0, rng) in solutions(problem)


def test_all_solutions_are_demonstrated():
    rng = random.Random(0)
    expected = solutions(PROBLEM)
    assert len(expected) > 10
    assert {demonstration(PROBLEM, 0.0, rng) for _ in range(2000)} == expected


def test_a_quarter_of_the_steps_is_any_legal_one():
    """From 18 with 2, 3, 8 and 9 every number may be added or subtracted, and some of these eight first steps win."""
    rng = random.Random(0)
    winning = {play.partition(";")[0] for play in solutions(PROBLEM)}
    first = [demonstration(PROBLEM, 0.25, rng).partition(";")[0] for _ in range(4000)]
    assert len(set(first)) == 8 > len(winning)
    assert sum(step in winning for step in first) / 4000 == pytest.approx(0.75 + 0.25 * len(winning) / 8, abs=0.015)


def test_the_length_limits_fit():
    rng = random.Random(0)
    assert max(len(prompt(problem)) for problem in PROBLEMS) == MAX_PROMPT_LENGTH
    longest = max(len(demonstration(problem, 1.0, rng)) for problem in PROBLEMS)
    # no legal play reaches the buffer of four tokens in which the quickstart punishes length; the end is a token too
    assert longest + 1 <= 32 <= MAX_RESPONSE_LENGTH - 4


def test_validation_shares_no_problem_with_training_and_warm_start():
    parts = prepare.partition(TASK, 0)
    assert (len(parts.validation), len(parts.train)) == (TASK.val_prompts, TASK.train_prompts)
    assert set(parts.validation).isdisjoint({*parts.train, *parts.warm_start})
    assert {*parts.validation, *parts.train, *parts.warm_start} == set(PROBLEMS)
    assert len({TASK.cluster(problem) for problem in parts.validation}) == len(parts.validation)


# The verifier


def test_a_solution_is_right():
    assert score(SOLUTION) == {"score": 1.0, "acc": 1.0, "legal": 1.0, "pred": SOLUTION}


@pytest.mark.parametrize("play", ["18-3=15;15-9=6;6-2=4", "18-3=15", "18-9=9;9-8=1;1+3=4;4+2=6"])
def test_a_legal_play_that_ends_elsewhere_is_an_error_of_search(play: str):
    assert score(play) == {"score": -1.0, "acc": 0.0, "legal": 1.0, "pred": play}


CHEATS = {
    "nothing": "",
    "only the result": "0",
    "only the last step": "8-8=0",
    "one step to 0": "18-18=0",
    "a wrong result": "18-9=0",
    "a wrong result that is mended": "18-3=14;14-9=6;6+2=8;8-8=0",
    "a number twice": "18-9=9;9-9=0",
    "a number of two digits": "18-10=8;8-8=0",
    "a number that is not there": "18-7=11;11-9=2;2-2=0",
    "another start": "17-9=8;8-8=0",
    "a start that is not the total": "18-9=9;8-8=0",
    "below zero": "18-9=9;9-8=1;1-3=-2;-2+2=0",
    "below zero, without the sign": "18-9=9;9-8=1;1-3=2;2-2=0",
    "after 0": f"{SOLUTION};0+2=2;2-2=0",
    "after the end": f"{SOLUTION};",
    "before the start": f";{SOLUTION}",
    "a newline at the end": f"{SOLUTION}\n",
    "several plays": f"18-3=15\n{SOLUTION}",
    "a play and a comment": f"{SOLUTION} done",
    "an empty step": "18-3=15;;15-9=6;6+2=8;8-8=0",
    "spaces": SOLUTION.replace("=", " = "),
    "leading zeros": SOLUTION.replace("=0", "=00"),
    "a leading zero of the number": SOLUTION.replace("-8", "-08"),
    "a double sign": "18--3=21;21+-9=12;12-2=10;10-8=2",
    "minus nothing": "18-0=18;18-9=9;9-9=0",
    "another operation": "18/9=2;2-2=0",
    "several numbers a step": "18-3-9=6;6+2=8;8-8=0",
    "several results a step": "18-3=15=15;15-9=6;6+2=8;8-8=0",
    "the other direction": "0+8=8;8-2=6;6+9=15;15+3=18",
    "digits of another script": SOLUTION.replace("3", "３"),
    "a superscript": SOLUTION.replace("2", "²"),
    "a minus sign of typography": SOLUTION.replace("-", "\N{MINUS SIGN}"),
    "another separator": SOLUTION.replace(";", ","),
    "a null byte": SOLUTION.replace(";", ";\0"),
    "the end of sequence as text": f"{SOLUTION}<eos>",
    "the prompt again": f"2,3,8,9:18\n{SOLUTION}",
    "a lone surrogate": f"{SOLUTION}\ud800",
    "much": "18-3=15;" * 20_000,
}


@pytest.mark.parametrize("play", CHEATS.values(), ids=CHEATS.keys())
def test_a_play_that_breaks_a_rule_is_wrong_and_illegal(play: str):
    assert score(play) == {"score": -1.0, "acc": 0.0, "legal": 0.0, "pred": ""}


def edits(play: str, alphabet: str = "0123456789+-=;, \n") -> Iterator[str]:
    """Every text that differs from a play in one character, which is removed, replaced or inserted."""
    for place in range(len(play) + 1):
        yield play[:place] + play[place + 1 :]
        for letter in alphabet:
            yield play[:place] + letter + play[place:]
            yield play[:place] + letter + play[place + 1 :]


@FEWER
@given(problem=problems, seed=st.integers(0, 2**32))
def test_no_change_of_a_character_makes_a_solution_that_is_none(problem: Problem, seed: int):
    rng = random.Random(seed)
    true = solutions(problem)
    for play in edits(demonstration(problem, rng.choice((0.0, 0.5)), rng)):
        assert (score(play, problem)["acc"] == 1) == (play in true)


@FEWER
@given(problem=problems, other=problems, seed=st.integers(0, 2**32))
def test_the_solution_of_another_problem_is_right_only_where_it_is_a_solution(problem, other, seed: int):
    play = demonstration(other, 0.0, random.Random(seed))
    assert (score(play, problem)["acc"] == 1) == (play in solutions(problem))


@settings(deadline=None)
@given(
    problem=problems,
    steps=st.lists(
        st.tuples(st.integers(-5, 40), st.sampled_from("+-"), st.integers(0, 12), st.integers(-5, 40)), max_size=5
    ),
)
def test_plays_made_up_of_steps_are_right_only_where_they_are_solutions(problem: Problem, steps: list):
    play = ";".join(f"{a}{sign}{n}={b}" for a, sign, n, b in steps)
    verdict = score(play, problem)
    assert (verdict["acc"] == 1) == (play in solutions(problem))
    assert verdict["legal"] >= verdict["acc"]


@settings(deadline=None)
@given(problem=problems, moves=st.lists(st.tuples(st.integers(1, 9), st.sampled_from((1, -1))), min_size=1, max_size=6))
def test_right_arithmetic_does_not_excuse_a_number_that_may_not_be_used(problem: Problem, moves: list):
    """Chains whose every step starts from the total before and is right; only numbers, sign and end may be wrong."""
    total, play = problem.target, []
    for number, sign in moves:
        play.append(f"{total}{'+' if sign > 0 else '-'}{number}={total + sign * number}")
        total += sign * number
    assert (score(";".join(play), problem)["acc"] == 1) == (";".join(play) in solutions(problem))
    used = [number for number, _ in moves]
    if len(set(used)) < len(used) or not set(used) <= set(problem.numbers):
        assert score(";".join(play), problem)["legal"] == 0


@given(st.text())
def test_any_text_gets_a_verdict(text: str):
    assume(text != SOLUTION)
    verdict = score(text)
    assert (verdict["score"], verdict["acc"]) == (-1.0, 0.0)


# The control


def control(play: str, question: str = "2,3,8,9:18\n", split: str = "train", **options) -> dict:
    extra = {"question": question, "split": split}
    return random_verdict("gtpo_verl/countdown", play, "2,3,8,9:18", extra, **options)


def test_the_control_knows_nothing_of_the_answer_and_validates_truthfully():
    for play in (SOLUTION, "18-3=15", "no play"):
        verdicts = [control(play, question=f"question {index}") for index in range(2000)]
        assert sum(verdict["acc"] for verdict in verdicts) / 2000 == pytest.approx(0.25, abs=0.03)
        assert all(verdict["score"] == 2 * verdict["acc"] - 1 for verdict in verdicts)
    assert control(SOLUTION, split="val") == score(SOLUTION)
    assert control("18-3=15", split="val") == score("18-3=15")
