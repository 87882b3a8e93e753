"""Log-probabilities in chunks: equal to those of the model's own logits, in bounded memory."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from structlog.testing import capture_logs
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.data.packing import MicrobatchInputs, PromptBlock, pack_sequences, to_tensors
from starling.policy.train.loss.logprobs import head_logprobs, token_logprobs
from starling.policy.train.model.lm_head import LmHead, LogitTransform, find_lm_head, trained_logits

torch.set_num_threads(1)

FINISHES = {
    "llama": LogitTransform(),
    "qwen2": LogitTransform(),
    "qwen3": LogitTransform(),
    "qwen3_moe": LogitTransform(),
    "gemma2": LogitTransform("cap", 30.0),
    "gemma3_text": LogitTransform("cap", 3.0),
    "granite": LogitTransform("divide", 7.0),
    "cohere": LogitTransform("multiply", 0.0625),
}


def make(kind: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Make a tiny model of an architecture by name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    special: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        "gemma2": {"head_dim": 8, "final_logit_softcapping": 30.0},
        "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 3.0},
        "granite": {"logits_scaling": 7.0},
    }
    config = AutoConfig.for_model(kind, **(shape | special.get(kind, {}) | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_inputs() -> MicrobatchInputs:
    """Two prompts with three completions, packed into one microbatch of 17 trained tokens."""
    generator = np.random.default_rng(0)
    token_ids = generator.integers(61, size=17).astype(np.int32)
    prompted = [
        PromptBlock(generator.integers(61, size=4).astype(np.int32), ((0, 6), (6, 7))),
        PromptBlock(generator.integers(61, size=3).astype(np.int32), ((7, 17),)),
    ]
    batch = pack_sequences(prompted, token_ids, 1000, layout="rows")
    (microbatch,) = batch.plan
    return to_tensors(batch, microbatch)


def by_logits(
    logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0, *, with_entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the same for all tokens at once."""
    logs = torch.log_softmax(logits.float() / torch.as_tensor(temperature).reshape(-1, 1), dim=-1)
    entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(-1, targets[:, None])[:, 0], entropy if with_entropy_gradient else entropy.detach()


def gradients(model: Any, logprobs: Tensor, entropy: Tensor | None = None) -> dict[str, Tensor]:
    """Return the gradient of a loss with a different weight for each token."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    loss = (weights * logprobs).sum()
    if entropy is not None:
        loss = loss + (weights.flip(0) * entropy).sum()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        distance = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert distance <= tolerance, name


@pytest.mark.parametrize(("kind", "tied"), covering(FINISHES, [True, False]))
def test_token_logprobs_equal_each_architectures_own_code(kind: str, tied: bool) -> None:
    model, inputs = make(kind, tie_word_embeddings=tied), make_inputs()
    temperature = torch.linspace(0.5, 1.5, 17)
    expected, expected_entropy = by_logits(trained_logits(model, inputs), inputs.targets, temperature)
    expected_gradients = gradients(model, expected)
    head = find_lm_head(model)
    assert head is not None
    assert head.transform == FINISHES[kind]
    for chunk_tokens in (1000, 5, 2):
        logprobs, entropy = token_logprobs(model, inputs, temperature, chunk_tokens=chunk_tokens)
        assert not entropy.requires_grad
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=2e-6)
        assert_same(gradients(model, logprobs), expected_gradients, 2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_single_float32_chunk_is_bitwise_equal(temperature: float) -> None:
    model, inputs = make("qwen3"), make_inputs()
    expected, expected_entropy = by_logits(trained_logits(model, inputs), inputs.targets, temperature)
    expected_gradients = gradients(model, expected)
    logprobs, entropy = token_logprobs(model, inputs, temperature, chunk_tokens=17)
    assert torch.equal(logprobs, expected)
    assert torch.equal(entropy, expected_entropy)
    assert_same(gradients(model, logprobs), expected_gradients, 1e-6)


@pytest.mark.parametrize("chunk_tokens", [17, 5, 2])
def test_token_logprobs_graph_is_differentiated_twice(chunk_tokens: int) -> None:
    """The first time uses up the probabilities that the forward pass has kept."""
    model, inputs = make("llama"), make_inputs()
    logprobs, _ = token_logprobs(model, inputs, 0.7, chunk_tokens=chunk_tokens)
    expected = gradients(model, by_logits(trained_logits(model, inputs), inputs.targets, 0.7)[0])
    for retain_graph in (True, False):
        model.zero_grad(set_to_none=True)
        (torch.linspace(-1.0, 2.0, len(logprobs)) * logprobs).sum().backward(retain_graph=retain_graph)
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert_same(found, expected, 2e-6)


@pytest.mark.parametrize("keeps", [True, False])
def test_head_logprobs_of_no_tokens_have_a_gradient_of_zero(keeps: bool) -> None:
    """As on a rank to which a microbatch gives no trained token."""
    model = make("llama")
    head = find_lm_head(model)
    assert head is not None
    hidden = torch.zeros(0, head.weight.shape[1], requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = head_logprobs(hidden, head, targets, chunk_tokens=8, keeps_probabilities=keeps)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


def test_probabilities_are_kept_for_a_backward_pass_alone() -> None:
    model, inputs = make("llama"), make_inputs()

    def kept(**options: Any) -> Tensor | None:
        logprobs, _ = token_logprobs(model, inputs, chunk_tokens=17, **options)
        node: Any = logprobs.grad_fn
        return None if node is None else node.probabilities

    found = kept()
    assert found is not None
    torch.testing.assert_close(found.sum(dim=1), torch.ones(17))
    assert kept(keeps_probabilities=False) is None
    assert kept(with_entropy_gradient=True) is None
    with torch.no_grad():
        assert kept() is None


@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text"])
@pytest.mark.parametrize("chunk_tokens", [1000, 5, 2])
def test_token_logprobs_entropy_gradient(kind: str, chunk_tokens: int) -> None:
    model, inputs = make(kind), make_inputs()
    expected = by_logits(trained_logits(model, inputs), inputs.targets, 0.8, with_entropy_gradient=True)
    expected_gradients = gradients(model, *expected)
    found = token_logprobs(model, inputs, 0.8, with_entropy_gradient=True, chunk_tokens=chunk_tokens)
    assert_same(gradients(model, *found), expected_gradients, 2e-6)
    only_entropy = token_logprobs(model, inputs, 0.8, with_entropy_gradient=True, chunk_tokens=chunk_tokens)[1]
    expected_gradients = gradients(
        model, by_logits(trained_logits(model, inputs), inputs.targets, 0.8, with_entropy_gradient=True)[1]
    )
    assert_same(gradients(model, only_entropy), expected_gradients, 2e-6)


def test_model_of_an_inconsistent_configuration_is_refused() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=1, num_key_value_heads=4))
    with pytest.raises(ConfigError, match=r"a Qwen3ForCausalLM, cannot compute .* its config.json is not consistent"):
        find_lm_head(model)


def test_token_logprobs_unknown_logit_transform_uses_model_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make("llama"), make_inputs()
    forward = type(model).forward

    def odd(self: Any, **arguments: Any) -> Any:
        output = forward(self, **arguments)
        output.logits = output.logits + output.logits.sin()
        return output

    monkeypatch.setattr(type(model), "forward", odd)
    expected = by_logits(trained_logits(model, inputs), inputs.targets, 0.8, with_entropy_gradient=True)
    expected_gradients = gradients(model, *expected)
    with capture_logs() as logs:
        for _ in range(2):
            found = token_logprobs(model, inputs, 0.8, with_entropy_gradient=True, chunk_tokens=2)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
            assert_same(gradients(model, *found), expected_gradients, 2e-6)
    assert [entry["model"] for entry in logs] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "cohere"])
def test_token_logprobs_bfloat16_rounds_like_the_model(kind: str) -> None:
    """Otherwise importance ratios would differ from 1."""
    model, inputs = make(kind, dtype=torch.bfloat16), make_inputs()
    expected, _ = by_logits(trained_logits(model, inputs), inputs.targets, 0.7)
    for chunk_tokens in (1000, 5, 2):
        logprobs, _ = token_logprobs(model, inputs, 0.7, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_token_logprobs_frozen_output_layer_has_no_gradient() -> None:
    model, inputs = make("llama"), make_inputs()
    expected = gradients(model, by_logits(trained_logits(model, inputs), inputs.targets)[0])
    model.lm_head.weight.requires_grad_(False)
    found = gradients(model, token_logprobs(model, inputs, chunk_tokens=2)[0])
    del expected["lm_head.weight"]
    assert_same(found, expected, 2e-6)


def test_token_logprobs_model_copy_uses_its_own_weights() -> None:
    model, inputs = make("qwen3"), make_inputs()
    before, _ = token_logprobs(model, inputs, chunk_tokens=2)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(token_logprobs(reference, inputs, chunk_tokens=2)[0], before)
    assert not torch.equal(token_logprobs(model, inputs, chunk_tokens=2)[0], before)


@examples(40)
@given(
    num_tokens=st.integers(1, 70),
    vocabulary=st.integers(2, 150),
    chunk_tokens=st.integers(1, 80),
    with_bias=st.booleans(),
    transform=st.sampled_from(
        [LogitTransform(), LogitTransform("cap", 2.0), LogitTransform("multiply", 0.3), LogitTransform("divide", 3.0)]
    ),
    seed=st.integers(0, 99),
)
def test_token_logprobs_any_chunking_agrees_with_float64(
    num_tokens: int, vocabulary: int, chunk_tokens: int, with_bias: bool, transform: LogitTransform, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in [(num_tokens, 6), (vocabulary, 6), (vocabulary,)]
    )
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    temperature = 0.5 + torch.rand(num_tokens, generator=generator)
    outside = torch.randn(2, num_tokens, generator=generator)
    head = LmHead(weight, bias if with_bias else None, transform)
    found = head_logprobs(hidden, head, targets, temperature, with_entropy_gradient=True, chunk_tokens=chunk_tokens)
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    found_gradients = torch.autograd.grad(found, inputs, tuple(outside))

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = exact[0] @ exact[1].T + (exact[2] if with_bias else 0.0)
    value = transform.value
    logits = {
        "nothing": lambda: logits,
        "cap": lambda: value * torch.tanh(logits / value),
        "multiply": lambda: logits * value,
        "divide": lambda: logits / value,
    }[transform.kind]()
    logs = torch.log_softmax(logits / temperature.double()[:, None], dim=-1)
    expected = logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    expected_gradients = torch.autograd.grad(expected, exact, tuple(outside.double()))
    for one, other in zip([*found, *found_gradients], [*expected, *expected_gradients], strict=True):
        assert one.dtype == torch.float32
        assert (one.double() - other).norm() <= 3e-6 * (1.0 + other.norm())


def test_token_logprobs_bfloat16_accumulates_in_float32() -> None:
    """In 16 blocks, the gradients are about as close to the exact ones as in one block."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        (0.3 * torch.randn(shape, generator=generator)).bfloat16().requires_grad_() for shape in [(128, 16), (2048, 16)]
    )
    targets = torch.randint(2048, (128,), generator=generator)

    def distance(chunk_tokens: int) -> list[float]:
        logprobs, _ = head_logprobs(hidden, LmHead(weight, None, LogitTransform()), targets, chunk_tokens=chunk_tokens)
        found = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        assert [gradient.dtype for gradient in found] == [torch.bfloat16] * 2
        return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]

    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logs = torch.log_softmax(doubles[0] @ doubles[1].T, dim=-1)
    exact = torch.autograd.grad(logs.gather(-1, targets[:, None]).sum(), doubles)
    for whole, cut in zip(distance(128), distance(8), strict=True):
        assert cut <= 1.5 * whole + 1e-4
