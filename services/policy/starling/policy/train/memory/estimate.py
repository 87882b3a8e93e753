"""Peak memory of a policy as a formula, printed by `starling run --dry-run`.

    peak = weights + gradients + optimizer + reference + the largest of
             at the output layer     inputs + saved of all blocks and the tail + log-probabilities
             at the final norm       inputs + saved of all blocks and the tail + the tail's working set
             in block k              inputs + saved of blocks 1 to k + head gradient + working set of block k
             at the embedding        inputs + head gradient + the embedding's working set

All gradients exist from the second microbatch of a step on, so they count at every moment. What a block saves, and its
working set (what it needs on top while it computes, forward or backward, recomputation included), are functions of the
microbatch's tokens that depend on the model's code: `starling.policy.train.memory.observed` reads them off. Everything
else is arithmetic of sizes.

With activations offloaded, those that are moved count in host memory instead, and in the working set of their block.

Not counted: the device's context, gaps between the allocator's blocks, vision towers, buckets of a publication, and
the memory that libraries for matrix products take for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final

TOKEN_BYTES: Final = 96
"""Bytes for each token of a microbatch that no layer takes: its ids, positions and targets (int64), and some float32
numbers of the loss."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Memory of one block, for one microbatch; bytes."""

    saved: int
    """What the block adds to the memory that is kept for the backward pass."""
    working: int
    """The most that it needs beyond what it and the blocks before it save, forward or backward."""
    movable: int
    """Part of `saved` that `policy.memory.offload_activations` moves to host memory."""


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Memory of a model's activations for one microbatch; bytes."""

    inputs: int
    """Embedded tokens and rotary embeddings, before the first block."""
    blocks: tuple[BlockMemory, ...]
    """In their order."""
    tail_saved: int
    """Final norm, and the hidden states of trained tokens."""
    tail_working: int
    embedding_working: int
    """In the backward pass of the embedding, its gradient included."""


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Memory of a policy at its peak: bytes on its device."""

    num_tokens: int
    """Of a microbatch, all of them trained."""
    weights: int
    gradients: int
    """Of all trained parameters, as the optimizer reads them."""
    optimizer: int
    """Moments, float32 masters, and the average of the weights."""
    reference: int
    """Weights of a KL term's or a preference loss's reference model."""
    activations: ActivationMemory
    logprobs: int
    """Working set of the output layer's log-probabilities, its gradient included."""
    head_gradient: int
    """Gradient of an output layer that is the embedding too, kept until that has its own; 0 without one."""
    offloads_activations: bool
    host: int
    """Of the host: what is offloaded there."""

    @property
    def saved(self) -> int:
        """Bytes that all blocks keep on the device for the backward pass."""
        return sum(self._saved)

    @property
    def moved(self) -> int:
        """Bytes of activations in host memory."""
        return sum(block.movable for block in self.activations.blocks) if self.offloads_activations else 0

    @property
    def working(self) -> int:
        """Largest working set of a block."""
        return max(self._working)

    @property
    def lasting(self) -> int:
        """Bytes that exist in every moment of a step."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def peak(self) -> int:
        """Most bytes that exist at a time."""
        found, head = self.activations, self.head_gradient
        tail = self.saved + found.tail_saved
        blocks = (saved + working for saved, working in zip(accumulate(self._saved), self._working, strict=True))
        moments = tail + self.logprobs, tail + found.tail_working, head + max(blocks), head + found.embedding_working
        return self.lasting + found.inputs + TOKEN_BYTES * self.num_tokens + max(moments)

    @property
    def _saved(self) -> list[int]:
        return [block.saved - block.movable * self.offloads_activations for block in self.activations.blocks]

    @property
    def _working(self) -> list[int]:
        return [block.working + block.movable * self.offloads_activations for block in self.activations.blocks]
