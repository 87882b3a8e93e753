"""What is computed again or kept elsewhere to need less of the device's memory, and what is compiled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from starling.common.settings import SettingsSection


class MemorySettings(SettingsSection):
    """Trading time for memory, and start-up time for speed. None of it changes what a step computes but by rounding."""

    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Trained tokens whose logits exist at a time: 2 bytes x vocabulary each in bfloat16, 300 MB for the default and
    a vocabulary of 150,000. Fewer cost more passes over the output layer's weights."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    """Which activations of a transformer block are not kept but computed again in the backward pass: all (`full`, about
    a third more computation), or all but the results of matrix products and attention (`selective`)."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Every so many blocks, one is checkpointed; the others keep their activations."""
    offload_activations: bool = False
    """Keep the activations that the backward pass needs in the CPU's memory. Without effect for a model on a CPU."""
    offload_optimizer: bool = False
    """Keep the optimizer's averages, its float32 weights and the gradients in the CPU's memory, and make its update
    there, with `launch.num_threads` threads: the device keeps the weights alone. `muon` is slow there. Without effect
    for a model on a CPU."""
    compile: bool = False
    """Compile each transformer block (`torch.compile`): faster steps after a first one that takes a minute or more.

    On a CPU this needs a C++ compiler.
    """
