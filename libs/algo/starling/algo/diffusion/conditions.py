"""What trajectories are conditioned on: the embeddings of their prompts, and frames that are given.

A prompt's embeddings travel without padding. Models are trained with prompts of one length, padded with zeros, and most
of them attend to the padding: everything that computes a velocity pads to that length first, or the velocity of a
trajectory would depend on the longest prompt of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from starling.common.wire.tensors import FRAMES, POOLED, TEXT, TEXT_MASK


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

    @property
    def shapes(self) -> tuple[torch.Size | None, ...]:
        """Shapes of one trajectory's tensors: only those of equal ones can be joined."""
        tensors = (self.text, self.text_mask, self.pooled, self.frames)
        return tuple(None if tensor is None else tensor.shape[1:] for tensor in tensors)

    def rows(self, numbers: Sequence[int] | Tensor) -> Conditions:
        """Return those of some trajectories, each as often as its number is given."""
        index = torch.as_tensor(numbers, device=self.text.device)
        return Conditions(
            self.text[index],
            None if self.text_mask is None else self.text_mask[index],
            None if self.pooled is None else self.pooled[index],
            None if self.frames is None else self.frames[index],
        )


def conditions_of(tensors: Mapping[str, npt.NDArray[Any]], length: int, device: torch.device) -> Conditions:
    """Return the conditions of a prompt, padded to `length` tokens, with a batch axis of 1.

    Args:
        tensors: without a problem, see `starling.algo.denoising.conditions_problem`.
        length: tokens of a text that the model was trained with.
        device: of the result.
    """

    def of(name: str) -> Tensor | None:
        # A copy, as torch has no tensors that cannot be written, such as those in the buffers of a message.
        return torch.from_numpy(tensors[name].copy()).to(device).unsqueeze(0) if name in tensors else None

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
