"""Simulated all-reduce of a step that several policies share: each policy waits until all shares have arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starling.common.wire.messages import TrainStep


@dataclass(frozen=True)
class StepItem:
    """One group, or one supervised example, of a step."""

    content: bytes
    """Everything that the outcome of training it depends on."""
    staleness: tuple[int, ...] = ()
    """Of each completion, in versions."""
    num_tokens: int = 0


@dataclass(frozen=True)
class StepShare:
    """The part of a step that one policy contributes."""

    policy: str
    message: TrainStep
    items: dict[str, StepItem]
    """The groups or examples of the share, by prompt."""
    start: str
    """Digest of the weights that the policy starts from."""
    done: Callable[[dict[str, StepItem]], None]
    """Called with the items of all shares when the step is whole."""


class Collective:
    """Policies that wait for each other, by step and by the number of shares of the step."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], dict[int, StepShare]] = {}

    def arrive(self, share: StepShare) -> None:
        """Add a share; the last share of a step completes it for all.

        Shares that do not add up to a whole step belong to different attempts: they wait until the others are replaced.
        """
        message = share.message
        key = (message.step, message.num_replicas)
        shares = self._waiting.setdefault(key, {})
        shares[message.replica] = share
        items = {prompt: item for other in shares.values() for prompt, item in other.items.items()}
        num = sum(len(other.items) for other in shares.values())
        same = len({other.start for other in shares.values()}) == 1
        if len(shares) == message.num_replicas and len(items) == num == message.num_groups and same:
            del self._waiting[key]
            for other in shares.values():
                other.done(items)

    def leave(self, policy: str) -> None:
        """Withdraw the share of a policy that died, or whose lease was released."""
        for key, shares in list(self._waiting.items()):
            for replica, share in list(shares.items()):
                if share.policy == policy:
                    del shares[replica]
            if not shares:
                del self._waiting[key]
