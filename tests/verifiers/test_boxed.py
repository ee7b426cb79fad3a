r"""Math-Verify as it is called here: what is read, what is equal, and what is not."""

import pytest

from gtpo_verl.verifiers.boxed import judge, read_truth


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", "0.5"),
        (r"so \boxed{0.5}", r"\frac12"),
        (r"\boxed{1}? That forgets the case of zero, so \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),  # boxes side by side are one answer
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{50\%}", r"50\%"),
        (r"\boxed{12\text{ cm}}", "12"),
        (r"\boxed{12}", "12 cm"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1234}", "1,234"),
        (r"\boxed{2, 1}", "1, 2"),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
        (r"\boxed{1.5}", "1,5"),
        (r"\boxed{1, 5}", "1,5"),
        (r"\boxed{[0, 1)}", "$[0,1)$"),
        (r"\boxed{(-\infty, 3]}", r"(-\infty, 3]"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{5}", "x=5"),
        (r"\boxed{5 \ge x}", r"x \leq 5"),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2"),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        (r"\boxed{Evelyn}", r"\text{Evelyn}"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{3.1415926}", r"$3.1415927$"),
        ("The answer is 1/2.", "0.5"),
        ("It costs $5 a day,\nin all $35", "35"),
        (r"**Final Answer**: $x = 7$", "7"),
        (r"\boxed{204_5}", "$204_5$"),
        (r"\boxed{36}", r"\$36"),
        (r"\boxed{\$18.90}", r"\$18.90"),
        (r"\boxed{1234}", r"\$1,234"),
        (r"\boxed{36}", r"costs $\$36$"),
        (r"\boxed{5}", "+5"),
        (r"\boxed{33}", "+033"),
    ],
)
def test_equal_answers_are_right(response: str, truth: str) -> None:
    assert judge(response, truth)[0]


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"\boxed{2} and not 3", "3"),
        (r"\boxed{2}, since \boxed{3} is wrong: \boxed{2}", "3"),
        (r"\boxed{[0, 1)}", "(0, 1)"),
        (r"\boxed{1, 2}", "1, 2, 3"),
        (r"\boxed{0.333}", r"\frac{1}{3}"),
        (r"\boxed{x > 5}", "x < 5"),
        (r"\boxed{-2}", "2"),
        (r"\boxed{}", "2"),
        ("", "2"),
        ("no idea", "2"),
        ("so it is $\n 9 \n$", "9"),  # a formula that is not one: its inside is not searched for a number
    ],
)
def test_other_answers_are_wrong(response: str, truth: str) -> None:
    assert not judge(response, truth)[0]


def test_the_prediction_is_the_text_that_was_read() -> None:
    assert judge(r"so \boxed{\frac{2}{4}}", "1/2") == (True, r"\frac{2}{4}")
    assert judge(r"so \boxed{1 + \frac{1}{\mathrm{e}}}", "2") == (False, r"1 + \frac{1}{\mathrm{e}}")
    assert judge("so it is 2/4", "1/2") == (True, "2/4")
    assert judge("nothing", "1/2") == (False, "")


def test_without_fallback_a_box_is_demanded() -> None:
    assert judge("The answer is 7", "7")[0]
    assert judge("The answer is 7", "7", fallback=False) == (False, "")
    assert judge(r"\boxed{8} The answer is 7", "7", fallback=False)[0] is False
    assert judge(r"\boxed{7} The answer is 8", "7", fallback=False) == (True, "7")
    assert judge(r"\boxed{\frac{14}{2}} The answer is 8", "7", fallback=False) == (True, r"\frac{14}{2}")
    unreadable = r"$x = 7$, so \boxed{ 7 + \bigl(\mathrm}"
    assert judge(unreadable, "7")[0]
    assert not judge(unreadable, "7", fallback=False)[0]


def test_the_same_text_is_right_even_where_it_means_nothing() -> None:
    assert judge(r"\boxed{12 000}", "12 000")[0]
    assert judge(r"\boxed{[[}", "[[")[0]


def test_options_of_the_comparison() -> None:
    assert not judge(r"\boxed{2.6667}", r"\frac{8}{3}")[0]
    assert judge(r"\boxed{2.6667}", r"\frac{8}{3}", decimals=3)[0]
    assert not judge("$f(y)$", "$f(x)$")[0]
    assert judge("$f(y)$", "$f(x)$", strict=False)[0]
    interval, inequality = r"$x \in [-2,7]$", r"$-2 \le x \le 7$"
    assert judge(interval, inequality)[0]
    assert not judge(inequality, interval)[0]
    assert judge(inequality, interval, set_relations=True)[0]


def test_a_truth_that_cannot_be_read_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match="the ground truth '' does not parse"):
        judge(r"\boxed{1}", "")


@pytest.mark.parametrize("truth", ["7", "-7", "1/2", ".5", "1,234.5", "50%", "\\pi", "2\\sqrt{3}", "(1,2)"])
def test_a_bare_truth_is_right_in_a_box(truth: str) -> None:
    assert read_truth(truth)
    assert judge(f"\\boxed{{{truth}}}", truth)[0]
