"""Partial completions of an interrupted group, kept so that another rollout can resume from their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starling.common.wire.messages import TRAINABLE_STATUSES, ModelLimits, PartialCompletionMeta, TensorMeta
from starling.controller.core.events import Buffers
from starling.controller.core.groups.validation.validation import (
    InvalidResultError,
    UnusableResultError,
    check_partial_tensors,
)


@dataclass(frozen=True, slots=True)
class PartialCompletions:
    """The tokens so far of a group's completions."""

    completions: tuple[PartialCompletionMeta, ...]
    tensors: tuple[TensorMeta, ...]
    buffers: Buffers
    oldest_version: int
    """Oldest, and below newest, weight version among its tokens."""
    newest_version: int
    giver: str = ""
    """The rollout that generated and gave them back; empty if it resumed those of another, or if it is not known."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions together."""
        return sum([completion.num_tokens for completion in self.completions])

    def giver_for(self, rollout: str) -> str | None:
        """Return `Group.giver` of the completions that `rollout` resumes from these."""
        if self.giver == rollout:
            return None
        return "" if any(completion.status is None for completion in self.completions) else self.giver

    def is_within(self, oldest: int, newest: int) -> bool:
        """Say whether no token is of a version before `oldest` or after `newest`."""
        return oldest <= self.oldest_version and self.newest_version <= newest


NO_TOKENS: Final = PartialCompletions((), (), (), 0, 0)


def parse_partial(
    completions: tuple[PartialCompletionMeta, ...],
    tensors: tuple[TensorMeta, ...],
    buffers: Sequence[bytes],
    num: int,
    limits: ModelLimits | None,
) -> PartialCompletions | None:
    """Return the partial completions of a group of `num` completions; None when they have no token.

    Raises:
        InvalidResultError: completions, tensors and buffers do not fit together, or cannot be trained; one sentence.
    """
    lengths = [completion.num_tokens for completion in completions]
    if not any(lengths):
        return None
    total = sum(lengths)
    if len(completions) != num or min(lengths) < 0:
        raise InvalidResultError(f"{len(completions)} completions of {total} tokens were returned for a group of {num}")
    if any(completion.status is not None and not completion.num_tokens for completion in completions):
        raise UnusableResultError("a partial completion has ended without a token")
    statuses = {completion.status for completion in completions} - {None, *TRAINABLE_STATUSES}
    if statuses:
        raise InvalidResultError(f"partial completions came with the status {', '.join(map(str, statuses))}")
    versions = check_partial_tensors(total, tensors, buffers, limits)
    return PartialCompletions(completions, tensors, tuple(buffers), int(versions.min()), int(versions.max()))
