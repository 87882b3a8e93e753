"""Incremental detokenization, and recognition of messages returned by a client."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from starling.rollout.api.detokenizer import IncrementalDetokenizer, _BegunStop
from starling.rollout.api.messages import message_key, read_messages
from starling.rollout.api.responses import spans

WORDS = "the cat sat. naïve café 日本語 🙂🙃 été ÿ"


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE of a few words, in which most non-ASCII characters are several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return made


def decode(ids: Sequence[int]) -> str:
    return tokenizer().decode(list(ids))


tokens = st.lists(st.integers(0, tokenizer().get_vocab_size() - 1), max_size=40)
texts = st.text(alphabet=WORDS, max_size=40)


def streamed(ids: Sequence[int], cuts: Sequence[int], stops: Sequence[str] = ()) -> tuple[str, IncrementalDetokenizer]:
    stream, pieces, begin = IncrementalDetokenizer(decode, stops), [], 0
    for cut in (*sorted(cuts), len(ids)):
        pieces.append(stream.add(ids[begin:cut]))
        begin = max(begin, cut)
    pieces.append(stream.close())
    assert "".join(pieces) == stream.text
    return stream.text, stream


@given(tokens, st.lists(st.integers(0, 40), max_size=5))
def test_joined_deltas_equal_decoded_text(ids: list[int], cuts: list[int]) -> None:
    text, stream = streamed(ids, cuts)
    assert text == decode(ids)
    assert stream.num_tokens == len(ids)


# The bytes of "a", of the replacement character, of "€", and beginnings of others, as byte-level BPE writes them.
BYTES: Final = [tokenizer().token_to_id(byte) for byte in ("a", "ï", "¿", "½", "â", "Ĥ", "¬", "ÿ", "ð", "Ł")]


@given(st.lists(st.sampled_from(BYTES), max_size=150), st.lists(st.integers(0, 150), max_size=20))
@example(BYTES[1:4] * 50, [*range(150)])
@example([*BYTES[7:8] * 30, *BYTES[4:7] * 40], [*range(150)])
def test_joined_deltas_of_bytes_that_are_no_characters_equal_decoded_text(ids: list[int], cuts: list[int]) -> None:
    assert streamed(ids, cuts)[0] == decode(ids)


@pytest.mark.parametrize("repeated", [BYTES[1:4], BYTES[7:8]], ids=["written", "invalid"])
def test_replacement_characters_are_not_decoded_again_and_again(repeated: list[int]) -> None:
    """A client can ask for a thousand of them: all of its tokens were decoded with each one."""
    num_decoded = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(ids)

    stream, ids = IncrementalDetokenizer(counting), repeated * (3000 // len(repeated))
    assert stream.add(ids) + stream.close() == decode(ids)
    assert num_decoded < 100 * len(ids)


@given(st.text(alphabet="ab", min_size=1, max_size=8), st.lists(st.text(alphabet="ab", max_size=5)))
@example("aabaaab", ["aabaa", "b"])
def test_begun_stop_text_is_the_longest_end_of_the_text(stop: str, parts: list[str]) -> None:
    begun, text = _BegunStop(stop), ""
    for part in parts:
        text += part
        if stop in text:
            return
        longest = max(size for size in range(len(stop)) if text.endswith(stop[:size]))
        assert begun.add(part) == longest


@given(texts, st.lists(st.text(alphabet=WORDS, min_size=1, max_size=3), max_size=3), st.lists(st.integers(0, 40)))
@example("aï", ["a"], [])  # one token ends the stop text and begins a character
def test_stop_text_is_never_returned(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = tokenizer().encode(text).ids
    returned_text, stream = streamed(ids, cuts, stops)
    at = [found for stop in stops if (found := text.find(stop)) >= 0]
    assert stream.stopped == bool(at)
    if not at:
        assert returned_text == text
        return
    assert not any(stop in returned_text for stop in stops)
    assert text.startswith(returned_text)
    needed = decode(ids[: stream.num_tokens])
    assert any(stop in needed for stop in stops)
    assert not any(stop in decode(ids[: stream.num_tokens - 1]) for stop in stops), (
        "the completion ends with the token that completes the stop text"
    )


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([], []),
        ([3], [(3, 0, 1)]),
        ([3, 3, 4, 4, 4, 7], [(3, 0, 2), (4, 2, 5), (7, 5, 6)]),
    ],
)
def test_version_spans(versions: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert [(span["version"], span["start"], span["end"]) for span in spans(versions)] == expected


CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}

SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
    ({"role": "system", "content": "hi"}, {"role": "developer", "content": "hi"}),
    ({"role": "assistant", "content": " hi\n"}, {"role": "assistant", "content": "hi", "refusal": None, "audio": None}),
    ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None}),
    (
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALLED, "id": "x", "function": {"name": "add", "arguments": '{"b":[2],"a":1}'}}],
        },
    ),
    ({"role": "tool", "content": "3", "tool_call_id": "a"}, {"role": "tool", "content": "3", "tool_call_id": "b"}),
]

OTHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "user", "content": "hi"}, {"role": "system", "content": "hi"}),
    ({"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}),
    ({"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "hi", "tool_calls": [CALLED]}),
    (
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "add", "arguments": '{"a": 2}'}}]},
    ),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_messages_have_equal_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = read_messages([one, other])
    assert message_key(first) == message_key(second)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_different_messages_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = read_messages([one, other])
    assert message_key(first) != message_key(second)


def test_read_messages_parses_arguments() -> None:
    (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [CALLED]}])
    assert message["tool_calls"][0]["function"]["arguments"] == json.loads(CALLED["function"]["arguments"])
    broken = {**CALLED, "function": {"name": "add", "arguments": "{oops"}}
    (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [broken]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "{oops", "arguments that are no JSON are unchanged"
