"""Stop 1 of the walk, and the memory of all the others: every group in exactly one state.

    waiting -> leased -> generated -> scored -> sealed -> trained
       ^_________|___________|           |
                 (again, or discarded)

Capacity is derived from the states; nothing is counted on the side, so nothing can leak.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from starling.algo.staleness import staleness
from starling.common.ids import Purpose
from starling.common.wire.messages import Prompt, Status, TensorMeta, TrajectoryMeta
from starling.controller.core.events import Buffers


class GroupState(enum.StrEnum):
    """Where a group is."""

    WAITING = "waiting"
    LEASED = "leased"
    GENERATED = "generated"
    SCORED = "scored"
    SEALED = "sealed"
    TRAINED = "trained"
    DISCARDED = "discarded"


@dataclass
class Group:
    """The completions of one prompt, on their way through the walk."""

    ordinal: int
    """Position in the order of admission, which is the order of training."""
    prompt: Prompt
    purpose: Purpose
    state: GroupState = GroupState.WAITING
    step: int = 0
    """The step that trains it, once it is sealed."""
    tries: int = 0
    """How often its completions were thrown away."""
    min_version: int = 0
    """Oldest weight version that may sample for it, as of its dispatch."""
    trajectories: tuple[TrajectoryMeta, ...] = ()
    tensors: tuple[TensorMeta, ...] = ()
    buffers: Buffers = ()
    rewards: tuple[float | None, ...] = ()
    components: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    scoring: bool = False
    """A reward replica has it."""

    @property
    def key(self) -> str:
        """Return its name in lease ids."""
        return f"{self.purpose[0]}{self.ordinal}"


class Groups:
    """Groups of one purpose, indexed by state; each state keeps the order of admission."""

    def __init__(self, purpose: Purpose, max_tries: int) -> None:
        """`max_tries`: how often a group is generated again before it is discarded."""
        self.purpose, self.max_tries = purpose, max_tries
        self.num_admitted = 0
        self.num_discarded = 0
        self._live: dict[int, Group] = {}
        self._states: dict[GroupState, dict[int, Group]] = {state: {} for state in GroupState}

    def admit(self, prompt: Prompt) -> Group:
        """Take in a prompt as a waiting group."""
        group = Group(self.num_admitted, prompt, self.purpose)
        self.num_admitted += 1
        self._live[group.ordinal] = group
        self._states[GroupState.WAITING][group.ordinal] = group
        return group

    def get(self, ordinal: int) -> Group | None:
        """Return a live group."""
        return self._live.get(ordinal)

    @property
    def num_live(self) -> int:
        """Groups that are neither trained nor discarded."""
        return len(self._live)

    def within(self, state: GroupState) -> list[Group]:
        """Return the groups in `state`, in the order of admission."""
        groups = self._states[state]
        return [groups[ordinal] for ordinal in sorted(groups)]

    def count(self, state: GroupState) -> int:
        """Return how many groups are in `state`."""
        return len(self._states[state])

    def move(self, group: Group, state: GroupState) -> None:
        """Put `group` into `state`."""
        del self._states[group.state][group.ordinal]
        group.state = state
        if state in (GroupState.TRAINED, GroupState.DISCARDED):
            del self._live[group.ordinal]
        else:
            self._states[state][group.ordinal] = group

    def generated(
        self, group: Group, trajectories: tuple[TrajectoryMeta, ...], tensors: tuple[TensorMeta, ...], buffers: Buffers
    ) -> None:
        """Store the completions of a leased group."""
        group.trajectories, group.tensors, group.buffers = trajectories, tensors, buffers
        self.move(group, GroupState.GENERATED)

    def scored(
        self, group: Group, rewards: tuple[float | None, ...], components: dict[str, tuple[float | None, ...]]
    ) -> None:
        """Store the rewards of a generated group."""
        group.scoring, group.rewards, group.components = False, rewards, components
        self.move(group, GroupState.SCORED)

    def requeue(self, group: Group) -> None:
        """Put a group back whose replica was lost: that is nobody's failure, so the same tokens are due again."""
        if group.state is GroupState.LEASED:
            self.move(group, GroupState.WAITING)
        group.scoring = False

    def retry(self, group: Group, *, hopeless: bool = False) -> None:
        """Throw a group's completions away: generate it again, or discard it after `max_tries`."""
        group.tries += 1
        group.trajectories, group.tensors, group.buffers, group.rewards = (), (), (), ()
        group.scoring = False
        if hopeless or group.tries > self.max_tries:
            self.num_discarded += 1
            self.move(group, GroupState.DISCARDED)
        else:
            self.move(group, GroupState.WAITING)


class Ledger(Groups):
    """The groups to train. At most `num_slots` exist; steps take them in the order of admission."""

    def __init__(self, *, num_steps: int, prompts_per_step: int, num_slots: int, max_tries: int) -> None:
        """`num_slots` bounds the staleness: see `starling.algo.staleness`."""
        super().__init__("train", max_tries)
        self.num_steps, self.prompts_per_step, self.num_slots = num_steps, prompts_per_step, num_slots
        self.num_sealed = 0
        """Steps that were sealed so far."""
        self.num_trained_groups = 0

    def free_slots(self) -> int:
        """Return how many prompts may be admitted now."""
        wanted = self.num_steps * self.prompts_per_step - (self.num_admitted - self.num_discarded)
        return max(0, min(self.num_slots - self.num_live, wanted))

    def ranked_waiting(self) -> list[tuple[int, Group]]:
        """Return the waiting groups, each with its rank among the live ones.

        A group of rank r is trained at most ``r // prompts_per_step`` steps after the next one. Groups that are
        discarded later can only bring that step nearer, never push it off.
        """
        live = enumerate(sorted(self._live))
        return [(rank, self._live[n]) for rank, n in live if self._live[n].state is GroupState.WAITING]

    def seal(self, step: int) -> list[Group]:
        """Seal and return the groups of `step`, the next one, once they are all scored; else return nothing.

        The groups of the step before may still wait for its publication: they are sealed, and come first.
        """
        if self.num_sealed >= self.num_steps:
            return []
        begin = self.count(GroupState.SEALED)
        first = [self._live[ordinal] for ordinal in sorted(self._live)[begin : begin + self.prompts_per_step]]
        if len(first) < self.prompts_per_step or any(group.state is not GroupState.SCORED for group in first):
            return []
        for group in first:
            group.step = step
            self.move(group, GroupState.SEALED)
        self.num_sealed += 1
        return first

    def sealed(self, step: int) -> list[Group]:
        """Return the groups that were sealed for `step`, in the order of admission."""
        return [group for group in self.within(GroupState.SEALED) if group.step == step]

    def trained(self, step: int) -> None:
        """Retire the groups of `step`, which frees their slots: it has been published."""
        sealed = self.sealed(step)
        self.num_trained_groups += len(sealed)
        for group in sealed:
            self.move(group, GroupState.TRAINED)

    def sealed_metrics(self, step: int) -> dict[str, float]:
        """Return what the groups of a step in training say of themselves; nothing for a supervised step."""
        sealed = self.sealed(step)
        if not sealed:
            return {}
        rewards = [r for group in sealed for r in group.rewards if r is not None]
        trajectories = [t for group in sealed for t in group.trajectories]
        stale = [staleness(step, t.oldest_version) for t in trajectories]
        metrics = {
            "reward_mean": sum(rewards) / len(rewards),
            "reward_max": max(rewards),
            "reward_min": min(rewards),
            "completion_tokens_mean": sum(t.num_tokens for t in trajectories) / len(trajectories),
            "truncated_share": sum(t.status is Status.TRUNCATED for t in trajectories) / len(trajectories),
            "staleness_mean": sum(stale) / len(stale),
            "staleness_max": max(stale),
            "num_discarded": self.num_discarded,
        }
        for name in sorted({name for group in sealed for name in group.components}):
            values = [v for group in sealed for v in group.components.get(name, ()) if v is not None]
            metrics[f"score/{name}"] = sum(values) / max(1, len(values))
        return metrics
