"""Plain decoders: which models have one, and that it computes what the model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT, FAMILIES, drain, make_engine, make_model, random_prompt, reference_logprobs, request
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import attention
from starling.rollout.engine.embedded import cache, engine, forward
from starling.rollout.engine.embedded.attention import use_paged_attention
from starling.rollout.engine.embedded.decoder import TABLE_POSITIONS, PlainDecoder, plain_decoder

torch.set_num_threads(1)

WITH_BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
SCALED_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: FAMILIES[name] for name in FAMILIES if name not in ("gpt2", "deepseek_v3")},
    "llama_biases": ("llama", {**FAMILIES["llama"][1], **WITH_BIASES}),
    "llama_scaled_rope": ("llama", {**FAMILIES["llama"][1], "rope_parameters": SCALED_ROPE}),
    "qwen3_yarn": ("qwen3", {**FAMILIES["qwen3"][1], "rope_parameters": YARN}),
    "llama_gelu": ("llama", {**FAMILIES["llama"][1], "hidden_act": "gelu"}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": FAMILIES["gpt2"],
    "deepseek_v3": FAMILIES["deepseek_v3"],
    "qwen3_moe": (
        "qwen3_moe",
        {**FAMILIES["qwen3"][1], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "granite": ("granite", FAMILIES["llama"][1]),
}


def build(case: tuple[str, dict[str, Any]], dtype: torch.dtype = torch.float64) -> Any:
    kind, settings = case
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    use_paged_attention(model)
    return model.requires_grad_(False)


@torch.inference_mode()
def difference(model: Any, decoder: Any) -> float:
    """Return the largest difference of logits, relative to them, over two sequences that share 20 tokens."""
    forest = Forest((20, 20, 9), (-1, 0, 0))
    tokens = torch.tensor(random_prompt(1, 49))
    packed = decoder.packed_logits(
        tokens,
        torch.from_numpy(forest.positions),
        lambda layer, query, key, value, scale, window: attention(query, key, value, forest, scale, window=window),
    )
    found = 0.0
    for path in (torch.arange(40), torch.cat((torch.arange(20), torch.arange(40, 49)))):
        alone = model(input_ids=tokens[path][None], use_cache=False).logits[0]
        found = max(found, float((packed[path] - alone).abs().max() / alone.abs().max()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_plain_decoder_computes_what_the_model_does(name: str) -> None:
    model = build(CASES[name])
    decoder = plain_decoder(model)
    assert decoder is not None
    assert difference(model, decoder) < 2e-6  # The norms of transformers are in single precision.


def test_plain_decoder_rounds_as_the_model_does() -> None:
    model = build(CASES["qwen3"], torch.bfloat16)
    decoder = plain_decoder(model)
    assert decoder is not None
    assert difference(model, decoder) < 0.02


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_keep_their_modules(name: str) -> None:
    assert plain_decoder(build(OTHERS[name])) is None


def test_model_that_computes_more_than_its_layers_keeps_its_modules() -> None:
    model = build(CASES["llama"])
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert plain_decoder(model) is None


def test_model_with_other_linear_layers_keeps_its_modules() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    model = build(CASES["llama"])
    own = model.model.layers[1].mlp
    own.up_proj.__class__ = Scaled
    assert plain_decoder(model) is None


def test_plain_decoder_reads_the_weights_of_the_model() -> None:
    """Adoptions write into them, and `Module.to` replaces them."""
    engine, other = make_engine(model := make_model("llama")), make_model("llama", seed=1)
    engine.add(request("a", random_prompt(0, 5)))
    drain(engine)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = its.data.clone()
    engine.add(request("b", prompt := random_prompt(1, 5), max_tokens=9))
    completion = drain(engine)["b"].completions[0]
    expected = reference_logprobs(other, prompt, completion.token_ids)
    torch.testing.assert_close(torch.from_numpy(completion.logprobs), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_what_is_written_into_joined_weights_changes_what_the_decoder_computes(name: str) -> None:
    model = build(CASES[name])
    weights = {key: parameter.clone() for key, parameter in model.named_parameters()}
    decoder = plain_decoder(model)
    layer = model.model.layers[1]
    attention_inputs = attrgetter("q_proj", "k_proj", "v_proj")(layer.self_attn)
    for modules in (attention_inputs, (layer.mlp.gate_proj, layer.mlp.up_proj)):
        assert len({one.weight.untyped_storage().data_ptr() for one in modules}) == 1
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[key])
        parameter.copy_(parameter.flip(0))
    assert difference(model, decoder) < 2e-6


def set_data(module: Any) -> None:
    module.weight.data = module.weight.data.flip(0)


def set_parameters(module: Any) -> None:
    module.weight, module.bias = (torch.nn.Parameter(one.flip(0), False) for one in (module.weight, module.bias))


def remove_bias(module: Any) -> None:
    module.bias = None


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"])
@pytest.mark.parametrize("replace_in", [set_data, set_parameters, remove_bias])
def test_decoder_reads_parameters_that_replace_joined_ones(name: str, replace_in: Callable[[Any], None]) -> None:
    decoder = plain_decoder(model := build(CASES["llama_biases"]))
    replace_in(model.model.layers[1].get_submodule(name))
    assert difference(model, decoder) < 2e-6


def test_decoder_reads_modules_that_replace_joined_ones() -> None:
    decoder = plain_decoder(model := build(CASES["llama"]))
    own = model.model.layers[0].self_attn
    own.k_proj = torch.nn.Linear(own.k_proj.in_features, own.k_proj.out_features, dtype=torch.float64)
    assert difference(model, decoder) < 2e-6


def test_memory_of_joined_weights_that_were_replaced_is_freed() -> None:
    decoder = plain_decoder(model := build(CASES["llama_biases"], torch.float32))
    own, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    joined = [StorageWeakRef(one.untyped_storage()) for one in (own.q_proj.weight, own.v_proj.bias, mlp.up_proj.weight)]
    assert not any(one.expired() for one in joined)
    model.double()
    assert difference(model, decoder) < 2e-6
    assert all(one.expired() for one in joined)


def test_weights_that_layers_share_are_joined_once() -> None:
    model = build(CASES["llama"])
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(second, name).weight = getattr(first, name).weight
    decoder = PlainDecoder(model)
    joined = [layer._heads._weight for layer in decoder._layers[:2]]
    storages = [StorageWeakRef(one.untyped_storage()) for one in joined if one is not None]
    del joined
    assert difference(model, decoder) < 2e-6
    assert [one.expired() for one in storages] == [True, False]


def test_weights_are_not_joined_where_only_some_layers_have_biases() -> None:
    model = build(CASES["llama"])
    own = model.model.layers[0].self_attn
    own.q_proj.bias = torch.nn.Parameter(torch.randn(own.q_proj.out_features, dtype=torch.float64), False)
    decoder = plain_decoder(model)
    assert decoder is not None
    assert difference(model, decoder) < 2e-6


@pytest.mark.parametrize("name", ["llama", "llama_scaled_rope", "qwen3_yarn"])
@torch.inference_mode()
def test_rotations_of_a_table_are_those_that_the_model_computes(name: str) -> None:
    """Also when a longer sequence makes it grow, and beyond its end."""
    decoder = plain_decoder(build(CASES[name], torch.float32))
    assert decoder is not None
    tokens = torch.tensor(random_prompt(3, 8))

    def hidden(first: int, *, has_table: bool) -> torch.Tensor:
        decoder._has_table = has_table
        # Each query sees itself, turned: the output depends on its rotation.
        return decoder.hidden(tokens, torch.arange(first, first + 8), lambda layer, query, key, value, *_: query)

    for first in (0, 3, 250, 1000, TABLE_POSITIONS - 4):
        assert torch.equal(hidden(first, has_table=True), hidden(first, has_table=False))


@pytest.mark.parametrize("gathered_bytes", [0, 1 << 20], ids=["in place", "gathered"])
def test_groups_that_join_are_prefilled_in_the_pass_that_decodes_the_others(
    gathered_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "GATHERED_BYTES", gathered_bytes)
    passes: list[int] = []
    hidden = PlainDecoder.hidden

    def counted(self: PlainDecoder, token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        passes.append(len(token_ids))
        return hidden(self, token_ids, *arguments)

    engine = make_engine(make_model())
    monkeypatch.setattr(PlainDecoder, "hidden", counted)
    for number in range(3):
        scored = replace(
            request(str(number), random_prompt(number, 6 + number), 2 + number, seed=number), score_prompt=True
        )
        engine.add(scored)
        engine.step()
    # The newest token of each row, and the prompt of the group that joins, once.
    assert passes == [6, 2 + 7, 5 + 8]
    for result in drain(engine).values():
        prompt = result.prompt_ids.tolist()
        assert result.prompt_logprobs is not None
        expected = reference_logprobs(make_model(), prompt[:1], prompt[1:])
        np.testing.assert_allclose(result.prompt_logprobs.logprobs, expected, rtol=1e-5, atol=1e-5)
        for completion in result.completions:
            expected = reference_logprobs(make_model(), prompt, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_long_prompt_that_is_scored_is_prefilled_in_parts_beside_running_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its logits at once would take gigabytes."""
    for module in (forward, engine):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 8)
    sizes: list[int] = []
    logits = PlainDecoder.logits

    def counted(self: PlainDecoder, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(self, hidden)

    made = make_engine(make_model())
    made.add(request("first", [1, 2], max_tokens=30))
    made.step()
    monkeypatch.setattr(PlainDecoder, "logits", counted)
    made.add(replace(request("long", random_prompt(3, 50), 2, max_tokens=3), score_prompt=True))
    made.step()
    assert max(sizes) == 1
    result = drain(made)["long"]
    assert result.prompt_logprobs is not None
    expected = reference_logprobs(make_model(), random_prompt(3, 50)[:1], random_prompt(3, 50)[1:])
    np.testing.assert_allclose(result.prompt_logprobs.logprobs, expected, rtol=1e-5, atol=1e-5)
