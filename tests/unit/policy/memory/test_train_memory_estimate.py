"""The formula of a policy's peak memory equals what a step takes, for every setting that changes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
MODEL = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 160, "max_position_embeddings": 4096}
MOSTLY_WEIGHTS = {"vocab_size": 12_000, "intermediate_size": 64}
LITTLE_COMPUTING = {"checkpointing": "full", "logprob_chunk_tokens": 16}
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its settings, and the parts of the formula that decide its peak."""

    parts: tuple[str, ...]
    """Without any one of them the formula is more than a tenth too low: the case proves each."""
    kind: str = "qwen3"
    dtype: torch.dtype = torch.float32
    model: dict[str, int] = field(default_factory=dict)
    tied: bool = False
    lora: bool = False
    prompt: int = 1
    """Tokens that both sequences of the group share."""
    memory: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    def make_model(self, tiny: Callable[..., Any]) -> Any:
        """Make the model."""
        model = tiny(self.kind, tied=self.tied, **{**MODEL, **self.model}).to(self.dtype)
        if self.lora:
            add_adapters(model, LoraSettings(rank=4), seed=0)
        return model


CASES = {
    "nothing recomputed": Case(parts=("saved",)),
    "all recomputed, in bfloat16": Case(parts=("working",), dtype=torch.bfloat16, memory={"checkpointing": "full"}),
    "all but products recomputed": Case(parts=("saved", "working"), memory={"checkpointing": "selective"}),
    "every second block recomputed": Case(
        parts=("saved", "working"),
        model={"num_hidden_layers": 3},
        memory={"checkpointing": "full", "checkpoint_every": 2},
    ),
    "output layer in chunks": Case(
        parts=("logprobs",),
        model={"vocab_size": 13_000},
        memory={"checkpointing": "full", "logprob_chunk_tokens": 120},
    ),
    "probabilities kept from the output layer": Case(
        parts=("logprobs",),
        model={"vocab_size": 6000},
        memory={"checkpointing": "full", "logprob_chunk_tokens": 256},
    ),
    "output layer in one chunk, with a gradient of the entropy": Case(
        parts=("logprobs", "saved"),
        model={"vocab_size": 3000},
        memory={"logprob_chunk_tokens": 4096},
        algorithm={"entropy_coefficient": 0.1},
    ),
    "tied embedding": Case(
        parts=("head_gradient", "weights", "gradients", "optimizer"),
        model={"vocab_size": 16_000},
        tied=True,
        memory=LITTLE_COMPUTING,
    ),
    "reference": Case(
        parts=("reference", "weights", "gradients", "optimizer"),
        model=MOSTLY_WEIGHTS,
        memory=LITTLE_COMPUTING,
        algorithm={"kl_coefficient": 0.1},
    ),
    "muon and an average": Case(
        parts=("weights", "gradients", "optimizer"),
        model=MOSTLY_WEIGHTS,
        memory=LITTLE_COMPUTING,
        optimizer={"kind": "muon", "ema_decay": 0.9},
    ),
    "adapters": Case(parts=("weights",), lora=True, model={"vocab_size": 3000}, memory={"checkpointing": "full"}),
    "experts, and a common prompt": Case(parts=("saved",), kind="qwen3_moe", dtype=torch.bfloat16, prompt=TOKENS // 2),
}


def without(memory: PolicyMemory, part: str) -> PolicyMemory:
    """Return `memory` as if the formula left out one part."""
    if part not in ("saved", "working"):
        return replace(memory, **{part: 0})
    blocks = tuple(replace(block, **{part: 0}) for block in memory.activations.blocks)
    return replace(memory, activations=replace(memory.activations, blocks=blocks))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_step_is_within_a_tenth_of_the_formula(
    tiny: Callable[..., Any], make_groups: Callable[..., Any], name: str
) -> None:
    case = CASES[name]
    settings = PolicySettings(
        tokens_per_microbatch=TOKENS,
        memory={"logprob_chunk_tokens": 64, **case.memory},
        algorithm=case.algorithm,
        optimizer=case.optimizer,
    )
    rest = TOKENS - case.prompt
    lengths = (rest // 2, rest - rest // 2 + 1) * 2 if case.prompt > 1 else (TOKENS, TOKENS)
    groups = make_groups([(case.prompt, lengths)])
    expected = estimate_memory(case.make_model(tiny), settings, "rl", CPU, TOKENS)
    with PeakMemory() as memory:
        model = case.make_model(tiny)
        apply_memory_settings(model, settings.memory)
        trainer = RlTrainer(model, settings, total_steps=1)
        model.zero_grad(set_to_none=True)
        memory.restart()
        metrics = trainer.step(groups, step=1)
    assert metrics["num_microbatches"] == 2
    assert 0.9 < expected.peak / memory.peak_bytes < 1.1
    for part in case.parts:
        assert without(expected, part).peak / memory.peak_bytes < 0.9, part


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_movable_activations_are_those_that_are_offloaded(tiny: Callable[..., Any], checkpointing: Any) -> None:
    num_tokens, settings = 1100, MemorySettings(checkpointing=checkpointing)
    wide = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}  # Only large tensors are offloaded.
    prompt = PromptBlock(np.zeros(1, dtype=np.int32), ((0, num_tokens),))
    batch = pack_sequences([prompt], np.zeros(num_tokens, dtype=np.int32), num_tokens)
    inputs = to_tensors(batch, batch.plan[0])

    def copied(num_blocks: int) -> int:
        model = tiny(num_hidden_layers=num_blocks, max_position_embeddings=num_tokens, **wide)
        apply_memory_settings(model, settings)
        offload_activations(model, device_types={"cpu"})
        with Copies() as copies:
            trained_hidden(model, inputs)
        return copies.total

    (block, _) = observe_activations(tiny(**wide), settings, num_tokens).blocks
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


def test_description_says_where_it_does_not_fit() -> None:
    settings = MemorySettings(checkpointing="full")
    lines = describe_memory(replace(MEMORY, num_tokens=512), settings, CPU)
    assert [line.partition(":")[0] for line in lines] == ["memory of the policy", "always", "activations"]
    assert "in microbatches of 512 tokens" in lines[0]
    assert "of 2 blocks (checkpointing = full), and up to" in lines[2]
    notice = describe_memory(replace(MEMORY, weights=1 << 60), settings, CPU)[-1]
    assert notice.startswith("notice: the policy does not fit, cpu has ")
    assert "lower policy.tokens_per_microbatch" in notice
