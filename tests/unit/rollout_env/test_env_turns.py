"""Text between two replies, as the template renders it after the last reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_chat import TEMPLATES, encode, tokenizer

from starling.algo.text import conversation_text
from starling.common.errors import ConfigError
from starling.rollout.env.episodes.turns import common_length, encode_continuation, strip_end_token, text_between

USER = {"role": "user", "content": "try again"}
EXPECTED = {
    "chatml": "<|im_end|>\n<|im_start|>user\ntry again<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_end|>\n<|im_start|>user\ntry again<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\ntry again<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("reply", ["well", "<think>so it is</think>\n\nwell", "  blanks  ", "", "StarlingReply0"])
def test_text_between_turns_is_independent_of_the_reply(style: str, reply: str) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": reply}]
    assert text_between(tokenizer(style), messages, [USER], (), of="it") == EXPECTED[style]


def test_adjacent_tool_results_follow_the_template() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<tool_call>"}]
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    assert text_between(tokenizer("qwen3"), messages, results, (), of="it") == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_only_sampled_end_token_is_stripped() -> None:
    text = EXPECTED["chatml"]
    assert strip_end_token(text, "<|im_end|>") == text.removeprefix("<|im_end|>")
    assert strip_end_token("\n" + text, "<|im_end|>") == text.removeprefix("<|im_end|>")
    assert strip_end_token(text, "") == text
    assert strip_end_token(text, "<|endoftext|>") == text, "another end token does not end the template's turn"


def test_template_errors_are_described() -> None:
    chosen = tokenizer("chatml")
    messages = [USER, {"role": "assistant", "content": "x"}]
    for template, sentence in (
        ("{{ raise_exception('no tools here') }}", "cannot render the chat .*no tools here"),
        ("{{ messages[0].content }}", "does not write what the assistant said in the chat"),
        (None, "the chat is a conversation and the tokenizer has no chat template"),
    ):
        changed = type(chosen)(tokenizer_object=chosen.backend_tokenizer, chat_template=template)
        with pytest.raises(ConfigError, match=sentence):
            text_between(changed, messages, [USER], (), of="the chat")


WORDS = st.sampled_from(["weather", "no. ", "<think>", "</think>", "\n", " ", "42", "é", "<|im_start|>"])


@pytest.mark.parametrize("style", ["chatml", "llama3"])
@given(replies=st.lists(st.lists(WORDS, min_size=1, max_size=6).map("".join), min_size=1, max_size=3))
def test_sequence_equals_rendered_conversation(style: str, replies: list[str]) -> None:
    """For templates that keep earlier messages and replies sampled as the tokenizer encodes them."""
    chosen, (_, eos) = tokenizer(style), TEMPLATES[style]
    messages = [{"role": "user", "content": "hello"}]
    ids = encode(style, conversation_text(chosen, messages, of="it"))
    for reply in replies:
        if style == "llama3":
            reply = reply.strip()  # its template changes earlier messages
        ids += encode(style, reply + eos)
        messages.append({"role": "assistant", "content": reply})
        ids += encode_continuation(chosen, strip_end_token(text_between(chosen, messages, [USER], (), of="it"), eos))
        messages.append(USER)
    whole = conversation_text(chosen, messages, of="it")
    assert chosen.decode(ids, skip_special_tokens=False) == whole
    assert ids == encode(style, whole), "special tokens separate turns, so no tokens merge across"


def test_no_tokenizer_prefix_blank_inside_text() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<eos>": 0, "▁": 1, "a": 2, "▁a": 3, "<unk>": 4}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    blank = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    assert blank.encode("a", add_special_tokens=False) == [3]
    assert encode_continuation(blank, "a") == [2]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=5))
def test_common_length_is_longest_shared_prefix(sequences: list[list[int]]) -> None:
    length = common_length(sequences)
    assert len({tuple(one[:length]) for one in sequences}) == 1
    assert len({tuple(one[: length + 1]) for one in sequences}) > 1 or any(len(one) == length for one in sequences)
