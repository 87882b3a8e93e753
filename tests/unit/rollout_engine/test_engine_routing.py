"""Recorded experts of the embedded engine, against those of a plain forward pass over the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plain_routing import chosen_experts
from tiny_models import FAMILIES as FAMILIES_OF_ENGINES
from tiny_models import GROUPED, drain, make_engine, make_model, request
from transformers import AutoConfig, AutoModelForCausalLM

from starling.algo.routing import is_recorded, no_experts
from starling.common.wire.messages import GenerateGroup, Prompt, Sampling, Status
from starling.rollout.engine.base import GroupResult, RequestError
from starling.rollout.shell.results import generated_message, interrupted_message, read_partials

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5, "layer_types": None},
    "deepseek_v3": FAMILIES_OF_ENGINES["deepseek_v3"][1] | {"head_dim": None, "n_routed_experts": 8},
    "many experts": {"num_experts": 300, "num_experts_per_tok": 3, "moe_intermediate_size": 8},
}
ROUTED: dict[str, Any] = {"routing": "replayed", "max_tokens": 9, "seed": 3}


def mixture(kind: str = "qwen3_moe") -> Any:
    settings = {name: value for name, value in (GROUPED | FAMILIES[kind]).items() if value is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_moe" if kind == "many experts" else kind, **settings)
    )
    return model.eval().requires_grad_(False)


def generate(engine: Any, *requests: Any) -> dict[str, GroupResult]:
    for one in requests:
        engine.add(one)
    found = {}
    for _ in range(200):
        for result in engine.step():
            assert isinstance(result, GroupResult), result
            found[result.lease] = result
    assert len(found) == len(requests)
    return found


def check(model: Any, result: GroupResult) -> None:
    """Compare the recorded experts with those of a plain pass."""
    assert result.prompt_routing is not None
    prompt = result.prompt_ids.tolist()
    for completion in result.completions:
        expected = chosen_experts(model, [*prompt, *completion.token_ids.tolist()]).numpy()
        assert completion.routing is not None
        assert len(completion.routing) == len(completion.token_ids)
        assert is_recorded(completion.routing).tolist() == [True] * (len(completion.token_ids) - 1) + [False]
        assert result.prompt_routing.tolist() == expected[: len(prompt)].tolist()
        assert completion.routing[:-1].tolist() == expected[len(prompt) : -1].tolist()


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_recorded_experts_are_those_of_a_plain_pass(kind: str) -> None:
    engine = make_engine(mixture(kind))
    found = generate(
        engine, request("a", [1, 2, 3], 3, **ROUTED), request("b", [4, 5], 2), request("c", [6] * 7, 1, **ROUTED)
    )
    model = mixture(kind)
    for lease in "ac":
        check(model, found[lease])
    assert found["b"].prompt_routing is None
    assert all(one.routing is None for one in found["b"].completions)
    dtype = np.uint16 if kind == "many experts" else np.uint8
    assert found["a"].prompt_routing is not None
    assert found["a"].prompt_routing.dtype == dtype


@pytest.mark.parametrize("exclusive", [False, True])
def test_interrupted_group_resumes_with_its_experts(*, exclusive: bool) -> None:
    """Also through the wire, where the last token's experts are not recorded yet; the next engine computes it."""
    whole = request("a", [1, 2, 3], 2, **ROUTED)
    engine = make_engine(mixture(), exclusive=exclusive)
    engine.add(whole)
    for _ in range(4):
        assert not engine.step()
    partials = engine.interrupt("a")
    assert partials is not None
    message, buffers = interrupted_message("a", partials, "it leaves", 1.0)
    assert message.tensors[-1].name == "routing"
    order = GenerateGroup(
        lease="a", purpose="train", prompt=Prompt(id="p"), num_completions=2, sampling=Sampling(max_tokens=9),
        min_version=0, partial=message.partial, tensors=message.tensors,
    )  # fmt: skip
    resumed = read_partials(order, buffers)
    other = make_engine(mixture(), exclusive=exclusive)
    result = generate(other, replace(whole, partial=resumed))["a"]
    check(mixture(), result)
    # What was recorded stays, whatever the next engine's own routers choose.
    assert resumed[0].routing is not None
    turned = np.where(is_recorded(resumed[0].routing)[:, None, None], (resumed[0].routing + 1) % 8, 255)
    strange = replace(resumed[0], routing=turned.astype(np.uint8))
    result = generate(make_engine(mixture(), exclusive=exclusive), replace(whole, partial=(strange, resumed[1])))["a"]
    routing = result.completions[0].routing
    assert routing is not None
    num = len(turned) - 1
    assert routing[:num].tolist() == turned[:num].tolist()
    assert is_recorded(routing)[num]


def test_experts_of_an_ended_completion_and_of_short_ones_are_sent() -> None:
    result = generate(make_engine(mixture()), request("a", [1, 2, 3], 2, **(ROUTED | {"max_tokens": 1})))["a"]
    assert all(one.status is Status.TRUNCATED for one in result.completions)
    message, buffers = generated_message(result, lambda ids: "", 1.0)
    assert [one.name for one in message.tensors[4:]] == ["prompt_routing", "routing"]
    routing = np.frombuffer(buffers[-1], np.uint8).reshape(message.tensors[-1].shape)
    assert routing.shape == (2, 2, 3)
    assert not is_recorded(routing).any()
    assert is_recorded(np.frombuffer(buffers[-2], np.uint8).reshape(message.tensors[-2].shape)).all()


def test_preempted_group_keeps_its_experts() -> None:
    model = mixture()
    engine = make_engine(model, kv_cache_mb=1, max_rows=16, max_model_len=64)
    engine._forward.cache.max_blocks = 6
    found = generate(
        engine,
        request("a", [1] * 20, 2, **(ROUTED | {"max_tokens": 40})),
        request("b", [2] * 20, 2, **(ROUTED | {"max_tokens": 40})),
    )
    for result in found.values():
        check(mixture(), result)


def test_recomputed_cache_leaves_what_was_recorded() -> None:
    engine = make_engine(mixture())
    engine.add(request("a", [1, 2, 3], 2, **ROUTED))
    for _ in range(3):
        engine.step()
    engine._recompute()
    for result in drain(engine).values():
        check(mixture(), result)


def test_models_without_experts_and_other_experts_are_refused() -> None:
    with pytest.raises(RequestError, match="the model has no experts whose choice is recorded"):
        make_engine(make_model()).add(request("a", [1, 2], **ROUTED))
    engine = make_engine(mixture())
    engine.add(request("a", [1, 2], **ROUTED))
    engine.step()
    partials = engine.interrupt("a")
    assert partials is not None
    for routing in (no_experts(1, np.zeros((0, 1, 3), np.uint8)), np.full((1, 2, 3), 4, np.uint8)):
        wrong = replace(partials[0], routing=routing)
        with pytest.raises(RequestError, match="cannot be resumed"):
            engine.add(replace(request("a", [1, 2], **ROUTED), partial=(wrong,)))
