"""Log-probabilities of the teacher equal those of a plain forward pass over each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONTEXT, FAMILIES, VOCAB, make_model, random_prompt, reference_logprobs

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import ConfigError
from starling.rollout.engine.teacher import TeacherRequestError, TokenScorer, batches_by_budget, num_shared_token_ids

LENGTHS = (5, 1, 0, 9, 3)
PROMPT = random_prompt(0, 6)


def tokens(lengths: tuple[int, ...] = LENGTHS) -> np.ndarray[Any, Any]:
    return np.array(random_prompt(1, sum(lengths)), np.int32)


def scorer(family: str = "qwen3", **settings: Any) -> TokenScorer:
    return TokenScorer(make_model(family), **{"tokens_per_forward": 30, **settings})


def score(teacher: TokenScorer, temperature: float = 1.0, lengths: tuple[int, ...] = LENGTHS) -> Any:
    return teacher.score(np.array(PROMPT, np.int32), tokens(lengths), lengths, temperature)


def completions(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray[Any, Any]]:
    return np.split(tokens(lengths), np.cumsum(lengths)[:-1])


@pytest.mark.parametrize(("family", "temperature"), covering(FAMILIES, [1.0, 0.6, 0.0]))
def test_logprobs_equal_a_forward_pass(family: str, temperature: float) -> None:
    found = score(scorer(family), temperature).logprobs
    model = make_model(family)
    expected = [reference_logprobs(model, PROMPT, some, temperature) for some in completions() if len(some)]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=0, atol=1e-5)


def test_top_tokens_equal_those_of_a_forward_pass() -> None:
    found, model = score(scorer(top_k=4), 0.7), make_model()
    begin = 0
    for some in completions():
        if not len(some):
            continue
        ids = torch.tensor([[*PROMPT, *some.tolist()]])
        with torch.no_grad():
            plain = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / 0.7, dim=-1)
        values, top = plain[len(PROMPT) - 1 : -1].topk(4, dim=-1)
        place = slice(begin, begin := begin + len(some))
        assert (found.top_ids[place] == top.numpy()).all()
        np.testing.assert_allclose(found.top_logprobs[place], values.numpy(), rtol=0, atol=1e-5)


def test_top_tokens_are_shared_ids_with_probabilities_over_the_whole_vocabulary() -> None:
    all_of_them, some = score(scorer(top_k=VOCAB)), score(scorer(top_k=3, num_ids=7))
    assert some.top_ids.max() < 7
    by_id = np.take_along_axis(all_of_them.top_logprobs, np.argsort(all_of_them.top_ids, axis=1), axis=1)
    np.testing.assert_allclose(some.top_logprobs, np.take_along_axis(by_id, some.top_ids, axis=1), atol=1e-5)
    np.testing.assert_allclose(np.exp(all_of_them.top_logprobs).sum(axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 15, 40, 10_000])
def test_token_budget_does_not_change_results(budget: int) -> None:
    found, expected = score(scorer(tokens_per_forward=budget, top_k=2)), score(scorer(top_k=2))
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert (found.top_ids == expected.top_ids).all()


def test_long_completions_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.rollout.engine.teacher.ROWS_AT_ONCE", 4)
    found = score(scorer(top_k=2))
    monkeypatch.undo()
    expected = score(scorer(top_k=2))
    assert (found.logprobs == expected.logprobs).all()
    assert (found.top_ids == expected.top_ids).all()


def test_without_top_k_the_top_arrays_are_empty() -> None:
    found = score(scorer())
    assert (found.top_ids.shape, found.top_logprobs.shape) == ((18, 0), (18, 0))
    assert len(score(scorer(), lengths=(0, 0)).logprobs) == 0


@pytest.mark.parametrize(
    ("prompt", "ids", "lengths", "complaint"),
    [
        ([1], [2, VOCAB], (2,), f"token {VOCAB} is not in the teacher's vocabulary of {VOCAB}"),
        ([-1], [2], (1,), "token -1 is not in the teacher's vocabulary"),
        ([], [2], (1,), "the prompt is empty"),
        ([1], [2, 3], (1,), r"completions of \[1\] tokens were announced, but 2 tokens arrived"),
        ([1], [2] * CONTEXT, (CONTEXT,), f"has {CONTEXT + 1} tokens, and the teacher's context {CONTEXT}"),
    ],
)
def test_invalid_tokens_are_rejected(
    prompt: list[int], ids: list[int], lengths: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(TeacherRequestError, match=complaint):
        scorer().score(np.array(prompt, np.int32), np.array(ids, np.int32), lengths, 1.0)


def test_top_k_beyond_the_shared_vocabulary_is_rejected() -> None:
    with pytest.raises(ConfigError, match="top_k = 9, but teacher and policy share 8 tokens"):
        scorer(top_k=9, num_ids=8)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 20), st.integers(1, 200))
def test_batches_hold_every_completion_once_within_the_budget(
    lengths: list[int], prompt_length: int, budget: int
) -> None:
    found = batches_by_budget(lengths, prompt_length, budget)
    assert sorted(index for batch in found for index in batch) == [i for i, n in enumerate(lengths) if n]
    for batch in found:
        width = prompt_length + max(lengths[index] for index in batch) - 1
        assert len(batch) == 1 or width * len(batch) <= budget


# --- one vocabulary ------------------------------------------------------------------------------------------------


def folder(path: Path, alphabet: str) -> Path:
    make_model_folder(ScratchSettings(alphabet=alphabet, max_length=16, config={"hidden_size": 16}), path)
    return path


def test_num_shared_token_ids_rejects_another_tokenizer(tmp_path: Path) -> None:
    mine = folder(tmp_path / "mine", "abc")
    assert num_shared_token_ids(folder(tmp_path / "same", "abc"), mine) > len("abc")
    with pytest.raises(ConfigError, match=r"has \d+ tokens and the model's in .* \d+: the teacher must read"):
        num_shared_token_ids(folder(tmp_path / "larger", "abcd"), mine)
    with pytest.raises(ConfigError, match=r"differs from the model's in .*: token '.' has the id"):
        num_shared_token_ids(folder(tmp_path / "other", "cba"), mine)


def test_num_shared_token_ids_rejects_a_missing_tokenizer(tmp_path: Path) -> None:
    mine = folder(tmp_path / "mine", "abc")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text((mine / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has no tokenizer; add its tokenizer.json"):
        num_shared_token_ids(tmp_path / "bare", mine)
