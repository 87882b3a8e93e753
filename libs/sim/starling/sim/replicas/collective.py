"""The all-reduce of a step that several policies share: each waits until all have come with their shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starling.common.wire.messages import TrainStep


@dataclass(frozen=True)
class StepItem:
    """One group, or one supervised example, of a step."""

    content: bytes
    """Everything that the outcome depends on."""
    staleness: tuple[int, ...] = ()
    """Of each completion, in versions."""
    num_tokens: int = 0


@dataclass(frozen=True)
class StepShare:
    """What one policy brings."""

    policy: str
    message: TrainStep
    pieces: dict[str, StepItem]
    """What it trains, by prompt."""
    start: str
    """Digest of the weights that it starts from."""
    done: Callable[[dict[str, StepItem]], None]
    """Called with the pieces of all shares."""


class Collective:
    """The policies that wait for each other, by the step and into how many shares it was cut."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], dict[int, StepShare]] = {}

    def arrive(self, share: StepShare) -> None:
        """Wait for the others, or, as the last of them, let all go on.

        Shares that make up no whole step are of different attempts: they wait until the others are replaced.
        """
        message = share.message
        key = (message.step, message.num_replicas)
        shares = self._waiting.setdefault(key, {})
        shares[message.replica] = share
        pieces = {prompt: piece for other in shares.values() for prompt, piece in other.pieces.items()}
        num = sum(len(other.pieces) for other in shares.values())
        same = len({other.start for other in shares.values()}) == 1
        if len(shares) == message.num_replicas and len(pieces) == num == message.num_groups and same:
            del self._waiting[key]
            for other in shares.values():
                other.done(pieces)

    def leave(self, policy: str) -> None:
        """Wait no longer: the policy died, or its share is wanted no more."""
        for key, shares in list(self._waiting.items()):
            for replica, share in list(shares.items()):
                if share.policy == policy:
                    del shares[replica]
            if not shares:
                del self._waiting[key]
