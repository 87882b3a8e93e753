"""Memory settings: recomputation, offload and compilation (`docs/how-to/long-sequences.md`)."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from starling.common.ranges import MAX_COUNT, MAX_TOKENS
from starling.common.settings import SettingsSection

KEPT_CHUNKS: Final = 8
"""Chunks of probabilities that may be kept from the forward to the backward pass of the output layer,"""
MOST_KEPT: Final = 1 << 28
"""and bytes of them."""


def few_probabilities(num_tokens: float, vocabulary: int, chunk_tokens: int) -> bool:
    """Return whether float32 probabilities of so many tokens are few enough to be kept."""
    return num_tokens <= KEPT_CHUNKS * chunk_tokens and 4 * num_tokens * vocabulary <= MOST_KEPT


class MemorySettings(SettingsSection):
    """Trade-offs of time for memory, and of start-up time for speed. They change a step's results only by rounding."""

    logprob_chunk_tokens: int = Field(default=1024, ge=1, le=MAX_TOKENS)
    """Trained tokens whose logits exist at a time: 2 bytes x vocabulary each in bfloat16, 300 MB for the default and
    a vocabulary of 150,000. Smaller chunks take more passes over the output layer's weights. In float32, up to 8 chunks
    of at most 256 MiB are kept from the forward to the backward pass, which need not compute them again then."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    """Activations of a transformer block to recompute in the backward pass: all (`full`, about a third more
    computation), or all but the results of matrix products and attention (`selective`)."""
    checkpoint_every: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Checkpoint every n-th block; the others keep their activations."""
    offload_activations: bool = False
    """Keep activations for the backward pass in pinned host memory. No effect for a model on a CPU."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments, its float32 weights and the gradients in host memory, and update there with
    `launch.num_threads` threads: the device keeps only the weights, and on a mesh gradients and float32 weights too.
    `muon` is slow there, and refused on a mesh. No effect for a model on a CPU."""
    compile: bool = False
    """Compile each transformer block (`torch.compile`), once for all sizes of microbatches: faster steps after a first
    one that takes a minute or more, or some seconds when `~/.cache/starling` has the code of an earlier run. On a CPU
    this needs a C++ compiler."""

    @model_validator(mode="after")
    def _compiled_code_is_not_selective(self) -> Self:
        if self.compile and self.checkpointing == "selective":
            raise ValueError(
                'compile = true with checkpointing = "selective": compiled code does not keep single products; '
                'set checkpointing = "full" or "none"'
            )
        return self
