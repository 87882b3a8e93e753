"""Simulated all-reduce of a step that several policies make together: each waits until all have arrived."""

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
    """What one policy contributes to a step."""

    policy: str
    message: TrainStep
    items: dict[str, StepItem]
    """The groups or examples of the step, by prompt."""
    start: str
    """Digest of the weights that the policy starts from."""
    done: Callable[[], None]
    """Called when all policies have arrived."""


class Collective:
    """Policies that wait for each other, by the name of their process groups and by step."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], dict[int, StepShare]] = {}

    def arrive(self, share: StepShare) -> None:
        """Add a policy; the last one of a step completes it for all.

        Those that start from other weights or have other groups wait in vain, as they would find out.
        """
        message = share.message
        key = (message.group, message.step)
        shares = self._waiting.setdefault(key, {})
        shares[message.replica] = share
        others = shares.values()
        if len(shares) == message.num_replicas and all(
            (one.start, one.items, one.message.peers) == (share.start, share.items, message.peers) for one in others
        ):
            del self._waiting[key]
            for one in others:
                one.done()

    def leave(self, policy: str) -> None:
        """Withdraw a policy that died, or whose lease was released."""
        for key, shares in list(self._waiting.items()):
            for replica, share in list(shares.items()):
                if share.policy == policy:
                    del shares[replica]
            if not shares:
                del self._waiting[key]
