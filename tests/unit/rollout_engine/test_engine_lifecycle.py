"""Life cycle of groups in the embedded engine: waiting, ending, cancellation, rejection and new weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from tiny_models import (
    CONTEXT,
    VOCAB,
    drain,
    make_engine,
    make_model,
    random_prompt,
    reference_logprobs,
    request,
)

from starling.common.errors import ConfigError
from starling.common.wire.messages import Status
from starling.rollout.engine.base import Engine, GroupFailed, GroupRequest, GroupResult, RequestError
from starling.rollout.engine.embedded import cache

torch.set_num_threads(1)


def test_embedded_engine_implements_the_protocol() -> None:
    engine: Engine = make_engine(version=3)
    assert engine.max_model_len == CONTEXT
    assert engine.version == 3
    assert engine.step() == []


# --- ends ---------------------------------------------------------------------------------------------------------


def greedy_tokens(count: int) -> list[int]:
    engine = make_engine()
    engine.add(request("g", [1, 2, 3], max_tokens=count, temperature=0.0))
    return drain(engine)["g"].completions[0].token_ids.tolist()


@pytest.mark.parametrize("given_to", ["constructor", "sampling"])
def test_stop_token_ends_the_completion_and_is_part_of_it(given_to: str) -> None:
    tokens = greedy_tokens(10)
    stop = tokens[4]
    cut = tokens[: tokens.index(stop) + 1]
    engine = make_engine(eos_token_ids=(stop,) if given_to == "constructor" else ())
    stops = (stop,) if given_to == "sampling" else ()
    engine.add(request("g", [1, 2, 3], max_tokens=10, temperature=0.0, stop_token_ids=stops))
    completion = drain(engine)["g"].completions[0]
    assert completion.token_ids.tolist() == cut
    assert completion.status is Status.OK
    assert len(completion.logprobs) == len(completion.versions) == len(cut)


def test_stop_token_as_the_last_allowed_token_is_ok() -> None:
    tokens = greedy_tokens(10)
    length = tokens.index(tokens[4]) + 1
    engine = make_engine(eos_token_ids=(tokens[4],))
    engine.add(request("g", [1, 2, 3], max_tokens=length, temperature=0.0))
    assert drain(engine)["g"].completions[0].status is Status.OK


def test_stop_tokens_of_one_group_do_not_stop_another() -> None:
    tokens = greedy_tokens(10)
    engine = make_engine()
    engine.add(request("stops", [1, 2, 3], max_tokens=10, temperature=0.0, stop_token_ids=(tokens[0],)))
    engine.add(request("runs", [1, 2, 3], max_tokens=10, temperature=0.0))
    results = drain(engine)
    assert results["stops"].completions[0].token_ids.tolist() == tokens[:1]
    assert results["runs"].completions[0].token_ids.tolist() == tokens


def test_max_tokens_truncates() -> None:
    engine = make_engine()
    engine.add(request("g", [1, 2, 3], 3, max_tokens=5))
    for completion in drain(engine)["g"].completions:
        assert len(completion.token_ids) == 5
        assert completion.status is Status.TRUNCATED


# --- room ---------------------------------------------------------------------------------------------------------


def test_groups_wait_in_order_until_their_rows_fit() -> None:
    engine = make_engine(max_rows=4)
    for lease, count in (("a", 3), ("b", 3), ("c", 1)):
        engine.add(request(lease, [1, 2], count, max_tokens=2))
    engine.step()
    # `c` would fit next to `a`, but groups start in first-in, first-out order.
    assert (engine.num_running, engine.num_waiting) == (3, 2)
    assert [ended.lease for ended in engine.step()] == ["a"]
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (4, 0)
    assert sorted(drain(engine)) == ["b", "c"]


def test_cache_shrinks_when_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT_BYTES", 0)
    engine = make_engine(max_rows=16)
    engine.add(request("short", [1, 2, 3], 12, max_tokens=4))
    engine.add(request("long", [1, 2, 3], 2, max_tokens=30))
    engine.step()
    full = engine.cache_size_bytes
    results = []
    while not results:
        results = engine.step()
    assert engine.num_running == 2
    assert 0 < engine.cache_size_bytes <= full // 4
    drain(engine)
    assert engine.cache_size_bytes == 0


def test_small_cache_is_kept_for_the_next_rows_and_freed_on_demand() -> None:
    engine = make_engine()
    engine.add(request("g", [1, 2, 3], 3, max_tokens=4))
    engine.step()
    kept = engine.cache_size_bytes
    drain(engine)
    assert engine.cache_size_bytes == kept > 0
    engine._forward.cache.shrink()
    assert engine.cache_size_bytes == 0
    engine.add(request("g", [1, 2, 3], 3, max_tokens=4))
    assert len(drain(engine)["g"].completions) == 3


def test_cache_width_follows_the_longest_row() -> None:
    engine = make_engine()
    engine.add(request("long", random_prompt(0, 50), max_tokens=2))
    engine.add(request("short", [1, 2], max_tokens=20))
    engine.step()
    assert engine._forward.cache.width == 50
    engine.step()
    assert engine._forward.cache.width == 3
    drain(engine)


# --- cancel -------------------------------------------------------------------------------------------------------


def test_cancel_frees_a_waiting_and_a_running_group() -> None:
    engine = make_engine(max_rows=4)
    engine.add(request("runs", [1, 2], 2, max_tokens=9))
    engine.add(request("stays", [3], 2, max_tokens=9, seed=5))
    engine.add(request("waits", [4], 4, max_tokens=9))
    engine.step()
    engine.step()
    assert engine.cancel("waits")
    assert engine.cancel("runs")
    assert (engine.num_running, engine.num_waiting) == (2, 0)
    assert not engine.cancel("runs")
    assert not engine.cancel("unknown")
    results = drain(engine)
    assert list(results) == ["stays"]
    for completion in results["stays"].completions:
        expected = reference_logprobs(make_model(), [3], completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)
    engine.add(request("runs", [1, 2], 2))  # the lease is free again
    assert list(drain(engine)) == ["runs"]


class CountedLease(str):
    """A lease that counts how often any of them is compared."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedLease.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_cancel_of_many_waiting_groups_looks_at_each_once() -> None:
    """A client of the HTTP server gives up 65,536 groups at once: no square of their number."""
    engine, num_groups = make_engine(), 500
    for number in range(num_groups):
        engine.add(request(CountedLease(f"g{number}"), [1, 2], 1))
    CountedLease.num_compared = 0
    for number in reversed(range(num_groups)):
        assert engine.cancel(CountedLease(f"g{number}"))
    assert engine.num_waiting == 0
    assert CountedLease.num_compared <= 8 * num_groups


def test_cancel_of_all_groups_leaves_an_empty_engine() -> None:
    engine = make_engine()
    engine.add(request("a", [1, 2], 3))
    engine.step()
    assert engine.cancel("a")
    assert engine.num_running == engine._forward.cache.num_blocks == 0
    assert engine.step() == []


# --- refusals -----------------------------------------------------------------------------------------------------

BAD = {
    "empty prompt": (request("bad", []), "empty"),
    "negative id": (request("bad", [1, -1]), "-1 is outside"),
    "id beyond the vocabulary": (request("bad", [VOCAB]), f"{VOCAB} is outside"),
    "prompt fills the context": (request("bad", [1] * CONTEXT), "no room"),
    "no completion": (request("bad", [1], 0), "num_completions is 0"),
    "more rows than fit": (request("bad", [1], 17), "num_completions is 17"),
    "no token": (request("bad", [1], max_tokens=0), "max_tokens is 0"),
    "negative temperature": (request("bad", [1], temperature=-0.1), "temperature is -0.1"),
    "temperature not a number": (request("bad", [1], temperature=float("nan")), "temperature is nan"),
    "top_p of 0": (request("bad", [1], top_p=0.0), "top_p is 0.0"),
    "negative top_k": (request("bad", [1], top_k=-1), "top_k is -1"),
    "lease in use": (request("good", [1]), "held already"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", BAD)
def test_invalid_request_is_rejected_alone(case: str) -> None:
    bad, text = BAD[case]
    engine = make_engine()
    engine.add(request("good", [1, 2, 3], 2, seed=4))
    engine.step()
    with pytest.raises(RequestError, match=text):
        engine.add(bad)
    undisturbed = make_engine()
    undisturbed.add(request("good", [1, 2, 3], 2, seed=4))
    ours, theirs = drain(engine), drain(undisturbed)
    assert list(ours) == ["good"]
    for a, b in zip(ours["good"].completions, theirs["good"].completions, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()


def test_non_finite_logits_fail_only_their_group() -> None:
    engine = make_engine()
    engine.add(request("poisoned", [1, 2, 3], 2, max_tokens=6))
    engine.step()
    healthy = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    with torch.no_grad():
        engine.tensors()["model.norm.weight"].fill_(float("nan"))
    engine.set_version(7)
    (failed,) = engine.step()
    assert isinstance(failed, GroupFailed)
    assert failed.lease == "poisoned"
    assert "weight version 7" in failed.reason
    assert engine.num_running == 0
    with torch.no_grad():
        for name, tensor in engine.tensors().items():
            tensor.copy_(healthy[name])
    engine.add(request("poisoned", [1, 2, 3], 2, max_tokens=6))
    assert isinstance(drain(engine)["poisoned"], GroupResult)


@pytest.mark.parametrize(
    ("wrong", "text"), [({"max_rows": 0}, "max_rows is 0"), ({"max_model_len": 1}, "max_model_len is 1")]
)
def test_invalid_settings_are_rejected(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_engine(**wrong)


# --- weights ------------------------------------------------------------------------------------------------------


@examples(15)
@given(
    before=st.integers(0, 9),
    groups=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_weights_change_between_two_tokens(before: int, groups: list[tuple[int, int]]) -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    engine = make_engine(make_model(seed=0), version=4)
    for number, (length, count) in enumerate(groups):
        engine.add(request(str(number), random_prompt(number, length), count, max_tokens=10, seed=number))
    for _ in range(before):
        assert engine.step() == []
    with torch.no_grad():
        for name, tensor in engine.tensors().items():
            tensor.copy_(dict(new.named_parameters())[name])
    engine.set_version(5)
    for lease, result in drain(engine).items():
        prompt = random_prompt(int(lease), groups[int(lease)][0])
        for completion in result.completions:
            tokens = completion.token_ids
            assert completion.versions.tolist() == [4] * before + [5] * (10 - before)
            if before:
                expected = reference_logprobs(old, prompt, tokens)[:before]
                np.testing.assert_allclose(completion.logprobs[:before], expected, rtol=1e-5, atol=1e-5)
            expected = kept_cache_logprobs(old, new, prompt, tokens.tolist(), before)
            np.testing.assert_allclose(completion.logprobs[before:], expected, rtol=1e-5, atol=1e-5)


def kept_cache_logprobs(
    old: torch.nn.Module, new: torch.nn.Module, prompt: list[int], tokens: list[int], before: int
) -> np.ndarray:
    """Return the log-probabilities of `tokens[before:]` under `new`, on the KV cache computed by `old`."""
    sequence = torch.tensor([prompt + tokens])
    fed_by_old = len(prompt) + before - 1 if before else 0
    with torch.no_grad():
        past = old(input_ids=sequence[:, :fed_by_old], use_cache=True).past_key_values if fed_by_old else None
        logits = new(input_ids=sequence[:, fed_by_old:-1], past_key_values=past, use_cache=True).logits[0]
    logits = logits[-(len(tokens) - before) :]
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(-1, torch.tensor(tokens[before:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_untied", "gpt2"])
def test_tensors_are_the_live_parameters_by_name(family: str) -> None:
    model = make_model(family)
    engine = make_engine(model)
    listed = engine.tensors()
    assert list(listed) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert listed[name].data_ptr() == parameter.data_ptr()
        assert not listed[name].is_inference()
        assert not listed[name].requires_grad
    assert ("lm_head.weight" in listed) == (family == "qwen3_untied")


def test_types_are_frozen() -> None:
    made = GroupRequest("a", [1], 1, request("a", [1]).sampling)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lease = "b"  # type: ignore[misc]
