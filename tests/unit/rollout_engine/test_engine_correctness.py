"""Tokens and log-probabilities of the embedded engine equal those of a plain forward pass, in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from tiny_models import (
    CONTEXT,
    FAMILIES,
    VOCAB,
    drain,
    make_engine,
    make_model,
    random_prompt,
    reference_logprobs,
    request,
)

from starling.common.wire.messages import Status
from starling.rollout.engine.base import GroupFailed
from starling.rollout.engine.embedded import forward

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family: str) -> None:
    reference = make_model(family)
    engine = make_engine(make_model(family))
    prompts = {f"p{length}": random_prompt(length, length) for length in (1, 3, 7, 8, 20)}
    for lease, prompt in prompts.items():
        engine.add(request(lease, prompt, max_tokens=12, temperature=0.0))
    for lease, result in drain(engine).items():
        prompt = prompts[lease]
        with torch.no_grad():
            ids = torch.tensor([prompt])
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
        assert result.completions[0].token_ids.tolist() == expected[0, len(prompt) :].tolist()
        assert result.prompt_ids.tolist() == prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_logits_depend_on_positions(family: str) -> None:
    """The comparison is meaningful only if the logits of these models depend on positions."""
    model = make_model(family)
    there = reference_logprobs(model, [1, 2, 3, 4], [5])
    back = reference_logprobs(model, [3, 2, 1, 4], [5])
    assert abs(there - back).max() > 1e-3


group = st.fixed_dictionaries(
    {
        "arrives": st.integers(0, 12),
        "prompt": st.integers(1, 24),
        "count": st.integers(1, 5),
        "max_tokens": st.integers(1, 14),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8]),
        "top_k": st.sampled_from([0, 0, 5]),
        "stop": st.booleans(),
    }
)


def run_schedule(engine: Any, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Add every group before the step at which it arrives; return the results by lease."""
    results: dict[str, Any] = {}
    waiting = dict(enumerate(groups))
    for step in range(500):
        for number in [n for n, g in waiting.items() if g["arrives"] <= step]:
            g = waiting.pop(number)
            engine.add(
                request(
                    str(number),
                    random_prompt(number, g["prompt"]),
                    g["count"],
                    max_tokens=g["max_tokens"],
                    temperature=g["temperature"],
                    top_p=g["top_p"],
                    top_k=g["top_k"],
                    stop_token_ids=tuple(range(6)) if g["stop"] else (),
                    seed=number,
                )
            )
        for ended in engine.step():
            assert not isinstance(ended, GroupFailed)
            results[ended.lease] = ended
        if not waiting and not engine.num_running and not engine.num_waiting:
            return results
    raise AssertionError("the schedule does not end")


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2_mixed_sliding", "mistral_all_sliding"])
@examples(12)
@given(groups=st.lists(group, min_size=1, max_size=7), max_rows=st.integers(5, 14), exclusive=st.booleans())
def test_logprobs_equal_a_forward_pass_for_every_schedule(
    family: str, groups: list[dict[str, Any]], max_rows: int, exclusive: bool
) -> None:
    reference = make_model(family)
    engine = make_engine(make_model(family), max_rows=max_rows, exclusive=exclusive)
    results = run_schedule(engine, groups)
    assert len(results) == len(groups)
    for lease, result in results.items():
        g = groups[int(lease)]
        assert len(result.completions) == g["count"]
        for completion in result.completions:
            tokens = completion.token_ids
            expected = reference_logprobs(reference, result.prompt_ids.tolist(), tokens, g["temperature"])
            np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)
            hits = [g["stop"] and token < 6 for token in tokens]
            assert not any(hits[:-1])
            assert completion.status is (Status.OK if hits[-1] else Status.TRUNCATED)
            assert hits[-1] or len(tokens) == g["max_tokens"]
            assert tokens.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert completion.versions.tolist() == [0] * len(tokens)
    assert engine._forward.cache.num_blocks == 0


@examples(15)
@given(groups=st.lists(group, min_size=2, max_size=6), max_rows=st.integers(5, 14))
def test_exclusive_results_are_bitwise_independent_of_the_queue(groups: list[dict[str, Any]], max_rows: int) -> None:
    together = run_schedule(make_engine(max_rows=max_rows, exclusive=True), groups)
    for number, g in enumerate(groups):
        engine = make_engine(max_rows=16, exclusive=True)
        # Run the group alone under the same name, so that prompt and seed are the same.
        engine_alone = run_schedule_of_one(engine, number, g)
        for alone, among in zip(engine_alone.completions, together[str(number)].completions, strict=True):
            assert alone.token_ids.tobytes() == among.token_ids.tobytes()
            assert alone.logprobs.tobytes() == among.logprobs.tobytes()


def run_schedule_of_one(engine: Any, number: int, g: dict[str, Any]) -> Any:
    engine.add(
        request(
            str(number),
            random_prompt(number, g["prompt"]),
            g["count"],
            max_tokens=g["max_tokens"],
            temperature=g["temperature"],
            top_p=g["top_p"],
            top_k=g["top_k"],
            stop_token_ids=tuple(range(6)) if g["stop"] else (),
            seed=number,
        )
    )
    return drain(engine)[str(number)]


def test_exclusive_runs_one_group_at_a_time() -> None:
    engine = make_engine(exclusive=True)
    for number in range(3):
        engine.add(request(str(number), [1, 2], 2, max_tokens=3))
    seen = []
    while engine.num_running or engine.num_waiting:
        seen.append([ended.lease for ended in engine.step()])
        assert engine.num_running in (0, 2)
    assert seen == [[], [], ["0"], [], [], ["1"], [], [], ["2"]]


def test_same_seed_gives_the_same_tokens_in_any_batch() -> None:
    def tokens(others: int) -> list[list[int]]:
        engine = make_engine()
        for number in range(others):
            engine.add(request(f"other{number}", random_prompt(number, 3 + 5 * number), 3, max_tokens=4 + number))
        engine.add(request("mine", [1, 2, 3], 4, max_tokens=10, temperature=0.8, seed=7))
        return [c.token_ids.tolist() for c in drain(engine)["mine"].completions]

    alone = tokens(0)
    assert tokens(2) == alone
    assert tokens(4) == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_row_sampling_is_independent_of_truncating_rows() -> None:
    def tokens(mate: dict[str, Any]) -> list[list[int]]:
        engine = make_engine()
        engine.add(request("mate", [4, 5, 6], 4, max_tokens=12, seed=1, **mate))
        engine.add(request("mine", [1, 2, 3], 4, max_tokens=12, seed=7))
        return [c.token_ids.tolist() for c in drain(engine)["mine"].completions]

    assert tokens({}) == tokens({"top_k": 3}) == tokens({"top_p": 0.5}) == tokens({"temperature": 0.0})


def test_another_seed_gives_other_tokens() -> None:
    engine = make_engine()
    for seed in (1, 2):
        engine.add(request(str(seed), [1, 2, 3], 2, max_tokens=20, seed=seed))
    results = drain(engine)
    first, second = (results[key].completions[0].token_ids.tolist() for key in ("1", "2"))
    assert first != second


def test_completions_reach_the_end_of_the_context() -> None:
    engine = make_engine()
    prompt = random_prompt(0, CONTEXT - 5)
    engine.add(request("tight", prompt, 2, max_tokens=100))
    engine.add(request("last", random_prompt(1, CONTEXT - 1), 1, max_tokens=100))
    results = drain(engine)
    assert [len(c.token_ids) for c in results["tight"].completions] == [5, 5]
    assert len(results["last"].completions[0].token_ids) == 1
    assert all(c.status is Status.TRUNCATED for c in results["tight"].completions)
    expected = reference_logprobs(make_model(), prompt, results["tight"].completions[0].token_ids)
    np.testing.assert_allclose(results["tight"].completions[0].logprobs, expected, rtol=1e-5, atol=1e-5)


def test_long_prompts_prefilled_in_several_steps() -> None:
    """Prompts that exceed one prefill pass are prefilled in the next step, in order."""
    long_context = make_engine(max_model_len=CONTEXT, max_rows=200)
    for number in range(100):
        long_context.add(request(str(number), random_prompt(number, 60), 2, max_tokens=3, seed=number))
    long_context.step()
    assert long_context.num_running == 2 * (4096 // 60)
    results = drain(long_context)
    reference = make_model()
    for number in (0, 67, 68, 99):
        completion = results[str(number)].completions[1]
        expected = reference_logprobs(reference, random_prompt(number, 60), completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_sampled_tokens_cover_the_vocabulary() -> None:
    engine = make_engine()
    engine.add(request("many", [1], 16, max_tokens=50, temperature=5.0))
    seen = {int(t) for c in drain(engine)["many"].completions for t in c.token_ids}
    assert len(seen) > VOCAB // 2


@pytest.mark.parametrize(("family", "length"), covering(FAMILIES, [9, 15, 16, 17]))
def test_prompt_logprobs_of_a_long_prompt_are_computed_in_parts(
    family: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(request("a", random_prompt(1, length), 2, max_tokens=5, temperature=0.0), score_prompt=True)
    found = []
    for most in (forward.PREFILL_TOKENS, 8):
        monkeypatch.setattr(forward, "PREFILL_TOKENS", most)
        engine = make_engine(make_model(family))
        engine.add(asked)
        engine.add(request("b", random_prompt(2, 3), max_tokens=5, temperature=0.0))
        found.append(drain(engine)["a"])
    whole, parts = found
    assert whole.prompt_logprobs is not None
    assert parts.prompt_logprobs is not None
    assert len(parts.prompt_logprobs.logprobs) == length - 1
    np.testing.assert_allclose(parts.prompt_logprobs.logprobs, whole.prompt_logprobs.logprobs, atol=1e-5)
    np.testing.assert_allclose(parts.prompt_logprobs.top_logprobs, whole.prompt_logprobs.top_logprobs, atol=1e-5)
    assert parts.prompt_logprobs.top_ids.tolist() == whole.prompt_logprobs.top_ids.tolist()
    for one, other in zip(parts.completions, whole.completions, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
