"""What is left of trainings, from the times of their steps."""

import pytest

from gtpo_verl.runs.pace import Pace, in_words


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_is_the_rest_of_this_training_and_the_whole_of_those_to_come():
    clock = Clock()
    pace = Pace(10, trainings=3, done=1, clock=clock)
    assert (pace.share, pace.seconds_left) == (pytest.approx(1 / 3), None)
    clock.now += 60  # set-up, with the validation before the first step
    pace.saw("gtpo", 0)
    assert pace.seconds_left is None
    clock.now += 20
    pace.saw("gtpo", 5)
    assert pace.share == pytest.approx(1.5 / 3)
    assert pace.seconds_left == pytest.approx(5 * 4 + 60 + 10 * 4)
    clock.now += 3
    pace.saw("gtpo", 5)  # a second look
    assert pace.seconds_left == pytest.approx(117)


def test_the_set_up_of_the_last_training_counts_for_those_to_come():
    clock = Clock()
    pace = Pace(2, trainings=3, clock=clock)
    for training, set_up in (("dapo", 60), ("gtpo", 10)):
        clock.now += set_up
        pace.saw(training, 0)
        clock.now += 8
        pace.saw(training, 2)
    assert pace.seconds_left == pytest.approx(10 + 2 * 4)


def test_trainings_side_by_side_are_rounds():
    clock = Clock()
    pace = Pace(10, trainings=5, at_once=2, clock=clock)
    clock.now += 60
    pace.saw("a", 0)
    clock.now += 1
    pace.saw("b", 0)
    clock.now += 19
    pace.saw("a", 4)  # 5 s a step
    pace.saw("b", 2)  # 9.5
    assert pace.share == pytest.approx(0.6 / 5)
    assert pace.seconds_left == pytest.approx(8 * 9.5 + 2 * (60 + 10 * 9.5))


def test_a_resumed_training_is_judged_by_the_steps_that_it_takes_now():
    clock = Clock()
    pace = Pace(10, clock=clock)
    clock.now += 60
    pace.saw("gtpo", 7)
    assert (pace.share, pace.seconds_left) == (pytest.approx(0.7), None)
    clock.now += 4
    pace.saw("gtpo", 8)
    assert pace.seconds_left == pytest.approx(8)
    clock.now += 60  # the last steps take longer than expected
    assert pace.seconds_left == 0


def test_steps_beyond_the_last_are_not_more_than_everything():
    pace = Pace(2)
    pace.saw("gtpo", 3)
    assert pace.share == 1


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (89.4, "89 s"), (90, "2 min"), (1200, "20 min"), (7500, "2 h 05 min")]
)
def test_durations_in_words(seconds: float, words: str):
    assert in_words(seconds) == words
