"""The scorer `math` on numbers that cannot be evaluated, and on ordinary powers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.reward.score.scorers.mathematics import TooLargeError, check_size
from starling.reward.score.scorers.registry import Scorer, resolve_scorer


def scorer(name: str, **options: Any) -> Scorer:
    return resolve_scorer(name, options)


LARGE = [
    "9^{9^{9^9}}",
    "9^{99999999}",
    "(((9^{99})^{99})^{99})^{99}",
    "{9^{9^{9}}}^{2}",
    "x<9^{9^{9^9}}",
    "9^{9^{9^9}}, 2",
    "\\frac{1}{9^{9^{9^9}}}",
    "9^{-9^{9^9}}",
    "\\left(9^{9999}\\right)^{99999}",
    "\\frac{9^{9999}}{2}^{99999}",
    "|9^{9999}|^{99999}",
    "9^{9^{9} + x - x}",
    "99999999!",
    "((10!)!)!",
    "2^{10!}",
    "e^{e^{e^{e^{e^{e}}}}}",
    "\\exp(\\exp(\\exp(\\exp(99))))",
    "\\prod_{i=1}^{999999999} i",
    "10^{1e9}",
    "9_{1}^{9^{9^9}}",
    "{" * 500 + "2" + "}" * 500,
]


@pytest.mark.parametrize("answer", LARGE)
def test_math_never_evaluates_numbers_of_too_many_digits(answer: str) -> None:
    judged = scorer("math")
    for completion in (f"\\boxed{{{answer}}}", f"The final answer is ${answer}$. I hope it is right."):
        assert judged(completion, "7", "", {}) == 0
    assert judged(f"The last digit of ${answer}$ is \\boxed{{7}}", "7", "", {}) == 1


def test_math_never_evaluates_large_powers_without_latex() -> None:
    for answer in ("9^9^9^9", "9**9**9**9", "9^(9^(9^9))", "(9^9999)^99999", "9^-99999999"):
        assert scorer("math")(f"The answer is {answer}", "7", "", {}) == 0
    assert scorer("math")("The answer is 2^3^2", "512", "", {}) == 1


def test_math_compares_too_large_numbers_by_how_they_are_written() -> None:
    judged = scorer("math")
    assert judged("\\boxed{2^{2^{2016}} + 1}", "2^{2^{2016}}+1", "", {}) == 1
    assert judged("\\boxed{2^{2^{2017}}}", "2^{2^{2016}}", "", {}) == 0
    assert judged("\\boxed{7}", "$2^{2^{2016}}$", "", {}) == 0


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("2^{10}", "1024", 1),
        ("1024", "2^{10}", 1),
        ("2^{10}", "1023", 0),
        ("x^{2y}", "x^{2 y}", 1),
        ("(x^{y})^{2}", "x^{2z}", 0),
        ("10^{-3}", "0.001", 1),
        ("1.5 \\times 10^{-3}", "0.0015", 1),
        ("e^{x^2}", "e^{x^{2}}", 1),
        ("e^{e^{e^{x}}}", "e^{e^{e^{x}}}", 1),
        ("e^{-1000000 t}", "e^{-10^{6} t}", 1),
        ("2^{2^{n}}", "2^{2^n}", 1),
        ("2^{100}", "4^{50}", 1),
        ("2^{100}+1", "4^{50}", 0),
        ("2^{2024}", "2 \\cdot 2^{2023}", 1),
        ("2^{100000}", "2^{100000}", 1),
        ("7^{2023} - 1", "7^{2023}-1", 1),
        ("x^{2024}", "x^{2024}", 1),
        ("2^{3^{4}}", "2^{81}", 1),
        ("10!", "3628800", 1),
        ("\\binom{10}{3}", "120", 1),
        ("\\sum_{k=1}^{10} k", "55", 1),
        ("\\int_{0}^{1000000} x dx", "\\int_{0}^{1000000} x dx", 1),
        ("60^{\\circ}", "60", 1),
        ("1,000,000", "10^{6}", 1),
        ("\\sqrt{2}^{10}", "32", 1),
        ("\\left(\\frac{2}{3}\\right)^{10}", "\\frac{1024}{59049}", 1),
        ("\\frac{\\pi^2}{6}", "\\pi^{2}/6", 1),
        (" + ".join(f"x^{{{power}}}" for power in range(2, 30)), "x", 0),
    ],
)
def test_math_judges_ordinary_powers(answer: str, reference: str, value: float) -> None:
    assert scorer("math")(f"so it is \\boxed{{{answer}}}", reference, "", {}) == value


@given(st.text("0123456789^{}()+-*/!x,.e\\ |", max_size=60))
def test_math_bounds_the_size_of_any_text(text: str) -> None:
    for is_python in (False, True):
        with contextlib.suppress(TooLargeError):
            check_size(text, is_python=is_python)
