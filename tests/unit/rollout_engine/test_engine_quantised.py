"""The embedded engine with quantised linear layers: sampling, and adoption of quantised weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tiny_models import drain, make_engine, make_model, random_prompt, reference_logprobs, request
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.quantization.granularity import PerRow
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

from starling.common.errors import ConfigError, WeightsError
from starling.common.settings import WeightsSettings
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.embedded.quantised import QuantisedLinear, quantise_linears
from starling.weightsync.offers.offer import Offer
from starling.weightsync.plan.layout import Layout, TensorSpec, item_bytes
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.quantise.formats import FORMATS
from starling.weightsync.quantise.layouts import received_layout
from starling.weightsync.quantise.recipe import linear_weights
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.modules import layout_of

PAGE = Path(__file__).parents[3] / "docs/how-to/low-precision.md"
FORMS = ("fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4")


def quantised_model(form: str, family: str = "qwen3", seed: int = 0) -> Any:
    model = make_model(family, seed)
    quantise_linears(model, linear_weights(form))
    return model


def plain_of(model: Any, family: str) -> Any:
    """Return a model of plain layers with the dequantised weights of `model`."""
    plain = make_model(family)
    plain.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if "_proj" not in name}, strict=False
    )
    for name, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear):
            plain.get_submodule(name).weight.copy_(layer.weight_as(torch.float32))
            if layer.bias is not None:
                plain.get_submodule(name).bias.copy_(layer.bias)
    return plain


def assert_same_bytes(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        one, other = (t.contiguous().flatten().view(torch.uint8) for t in (tensor, expected[name]))
        assert torch.equal(one, other), name


def adopt(engine: TransformersEngine, offer: Offer, source: Layout, *, in_place: bool = False) -> str:
    """Make `engine` adopt a version; return the digest of its weights afterwards."""
    plan = make_plan(source, engine.layout())
    report = engine.pull(
        offer, plan, deadline_s=30.0, cancelled=lambda: False, progress=lambda _: None, in_place=in_place
    )
    assert report.size_bytes == sum(tensor.nbytes for tensor in engine.tensors().values())
    adopted = engine.adopt("recompute")
    assert adopted.proven
    return adopted.root


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_quantised_engine_samples_from_the_dequantised_weights(form: str, family: str) -> None:
    model = quantised_model(form, family)
    plain, prompt = plain_of(model, family), random_prompt(1, 7)
    engine = make_engine(model)
    engine.add(request("one", prompt, 3, seed=5, max_tokens=12))
    for completion in drain(engine)["one"].completions:
        expected = reference_logprobs(plain, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        rounded = reference_logprobs(make_model(family), prompt, completion.token_ids)
        assert np.abs(completion.logprobs - rounded).max() > 1e-4  # those of the weights before they were quantised


def test_only_linear_layers_are_quantised() -> None:
    """Other tensors equal the policy's, and the codes equal torchao's."""
    original = make_model("qwen3_untied").state_dict()
    for form in ("fp8_row", "mxfp4"):
        tensors = make_engine(quantised_model(form, "qwen3_untied")).tensors()
        kept = [name for name, tensor in tensors.items() if tensor.dtype == torch.float32 and "_scale" not in name]
        assert kept == [name for name in original if "_proj" not in name]
        for name, weight in original.items():
            if "_proj" not in name or weight.shape[-1] % 32:  # torchao takes whole groups only
                continue
            if form == "fp8_row":
                preference = KernelPreference.TORCH
                made = Float8Tensor.from_hp(weight, granularity=PerRow(), kernel_preference=preference)
                codes, scales = made.qdata, made.scale
            else:
                scales, codes = to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)
            assert_same_bytes({"": tensors[name]}, {"": codes})
            assert_same_bytes({"": tensors[f"{name}_scale"]}, {"": scales})


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_are_pulled_and_verified(form: str) -> None:
    """The source quantises the policy's weights; the engine holds exactly the quantised weights."""
    source, prompt = dict(make_model(seed=1).named_parameters()), random_prompt(2, 5)
    layout = layout_of(source, "policy-0")
    model = quantised_model(form, seed=0)
    engine = make_engine(model, version=0)
    expected_tensors = received_layout(layout, linear_weights(form)).tensors
    assert {(t.name, t.shape, t.dtype) for t in engine.layout().tensors} == {
        (t.name, t.shape, t.dtype) for t in expected_tensors
    }
    engine.add(request("one", prompt, seed=3, max_tokens=6))
    engine.step()
    with Publisher(layout, transport="local", quantise=linear_weights(form)) as publisher:
        root = adopt(engine, publisher.publish(4, source), publisher.layout)
    assert_same_bytes(engine.tensors(), make_engine(quantised_model(form, seed=1)).tensors())
    (completion,) = drain(engine)["one"].completions
    assert completion.versions.tolist() == [0, 4, 4, 4, 4, 4]
    expected = reference_logprobs(plain_of(model, "qwen3"), prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[1:], expected[1:], atol=1e-5)
    with Publisher(engine.layout(), transport="local") as relay:  # a rollout offers what it holds
        other = make_engine(quantised_model(form, seed=2))
        offer = relay.publish(4, engine.tensors())
        assert adopt(other, offer, engine.layout(), in_place=True) == offer.root == root
    assert_same_bytes(other.tensors(), engine.tensors())
    for one in (engine, other):
        one.close()


def test_digest_detects_a_flipped_bit_of_a_code() -> None:
    source = dict(make_model(seed=1).named_parameters())
    engine = make_engine(quantised_model("mxfp4"))
    with (
        Publisher(layout_of(source, "policy-0"), transport="local", quantise=linear_weights("mxfp4")) as publisher,
        closing(Puller(engine.layout())) as puller,
    ):
        offer = publisher.publish(1, source)
        puller.pull(offer, make_plan(publisher.layout, engine.layout()), deadline_s=30.0)
        puller.switch(engine.tensors())
        assert puller.attest(engine.tensors(), offer) == offer.root
        for name in ("weight", "weight_scale"):
            held = engine.tensors()[f"model.layers.0.mlp.up_proj.{name}"].view(torch.uint8)
            held[3, 0] ^= 1
            assert puller.attest(engine.tensors(), offer) != offer.root
            held[3, 0] ^= 1
    engine.close()


def test_plan_rejects_a_replica_of_another_format() -> None:
    """Planning for a replica whose format differs from the published one fails with a tensor's name."""
    layout = layout_of(dict(make_model("qwen3_untied").named_parameters()), "policy-0")
    eight = received_layout(layout, linear_weights("fp8_row"))
    for other in (layout, received_layout(layout, linear_weights("mxfp4"))):
        with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.q_proj\.weight"):
            make_plan(eight, other)


def test_quantised_tensor_of_another_layer_type_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"h\.0\.attn\.c_attn\.weight is that of a Conv1D, .* leave weights\.quantise"
    ):
        quantised_model("fp8_row", "gpt2")


def test_quantised_tied_layer_is_rejected() -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj\.weight is tied to another tensor"):
        quantise_linears(model, linear_weights("mxfp4"))


def test_every_format_of_the_setting_is_documented() -> None:
    """The page gives its size relative to float32 and bfloat16."""
    assert get_args(WeightsSettings.model_fields["quantise"].annotation) == ("", *FORMS)
    page = PAGE.read_text()
    weight = TensorSpec(name="layer.weight", shape=(4096, 4096), dtype="bfloat16")
    for form in FORMS:
        parts = QuantSpec(tensor=weight, format=FORMATS[form]).tensors()
        size = sum(item_bytes(part) * math.prod(part.shape) for part in parts)
        shares = ", ".join(f"{round(size / (4096 * 4096 * width), 2):g}" for width in (4, 2))
        assert re.search(rf"\| `{form}` \|.*\| {shares} \|", page), (form, shares)
