"""Memory settings reduce memory, and change neither results nor names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from structlog.testing import capture_logs
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.settings.memory import MemorySettings
from starling.policy.train.loss import logprobs as logprobs_module
from starling.policy.train.loss.logprobs import head_logprobs
from starling.policy.train.memory.blocks import find_blocks
from starling.policy.train.memory.compiled import compile_blocks
from starling.policy.train.memory.offload import offload_activations
from starling.policy.train.memory.peak import PeakMemory
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.model.layout import attention_plan
from starling.policy.train.model.lm_head import LmHead, LogitTransform
from starling.policy.train.model.load import version_tensors

torch.set_num_threads(1)

IDS = torch.arange(60).view(2, 30) % 31


def train(model: Any, ids: Tensor = IDS) -> dict[str, Tensor]:
    """Return the gradients of a loss of all logits."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    (logits.float() * torch.linspace(-1.0, 1.0, logits.shape[-1])).tanh().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def kept_bytes(model: Any) -> int:
    """Return the bytes that the forward pass keeps for the backward pass."""
    with PeakMemory() as memory:
        output = model(input_ids=IDS, use_cache=False).logits
        size = memory.held_bytes
    del output
    return size


@pytest.mark.parametrize(
    ("kind", "checkpointing", "every"), covering(["qwen3", "llama"], ["full", "selective"], [1, 2])
)
def test_checkpointing_keeps_gradients_and_names(
    tiny: Callable[..., Any], kind: str, checkpointing: Any, every: int
) -> None:
    model, plain = tiny(kind), tiny(kind)
    apply_memory_settings(model, MemorySettings(checkpointing=checkpointing, checkpoint_every=every))
    found = train(model)
    for name, expected in train(plain).items():
        assert torch.equal(found[name], expected), name
    assert version_tensors(model).keys() == version_tensors(plain).keys()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not model.training


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointing_keeps_shared_prefixes(tiny: Callable[..., Any], checkpointing: Any) -> None:
    model = tiny()
    apply_memory_settings(model, MemorySettings(checkpointing=checkpointing))
    assert attention_plan(model).layout == "forest"


def test_checkpointing_reduces_peak_memory(tiny: Callable[..., Any]) -> None:
    def kept(**settings: Any) -> int:
        model = tiny(num_hidden_layers=4)
        apply_memory_settings(model, MemorySettings(**settings))
        return kept_bytes(model)

    none = kept()
    selective = kept(checkpointing="selective")
    every_second = kept(checkpointing="full", checkpoint_every=2)
    full = kept(checkpointing="full")
    assert full < 0.3 * none
    assert full < every_second < none
    assert full < selective < 0.8 * none


def test_checkpointing_recomputes_expert_routing() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    expected = train(plain)
    for checkpointing in ("full", "selective"):
        model = copy.deepcopy(plain)
        apply_memory_settings(model, MemorySettings(checkpointing=checkpointing))
        found = train(model)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("how", ["full", "selective", "offload", "compile"])
def test_checkpointing_model_copy_uses_its_own_weights(tiny: Callable[..., Any], how: str) -> None:
    """The reference of a KL term is a copy of a model that keeps changing."""
    model = tiny()
    if how == "offload":
        offload_activations(model, min_bytes=0, device_types={"cpu"})
    elif how == "compile":
        compile_blocks(model, backend="eager")
    else:
        apply_memory_settings(model, MemorySettings(checkpointing=how))
    before = train(model)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    found = train(reference)
    assert all(torch.equal(found[name], gradient) for name, gradient in before.items())
    assert not torch.equal(train(model)["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_offload_activations_keeps_gradients(tiny: Callable[..., Any], checkpointing: Any) -> None:
    model, plain = tiny(), tiny()
    apply_memory_settings(model, MemorySettings(checkpointing=checkpointing))
    offload_activations(model, min_bytes=512, device_types={"cpu"})
    found = train(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in train(plain).items())


class Projections(torch.nn.Module):
    """Three matrix products of one activation, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(16, 4) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs * 2.0
        return torch.cat([part(hidden) for part in self.parts])


def test_offload_activations_moves_each_once_and_no_weights() -> None:
    model, inputs = Projections(), torch.randn(50, 16)
    offload_activations(model, min_bytes=0, device_types={"cpu"})
    with PeakMemory() as memory:
        output = model(inputs)
        # The activation itself is gone; its copy, which takes as much, is there once.
        assert memory.held_bytes == output.nbytes + inputs.nbytes
    output.sum().backward()
    assert torch.equal(model.parts[0].weight.grad, torch.ones(4, 50) @ (inputs * 2.0))


class Views(torch.nn.Module):
    """Three products that save views of one activation."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs * 2.0
        return (hidden * hidden.t()).sum() + (hidden.view(-1)[None] @ hidden.view(-1)[:, None]).sum()


def test_offload_activations_moves_views_of_one_memory_once() -> None:
    expected, found = (torch.randn(40, 40, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    model = Views()
    model(expected.requires_grad_()).backward()
    offload_activations(model, min_bytes=0, device_types={"cpu"})
    with PeakMemory() as memory:
        output = model(found.requires_grad_())
        assert memory.held_bytes == output.nbytes + found.nbytes
    output.backward()
    assert torch.equal(found.grad, expected.grad)


def test_offload_activations_keeps_small_ones() -> None:
    model, inputs = Projections(), torch.randn(50, 16)
    offload_activations(model, min_bytes=inputs.nbytes + 1, device_types={"cpu"})
    with PeakMemory() as memory:
        output = model(inputs)
        assert memory.peak_bytes == inputs.nbytes + 2 * output.nbytes
    assert output.requires_grad


def test_offload_activations_on_cpu_warns(tiny: Callable[..., Any]) -> None:
    model = tiny()
    with capture_logs() as logs:
        apply_memory_settings(model, MemorySettings(offload_activations=True))
    assert "forward" not in vars(model)
    assert [entry["event"] for entry in logs] == [
        "policy.memory.offload_activations has no effect: the model is on the CPU"
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("checkpointing", "backend"), [("none", "eager"), ("full", "aot_eager")])
def test_compiled_blocks_share_code_for_all_sizes(tiny: Callable[..., Any], checkpointing: Any, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, plain = tiny(), tiny()
    apply_memory_settings(model, MemorySettings(checkpointing=checkpointing))
    compile_blocks(model, backend=backend)
    counts = []
    for ids in (IDS, IDS[:, :17], IDS[:, :24]):
        found = train(model, ids)
        for name, expected in train(plain, ids).items():
            assert (found[name] - expected).norm() <= 2e-6 * expected.norm(), name
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < counts[0] == counts[1] == counts[2] <= 4  # before and after the attention, with a break in between
    assert version_tensors(model).keys() == version_tensors(plain).keys()


def test_find_blocks_returns_largest_list() -> None:
    linear = torch.nn.Linear(4, 4)
    experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    block = torch.nn.Sequential(linear, experts)
    model = torch.nn.ModuleDict({"tower": experts, "layers": torch.nn.ModuleList([block])})
    assert find_blocks(model) == [block]


def test_find_blocks_ignores_vision_tower() -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 16}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    assert [id(block) for block in find_blocks(model)] == [id(layer) for layer in model.model.language_model.layers]


def test_find_blocks_without_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Linear has no list of blocks of one class: leave policy\.memory\.checkpointing"
    ):
        find_blocks(torch.nn.Linear(2, 2))


@pytest.mark.sample(3)
@pytest.mark.parametrize("with_entropy_gradient", [False, True])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform("cap", 5.0)])
@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(96, 8), (500, 8), (500, 128)])
def test_token_logprobs_peak_memory_is_about_one_chunk(
    with_entropy_gradient: bool,
    transform: LogitTransform,
    num_tokens: int,
    hidden_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs_module, "_SMALL_PART", 0)
    generator = torch.Generator().manual_seed(0)
    vocabulary, chunk_tokens = 4096, 96
    hidden, weight = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in [(num_tokens, hidden_size), (vocabulary, hidden_size)]
    )
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    with PeakMemory() as memory:
        logprobs, entropy = head_logprobs(
            hidden,
            LmHead(weight, None, transform),
            targets,
            0.9,
            with_entropy_gradient=with_entropy_gradient,
            chunk_tokens=chunk_tokens,
        )
        forward_peak = memory.peak_bytes
        loss = logprobs.sum() + entropy.sum() if with_entropy_gradient else logprobs.sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
    chunk_bytes = 2 * chunk_tokens * vocabulary
    backward_peak = memory.peak_bytes - sum(gradient.nbytes for gradient in gradients)
    assert chunk_bytes < max(forward_peak, backward_peak) <= 1.3 * chunk_bytes


def test_peak_memory_counts_live_tensors() -> None:
    outside = torch.zeros(1000)
    with PeakMemory() as memory:
        first = outside + 1
        view = first[10:]
        del first
        second = view + 1
        assert memory.held_bytes == 4000 + 3960
        del view, second
        assert memory.held_bytes == 0
        outside.mul_(2.0)
    assert memory.peak_bytes == 4000 + 3960
