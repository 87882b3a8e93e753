"""Stop 8 as the controller sees it: one step at a time, dealt to the policies that are members at its start.

    dealt -> made -> committed
      ^  |
      +--+ (a replica died before any had made it: dealt again, with the same groups)

A step is *made* once one policy has it: it can only have got there with every replica's share. Policies that made no
more of it than their share are behind, and take the weights from one that has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starling.algo.packing import balance
from starling.common.wire import messages as wire
from starling.controller.core.events import Buffers
from starling.controller.core.groups.group import Group


@dataclass
class ActiveStep:
    """The step in hand."""

    number: int
    shares: dict[str, str] = field(default_factory=dict)
    """Lease by policy, of those that still work on it."""
    done: set[str] = field(default_factory=set)
    """Policies that have made it."""
    broken: bool = False
    """A replica is gone that had a share: whoever waits for it waits in vain."""
    metrics: dict[str, Any] = field(default_factory=dict)
    alarms: dict[str, wire.Alarm] = field(default_factory=dict)
    """Those that are on, by name, as the policies say that made it."""

    @property
    def is_made(self) -> bool:
        """Say whether some policy holds its version, and no other can be expected to."""
        return bool(self.done) and (self.broken or not self.shares)

    @property
    def must_be_dealt_again(self) -> bool:
        """Say whether nobody can make it as it was dealt."""
        return not self.done and (self.broken or not self.shares)


def share_of(items: int, index: int, num: int) -> slice:
    """Return the part of `items` examples that replica `index` of `num` gets: in order, as even as can be."""
    return slice(items * index // num, items * (index + 1) // num)


def shares_of(groups: Sequence[Group], num: int) -> list[list[Group]]:
    """Return which groups each of `num` replicas trains: whole ones, in order, of about equally many tokens.

    Replicas wait for one another at every update, so the longest share decides how long a step takes. Where there are
    as many groups as replicas, nobody goes without.
    """
    # The first two tensors are the token ids of prompt and completions. A cost of 0 could leave a share empty.
    costs = [1 + sum(math.prod(meta.shape) for meta in group.tensors[:2]) for group in groups]
    return [[groups[index] for index in part] for part in balance(costs, num)]


def train_group(group: Group) -> wire.TrainGroup:
    """Return a scored group as a policy gets it."""
    trajectories = tuple(
        wire.ScoredTrajectory(num_tokens=t.num_tokens, oldest_version=t.oldest_version, reward=reward, status=t.status)
        for t, reward in zip(group.trajectories, group.rewards, strict=True)
        if reward is not None
    )
    return wire.TrainGroup(
        prompt_id=group.prompt.id, trajectories=trajectories, tensors=group.tensors, temperature=group.temperature
    )


def buffers_of(groups: list[Group]) -> Buffers:
    """Return the groups' buffers, in order."""
    return tuple(buffer for group in groups for buffer in group.buffers)
