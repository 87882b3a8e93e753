"""Interrupted completions resume with the same tokens, on any engine; and the KV cache can be recomputed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from tiny_models import drain, make_engine, make_model, random_prompt, reference_logprobs, request

from starling.common.wire.messages import Status
from starling.rollout.engine.base import GroupResult, PartialCompletion, RequestError
from starling.rollout.engine.embedded.engine import TransformersEngine

torch.set_num_threads(1)

STOP = 7


def tokens_of(result: GroupResult) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in result.completions]


def load(engine: TransformersEngine, seed: int, version: int) -> None:
    """Switch to the weights of another seed."""
    new = dict(make_model(seed=seed).named_parameters())
    with torch.no_grad():
        for name, tensor in engine.tensors().items():
            tensor.copy_(new[name])
    engine.set_version(version)


@examples(16)
@given(
    length=st.integers(1, 12),
    count=st.integers(1, 4),
    seed=st.integers(0, 50),
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    temperature=st.sampled_from((0.0, 0.8, 1.0)),
)
def test_exclusive_group_is_bitwise_equal_after_any_interruption(
    length: int, count: int, seed: int, cuts: list[int], temperature: float
) -> None:
    asked = request(
        "g",
        random_prompt(seed, length),
        count,
        max_tokens=16,
        seed=seed,
        temperature=temperature,
        stop_token_ids=(STOP,),
    )
    undisturbed = make_engine(exclusive=True)
    undisturbed.add(asked)
    whole = drain(undisturbed)["g"]
    again = asked
    for cut in cuts:  # each on a new engine that resumes from the previous one
        engine = make_engine(exclusive=True)
        engine.add(again)
        done = 0
        while not done and engine.num_tokens < cut * count and engine.ready:
            done = len(engine.step())
        if done:
            break
        partials = engine.interrupt("g")
        assert partials is not None
        assert engine.num_running == engine.num_waiting == 0
        again = replace(asked, partial=partials)
    last = make_engine(exclusive=True)
    last.add(again)
    result = drain(last)["g"]
    for before, after in zip(whole.completions, result.completions, strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.logprobs.tobytes() == after.logprobs.tobytes()
        assert before.versions.tolist() == after.versions.tolist()
        assert before.status is after.status


@examples(10)
@given(num_steps=st.integers(1, 9), seed=st.integers(0, 50), crowd=st.integers(0, 2))
def test_shared_batch_resumes_with_the_same_tokens(num_steps: int, seed: int, crowd: int) -> None:
    asked = request("g", random_prompt(seed, 6), 3, max_tokens=14, seed=seed)
    engine = make_engine()
    engine.add(asked)
    for _ in range(num_steps):
        assert engine.step() == []
    partials = engine.interrupt("g")
    assert partials is not None
    assert [len(partial.token_ids) for partial in partials] == [num_steps] * 3
    elsewhere, plain = make_engine(), make_engine()
    for number in range(crowd):
        elsewhere.add(request(f"other{number}", random_prompt(number, 3 + number), 2, max_tokens=20))
    elsewhere.add(replace(asked, partial=partials))
    plain.add(asked)
    result, whole = drain(elsewhere)["g"], drain(plain)["g"]
    assert tokens_of(result) == tokens_of(whole)
    for completion, partial in zip(result.completions, partials, strict=True):
        assert completion.logprobs[:num_steps].tobytes() == partial.logprobs.tobytes()
        expected = reference_logprobs(make_model(), asked.prompt_ids, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_resumed_tokens_keep_their_versions_and_are_not_counted_again() -> None:
    asked = request("g", random_prompt(0, 5), 2, max_tokens=12)
    first = make_engine(version=3)
    first.add(asked)
    for _ in range(4):
        first.step()
    partials = first.interrupt("g")
    assert partials is not None
    for exclusive in (False, True):
        second = make_engine(version=5, exclusive=exclusive)
        second.add(replace(asked, partial=partials))
        result = drain(second)["g"]
        assert second.num_tokens == 2 * 8
        for completion in result.completions:
            assert completion.versions.tolist() == [3] * 4 + [5] * 8


def test_interruption_during_a_replay_loses_no_token() -> None:
    asked = request("g", random_prompt(0, 5), 2, max_tokens=12)
    first, second = make_engine(exclusive=True), make_engine(exclusive=True)
    first.add(asked)
    for _ in range(6):
        first.step()
    partials = first.interrupt("g")
    assert partials is not None
    second.add(replace(asked, partial=partials))
    second.step()
    again = second.interrupt("g")
    assert again is not None
    for before, after in zip(partials, again, strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.logprobs.tobytes() == after.logprobs.tobytes()


def partial(tokens: list[int], status: Status | None = None) -> PartialCompletion:
    count = len(tokens)
    return PartialCompletion(np.array(tokens, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), status)


@pytest.mark.parametrize("exclusive", [False, True])
def test_resumed_group_with_ended_completions_of_different_lengths(exclusive: bool) -> None:
    asked = request("g", [1, 2, 3], 4, max_tokens=9, stop_token_ids=(STOP,))
    given = (partial([1] * 9), partial([4, 5], Status.OK), partial([6, STOP]), partial([8]))
    engine = make_engine(exclusive=exclusive)
    engine.add(replace(asked, partial=given))
    result = drain(engine)["g"]
    assert [tokens[: len(one.token_ids)] for tokens, one in zip(tokens_of(result), given, strict=True)] == [
        one.token_ids.tolist() for one in given
    ]
    assert [len(tokens) for tokens in tokens_of(result)[:3]] == [9, 2, 2]
    assert [completion.status for completion in result.completions[:3]] == [Status.TRUNCATED, Status.OK, Status.OK]
    assert engine.num_running == 0
    assert engine._forward.cache.num_blocks == 0


def test_resumed_group_whose_completions_have_ended_samples_nothing() -> None:
    engine = make_engine()
    engine.add(replace(request("g", [1], 2, max_tokens=2), partial=(partial([1, 2]), partial([3], Status.OK))))
    assert engine.num_waiting == 1
    assert engine.ready
    assert tokens_of(drain(engine)["g"]) == [[1, 2], [3]]
    assert engine.num_tokens == 0


BAD = {
    "too few": ((partial([1]),), "1 partial completions for a group of 2"),
    "an id out of range": ((partial([1]), partial([40])), "partial completion 1 has a token id outside"),
    "unlike lengths": ((partial([1]), replace(partial([1]), logprobs=np.zeros(2, np.float32))), "1 tokens, 2 log-prob"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_partial_completions_are_rejected(case: str) -> None:
    given, text = BAD[case]
    with pytest.raises(RequestError, match=text):
        make_engine().add(replace(request("g", [1, 2], 2), partial=given))


@pytest.mark.parametrize("family", ["qwen3", "qwen2_mixed_sliding", "mistral_all_sliding", "gpt2"])
def test_recomputed_rows_continue_as_the_new_weights_would(family: str) -> None:
    engine = make_engine(make_model(family, seed=0), version=0)
    groups = {str(n): random_prompt(n, 2 + 5 * n) for n in range(3)}
    for lease, prompt in groups.items():
        engine.add(request(lease, prompt, 2, max_tokens=20, seed=int(lease)))
        engine.step()  # they begin one after another, so that no two are as long
    for _ in range(5):
        engine.step()
    new = make_model(family, seed=1)
    with torch.no_grad():
        for name, tensor in engine.tensors().items():
            tensor.copy_(dict(new.named_parameters())[name])
    engine.set_version(1)
    assert engine._recompute() == sum(2 * (len(prompt) + 7 - int(lease)) for lease, prompt in groups.items())
    for lease, result in drain(engine).items():
        for completion in result.completions:
            num_old = 8 - int(lease)
            assert completion.versions.tolist() == [0] * num_old + [1] * (20 - num_old)
            expected = reference_logprobs(new, groups[lease], completion.token_ids)
            np.testing.assert_allclose(completion.logprobs[num_old:], expected[num_old:], rtol=1e-5, atol=1e-5)


def test_recompute_of_long_rows_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.rollout.engine.embedded.forward.PREFILL_TOKENS", 30)
    engine = make_engine(max_rows=8)
    engine.add(request("g", random_prompt(0, 9), 8, max_tokens=12))
    for _ in range(4):
        engine.step()
    load(engine, seed=1, version=1)
    engine._recompute()
    for completion in drain(engine)["g"].completions:
        expected = reference_logprobs(make_model(seed=1), random_prompt(0, 9), completion.token_ids)
        np.testing.assert_allclose(completion.logprobs[4:], expected[4:], rtol=1e-5, atol=1e-5)
