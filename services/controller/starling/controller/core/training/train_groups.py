"""Groups of a step as messages to the policies."""

from __future__ import annotations

from starling.common.wire import messages as wire
from starling.controller.core.events import Buffers
from starling.controller.core.groups.group import Group


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
