"""Stop 1 of the walk, and the memory of all the others: every group in exactly one state.

    waiting -> leased -> generated -> scored -> sealed -> trained
       ^_________|___________|           |
                 (again, or discarded)

Capacity is derived from the states; nothing is counted on the side, so nothing can leak. What follows next (which group
waits first, whether a step is full) is found in a time that does not depend on how many groups there are.
"""

from __future__ import annotations

import bisect
import enum
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from starling.algo.staleness import num_slots, staleness
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


GONE = frozenset({GroupState.TRAINED, GroupState.DISCARDED})


@dataclass(slots=True)
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
    temperature: float = 1.0
    """Divisor of the logits, as of its dispatch."""

    @property
    def key(self) -> str:
        """Return its name in lease ids and in the journal."""
        return f"{self.purpose[0]}{self.ordinal}"


class Groups:
    """Groups of one purpose. Those that wait, and those to score, come in the order of admission."""

    def __init__(self, purpose: Purpose, max_tries: int) -> None:
        """`max_tries`: how often a group is generated again before it is discarded."""
        self.purpose, self.max_tries = purpose, max_tries
        self.num_admitted = 0
        self.num_discarded = 0
        self._live: dict[int, Group] = {}
        self._counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        self._waiting: list[int] = []
        self._to_score: list[int] = []

    def admit(self, prompt: Prompt) -> Group:
        """Take in a prompt as a waiting group."""
        group = Group(self.num_admitted, prompt, self.purpose)
        self.num_admitted += 1
        self._live[group.ordinal] = group
        self._counts[GroupState.WAITING] += 1
        heapq.heappush(self._waiting, group.ordinal)
        return group

    def get(self, ordinal: int) -> Group | None:
        """Return a live group."""
        return self._live.get(ordinal)

    @property
    def num_live(self) -> int:
        """Groups that are neither trained nor discarded."""
        return len(self._live)

    def live(self) -> Iterable[Group]:
        """Return all live groups, in no order."""
        return self._live.values()

    def within(self, state: GroupState) -> list[Group]:
        """Return the groups in `state`, in the order of admission. Looks at all live groups."""
        return sorted((g for g in self._live.values() if g.state is state), key=lambda g: g.ordinal)

    def count(self, state: GroupState) -> int:
        """Return how many groups are in `state`."""
        return self._counts[state]

    def next_waiting(self) -> Group | None:
        """Return the first group that waits."""
        return self._first(self._waiting, GroupState.WAITING)

    def next_to_score(self) -> Group | None:
        """Return the first group that has completions, and nobody that scores them."""
        return self._first(self._to_score, GroupState.GENERATED)

    def _first(self, heap: list[int], state: GroupState) -> Group | None:
        # An ordinal stays in its heap when the group goes on, and may be in it twice: only the state says what counts.
        while heap:
            group = self._live.get(heap[0])
            if group is not None and group.state is state and not group.scoring:
                return group
            heapq.heappop(heap)
        return None

    def move(self, group: Group, state: GroupState) -> None:
        """Put `group` into `state`."""
        self._counts[group.state] -= 1
        self._counts[state] += 1
        group.state = state
        if state is GroupState.WAITING:
            heapq.heappush(self._waiting, group.ordinal)
        elif state in GONE:
            del self._live[group.ordinal]
            self._counts[state] -= 1

    def lease(self, group: Group, min_version: int) -> None:
        """A rollout has the group."""
        group.min_version = min_version
        self.move(group, GroupState.LEASED)

    def generated(
        self, group: Group, trajectories: tuple[TrajectoryMeta, ...], tensors: tuple[TensorMeta, ...], buffers: Buffers
    ) -> None:
        """Store the completions of a leased group."""
        group.trajectories, group.tensors, group.buffers = trajectories, tensors, buffers
        self.move(group, GroupState.GENERATED)
        heapq.heappush(self._to_score, group.ordinal)

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
        elif group.scoring:
            group.scoring = False
            heapq.heappush(self._to_score, group.ordinal)

    def retry(self, group: Group, *, hopeless: bool = False) -> None:
        """Throw a group's completions away: generate it again, or discard it after `max_tries`."""
        group.tries += 1
        group.trajectories, group.tensors, group.buffers, group.rewards = (), (), (), ()
        group.scoring = False
        if hopeless or group.tries > self.max_tries:
            self.discard(group)
        else:
            self.move(group, GroupState.WAITING)

    def discard(self, group: Group) -> None:
        """Give a group up."""
        self.num_discarded += 1
        self.move(group, GroupState.DISCARDED)


class Ledger(Groups):
    """The groups to train. At most `num_slots` are live; steps take them in the order of admission."""

    def __init__(self, *, num_steps: int, prompts_per_step: int, max_staleness: int, max_tries: int) -> None:
        """`max_staleness` bounds the number of groups: see `starling.algo.staleness`."""
        super().__init__("train", max_tries)
        self.num_steps, self.prompts_per_step, self.max_staleness = num_steps, prompts_per_step, max_staleness
        self.num_sealed = 0
        """Steps that were sealed so far."""
        self.num_trained_groups = 0
        self._unsealed: list[int] = []
        """Live ordinals that no step has, in order."""
        self._num_ready = 0
        """How many of the first of them, up to a step's worth, are scored."""
        self._discarded: list[int] = []
        """Ordinals, ascending, of those that were admitted after some live group."""
        self._num_forgotten = 0
        """How many others were discarded."""
        self._sealed: dict[int, list[Group]] = {}
        """By step, until it is published."""

    @property
    def num_slots(self) -> int:
        """Groups that may be live."""
        return num_slots(self.prompts_per_step, self.max_staleness)

    def free_slots(self) -> int:
        """Return how many prompts may be admitted now."""
        wanted = self.num_steps * self.prompts_per_step - (self.num_admitted - self.num_discarded)
        return max(0, min(self.num_slots - self.num_live, wanted))

    def admit(self, prompt: Prompt) -> Group:
        """Take in a prompt as a waiting group."""
        group = super().admit(prompt)
        self._unsealed.append(group.ordinal)
        return group

    def rank(self, group: Group) -> int:
        """Return how many live groups were admitted before this one.

        A group of rank r is trained at most ``r // prompts_per_step`` steps after the next one. Groups that are
        discarded later can only bring that step nearer, never push it off.
        """
        # Trained groups were all admitted before any live one, for steps take them in order.
        num_discarded = self._num_forgotten + bisect.bisect_left(self._discarded, group.ordinal)
        return group.ordinal - self.num_trained_groups - num_discarded

    def scored(
        self, group: Group, rewards: tuple[float | None, ...], components: dict[str, tuple[float | None, ...]]
    ) -> None:
        """Store the rewards of a generated group."""
        super().scored(group, rewards, components)
        self._look_ahead()

    def discard(self, group: Group) -> None:
        """Give a group up."""
        super().discard(group)
        bisect.insort(self._discarded, group.ordinal)
        del self._unsealed[bisect.bisect_left(self._unsealed, group.ordinal)]
        self._look_ahead()

    def is_full(self) -> bool:
        """Say whether the next step can be sealed."""
        return self._num_ready == self.prompts_per_step and self.num_sealed < self.num_steps

    def seal(self, step: int) -> list[Group]:
        """Seal and return the groups of `step`, the next one, once they are all scored; else return nothing.

        The groups of the step before may still wait for its publication: they are sealed, and come first.
        """
        if not self.is_full():
            return []
        first = [self._live[ordinal] for ordinal in self._unsealed[: self.prompts_per_step]]
        self.take(step, first)
        return first

    def take(self, step: int, groups: list[Group]) -> None:
        """Seal these groups, the first ones, for `step`."""
        assert self._unsealed[: len(groups)] == [group.ordinal for group in groups], "steps take groups in order"
        del self._unsealed[: len(groups)]
        for group in groups:
            group.step = step
            self.move(group, GroupState.SEALED)
        self._sealed[step] = groups
        self.num_sealed += 1
        self._num_ready = 0
        self._look_ahead()

    def sealed(self, step: int) -> list[Group]:
        """Return the groups that were sealed for `step`, in the order of admission, until it is published."""
        return self._sealed.get(step, [])

    def trained(self, step: int) -> None:
        """Retire the groups of `step`, which frees their slots: it has been published."""
        sealed = self._sealed.pop(step, [])
        self.num_trained_groups += len(sealed)
        for group in sealed:
            self.move(group, GroupState.TRAINED)
        if sealed:
            # No live group was admitted before these.
            num = bisect.bisect_left(self._discarded, sealed[-1].ordinal)
            del self._discarded[:num]
            self._num_forgotten += num

    def _look_ahead(self) -> None:
        end = min(self.prompts_per_step, len(self._unsealed))
        while self._num_ready < end and self._live[self._unsealed[self._num_ready]].state is GroupState.SCORED:
            self._num_ready += 1

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
