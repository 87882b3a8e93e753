"""The built-in scorers, called directly."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from starling.reward.score.scorers.gsm8k import final_number, find_numbers
from starling.reward.score.scorers.registry import Scorer, resolve_scorer, wanted_fields


def scorer(name: str, **options: Any) -> Scorer:
    return resolve_scorer(name, options)


EXACT = scorer("exact_match")
PREFIX = scorer("prefix_match")
GSM8K = scorer("gsm8k")
FORMAT = scorer("format")

texts = st.text(max_size=30)
visible = st.text(st.characters(categories=["L", "N", "P"]), max_size=30)


@given(texts, texts)
def test_exact_match_ignores_only_white_space_around(a: str, b: str) -> None:
    assert EXACT(f" {a}\n", a, "", {}) == 1.0
    assert EXACT(a, b, "", {}) == (1.0 if a.strip() == b.strip() else 0.0)


@given(visible, visible)
def test_prefix_match_is_a_share_that_is_1_for_the_reference_alone(a: str, b: str) -> None:
    value = PREFIX(a, b, "", {})
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (a == b)
    assert value == PREFIX(b, a, "", {})


@given(visible.filter(bool), st.data())
def test_prefix_match_rises_with_each_right_character(reference: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(reference) - 1))
    values = [PREFIX(reference[:n], reference, "", {}) for n in (count, count + 1)]
    assert values == [count / len(reference), (count + 1) / len(reference)]
    assert PREFIX(reference + "!" * (count + 1), reference, "", {}) < 1.0


numbers = st.decimals(min_value=-(10**12), max_value=10**12, places=2, allow_nan=False)


@given(numbers, st.sampled_from(["{:,}", "{}", "${:,}", "**{}**", "\\boxed{{{}}}", "{:,} dollars.", "{}."]))
def test_find_numbers_reads_every_notation(number: Decimal, form: str) -> None:
    written = form.format(number)
    assert find_numbers(written) == [number]
    assert GSM8K(f"First 3 then 4.\n#### {written}", f"2+2 is <<2+2=4>>4\n#### {number}", "", {}) == 1.0
    assert GSM8K(f"The answer is {written}", str(number), "", {}) == 1.0
    assert GSM8K(f"#### {written}", str(number + 1), "", {}) == 0.0


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
def test_last_number_counts_without_mark(values: list[int]) -> None:
    assert final_number(" and ".join(f"{value:,}" for value in values)) == values[-1]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10-3=7", 7),
        ("it is 5-3", 3),
        ("it is 5 - 3", 3),
        ("- 3 apples", 3),
        ("x = -3", -3),
        ("−3", -3),
        ("-$3.50", "-3.5"),
        ("$-3.50", "-3.5"),
        ("$ 1,234,567.89", "1234567.89"),
        ("1,2345", 2345),
        ("1, 2", 2),
        ("costs .5", "0.5"),
        ("The answer is 72.", 72),
        ("72.00", 72),
        ("50%", 50),
        ("#### 72 apples in 3 days", 72),
        ("#### 1 then #### 2", 2),
        ("it is 8 ####", 8),
        ("none at all", None),
        ("", None),
    ],
)
def test_final_numbers(text: str, number: int | str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@given(texts)
def test_gsm8k_scores_any_completion(text: str) -> None:
    assert GSM8K(text, "#### 7", "", {}) in (0.0, 1.0)


def test_gsm8k_rejects_reference_without_number() -> None:
    with pytest.raises(ValueError, match="contains no number"):
        GSM8K("7", "seven", "", {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1),
        ("  <think></think><answer></answer>\n", 1),
        ("<answer>c</answer>", 0),
        ("<think>a</think><answer>c</answer> and more", 0),
        ("<think>a</think><answer>c</answer><answer>d</answer>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
        ("<think>a</think>so<answer>c</answer>", 0),
        ("<think>" * 20_000, 0),
        ("<think>" + "a" * 200_000, 0),
    ],
)
def test_format(text: str, value: float) -> None:
    assert FORMAT(text, "", "", {}) == value


def test_format_takes_a_pattern_for_the_whole_completion() -> None:
    upper = scorer("format", pattern="[A-Z]+")
    assert [upper(text, "", "", {}) for text in ("ABC", " ABC ", "ABCd", "")] == [1, 1, 0, 0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("so it is \\boxed{0.5}", "1/2", 1),
        ("The answer is $\\frac{2}{4}$", "\\frac{1}{2}", 1),
        ("\\boxed{1+x^2}", "$x^2+1$", 1),
        ("first \\boxed{3}, or else \\boxed{4}", "4", 0),
        ("the roots are \\boxed{3} and \\boxed{4}", "\\{3, 4\\}", 1),
        ("$x=3$, so the answer is $4$", "4", 1),
        ("the answer is 12.", "\\boxed{12}", 1),
        ("$3\\pi$", "3\\pi", 1),
        ("$3$", "3\\pi", 0),
        ("\\boxed{(1,2)}", "(1,2)", 1),
        ("\\boxed{11}", "12", 0),
        ("I do not know", "12", 0),
        ("\\boxed{\\frac{", "12", 0),
        ("\\boxed{3.14159265}", "\\pi", 1),
    ],
)
def test_math(completion: str, reference: str, value: float) -> None:
    assert scorer("math")(completion, reference, "", {}) == value


def test_math_rejects_reference_without_expression() -> None:
    with pytest.raises(ValueError, match="not a mathematical expression"):
        scorer("math")("1", "", "", {})


@pytest.mark.parametrize("whole_row", [True, False])
def test_reasoning_gym_scores_equal_those_of_the_task(whole_row: bool) -> None:
    dataset = reasoning_gym.create_dataset("spell_backward", seed=1, size=5)
    score = scorer("reasoning_gym:spell_backward")
    for row in dataset:
        metadata = row if whole_row else row["metadata"]
        for answer in (row["answer"], row["answer"][:-1], "", "zzz"):
            expected = dataset.score_answer(answer, entry=row)
            assert score(f" {answer}\n", row["answer"], row["question"], metadata) == expected


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    [(0, 0.0), (1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1.0), (17, -1.0), (10**6, -1.0)],
)
def test_overlong_is_the_penalty_of_dapo(num_tokens: int, value: float) -> None:
    """Equation 13: L_max = 16, L_cache = 4; the text does not matter."""
    plain = scorer("overlong", max_tokens=16, buffer=4)
    assert plain("a text", "", "", {}, num_tokens=num_tokens) == value
    assert scorer("overlong", max_tokens=16, buffer=4, scale=0.5)("", "", "", {}, num_tokens=num_tokens) == value / 2


def test_environment_scorer_returns_environment_reward() -> None:
    judged = scorer("environment")
    assert judged("a text", "", "", {}, reward=-0.25) == -0.25
    assert wanted_fields(judged) == ("reward",)
    with pytest.raises(ValueError, match="no environment returned a reward: set"):
        judged("a text", "", "", {}, reward=None)


@given(st.data(), st.integers(1, 1000))
def test_overlong_never_rises_with_the_length(data: st.DataObject, max_tokens: int) -> None:
    punish = scorer("overlong", max_tokens=max_tokens, buffer=data.draw(st.integers(1, max_tokens)))
    values = [punish("", "", "", {}, num_tokens=count) for count in range(max_tokens + 2)]
    assert values == sorted(values, reverse=True)
    assert (values[0], values[max_tokens], values[-1]) == (0.0, -1.0, -1.0)
