"""The built-in scorers, called directly."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
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


@pytest.mark.parametrize(
    ("options", "completion", "reference", "value"),
    [
        ({"pattern": "Answer: (.*)"}, "Answer: 3\nno, Answer:  4 ", "4", 1),
        ({"pattern": "Answer: (.*)"}, "Answer: 4\nno, Answer: 3", "4", 0),
        ({"pattern": "Answer: (.*)"}, "4", "4", 0),
        ({"pattern": "[0-9]+"}, "first 3, then 42.", " 42\n", 1),
        ({"pattern": "answer: (.*)"}, "Answer: Yes", "yes", 0),
        ({"pattern": "answer: (.*)", "ignore_case": True}, "Answer: Yes", "yEs", 1),
        ({"pattern": "a(b)?"}, "a", "", 1),
        ({"pattern": "a(b)?"}, "a", "a", 0),
    ],
)
def test_regex(options: dict[str, Any], completion: str, reference: str, value: float) -> None:
    assert scorer("regex", **options)(completion, reference, "", {}) == value


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("B", "B", 1),
        ("(B)", "B", 1),
        ("b", "B", 0),
        ("The answer is B.", "(B)", 1),
        ("The answer is **B**", "B", 1),
        ("Answer: (C)", "C", 1),
        ("A is tempting, but the correct option is D, not A.", "D", 1),
        ("A or B? I choose \\boxed{C}, not (D)", "C", 1),
        ("\\boxed{\\text{A}}", "Answer: A", 1),
        ("first (A), then (B)", "B", 1),
        ("A dog. Both", "A", 1),
        ("Because D'Artagnan", "D", 0),
        ("no idea", "A", 0),
        ("", "A", 0),
        ("E", "D", 0),
    ],
)
def test_choice(completion: str, reference: str, value: float) -> None:
    assert scorer("choice")(completion, reference, "", {}) == value


def test_choice_needs_a_letter_in_the_reference() -> None:
    with pytest.raises(ValueError, match="'seven' has none of the letters ABCD"):
        scorer("choice")("A", "seven", "", {})
    assert scorer("choice", letters="ABCDEFGH")("(G)", "G", "", {}) == 1


@given(texts, texts)
def test_choice_and_regex_score_any_completion(completion: str, reference: str) -> None:
    assert scorer("choice")(completion, f"(A) {reference}", "", {}) in (0.0, 1.0)
    assert scorer("regex", pattern="(.*)")(completion, reference, "", {}) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "num_tokens", "value"),
    [
        ({"max_tokens": 100}, 0, 0.0),
        ({"max_tokens": 100}, 100, 0.0),
        ({"max_tokens": 100}, 150, -0.5),
        ({"max_tokens": 100, "scale": 2.0}, 1000, -2.0),
        ({"min_tokens": 10}, 10, 0.0),
        ({"min_tokens": 10}, 5, -0.5),
        ({"min_tokens": 10, "max_tokens": 20, "scale": 4.0}, 0, -4.0),
    ],
)
def test_length(options: dict[str, Any], num_tokens: int, value: float) -> None:
    assert scorer("length", **options)("", "", "", {}, num_tokens=num_tokens) == value


@pytest.mark.parametrize(
    ("options", "completion", "value"),
    [
        ({}, "one two", 0.0),
        ({}, "one two three four", 0.0),
        ({}, "a a a a a a", -0.75),
        ({"num_words": 1}, "no No NO no", -0.75),
        ({"num_words": 2, "scale": 3.0}, "to be or to be", -0.75),
        ({}, "", 0.0),
    ],
)
def test_repetition(options: dict[str, Any], completion: str, value: float) -> None:
    assert scorer("repetition", **options)(completion, "", "", {}) == value


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(1, 4))
def test_repetition_is_a_share_that_more_of_the_same_raises(words: list[str], num_words: int) -> None:
    penalty = scorer("repetition", num_words=num_words)
    value = penalty(" ".join(words), "", "", {})
    assert -1.0 < value <= 0.0
    assert penalty(" ".join(words * 2), "", "", {}) <= value


PERSON = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer", "minimum": 0}}}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"age": 3}', 1),
        ('{"age": -3}', 0),
        ('{"age": "3"}', 0),
        ("{}", 0),
        ('{"age": 3', 0),
        ('{"age": NaN}', 0),
        ("[" * 100_000, 0),
        ('It is\n```json\n{"age": 3}\n```\nas you see', 1),
        ('```\n{}\n```\nno:\n```json\n{"age": 4}\n```', 1),
        ('so {"age": 3}', 0),
    ],
)
def test_json_schema(completion: str, value: float) -> None:
    assert scorer("json_schema", schema=PERSON)(completion, "", "", {}) == value
    assert scorer("json_schema")(completion, "", "", {"schema": PERSON}) == value


def test_json_schema_of_a_row_must_be_one() -> None:
    for metadata in ({}, {"schema": "object"}):
        with pytest.raises(ValueError, match="not an object of JSON Schema"):
            scorer("json_schema")("{}", "", "", metadata)
    with pytest.raises(Exception, match="'thing' is not valid"):
        scorer("json_schema")("{}", "", "", {"schema": {"type": "thing"}})
    with pytest.raises(Exception, match="Unresolvable"):
        scorer("json_schema")("{}", "", "", {"schema": {"$ref": "http://localhost:1/schema.json"}})


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("regex", {"pattern": "("}, "'(' is not a regular expression"),
        ("regex", {"pattern": 3}, "3 is not a regular expression"),
        ("choice", {"letters": "A"}, "two or more different capital letters, not 'A'"),
        ("choice", {"letters": "ABA"}, "two or more different capital letters"),
        ("choice", {"letters": "A-Z"}, "two or more different capital letters"),
        ("length", {}, "needs min_tokens or max_tokens"),
        ("length", {"max_tokens": 0}, "max_tokens is 0; give at least 1"),
        ("length", {"min_tokens": 5, "max_tokens": 4}, "max_tokens is 4"),
        ("length", {"min_tokens": -1}, "min_tokens must be a number of tokens, not -1"),
        ("length", {"max_tokens": 4, "scale": 0}, "scale must be a number above 0"),
        ("repetition", {"num_words": 0}, "num_words must be 1 or more"),
        ("repetition", {"scale": float("nan")}, "scale must be a number above 0"),
        ("json_schema", {"schema": {"type": "thing"}}, "'thing' is not valid"),
        ("json_schema", {"schema": ["object"]}, "the schema is a list"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        scorer(name, **options)


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
