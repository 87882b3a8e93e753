"""Paged KV cache of the embedded engine: exact in any layout, shared prompts, no padding, and its limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from structlog.testing import capture_logs
from tiny_models import CONTEXT, FAMILIES, drain, make_engine, make_model, random_prompt, reference_logprobs, request
from transformers import AutoConfig, AutoModelForCausalLM

from starling.common.errors import ConfigError
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult, RequestError
from starling.rollout.engine.embedded import cache, decoder
from starling.rollout.engine.embedded.engine import TransformersEngine

torch.set_num_threads(1)

group = st.fixed_dictionaries(
    {
        "arrives": st.integers(0, 12),
        "prompt": st.integers(1, 24),
        "count": st.integers(1, 5),
        "max_tokens": st.integers(1, 20),
        "cancelled": st.integers(1, 60),
    }
)


def run_schedule(engine: TransformersEngine, groups: list[dict[str, Any]], recompute_at: int = -1) -> dict[str, Any]:
    """Add and cancel groups at their steps; return the results of the others by lease."""
    results: dict[str, Any] = {}
    for step in range(200):
        for number, g in enumerate(groups):
            if g["arrives"] == step:
                prompt = random_prompt(number, g["prompt"])
                engine.add(request(str(number), prompt, g["count"], max_tokens=g["max_tokens"], seed=number))
            if g["cancelled"] == step:
                engine.cancel(str(number))
        if step == recompute_at:
            engine._recompute()
        for ended in engine.step():
            assert isinstance(ended, GroupResult)
            results[ended.lease] = ended
        if step > 12 and not engine.num_running and not engine.num_waiting:
            return results
    raise AssertionError("the schedule does not end")


def check(results: dict[str, GroupResult], model: Any) -> None:
    for result in results.values():
        for completion in result.completions:
            expected = reference_logprobs(model, result.prompt_ids.tolist(), completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["qwen3", "qwen2_mixed_sliding", "mistral_all_sliding", "gpt2"])
@pytest.mark.parametrize("gathered_bytes", [0, 1 << 20], ids=["in place", "gathered"])
@examples(8)
@given(
    groups=st.lists(group, min_size=1, max_size=6),
    max_rows=st.integers(5, 14),
    block_tokens=st.sampled_from((1, 3, 32)),
    recompute_at=st.integers(-1, 20),
    kept_bytes=st.sampled_from((0, 1 << 20)),
    is_plain=st.booleans(),
)
def test_any_blocks_give_the_logprobs_of_a_forward_pass(
    family: str,
    gathered_bytes: int,
    groups: list[dict[str, Any]],
    max_rows: int,
    block_tokens: int,
    recompute_at: int,
    kept_bytes: int,
    is_plain: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "GATHERED_BYTES", gathered_bytes)
        patch.setattr(cache, "BLOCK_TOKENS", block_tokens)
        patch.setattr(cache, "KEPT_BYTES", kept_bytes)
        patch.setattr(decoder, "PLAIN_MODELS", decoder.PLAIN_MODELS if is_plain else ())
        engine = make_engine(make_model(family), max_rows=max_rows)
        check(run_schedule(engine, groups, recompute_at), make_model(family))
        assert engine._forward.cache.num_blocks == 0


OTHER_ATTENTION: dict[str, dict[str, Any]] = {
    "eager": {"kind": "qwen3", "attn_implementation": "eager"},
    "softcap": {"kind": "gemma2", "attn_implementation": "eager", "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "sinks": {"kind": "gpt_oss", "attn_implementation": "eager", "sliding_window": 5, "num_local_experts": 4},
}


@pytest.mark.parametrize("case", OTHER_ATTENTION)
def test_attention_that_cannot_be_replaced_reads_gathered_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "GATHERED_BYTES", 0)
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 3)
    settings = dict(OTHER_ATTENTION[case])
    attention = settings.pop("attn_implementation")
    config = AutoConfig.for_model(settings.pop("kind"), **{**FAMILIES["llama"][1], **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().requires_grad_(False)
    engine = make_engine(model)
    for number in range(3):
        engine.add(request(str(number), random_prompt(number, 2 + 5 * number), 3, max_tokens=10, seed=number))
        engine.step()
    check(drain(engine), model)


def test_soft_caps_are_computed_for_models_that_load_with_sdpa() -> None:
    """Which would ignore them, unlike the policy."""
    settings = {**FAMILIES["llama"][1], "attn_logit_softcapping": 0.05}
    models = []
    for attention in (None, "eager"):
        torch.manual_seed(0)
        config = AutoConfig.for_model("gemma2", **settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        models.append(model.requires_grad_(False))
    assert models[0].config._attn_implementation == "sdpa"
    engine = make_engine(models[0])
    engine.add(request("0", random_prompt(0, 12), 3, max_tokens=10))
    check(drain(engine), models[1])


def test_rows_of_a_group_share_the_blocks_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 4)
    engine = make_engine()
    engine.add(request("g", random_prompt(0, 30), 8, max_tokens=4))
    engine.step()
    blocks = engine._forward.cache
    assert (blocks._num_shared, blocks._num_own) == (8, 8)
    engine.step()
    assert (blocks._num_shared, blocks._num_own) == (8, 8)
    drain(engine)
    assert blocks.num_blocks == 0


def test_short_rows_take_no_room_of_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 4)
    engine = make_engine()
    engine.add(request("long", random_prompt(0, 40), max_tokens=20))
    for number in range(15):
        engine.add(request(str(number), [1, 2], max_tokens=3))
    engine.step()
    assert engine._forward.cache._num_own == 10 + 15


# --- the limit ----------------------------------------------------------------------------------------------------


def full_load() -> list[GroupRequest]:
    """Groups that need more than 1 MiB, 512 blocks of 8 tokens, when they run together."""
    return [request(str(n), random_prompt(n, 8 + n), 16, max_tokens=45, seed=n, temperature=0.9) for n in range(6)]


def test_full_cache_preempts_groups_that_give_the_same_tokens_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 8)

    def run(kv_cache_mb: int) -> tuple[dict[str, GroupResult], int, int]:
        engine = make_engine(max_rows=96, kv_cache_mb=kv_cache_mb)
        for asked in full_load():
            engine.add(asked)
        results, most = {}, 0
        with capture_logs() as logs:
            while engine.num_running or engine.num_waiting:
                for ended in engine.step():
                    assert isinstance(ended, GroupResult)
                    results[ended.lease] = ended
                most = max(most, engine.cache_size_bytes)
        return results, most, sum("preempted" in entry["event"] for entry in logs)

    limited, most, num_preempted = run(1)
    free, unlimited, _ = run(0)
    assert most <= 1 << 20 < unlimited
    assert num_preempted > 0
    assert sorted(limited) == sorted(free)
    for lease, result in limited.items():
        for ours, theirs in zip(result.completions, free[lease].completions, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)


def test_listeners_get_each_token_of_a_preempted_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 8)
    engine = make_engine(max_rows=96, kv_cache_mb=1)
    heard: dict[tuple[str, int], list[int]] = {}
    for asked in full_load():

        def listener(index: int, ids: Any, _: Any, lease: str = asked.lease) -> None:
            heard.setdefault((lease, index), []).extend(ids)

        engine.add(GroupRequest(asked.lease, asked.prompt_ids, 16, asked.sampling, listener=listener))
    for lease, result in drain(engine).items():
        for index, completion in enumerate(result.completions):
            assert heard[lease, index] == completion.token_ids.tolist()


def test_group_that_fills_the_cache_alone_fails_by_name() -> None:
    engine = make_engine(max_rows=128, kv_cache_mb=1)
    engine.add(request("big", [1, 2], 70, max_tokens=CONTEXT))
    engine.add(request("small", [1, 2, 3], 2, max_tokens=5))
    ended = {}
    for _ in range(200):
        ended |= {one.lease: one for one in engine.step()}
        if not engine.num_running and not engine.num_waiting:
            break
    assert isinstance(ended["big"], GroupFailed)
    assert "70 completions of a prompt of 2 tokens fill the KV cache of 1 MiB" in ended["big"].reason
    assert "rollout.kv_cache_mb" in ended["big"].reason
    assert isinstance(ended["small"], GroupResult)
    engine.add(request("big", [1, 2], 4))  # the lease is free again
    assert list(drain(engine)) == ["big"]


def test_preempted_group_that_does_not_fit_alone_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 8)  # 512 blocks
    engine = make_engine(max_rows=128, kv_cache_mb=1)
    engine.add(request("first", [1, 2], max_tokens=50))
    engine.add(request("second", [3], 100, max_tokens=60))
    ended: dict[str, Any] = {}
    for _ in range(200):
        ended |= {one.lease: one for one in engine.step()}
        if not engine.num_running and not engine.num_waiting:
            break
    assert isinstance(ended["first"], GroupResult)
    assert isinstance(ended["second"], GroupFailed)
    assert "when the longest has 41 tokens" in ended["second"].reason
    assert not engine.ready


def test_prompt_beyond_the_cache_is_rejected() -> None:
    engine = make_engine(max_rows=128, kv_cache_mb=1)
    with pytest.raises(RequestError, match="128 completions do not fit into a KV cache of 1 MiB"):
        engine.add(request("g", random_prompt(0, 20), 128))


def test_cache_below_one_block_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 8192)
    with pytest.raises(ConfigError, match="kv_cache_mb is 1, less than one block"):
        make_engine(kv_cache_mb=1)


def test_values_that_are_not_finite_reach_no_later_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "GATHERED_BYTES", 0)
    engine = make_engine()
    engine.add(request("poisoned", random_prompt(0, 20), 3, max_tokens=9))
    engine.add(request("longer", random_prompt(1, 9), 2, max_tokens=30))
    engine.step()
    weight = engine.tensors()["model.layers.0.self_attn.v_proj.weight"]
    healthy = weight.clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    assert sorted(ended.lease for ended in engine.step()) == ["longer", "poisoned"]
    with torch.no_grad():
        weight.copy_(healthy)
    engine.add(request("g", random_prompt(2, 5), 3, max_tokens=20))
    check(drain(engine), make_model())
