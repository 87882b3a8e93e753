"""The embedded engine with adapters: it adopts only adapters, and generates with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import GROUPED, drain, make_engine, make_model, random_prompt, reference_logprobs, request
from transformers import AutoConfig, AutoModelForCausalLM

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.policy.train.model.load import load_model, version_tensors
from starling.rollout.engine.embedded.lora import cache_weight_norms
from starling.rollout.engine.embedded.model import build_model, live_tensors
from starling.weightsync.tensors.adapters import add_adapters, is_adapter

torch.set_num_threads(1)

FORMS = {
    "lora": LoraSettings(rank=4, rslora=True),
    "dora": LoraSettings(rank=4, dora=True, targets=r".*(q|up|down)_proj"),
    "experts": LoraSettings(rank=4),
    "whole": LoraSettings(rank=4, targets=("v_proj",), modules_to_save=("embed_tokens", "lm_head")),
}


def small_experts() -> Any:
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **GROUPED, **experts))


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_sampled_logprobs_equal_those_of_the_policy(tmp_path: Path, form: str) -> None:
    (small_experts() if form == "experts" else make_model("qwen3_untied")).save_pretrained(tmp_path)
    policy = load_model(tmp_path)
    add_adapters(policy, FORMS[form], seed=5)
    model = build_model(tmp_path, dtype="float32", device="cpu", weights=False, lora=FORMS[form])
    engine = make_engine(model)
    trained, live = version_tensors(policy), engine.tensors()
    assert list(live) == list(trained), "both sides must have the same adapters and no other ones"
    assert all(is_adapter(name) for name in live)

    prompt = random_prompt(1, 9)
    engine.add(request("long", prompt, 3, max_tokens=24))
    for _ in range(8):
        engine.step()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in trained.items():
        tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
        live[name].copy_(tensor)
    engine.set_version(1)
    engine.add(request("new", prompt, 3, max_tokens=12))
    results = drain(engine)
    assert {int(v) for completion in results["long"].completions for v in completion.versions} == {0, 1}
    for completion in results["new"].completions:
        expected = reference_logprobs(policy, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        without = reference_logprobs(load_model(tmp_path), prompt, completion.token_ids)
        assert abs(without - expected).max() > 1e-2, "the adapters must change the log-probabilities"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_weight_norms_are_bitwise_equal(tmp_path: Path, dtype: str) -> None:
    make_model("qwen2").save_pretrained(tmp_path)  # with biases
    model, peft = (
        build_model(tmp_path, dtype=dtype, device="cpu", weights=False, lora=LoraSettings(rank=4, dora=True))
        for _ in range(2)
    )
    ids, kept = torch.tensor([random_prompt(2, 11)]), cache_weight_norms(model)
    assert kept
    results = []
    for _ in range(2):
        for one, other in zip(live_tensors(model).values(), live_tensors(peft).values(), strict=True):
            one.add_(0.1)
            other.copy_(one)
        for layer in kept:
            layer.forget()
        results.append(model(ids).logits)
        assert torch.equal(results[-1], peft(ids).logits)
        assert torch.equal(results[-1], model(ids).logits)
    assert not torch.equal(*results)


def test_adapters_need_their_base_weights(tmp_path: Path) -> None:
    make_model().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_model(tmp_path, dtype="float32", weights=False, lora=LoraSettings())
    assert live_tensors(build_model(tmp_path, dtype="float32", device="cpu", weights=False))
