"""Attention of models over packed forests: gradients against one sequence at a time, and which models take a forest."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from types import MethodType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from starling.common.errors import ConfigError
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.train.data.examples import SftExample
from starling.policy.train.data.groups import IntArray
from starling.policy.train.data.packing import PackedBatch, PromptBlock, pack_sequences, to_tensors
from starling.policy.train.memory.compiled import compile_blocks
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.model.attention import PACKED
from starling.policy.train.model.layout import attention_plan
from starling.policy.train.model.lm_head import trained_logits
from starling.policy.train.sft import SftTrainer

torch.set_num_threads(1)

VOCABULARY = 509
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=8, **EXPERTS),
    "qwen3 with windows": Qwen3Config(**SIZES, head_dim=8, **WINDOW),
    "mistral": MistralConfig(**SIZES, head_dim=8, sliding_window=9),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=0.5),
    "gpt_oss": GptOssConfig(
        **SIZES, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None
    ),
}


def make(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[kind])).eval()
    return in_double(model) if dtype == torch.float64 else model


def in_double(model: Any) -> Any:
    """Return `model` without its norms and routers that compute in single precision whatever the dtype."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
            elif isinstance(child, Qwen3MoeTopKRouter):
                child.forward = MethodType(route, child)  # type: ignore[method-assign]
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double().eval()


def route(router: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return logits, weights and experts of each token, as `Qwen3MoeTopKRouter` does."""
    logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
    weights, experts = logits.softmax(-1).topk(router.top_k)
    return logits, weights / weights.sum(-1, keepdim=True), experts


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[IntArray, IntArray]]:
    """Draw prompts with completions that share beginnings: turns, branches, documents; some share none."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    paths: list[IntArray] = []
    for _ in range(draw(st.integers(2, 6))):
        kept = generator.integers(VOCABULARY, size=0)
        if paths:
            other = paths[draw(st.integers(0, len(paths) - 1))]
            kept = other[: draw(st.integers(0, len(other)))]
        tail = generator.integers(VOCABULARY, size=draw(st.integers(1, 40)))
        paths.append(np.concatenate([kept, tail, tail[:1]]).astype(np.int32))
    cuts = [draw(st.integers(1, len(path) - 1)) for path in paths]
    return [(path[:cut], path[cut:]) for path, cut in zip(paths, cuts, strict=True)]


Gradients = dict[str, Tensor]


def gradients(model: Any, loss: Tensor) -> Gradients:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def alone(model: Any, sequences: Sequence[tuple[IntArray, IntArray]], weights: Tensor) -> Gradients:
    """Return the gradient of the weighted log-probabilities of all completions, one sequence at a time."""
    total: Gradients = {}
    end = 0
    for prompt, completion in sequences:
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        start, end = end, end + len(completion)
        for name, own in gradients(model, (logprobs * weights[start:end]).sum()).items():
            total[name] = total[name] + own if name in total else own
    return total


def packed(model: Any, batch: PackedBatch, weights: Tensor) -> Gradients:
    total: Gradients = {}
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch)
        logprobs = trained_logits(model, inputs).log_softmax(-1).gather(-1, inputs.targets[:, None])[:, 0]
        own = gradients(model, (logprobs * weights[torch.from_numpy(inputs.tokens)]).sum())
        for name, one in own.items():
            total[name] = total[name] + one if name in total else one
    return total


def check(kind: str, dtype: torch.dtype, sequences: Sequence[tuple[IntArray, IntArray]], budget: int) -> None:
    plain, model = make(kind, dtype), make(kind, dtype)
    if kind in ("gemma2", "gpt_oss"):  # only the eager attention of transformers has soft caps and sinks
        plain.set_attn_implementation("eager")
    assert attention_plan(model).layout == "forest"
    token_ids = np.concatenate([completion for _, completion in sequences])
    ends = np.cumsum([len(completion) for _, completion in sequences]).tolist()
    blocks = [
        PromptBlock(prompt, ((end - len(completion), end),))
        for (prompt, completion), end in zip(sequences, ends, strict=True)
    ]
    weights = torch.linspace(-1.0, 1.0, len(token_ids), dtype=dtype)
    found = packed(model, pack_sequences(blocks, token_ids, budget), weights)
    bound = 1e-10 if dtype == torch.float64 else 5e-6
    gradient = alone(plain, sequences, weights)
    norms = {name: float(torch.linalg.vector_norm(expected)) for name, expected in gradient.items()}
    # A token that sees only itself gives the projections of queries and keys no gradient but for rounding.
    rounding = 4 * torch.finfo(dtype).eps * max(norms.values())
    for name, expected in gradient.items():
        error = float(torch.linalg.vector_norm(found[name] - expected))
        assert error <= bound * norms[name] + rounding, (name, error, norms[name])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=settings().max_examples // 25)
@given(sequences=trees(), budget=st.sampled_from([1, 100, 1000]))
def test_gradients_of_random_trees_equal_one_sequence_at_a_time(
    kind: str, dtype: torch.dtype, sequences: list[tuple[IntArray, IntArray]], budget: int
) -> None:
    check(kind, dtype, sequences, budget)


def conversation() -> list[tuple[IntArray, IntArray]]:
    """Return three turns of a conversation, a branch of the second, and another conversation on the same document."""
    generator = np.random.default_rng(0)
    document, first, second, other = (generator.integers(VOCABULARY, size=n).astype(np.int32) for n in (40, 12, 17, 9))
    turn = np.concatenate([document, first])
    return [
        (document, first),
        (turn, second),
        (np.concatenate([turn, second]), other),
        (turn, other),
        (np.concatenate([document, other]), second),
    ]


@pytest.mark.parametrize("kind", ["qwen3 with windows", "mistral", "gemma3", "gemma2", "gpt_oss"])
def test_sliding_windows_are_trained_beyond_their_length(kind: str) -> None:
    check(kind, torch.float32, conversation(), 1000)


def sft_gradients(model: Any, sequences: Sequence[tuple[IntArray, IntArray]], **changes: Any) -> Gradients:
    optimizer = OptimizerSettings(learning_rate=1e-3, max_grad_norm=0.0)
    trainer = SftTrainer(model, PolicySettings(sft=SftStepSettings(optimizer=optimizer), **changes), total_steps=1)
    trainer.step([SftExample(prompt, completion) for prompt, completion in sequences])
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


STATEFUL = {
    "mamba": (MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2), "linear_attention"),
    "qwen3_next": (
        Qwen3NextConfig(
            **SIZES | {"num_hidden_layers": 4},
            head_dim=8,
            num_experts=0,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "linear_attention",
    ),
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_models_that_cannot_attend_by_segments_train_one_sequence_per_row(kind: str) -> None:
    config, reason = STATEFUL[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    sequences, before = conversation(), model.config._attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config).eval()
    with capture_logs() as logs:
        assert attention_plan(model).layout == attention_plan(model).layout == "rows"
    (warning,) = logs
    assert reason in warning["reason"]
    assert attention_plan(model).longest is None
    assert model.config._attn_implementation == (PACKED if kind == "qwen3_next" else before)
    count = sum(len(completion) for _, completion in sequences)
    expected = alone(plain, sequences, torch.full((count,), -1.0 / count))
    found = sft_gradients(model, sequences, tokens_per_microbatch=300)
    for name, gradient in expected.items():
        error = torch.linalg.vector_norm(found[name] - gradient)
        assert error <= 1e-3 * torch.linalg.vector_norm(gradient) + 1e-8, (name, float(error))


def leaky(kind: str) -> Any:
    """Return a model with a layer that mixes neighbours of a row, which no configuration names."""
    model = make(kind)

    def mix(_: Any, __: Any, output: Any) -> Any:
        return output + torch.nn.functional.pad(output[:, :-1], (0, 0, 1, 0))

    model.model.layers[1].input_layernorm.register_forward_hook(mix)
    return model


def test_a_leak_between_tokens_is_observed() -> None:
    model = leaky("llama")
    with capture_logs() as logs:
        assert attention_plan(model).layout == "rows"
    assert [line["reason"] for line in logs] == ["a forest of segments and its sequences alone differ"]


def test_a_window_that_the_attention_function_does_not_get_bounds_the_sequences() -> None:
    """Transformers would make a mask with an element for each pair of tokens."""
    model = make("qwen3 with windows")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    with capture_logs() as logs:
        assert attention_plan(model).layout == "rows"
    assert "windows" in logs[0]["reason"]
    assert model.config._attn_implementation != PACKED
    sft_gradients(model, [(np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32))])
    with pytest.raises(ConfigError, match="exceeds the 7 that the model can attend to"):
        sft_gradients(model, [(np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32))])


def test_chunked_attention_bounds_the_sequences() -> None:
    sizes = SIZES | {"num_hidden_layers": 2, "intermediate_size_mlp": 40, "num_local_experts": 2}
    config = Llama4TextConfig(**sizes, head_dim=8, attention_chunk_size=30)
    with capture_logs() as logs:
        plan = attention_plan(AutoModelForCausalLM.from_config(config).eval())
    assert (plan.layout, plan.longest) == ("rows", 30)
    assert "chunked_attention" in logs[0]["reason"]


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gemma3", "gpt_oss", "leaky windows", "leaky gemma2", "qwen3_next"]
)
def test_training_makes_no_tensor_with_an_element_for_each_pair_of_tokens(kind: str) -> None:
    """In packed rows and in those of one sequence, far beyond the windows."""
    model = {
        "leaky windows": lambda: leaky("qwen3 with windows"),
        "leaky gemma2": lambda: leaky("gemma2"),
        "qwen3_next": lambda: AutoModelForCausalLM.from_config(STATEFUL["qwen3_next"][0]).eval(),
    }.get(kind, lambda: make(kind))()
    model.config.max_position_embeddings = 2000
    generator = np.random.default_rng(0)
    prompt = generator.integers(VOCABULARY, size=1400).astype(np.int32)
    responses = [generator.integers(VOCABULARY, size=size).astype(np.int32) for size in (90, 100)]
    settings = PolicySettings(memory=MemorySettings(logprob_chunk_tokens=64))
    trainer = SftTrainer(model, settings, total_steps=1)
    with Largest() as largest:
        trainer.step([SftExample(prompt, response) for response in responses])
    assert largest.elements < 1400 * 1400 // 2


def test_observing_a_model_leaves_no_gradient_and_draws_no_random_number() -> None:
    model, before = make("qwen3_moe"), torch.random.get_rng_state()
    assert attention_plan(model).layout == "forest"
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_recomputed_blocks_have_the_structure(checkpointing: str) -> None:
    plain, model = make("qwen3"), make("qwen3")
    found = PolicySettings.model_validate({"memory": {"checkpointing": checkpointing}})
    apply_memory_settings(model, found.memory)
    expected = sft_gradients(plain, conversation(), share_prompts=False)
    for name, gradient in sft_gradients(model, conversation()).items():
        assert torch.linalg.vector_norm(gradient - expected[name]) <= 5e-6 * torch.linalg.vector_norm(expected[name])


def make_small() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | {"num_hidden_layers": 1}, head_dim=8)).eval()


@pytest.mark.campaign
def test_compiled_blocks_take_structures_of_any_size() -> None:
    torch._dynamo.reset()  # Loads it: the attention that `apply_memory_settings` registers is then not compiled.
    plain, model = make_small(), make_small()
    apply_memory_settings(model, MemorySettings())
    compile_blocks(model, backend="aot_eager")
    for count in (2, 5):
        expected = sft_gradients(plain, conversation()[:count], share_prompts=False)
        for name, gradient in sft_gradients(model, conversation()[:count]).items():
            error = torch.linalg.vector_norm(gradient - expected[name])
            assert error <= 1e-4 * torch.linalg.vector_norm(expected[name]), name


def test_forward_pass_without_a_structure_computes_as_before() -> None:
    """Padding and windows of transformers' own masks stay in force."""
    plain, model = make("qwen3 with windows"), make("qwen3 with windows")
    assert attention_plan(model).layout == "forest"
    assert model.config._attn_implementation == PACKED
    ids = torch.arange(40).view(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["segments", "varlen"])
def test_backend_is_that_of_the_settings(backend: Literal["segments", "varlen"]) -> None:
    plain, model = make("gemma3"), make("gemma3")
    expected = sft_gradients(plain, conversation(), share_prompts=False)
    found = sft_gradients(model, conversation(), attention=backend)
    assert attention_plan(model).backend == backend
    for name, gradient in found.items():
        assert torch.linalg.vector_norm(gradient - expected[name]) <= 5e-6 * torch.linalg.vector_norm(expected[name])


def test_backend_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'flex' has no backward pass on cpu"):
        sft_gradients(make("llama"), conversation(), attention="flex")


def test_saved_model_does_not_name_the_attention_function(tmp_path: Any) -> None:
    model = make("llama")
    attention_plan(model)
    model.save_pretrained(tmp_path)
    assert PACKED not in (tmp_path / "config.json").read_text()
