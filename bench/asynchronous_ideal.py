"""Simulated duration of a run without software overhead: the same groups, lengths and bounds on ideal services."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from asynchronous_device import Device, Profile, Row

from starling.algo.staleness import oldest_allowed_version
from starling.controller.core.plan import draw_seed


@dataclass(frozen=True)
class Work:
    """Groups to generate and train, and the devices."""

    profile: Profile
    train_s: float
    num_steps: int
    num_rollouts: int
    num_slots: int
    """Slots of a rollout."""
    prompts_per_step: int
    group_size: int
    max_tokens: int
    seed: int

    def lengths(self, group: int) -> list[int]:
        """Return the lengths of a group's completions, as the engine of the run draws them."""
        seed = draw_seed(self.seed, "train", group, 0)
        return [self.profile.length(seed, index, self.max_tokens) for index in range(self.group_size)]

    @property
    def tokens_per_step(self) -> float:
        """The mean over the steps."""
        groups = self.num_steps * self.prompts_per_step
        return sum(sum(self.lengths(group)) for group in range(groups)) / self.num_steps

    @property
    def full_s(self) -> float:
        """Seconds in which the rollouts generate the tokens of a step while all their rows are taken."""
        return self.tokens_per_step * self.profile.step_s / (self.profile.max_rows * self.num_rollouts)

    @property
    def batch_s(self) -> float:
        """Mean seconds in which they generate the groups of one step by themselves, its last completion included."""
        return generation_s(self)


def generation_s(work: Work) -> float:
    """Return the mean seconds of a synchronous step that is trained in no time."""
    ends = step_ends(work, 0, train_s=0.0)
    return ends[-1] / len(ends)


def step_ends(work: Work, max_staleness: int, *, train_s: float | None = None) -> list[float]:
    """Return when each step would end, in seconds from the start.

    The rules are those of the system: groups are trained in the order in which they were admitted, a group is given to
    the rollout that has the fewest once the weights are new enough for it, and a version is in use when it is made.
    """
    train_s = work.train_s if train_s is None else train_s
    devices = [Device(work.profile) for _ in range(work.num_rollouts)]
    left: dict[int, int] = {}  # completions that a group still lacks
    held = [0] * len(devices)  # groups that each device has
    done: set[int] = set()
    now, version, next_group, train_end = 0.0, 0, 0, math.inf
    ends: list[float] = []
    while len(ends) < work.num_steps:
        for number, device in enumerate(devices):
            for row in device.advance(now):
                group = int(row.lease)
                left[group] -= 1
                if not left[group]:
                    done.add(group)
                    held[number] -= 1
        if now >= train_end:
            version, train_end = version + 1, math.inf
            ends.append(now)
        while _may_start(work, next_group, version, max_staleness, held):
            number = held.index(min(held))
            held[number] += 1
            lengths = work.lengths(next_group)
            left[next_group] = len(lengths)
            devices[number].add((Row(str(next_group), i, length) for i, length in enumerate(lengths)), now)
            next_group += 1
        first = version * work.prompts_per_step
        if train_end == math.inf and all(group in done for group in range(first, first + work.prompts_per_step)):
            train_end = now + train_s
        now = min(train_end, *(device.next_end() for device in devices))
    return ends


def _may_start(work: Work, group: int, version: int, max_staleness: int, held: list[int]) -> bool:
    return (
        group < work.num_steps * work.prompts_per_step
        and oldest_allowed_version(0, group, work.prompts_per_step, max_staleness) <= version
        and min(held) < work.num_slots
    )


def seconds_per_step(ends: list[float], first: int, last: int) -> float:
    """Return the mean seconds of the steps after `first` up to `last`, counted from 1."""
    return fmean(ends[step] - ends[step - 1] for step in range(first, last))
