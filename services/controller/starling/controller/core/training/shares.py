"""Shares of a step: which examples or groups each policy trains, as messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starling.algo.packing import balance
from starling.common.wire import messages as wire
from starling.controller.core.events import Buffers
from starling.controller.core.groups.group import Group


def example_share(num_examples: int, index: int, num_policies: int) -> slice:
    """Return the examples of policy `index`: consecutive ones, as even as possible."""
    return slice(num_examples * index // num_policies, num_examples * (index + 1) // num_policies)


def group_shares(groups: Sequence[Group], num_policies: int) -> list[list[Group]]:
    """Return the groups of each policy: whole groups, in order, of about equally many tokens.

    Policies wait for one another at every update, so the longest share decides how long a step takes. With at least as
    many groups as policies, no share is empty.
    """
    if num_policies == 1:
        return [list(groups)]
    # The first two tensors are the token ids of prompt and completions. A cost of 0 could leave a share empty.
    costs = [1 + sum(math.prod(meta.shape) for meta in group.tensors[:2]) for group in groups]
    return [[groups[index] for index in part] for part in balance(costs, num_policies)]


def to_train_group(group: Group) -> wire.TrainGroup:
    """Return a scored group as the message to a policy."""
    trajectories = [
        wire.ScoredTrajectory(num_tokens=t.num_tokens, oldest_version=t.oldest_version, reward=reward, status=t.status)
        for t, reward in zip(group.trajectories, group.rewards, strict=True)
        if reward is not None
    ]
    return wire.TrainGroup(
        prompt_id=group.prompt.id,
        trajectories=tuple(trajectories),
        tensors=group.tensors,
        temperature=group.temperature,
    )


def buffers_of(groups: list[Group]) -> Buffers:
    """Return the buffers of groups, in order."""
    return tuple(buffer for group in groups for buffer in group.buffers)
