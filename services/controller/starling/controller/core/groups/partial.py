"""What is there of a group that a rollout could not finish: kept, so that another one goes on from its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starling.common.wire.messages import PartialCompletionMeta, TensorMeta
from starling.controller.core.events import Buffers

PER_TOKEN: Final = 3
"""The first tensors have one element of four bytes for each token: its id, its log-probability, its weight version."""
VERSIONS: Final = 2
"""Which of them holds the versions."""


@dataclass(frozen=True, slots=True)
class PartialCompletions:
    """The tokens so far of a group's completions."""

    completions: tuple[PartialCompletionMeta, ...]
    tensors: tuple[TensorMeta, ...]
    buffers: Buffers
    oldest_version: int
    """The least, and below the greatest weight version among its tokens."""
    newest_version: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions together."""
        return sum(completion.num_tokens for completion in self.completions)

    def is_within(self, oldest: int, newest: int) -> bool:
        """Say whether no token is of a version before `oldest` or after `newest`."""
        return oldest <= self.oldest_version and self.newest_version <= newest


NOTHING: Final = PartialCompletions((), (), (), 0, 0)
"""Of a group that is to be begun."""


def parse_partial(
    completions: tuple[PartialCompletionMeta, ...], tensors: tuple[TensorMeta, ...], buffers: Sequence[bytes], num: int
) -> PartialCompletions | None:
    """Return what a rollout left of a group of `num` completions; None when it left no token.

    Raises:
        ValueError: one sentence that says what does not fit together.
    """
    total = sum(completion.num_tokens for completion in completions)
    if total == 0 and all(completion.num_tokens == 0 for completion in completions):
        return None
    if len(completions) != num or min(completion.num_tokens for completion in completions) < 0:
        raise ValueError(f"{len(completions)} completions of {total} tokens came of a group of {num}")
    if len(tensors) < PER_TOKEN or len(buffers) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors came in {len(buffers)} buffers instead of {PER_TOKEN} or more")
    for position, (tensor, buffer) in enumerate(zip(tensors, buffers, strict=True)):
        fits = len(buffer) == tensor.nbytes and tensor.shape[:1] == (total,)
        if not fits or (position < PER_TOKEN and tensor.nbytes != 4 * math.prod(tensor.shape)):
            raise ValueError(f"a tensor {tensor.shape} of {len(buffer)} bytes came with {total} tokens")
    versions = memoryview(buffers[VERSIONS]).cast("i")
    return PartialCompletions(completions, tensors, tuple(buffers), min(versions), max(versions))
