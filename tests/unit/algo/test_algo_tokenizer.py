"""Tokens beyond a model's embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from starling.algo.tokenizer import load_tokenizer
from starling.common.errors import ConfigError


def save(folder: Path, **added: bool) -> None:
    """Write a tokenizer of three tokens and `added` ones, each special or not."""
    inner = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="</s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    for token, special in added.items():
        tokenizer.add_tokens([AddedToken(token, special=special)], special_tokens=special)
    tokenizer.save_pretrained(folder)


def test_special_tokens_may_lie_beyond_the_embedding(tmp_path: Path) -> None:
    save(tmp_path, image=True)
    assert len(load_tokenizer(tmp_path, LlamaConfig(vocab_size=3))) == 4


def test_ordinary_tokens_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    save(tmp_path, word=False)
    with pytest.raises(ConfigError, match=r"gives 'word' the id 3, and the model has embeddings for 3 tokens"):
        load_tokenizer(tmp_path, LlamaConfig(vocab_size=3))
    load_tokenizer(tmp_path, LlamaConfig(vocab_size=4))
    load_tokenizer(tmp_path)


def test_end_token_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="gives '</s>' the id 1"):
        load_tokenizer(tmp_path, LlamaConfig(vocab_size=1))
