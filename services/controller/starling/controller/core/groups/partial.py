"""Partial completions of an interrupted group, kept so that another rollout can resume from their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starling.common.wire.messages import PartialCompletionMeta, TensorMeta
from starling.controller.core.events import Buffers

NUM_TOKEN_TENSORS: Final = 3
"""The first tensors have one element of four bytes for each token: its id, its log-probability, its weight version."""
VERSIONS: Final = 2
"""Index of the tensor of weight versions."""


@dataclass(frozen=True, slots=True)
class PartialCompletions:
    """The tokens so far of a group's completions."""

    completions: tuple[PartialCompletionMeta, ...]
    tensors: tuple[TensorMeta, ...]
    buffers: Buffers
    oldest_version: int
    """Oldest, and below newest, weight version among its tokens."""
    newest_version: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions together."""
        return sum(completion.num_tokens for completion in self.completions)

    def is_within(self, oldest: int, newest: int) -> bool:
        """Say whether no token is of a version before `oldest` or after `newest`."""
        return oldest <= self.oldest_version and self.newest_version <= newest


NO_TOKENS: Final = PartialCompletions((), (), (), 0, 0)


def parse_partial(
    completions: tuple[PartialCompletionMeta, ...], tensors: tuple[TensorMeta, ...], buffers: Sequence[bytes], num: int
) -> PartialCompletions | None:
    """Return the partial completions of a group of `num` completions; None when they have no token.

    Raises:
        ValueError: completions, tensors and buffers do not fit together; one sentence.
    """
    total = sum(completion.num_tokens for completion in completions)
    if total == 0 and all(completion.num_tokens == 0 for completion in completions):
        return None
    if len(completions) != num or min(completion.num_tokens for completion in completions) < 0:
        raise ValueError(f"{len(completions)} completions of {total} tokens were returned for a group of {num}")
    if len(tensors) < NUM_TOKEN_TENSORS or len(buffers) != len(tensors):
        raise ValueError(
            f"{len(tensors)} tensors and {len(buffers)} buffers were returned; expected {NUM_TOKEN_TENSORS} or more"
        )
    for position, (tensor, buffer) in enumerate(zip(tensors, buffers, strict=True)):
        fits = len(buffer) == tensor.nbytes and tensor.shape[:1] == (total,)
        if not fits or (position < NUM_TOKEN_TENSORS and tensor.nbytes != 4 * math.prod(tensor.shape)):
            raise ValueError(f"a tensor {tensor.shape} of {len(buffer)} bytes was returned with {total} tokens")
    versions = memoryview(buffers[VERSIONS]).cast("i")
    return PartialCompletions(completions, tensors, tuple(buffers), min(versions), max(versions))
