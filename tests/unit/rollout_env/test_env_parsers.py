"""Tool calls in text: calls, answers, and malformed calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.rollout.env.parsers import PARSERS, Call, Malformed, hermes, llama

ARGUMENTS = st.dictionaries(
    st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=12), st.booleans()), max_size=3
)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=12), ARGUMENTS), min_size=1, max_size=3)


def clean(text: str) -> bool:
    return "tool_call>" not in text


@given(CALLS.filter(lambda calls: clean(str(calls))), st.text(max_size=20).filter(clean))
def test_hermes_parses_calls(calls: list[tuple[str, dict[str, Any]]], around: str) -> None:
    text = around + around.join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )
    assert hermes(text) == [Call(name, arguments) for name, arguments in calls]
    assert hermes(text.removesuffix("</tool_call>")) == hermes(text), "a stop text may have removed the end"
    assert hermes(around) == []


@given(CALLS)
def test_llama_parses_calls(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    assert llama(text) == llama(f" <|python_tag|>{text}\n") == [Call(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("parser", "text", "problem"),
    [
        ("hermes", "<tool_call>{</tool_call>", "the call is no JSON"),
        ("hermes", "<tool_call>add 1 2</tool_call>", "the call is no JSON"),
        ("hermes", "<tool_call>[]</tool_call>", 'no object with a "name"'),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', 'no object with a "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "\"arguments\" of 'f' are no object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "\"arguments\" of 'f' are text"),
        ("hermes", "<tool_call>" + "[" * 100_000, "the call is "),
        ("llama", '{"name": "f", "parameters": {', "the call is no JSON"),
        ("llama", '{"name": ' + "[" * 100_000, "the call is nested too deeply"),
        ("llama", '{"name": "f", "parameters": "' + "[" * 100_000 + '"}', "the call is nested too deeply"),
        ("llama", '{"name": "f"} and so on', "part calls by `;`"),
        ("llama", '{"parameters": {}}', 'no object with a "name"'),
    ],
)
def test_malformed_calls_are_described(parser: str, text: str, problem: str) -> None:
    last = PARSERS[parser](text)[-1]
    assert isinstance(last, Malformed)
    assert problem in last.problem


@pytest.mark.parametrize("text", ["", "42", "[1, 2]", '{"answer": 3}', "use {name} twice", "it is {", '"name"'])
def test_answer_has_no_calls(text: str) -> None:
    assert llama(text) == hermes(text) == []


def test_call_arguments_may_be_text_or_missing() -> None:
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>') == [Call("f", {"a": 1})]
    assert hermes('<tool_call>{"name": "now"}</tool_call>') == [Call("now", {})]


@given(st.text(alphabet='{}[]":;,<>/ nametool_cparuf1', max_size=60))
def test_parsers_accept_any_text(text: str) -> None:
    for parse in PARSERS.values():
        assert all(isinstance(one, Call | Malformed) for one in parse(text))
        parse(f"<tool_call>{text}")
        parse(f'{{"name": {text}')
