"""Tensors of groups of trajectories, by name: what they are conditioned on, and their states.

Conditions are the embeddings of their prompts, and frames that are given.

A prompt's embeddings travel without padding. Models are trained with prompts of one length, padded with zeros, and most
of them attend to the padding: everything that computes a velocity pads to that length first, or the velocity of a
trajectory would depend on the longest prompt of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TEXT: Final = "text_embeddings"
"""float [L, D]."""
TEXT_MASK: Final = "text_mask"
"""uint8 [L], 1 for embeddings that are no padding; absent for all of them."""
POOLED: Final = "pooled_embeddings"
"""float [P]."""
FRAMES: Final = "given_frames"
"""float [C, F, H, W], clean latents of the first frames."""
STATES: Final = "states"
"""[trajectories, actions + 1, ...], from the first action's state to the last one's successor; absent without actions.
Of the group, not of its prompt, as the next one."""
LATENTS: Final = "latents"
"""[trajectories, ...], where they end."""
RANKS: Final = {TEXT: 2, TEXT_MASK: 1, POOLED: 1, FRAMES: 4}
"""Dimensions of each tensor of a prompt, by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """What the model is conditioned on, for each of B trajectories."""

    text: Tensor
    """[B, L, D], embeddings of the prompt's tokens."""
    text_mask: Tensor | None = None
    """bool [B, L], the embeddings that are no padding; None for all of them."""
    pooled: Tensor | None = None
    """[B, P], one embedding of the whole prompt, for the families that read one."""
    frames: Tensor | None = None
    """[B, C, F, H, W], clean latents of the first F frames; None where all frames are generated."""

    def rows(self, numbers: Sequence[int] | Tensor) -> Conditions:
        """Return those of some trajectories, each as often as its number is given."""
        index = torch.as_tensor(numbers, device=self.text.device)
        return Conditions(
            self.text[index],
            None if self.text_mask is None else self.text_mask[index],
            None if self.pooled is None else self.pooled[index],
            None if self.frames is None else self.frames[index],
        )


def conditions_problem(tensors: Mapping[str, npt.NDArray[Any]], length: int) -> str:
    """Return what is wrong with the tensors of a prompt for a model of texts of `length`; empty if nothing is."""
    if TEXT not in tensors:
        return f"the prompt has no {TEXT}; compute them, or read them from a file"
    for name, array in tensors.items():
        if name not in RANKS or array.ndim != RANKS[name]:
            known = ", ".join(f"{one} of {number}" for one, number in RANKS.items())
            return f"the prompt has the tensor {name!r} of {array.ndim} dimensions; give {known}"
        if not np.isfinite(array).all():
            return f"{name} has numbers that are not finite; compute them anew"
    num_tokens = len(tensors[TEXT])
    if not 1 <= num_tokens <= length:
        return f"{TEXT} has {num_tokens} tokens, and the model reads 1 to {length}; shorten the prompt"
    if TEXT_MASK in tensors and len(tensors[TEXT_MASK]) != num_tokens:
        return f"{TEXT_MASK} has {len(tensors[TEXT_MASK])} elements for {num_tokens} embeddings; compute them anew"
    return ""


def conditions_of(tensors: Mapping[str, npt.NDArray[Any]], length: int, device: torch.device) -> Conditions:
    """Return the conditions of a prompt, padded to `length` tokens, with a batch axis of 1.

    Args:
        tensors: without a problem, see `conditions_problem`.
        length: tokens of a text that the model was trained with.
        device: of the result.
    """

    def of(name: str) -> Tensor | None:
        return torch.from_numpy(tensors[name]).to(device).unsqueeze(0) if name in tensors else None

    text, mask = of(TEXT), of(TEXT_MASK)
    assert text is not None, "it was checked"
    known = torch.ones(text.shape[:2], dtype=torch.bool, device=device) if mask is None else mask.bool()
    missing = length - text.shape[1]
    text = torch.cat([text, text.new_zeros(1, missing, text.shape[2])], dim=1)
    return Conditions(text, torch.cat([known, known.new_zeros(1, missing)], dim=1), of(POOLED), of(FRAMES))


def joined(conditions: Sequence[Conditions]) -> Conditions:
    """Return the conditions of several prompts of equal shapes, one after another."""
    return Conditions(
        torch.cat([one.text for one in conditions]),
        _cat([one.text_mask for one in conditions]),
        _cat([one.pooled for one in conditions]),
        _cat([one.frames for one in conditions]),
    )


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    assert len(known) in (0, len(parts)), "trajectories of one batch are conditioned alike"
    return torch.cat(known) if known else None
