"""Products in FP8 against an emulation of the formats, which layers have them, and what they leave as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from states_on_disk import save
from structlog.testing import capture_logs
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings, ModelSettings, WeightsSettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings, check_adapters
from starling.policy.train.checkpoint.header import find_state
from starling.policy.train.checkpoint.state import SavedState
from starling.policy.train.data.examples import SftExample
from starling.policy.train.fit import check_fit
from starling.policy.train.learner import Learner
from starling.policy.train.memory.compiled import compile_blocks
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.precision import float8, mx
from starling.policy.train.precision import layers as precision_layers
from starling.policy.train.precision.layers import check_precision, use_precision
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import FORMATS
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.tensors.quantise import dequantise, quantise

Make = Callable[..., Any]
KINDS = ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "mxfp8", "mxfp4")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(6, [4, 1]), (3, [2, 5])]

torch.set_num_threads(1)


def settings_of(kind: str = "fp8_rowwise", memory: dict[str, Any] | None = None, **changes: Any) -> PolicySettings:
    return PolicySettings.model_validate(
        {
            "precision": {"kind": kind} | changes,
            "memory": memory or {},
            "optimizer": {"learning_rate": 1e-6, "max_grad_norm": 0.0},
            "sft": {"optimizer": {"learning_rate": 1e-6, "max_grad_norm": 0.0}},
        }
    )


def learner_of(tiny: Make, settings: PolicySettings, dtype: torch.dtype = torch.float32) -> Learner:
    def load() -> Any:
        model = tiny().to(dtype)
        apply_memory_settings(model, settings.memory)
        use_precision(model, settings)
        return model

    return Learner(load, settings)


def supervise(learner: Learner, make_groups: Make, seed: int = 1) -> dict[str, float]:
    groups = make_groups(SHAPES, seed=seed)
    return learner.supervise([SftExample(group.prompt_ids, group.completion_ids) for group in groups], num_steps=9)


def gradients(learner: Learner) -> dict[str, Tensor]:
    assert learner.trainer is not None
    return {name: tensor.grad for name, tensor in learner.trainer.optimizer._trained.items() if tensor.grad is not None}


# --- the products ----------------------------------------------------------------------------------------------------


def rounded(tensor: Tensor, dtype: torch.dtype, over: int | None = None, *, power_of_2: bool = False) -> Tensor:
    """Return `tensor` as it is after encoding with one scale for all of it, or for what lies along dimension `over`."""
    largest = tensor.abs().max() if over is None else tensor.abs().amax(over, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double()).float()
    if power_of_2:
        scale = torch.exp2(torch.log2(scale).floor())
    return (tensor * scale).to(dtype).float() / scale


def in_blocks(tensor: Tensor, kind: str) -> Tensor:
    """Return `tensor` as it is after encoding with a scale for 32 numbers along dimension 1, as in `kind`."""
    padded = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % 32))
    blocks = padded.reshape(len(tensor), -1, 32)
    largest = blocks.abs().amax(2, keepdim=True)
    if kind == "mxfp8":  # the least scale with which nothing is clipped
        scale = torch.exp2(torch.log2(largest / torch.finfo(E4M3).max).ceil())
        blocks = (blocks / scale).to(E4M3).float() * scale
    else:  # as in the OCP specification
        scale = torch.exp2(torch.log2(largest).floor() - 2)
        codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nearest = (blocks.abs() / scale)[..., None].sub(codes).abs().argmin(-1)
        blocks = codes[nearest] * blocks.sign() * scale
    return blocks.reshape(padded.shape)[:, : tensor.shape[1]]


def products(kind: str, inputs: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, gradient of the inputs, and gradient of the weight, by the definition of each kind.

    Args:
        kind: of precision.
        inputs: [T, K].
        weight: [N, K].
        gradient: of the output, [T, N].
    """
    if kind == "mxfp4":
        x, w = in_blocks(inputs, kind), in_blocks(weight, kind)
        return x @ w.T, gradient @ w, gradient.T @ x
    if kind == "mxfp8":
        output = in_blocks(inputs, kind) @ in_blocks(weight, kind).T
        of_inputs = in_blocks(gradient, kind) @ in_blocks(weight.T, kind).T
        return output, of_inputs, in_blocks(gradient.T, kind) @ in_blocks(inputs.T, kind).T
    if kind == "fp8_tensorwise":
        x, w, g = rounded(inputs, E4M3), rounded(weight, E4M3), rounded(gradient, E5M2)
        return x @ w.T, g @ w, g.T @ x

    def by(tensor: Tensor, over: int | None) -> Tensor:
        return rounded(tensor, E4M3, over, power_of_2=True)

    output = by(inputs, 1) @ by(weight, 1).T
    if kind == "fp8_rowwise":
        return output, by(gradient, 1) @ by(weight, 0), by(gradient, 0).T @ by(inputs, 0)
    return output, by(gradient, 1) @ by(weight, None), gradient.T @ inputs


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_codes(kind: str) -> None:
    """Of a number of tokens that 16 does not divide, too."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96))
    inputs = torch.randn(1, 37, 64, generator=generator, requires_grad=True)
    gradient = torch.randn(1, 37, 96, generator=generator) * torch.logspace(-3, 0, 96)
    weight, bias = model[0].weight, model[0].bias
    (mx if kind.startswith("mx") else float8).replace_layers(model, ["0"], kind, emulate=True)
    assert model[0].weight is weight
    assert model[0].bias is bias
    output = model(inputs)
    output.backward(gradient)
    expected = products(kind, inputs.detach()[0], weight.detach(), gradient[0])
    torch.testing.assert_close(output.detach()[0], expected[0] + bias.detach())
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad[0], expected[1])
    torch.testing.assert_close(weight.grad, expected[2])
    torch.testing.assert_close(bias.grad, gradient[0].sum(0))
    exact = inputs.detach()[0] @ weight.detach().T
    assert not torch.allclose(expected[0], exact, rtol=1e-3), "codes are not exact"


def test_fp4_codes_of_a_weight_are_those_that_rollouts_receive() -> None:
    """A row of the unit matrix has exact codes, so its product is a column of the decoded weight."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    tensor = TensorSpec(name="0.weight", shape=(32, 64), dtype="float32")
    spec = QuantSpec(tensor=tensor, format=FORMATS["mxfp4"])
    expected = dequantise(quantise(model[0].weight.detach(), spec), spec)
    mx.replace_layers(model, ["0"], "mxfp4", emulate=True)
    assert torch.equal(model(torch.eye(64)).detach().T, expected)


# --- the layers ------------------------------------------------------------------------------------------------------


def names_of(model: Any, *endings: str) -> set[str]:
    return {f"model.layers.{number}.{ending}" for number in range(model.config.num_hidden_layers) for ending in endings}


ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def test_layers_of_the_blocks_compute_in_low_precision(tiny: Make) -> None:
    """Those whose sizes fit; and none of a router, an expert, an embedding or a head."""
    model = tiny()
    found = check_precision(model, settings_of())
    assert set(found.low) == names_of(model, *ATTENTION, *FEED_FORWARD)
    assert found.num_linear == 15
    found = check_precision(model, settings_of(skip=[r"layers\.0\.", "o_proj"]))
    assert set(found.low) == {f"model.layers.1.{name}" for name in (*ATTENTION[:3], *FEED_FORWARD)}
    model = tiny(intermediate_size=72)
    assert set(check_precision(model, settings_of()).low) == names_of(model, *ATTENTION)
    model = tiny()  # 16 columns of keys and values
    assert set(check_precision(model, settings_of("mxfp4")).low) == names_of(model, *ATTENTION[::3], *FEED_FORWARD)
    model = tiny("qwen3_moe")
    assert set(check_precision(model, settings_of()).low) == names_of(model, *ATTENTION)


def test_layers_fit_on_each_rank(tiny: Make) -> None:
    """Two ranks of tp have 8 columns each of keys and values."""
    model = tiny()
    settings = PolicySettings.model_validate({"precision": {"kind": "fp8_rowwise"}, "parallel": {"tp": 2}})
    assert set(check_precision(model, settings).low) == names_of(model, *ATTENTION[::3], *FEED_FORWARD)


def test_number_of_layers_is_logged_once(tiny: Make) -> None:
    precision_layers._log_once.cache_clear()
    with capture_logs() as lines:
        for _ in range(2):
            use_precision(tiny(), settings_of())
    assert [(one["event"], one["num_layers"], one["num_linear"]) for one in lines] == [("low_precision", 14, 15)]


# --- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_have_the_names_types_and_bits_of_a_model_without(tiny: Make, dtype: torch.dtype) -> None:
    plain, low = learner_of(tiny, settings_of("none"), dtype), learner_of(tiny, settings_of(), dtype)
    expected, found = plain.published(), low.published()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert layout_of(found, "policy-0") == layout_of(expected, "policy-0")
    assert list(low.exported()) == list(plain.exported())
    assert [type(one) for one in low.model.parameters()] == [type(one) for one in plain.model.parameters()]


def test_states_go_from_one_precision_to_another(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    first = learner_of(tiny, settings_of("fp8_tensorwise"), torch.bfloat16)
    supervise(first, make_groups)
    saved = SavedState.of(find_state(str(save(first, tmp_path, 1))))
    for kind in ("none", "fp8_rowwise"):
        other = learner_of(tiny, settings_of(kind), torch.bfloat16)
        assert other.resume(saved) == 1
        assert all(torch.equal(other.tensors[name], tensor) for name, tensor in first.tensors.items())
        supervise(other, make_groups, seed=2)


def test_updates_below_the_spacing_of_codes_accumulate(tiny: Make, make_groups: Make) -> None:
    """Each update is far below that of bfloat16, and of FP8: both see it after many, which the masters add up."""
    learner = learner_of(tiny, settings_of("fp8_tensorwise"), torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    before = learner.tensors[name].clone()
    supervise(learner, make_groups)
    assert learner.trainer is not None
    master = learner.trainer.optimizer.state_tensors()[f"master:{name}"]
    for number in (1, 5):
        if number > 1:
            for _ in range(number - 1):
                supervise(learner, make_groups)
        moved = (master - before.float()).abs()
        # AdamW moves by its learning rate in the direction of a gradient that stays the same.
        assert float(moved.median()) == pytest.approx(number * 1e-6, rel=0.2)
    large = before.abs() > 0.1
    assert torch.equal(learner.tensors[name][large], before[large]), "below the spacing of bfloat16"


def test_reference_has_the_precision_of_the_model(tiny: Make, make_groups: Make) -> None:
    """So a KL term to the same weights has no gradient, to the bit."""
    found = []
    for coefficient in (0.0, 10.0):
        settings = settings_of("fp8_tensorwise")
        algorithm = settings.algorithm.model_copy(update={"kl_coefficient": coefficient})
        learner = learner_of(tiny, settings.model_copy(update={"algorithm": algorithm}))
        learner.reinforce(make_groups(SHAPES, seed=2), step=1, num_steps=2)
        found.append(gradients(learner))
    without, with_term = found
    assert all(torch.equal(with_term[name], gradient) for name, gradient in without.items())


@pytest.mark.parametrize("kind", ["fp8_rowwise", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("memory", [{"checkpointing": "full"}, {"checkpointing": "selective"}], ids=str)
def test_recomputed_blocks_have_the_same_gradients(
    tiny: Make, make_groups: Make, memory: dict[str, Any], kind: str
) -> None:
    plain, recomputed = (learner_of(tiny, settings_of(kind, one)) for one in (None, memory))
    for learner in (plain, recomputed):
        supervise(learner, make_groups)
    expected, found = gradients(plain), gradients(recomputed)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["fp8_rowwise", "mxfp4"])
def test_compiled_blocks_have_the_same_gradients(tiny: Make, make_groups: Make, kind: str) -> None:
    plain, compiled = learner_of(tiny, settings_of(kind)), learner_of(tiny, settings_of(kind))
    compile_blocks(compiled.model, backend="aot_eager")
    for learner in (plain, compiled):
        supervise(learner, make_groups)
    expected, found = gradients(plain), gradients(compiled)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"precision": {"kind": "fp8_rowwise", "skip": ["("]}}, r"skip has '\(', which is not a regular expression"),
        ({"precision": {"skip": ["o_proj"]}}, r'skip has no effect with kind = "none": remove it, or set kind'),
        ({"precision": {"fsdp_all_gather": True}}, r'fsdp_all_gather has no effect with kind = "none"'),
        (
            {"precision": {"kind": "fp8_rowwise", "fsdp_all_gather": True}},
            r'"fp8_rowwise", and only codes with one scale for each tensor are gathered: set kind = "fp8_tensorwise"',
        ),
        (
            {"precision": {"kind": "fp8_tensorwise", "fsdp_all_gather": True}},
            r"has no effect where no rank shards weights: set it to false, or parallel\.dp_shard",
        ),
        (
            {"precision": {"kind": "mxfp4"}, "parallel": {"tp": 2}},
            r'kind = "mxfp4" is not available with parallel\.tp = 2: set tp = 1, or kind = "fp8_rowwise"',
        ),
    ],
)
def test_inconsistent_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        PolicySettings.model_validate(settings)


def test_adapters_are_refused() -> None:
    model = ModelSettings(lora=LoraSettings())
    with pytest.raises(ValueError, match=r"'fp8_rowwise' is not compatible with \[model\.lora\]: its layers would"):
        check_adapters(model, settings_of(), WeightsSettings())


def test_models_without_a_layer_that_fits_are_refused(tiny: Make) -> None:
    settings = settings_of(skip=["o_pro"])
    check_precision(tiny(), settings)
    odd = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    text = (
        r'"fp8_rowwise" finds no layer in the blocks of Qwen3ForCausalLM: of 14 linear ones, 12 are not skipped, and '
        r"have no two dimensions that are multiples of 16, such as model\.layers\.0\.self_attn\.q_proj\.weight of "
        r'24 x 24; set it to "none"'
    )
    with pytest.raises(ConfigError, match=text):
        check_precision(tiny(**odd), settings)
    with pytest.raises(ConfigError, match=text):  # a dry run has no weights
        check_fit(tiny(**odd).to("meta"), settings, "sft")
    with pytest.raises(
        ConfigError, match=r"'oproj', which matches the weight of no linear .* first of 14 is model\.lay"
    ):
        check_precision(tiny(), settings_of(skip=["oproj"]))
    with pytest.raises(ConfigError, match=r"leaves none of the 14 linear layers in .* remove a pattern"):
        check_precision(tiny(), settings_of(skip=["layers"]))
    ranks = PolicySettings(precision=settings.precision, parallel=ParallelSettings(tp=2))
    with pytest.raises(ConfigError, match=r"multiples of 32 \(16 on each of 2 ranks of tp\), such as model\.layers"):
        check_precision(tiny(**odd), ranks)


def test_mx_formats_refuse_float16(tiny: Make) -> None:
    with pytest.raises(ConfigError, match=r'"mxfp8" is not available with model\.dtype = "float16": set that to "bflo'):
        use_precision(tiny().half(), settings_of("mxfp8"))


def test_missing_torchao_is_named(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "starling.policy.train.precision.float8", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)  # what Python takes for a package that is not there
    text = r'kind = "fp8_rowwise" needs torchao .*: install starling-policy\[low-precision\], or set it to "none"'
    with pytest.raises(ConfigError, match=text):
        use_precision(tiny(), settings_of())
