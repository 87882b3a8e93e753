"""The formula of a policy's peak memory equals what a step takes, for every setting that changes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.budget import describe_memory, estimate_memory
from starling.policy.train.data.packing import PromptBlock, pack_sequences, to_tensors
from starling.policy.train.memory.blocks import find_blocks
from starling.policy.train.memory.estimate import TOKEN_BYTES, ActivationMemory, BlockMemory, PolicyMemory
from starling.policy.train.memory.observed import observe_activations
from starling.policy.train.memory.offload import offload_activations
from starling.policy.train.memory.peak import PeakMemory
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.model.lm_head import trained_hidden
from starling.policy.train.rl import RlTrainer
from starling.weightsync.tensors.adapters import add_adapters

TOKENS = 1024
MODEL = {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 160, "max_position_embeddings": 4096}
CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "nothing recomputed": {},
    "all recomputed": {"memory": {"checkpointing": "full"}},
    "all but products recomputed": {"memory": {"checkpointing": "selective"}},
    "every second block recomputed": {"memory": {"checkpointing": "full", "checkpoint_every": 2}},
    "bfloat16": {"dtype": torch.bfloat16, "memory": {"checkpointing": "full"}},
    "bfloat16, nothing recomputed": {"dtype": torch.bfloat16},
    "a large vocabulary": {"model": {"vocab_size": 3000}},
    "a large vocabulary, tied": {"model": {"vocab_size": 3000}, "tied": True, "memory": {"checkpointing": "full"}},
    "a large vocabulary in one chunk": {"model": {"vocab_size": 3000}, "memory": {"logprob_chunk_tokens": 4096}},
    "a gradient of the entropy": {"model": {"vocab_size": 3000}, "algorithm": {"entropy_coefficient": 0.1}},
    "a reference": {"algorithm": {"kl_coefficient": 0.1}, "model": {"hidden_size": 128}},
    "muon and an average": {"optimizer": {"kind": "muon", "ema_decay": 0.9}, "model": {"hidden_size": 128}},
    "frozen embeddings": {"frozen": "embed_tokens|lm_head", "model": {"vocab_size": 3000}},
    "adapters": {"lora": True, "memory": {"checkpointing": "full"}},
    "experts": {"kind": "qwen3_moe", "dtype": torch.bfloat16},
    "sequences with a common prompt": {"prompt": TOKENS // 2},
}


def make_model(tiny: Callable[..., Any], case: dict[str, Any]) -> Any:
    """Make the model of a case."""
    model = tiny(case.get("kind", "qwen3"), tied=case.get("tied", False), **{**MODEL, **case.get("model", {})})
    model.to(case.get("dtype", torch.float32))
    if case.get("lora"):
        add_adapters(model, LoraSettings(rank=4), seed=0)
    for name, parameter in model.named_parameters():
        if any(part in name for part in case.get("frozen", "nothing").split("|")):
            parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_step_is_within_a_tenth_of_the_formula(
    tiny: Callable[..., Any], make_groups: Callable[..., Any], name: str
) -> None:
    case = CASES[name]
    settings = PolicySettings(
        tokens_per_microbatch=TOKENS,
        memory={"logprob_chunk_tokens": 64, **case.get("memory", {})},
        algorithm=case.get("algorithm", {}),
        optimizer=case.get("optimizer", {}),
    )
    prompt = case.get("prompt", 1)
    rest = TOKENS - prompt
    lengths = (rest // 2, rest - rest // 2 + 1) * 2 if prompt > 1 else (TOKENS, TOKENS)
    groups = make_groups([(prompt, lengths)])
    expected = estimate_memory(make_model(tiny, case), settings, "rl", CPU, TOKENS)
    with PeakMemory() as memory:
        model = make_model(tiny, case)
        apply_memory_settings(model, settings.memory)
        trainer = RlTrainer(model, settings, total_steps=1)
        model.zero_grad(set_to_none=True)
        memory.restart()
        metrics = trainer.step(groups, step=1)
    assert metrics["num_microbatches"] == 2
    assert 0.9 < expected.peak / memory.peak_bytes < 1.1


def test_estimate_leaves_the_model_as_it_is(tiny: Callable[..., Any]) -> None:
    model = tiny()
    before = copy.deepcopy(model)
    settings = PolicySettings(memory={"checkpointing": "full"})
    first, second = (estimate_memory(model, settings, "rl", CPU, 1500) for _ in range(2))
    assert first == second
    assert model.config.to_dict() == before.config.to_dict()
    assert [type(block) for block in find_blocks(model)] == [type(block) for block in find_blocks(before)]
    for (name, found), (_, expected) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        assert found.grad is None, name
        assert torch.equal(found, expected)
    assert model(input_ids=torch.arange(5)[None]).logits.shape == (1, 5, len(model.lm_head.weight))


def test_activations_grow_with_tokens(tiny: Callable[..., Any]) -> None:
    model = tiny().to("meta")
    short, long = (observe_activations(model, MemorySettings(), tokens) for tokens in (1 << 10, 1 << 17))
    assert 120 < long.blocks[0].saved / short.blocks[0].saved <= 128


class Copies(PeakMemory):
    """Counts the bytes of the copies that the offload makes."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count."""
        if func is torch.ops.aten.empty_like.default and args[0].nbytes >= 1 << 20:
            self.total += args[0].nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_movable_activations_are_those_that_are_offloaded(tiny: Callable[..., Any], checkpointing: Any) -> None:
    num_tokens, settings = 10_000, MemorySettings(checkpointing=checkpointing)
    prompt = PromptBlock(np.zeros(1, dtype=np.int32), ((0, num_tokens),))
    batch = pack_sequences([prompt], np.zeros(num_tokens, dtype=np.int32), num_tokens)
    inputs = to_tensors(batch, batch.plan[0])

    def copied(num_blocks: int) -> int:
        model = tiny(num_hidden_layers=num_blocks)
        apply_memory_settings(model, settings)
        offload_activations(model, device_types={"cpu"})
        with Copies() as copies:
            trained_hidden(model, inputs)
        return copies.total

    (block, _) = observe_activations(tiny(), settings, num_tokens).blocks
    assert block.movable
    assert copied(3) - copied(2) == block.movable


BLOCKS = (BlockMemory(saved=100, working=10, movable=80), BlockMemory(saved=100, working=70, movable=80))
MEMORY = PolicyMemory(
    num_tokens=0,
    weights=1000,
    gradients=2000,
    optimizer=4000,
    reference=0,
    activations=ActivationMemory(inputs=5, blocks=BLOCKS, tail_saved=7, tail_working=3, embedding_working=11),
    logprobs=20,
    head_gradient=0,
    offloads_activations=False,
    host=0,
)


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({}, 7000 + 5 + 200 + 70),
        ({"num_tokens": 10}, 7000 + 5 + 200 + 70 + 10 * TOKEN_BYTES),
        ({"reference": 500}, 7500 + 5 + 200 + 70),
        ({"logprobs": 300}, 7000 + 5 + 200 + 7 + 300),
        ({"head_gradient": 40}, 7000 + 5 + 200 + 70 + 40),
        ({"head_gradient": 400, "logprobs": 500}, 7000 + 5 + 200 + 7 + 500),
        ({"offloads_activations": True}, 7000 + 5 + 40 + 70 + 80),
    ],
)
def test_peak_is_the_largest_moment(changes: dict[str, Any], peak: int) -> None:
    assert replace(MEMORY, **changes).peak == peak


def test_block_at_whose_moment_few_blocks_are_saved_counts_less() -> None:
    first = BlockMemory(saved=1, working=150, movable=0)
    activations = replace(MEMORY.activations, blocks=(first, BLOCKS[0]))
    assert replace(MEMORY, activations=activations).peak == 7000 + 5 + 1 + 150


def test_offloaded_optimizer_counts_as_host_memory(tiny: Callable[..., Any]) -> None:
    model = tiny().to(torch.bfloat16)
    settings = PolicySettings(memory={"offload_optimizer": True, "offload_activations": True})
    on_cpu = estimate_memory(model, settings, "sft", CPU, 2048)
    on_gpu = estimate_memory(model, settings, "sft", torch.device("cuda"), 2048)
    num = model.num_parameters()
    assert (on_cpu.gradients, on_cpu.optimizer, on_cpu.host) == (4 * num, pytest.approx(12 * num, rel=0.01), 0)
    assert (on_gpu.gradients, on_gpu.optimizer) == (0, 0)
    assert on_gpu.host - on_gpu.moved == pytest.approx((12 + 4 + 2) * num, rel=0.01)


class Branching(torch.nn.Module):
    """A layer whose code depends on values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if float(hidden.sum()) > 0 else -hidden


def test_model_whose_code_needs_values_is_named(tiny: Callable[..., Any]) -> None:
    model = tiny()
    model.model.norm = Branching()
    with pytest.raises(ConfigError, match=r"memory of a Qwen3ForCausalLM cannot be observed without its values \(Data"):
        estimate_memory(model, PolicySettings(), "rl", CPU, 512)


def test_description_says_where_it_does_not_fit(tiny: Callable[..., Any]) -> None:
    settings = PolicySettings(memory={"checkpointing": "full"})
    fits = estimate_memory(tiny(), settings, "rl", CPU, 512)
    lines = describe_memory(fits, settings.memory, CPU)
    assert [line.partition(":")[0] for line in lines] == ["memory of the policy", "always", "activations"]
    assert "in microbatches of 512 tokens" in lines[0]
    assert "of 2 blocks (checkpointing = full), and up to" in lines[2]
    too_large = estimate_memory(tiny(), settings, "rl", CPU, 10**9)
    notice = describe_memory(too_large, settings.memory, CPU)[-1]
    assert notice.startswith("notice: the policy does not fit, cpu has ")
    assert "lower policy.tokens_per_microbatch" in notice
