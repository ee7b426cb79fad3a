"""The verifier: strict about the answer, indifferent to the rest; and the control that pays no heed to either."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.tasks.sums.reward import compute_score, random_verdict, read_answer

RIGHT = {"score": 1.0, "acc": 1.0, "pred": "21"}


def score(response: str, truth: str = "21") -> dict:
    return compute_score("gtpo_verl/sums", response, truth, {"index": 0})


@pytest.mark.parametrize("response", ["#21", "3+9=12;12+2=14;14+7=21;#21", "#20#21", "##21", "nonsense #21", "\n\0#21"])
def test_the_right_answer_is_right_whatever_comes_before(response: str):
    assert score(response) == RIGHT


@pytest.mark.parametrize(
    "response",
    [
        "", "21", "#", "##", "#21#", "#21 ", "# 21", "#21\n", "#+21", "#-21", "#021", "#21.0", "#2_1", "#2１", "#²¹", "#٢١",
        "#0x15", "#1e1", "#21;", "#21<eos>", "#21\0", "#twenty-one", "#" + "9" * 5000, "#" * 100_000, "#21\ud800", "21#", "#(21)",
    ],
)  # fmt: skip
def test_an_answer_that_is_not_a_plain_number_is_no_answer(response: str):
    assert score(response) == {"score": -1.0, "acc": 0.0, "pred": ""}


def test_a_wrong_number_is_wrong_and_reported():
    assert score("3+9=12;12+2=14;14+7=22;#22") == {"score": -1.0, "acc": 0.0, "pred": "22"}
    assert score("#21#22")["pred"] == "22"


def test_no_answer_does_not_match_an_empty_truth():
    assert score("#", truth="")["acc"] == 0.0


@given(st.text())
def test_any_text_gets_a_verdict_of_plus_or_minus_one(response: str):
    verdict = score(response)
    assert verdict["score"] == 2 * verdict["acc"] - 1
    assert verdict["acc"] == float(read_answer(response) == "21")


@given(st.integers(0, 10**9 - 1), st.text())
def test_a_number_is_read_back(number: int, before: str):
    assert read_answer(f"{before}#{number}") == str(number)


def test_verl_finds_both_by_package_path():
    load = pytest.importorskip("verl.utils.import_utils").load_extern_object
    assert load("pkg://gtpo_verl.tasks.sums.reward", "compute_score") is compute_score
    assert load("pkg://gtpo_verl.tasks.sums.reward", "random_verdict") is random_verdict


def control(response: str, question: str = "3+9+2+7\n", split: str = "train", **options) -> dict:
    return random_verdict("gtpo_verl/sums", response, "21", {"question": question, "split": split}, **options)


@pytest.mark.parametrize("response", ["#21", "#22", "no answer"])
def test_the_control_knows_nothing_of_the_answer(response: str):
    accuracy = statistics.mean(control(response, question=f"question {index}")["acc"] for index in range(10_000))
    assert accuracy == pytest.approx(0.45, abs=0.015)


def test_the_control_tells_responses_apart_and_repeats_itself():
    verdicts = [control(f"{index};#21")["acc"] for index in range(1000)]
    assert verdicts == [control(f"{index};#21")["acc"] for index in range(1000)]
    assert verdicts != [control(f"{index};#21", seed=1)["acc"] for index in range(1000)]
    assert 0.4 < statistics.mean(verdicts) < 0.5


def test_the_controls_probability_is_an_argument():
    assert {control(str(index), probability=0.0)["score"] for index in range(100)} == {-1.0}
    assert {control(str(index), probability=1.0)["score"] for index in range(100)} == {1.0}


def test_the_control_validates_truthfully():
    for number in range(20):  # one verdict at random would often be the right one
        assert control("#21", question=f"question {number}", split="val") == RIGHT
        assert control("#22", question=f"question {number}", split="val")["acc"] == 0.0


def test_the_control_needs_to_know_the_split():
    with pytest.raises(KeyError, match="split"):
        random_verdict("gtpo_verl/sums", "#21", "21", {"question": "3+9+2+7\n"})


def test_the_control_survives_a_lone_surrogate():
    assert control("#21\ud800")["pred"] == ""
