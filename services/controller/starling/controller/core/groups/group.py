"""Groups of one purpose, each in exactly one state, and what they are waiting for.

    waiting -> leased -> generated -> scored -> sealed -> trained
       ^_________|___________|           |
                 (again, or discarded)

A rollout that leaves in good order gives back what it has of a group, which then waits with its tokens so far: the next
rollout goes on from them. That is nobody's failure and counts as no try.

A generated group is scored once it has its rewards and, in a run with teachers, its teacher's log-probabilities too:
the two come from different replicas, in either order.

What follows next (which group waits first, which is to be scored) is found in a time that does not depend on how many
groups there are.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starling.common.ids import LeaseKind, Purpose
from starling.common.wire.messages import Prompt, TensorMeta, TrajectoryMeta
from starling.controller.core.events import Buffers
from starling.controller.core.groups.partial import PartialCompletions
from starling.controller.core.replicas.estimates import length_class


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
    scoring: str = ""
    """The lease under which a reward replica has it; empty when none has."""
    teaching: str = ""
    """The lease under which a teacher has it."""
    taught: bool = False
    """Its teacher's tensors follow those of its completions."""
    generated_by: str = ""
    """The lease under which its completions were generated: those to score and to teach them are all newer."""
    temperature: float = 1.0
    """Divisor of the logits, as of its dispatch."""
    problem: str = ""
    """Why it was given up."""
    losses: int = 0
    """How many engines died with it in hand since its tries were counted last."""
    partial: PartialCompletions | None = None
    """What some rollout left of its completions, to go on from."""
    expected_tokens: int = 1
    """Of all completions, as was to be expected at its admission."""

    @property
    def num_tokens(self) -> int:
        """Tokens of its completions, once it is generated."""
        return sum([trajectory.num_tokens for trajectory in self.trajectories])

    @property
    def key(self) -> str:
        """Return its name in lease ids and in the journal."""
        return f"{self.purpose[0]}{self.ordinal}"


class Groups:
    """Groups of one purpose. Those that wait, and those to score, come in the order of admission."""

    def __init__(self, purpose: Purpose, max_tries: int, *, is_taught: bool = False) -> None:
        """`max_tries`: how often a group is generated again before it is discarded; `is_taught`: by teachers."""
        self.purpose, self.max_tries, self.is_taught = purpose, max_tries, is_taught
        self.num_admitted = 0
        self.num_discarded = 0
        """Groups that were given up: their completions could not be had, or not be scored."""
        self.num_env_errors = 0
        """Groups that were thrown away because an environment failed, since this controller started."""
        self._live: dict[int, Group] = {}
        self._counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        self._waiting: list[int] = []
        self._longest: list[tuple[int, int, int]] = []
        """The same by block, the longest first."""
        self.waiting_tokens = 0
        """Expected of all groups that wait."""
        self._to_score: list[int] = []
        self._to_teach: list[int] = []

    def admit(self, prompt: Prompt, expected_tokens: int = 1) -> Group:
        """Take in a prompt as a waiting group, of which so many tokens are expected."""
        group = Group(self.num_admitted, prompt, self.purpose, expected_tokens=expected_tokens)
        self.num_admitted += 1
        self._live[group.ordinal] = group
        self._counts[GroupState.WAITING] += 1
        self._push(group)
        return group

    def _push(self, group: Group) -> None:
        heapq.heappush(self._waiting, group.ordinal)
        place = (self.block(group), -length_class(group.expected_tokens), group.ordinal)
        heapq.heappush(self._longest, place)
        self.waiting_tokens += group.expected_tokens

    def block(self, group: Group) -> int:
        """Return which of the blocks a group is in, within which the longest goes first: here there is but one."""
        return 0

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
        found = self._first(self._waiting, _waits)
        if found is None:
            self._longest.clear()  # nothing that it holds counts any more
        return found

    def next_longest(self) -> Group | None:
        """Return the longest group of the first block of which any waits; the order of admission breaks ties."""
        # As in `_first`: only the state says what counts.
        while self._longest:
            group = self._live.get(self._longest[0][2])
            if group is not None and _waits(group):
                return group
            heapq.heappop(self._longest)
        return None

    def next_to_score(self) -> Group | None:
        """Return the first group that has completions, and nobody that scores them."""
        return self._first(self._to_score, wants_scores)

    def next_to_teach(self) -> Group | None:
        """Return the first group that lacks its teacher's log-probabilities, and that no teacher has."""
        return self._first(self._to_teach, wants_teacher)

    def _first(self, heap: list[int], wants: Callable[[Group], bool]) -> Group | None:
        # An ordinal stays in its heap when the group goes on, and may be in it twice: only the state says what counts.
        while heap:
            group = self._live.get(heap[0])
            if group is not None and wants(group):
                return group
            heapq.heappop(heap)
        return None

    def move(self, group: Group, state: GroupState) -> None:
        """Put `group` into `state`."""
        if group.state is GroupState.WAITING:
            self.waiting_tokens -= group.expected_tokens
        self._counts[group.state] -= 1
        self._counts[state] += 1
        group.state = state
        if state is GroupState.WAITING:
            self._push(group)
        elif state in GONE:
            del self._live[group.ordinal]
            self._counts[state] -= 1

    def lease(self, group: Group, min_version: int) -> None:
        """A rollout has the group."""
        group.min_version = min_version
        self.move(group, GroupState.LEASED)

    def generated(
        self,
        group: Group,
        trajectories: tuple[TrajectoryMeta, ...],
        tensors: tuple[TensorMeta, ...],
        buffers: Buffers,
        lease: str = "",
    ) -> None:
        """Store the completions of a group, which it was leased for as `lease`."""
        group.trajectories, group.tensors, group.buffers = trajectories, tensors, buffers
        group.generated_by, group.partial = lease, None
        self.move(group, GroupState.GENERATED)
        heapq.heappush(self._to_score, group.ordinal)
        if self.is_taught:
            heapq.heappush(self._to_teach, group.ordinal)

    def scored(
        self, group: Group, rewards: tuple[float | None, ...], components: dict[str, tuple[float | None, ...]]
    ) -> None:
        """Store the rewards of a generated group."""
        group.scoring, group.rewards, group.components = "", rewards, components
        self._complete(group)

    def taught(self, group: Group, tensors: tuple[TensorMeta, ...], buffers: Buffers) -> None:
        """Store what a teacher makes of a generated group, behind its completions."""
        group.teaching, group.taught = "", True
        group.tensors, group.buffers = (*group.tensors, *tensors), (*group.buffers, *buffers)
        self._complete(group)

    def _complete(self, group: Group) -> None:
        """Note that a group is scored when nothing is missing any more."""
        if group.rewards and (group.taught or not self.is_taught):
            self.move(group, GroupState.SCORED)

    def requeue(self, group: Group, kind: LeaseKind) -> None:
        """Put a group back whose replica was lost: that is nobody's failure, so the same tokens are due again.

        `kind`: of the work that the replica had.
        """
        match kind:
            case "generate" if group.state is GroupState.LEASED:
                self.move(group, GroupState.WAITING)
            case "score":
                group.scoring = ""
                heapq.heappush(self._to_score, group.ordinal)
            case "teach":
                group.teaching = ""
                heapq.heappush(self._to_teach, group.ordinal)

    def interrupted(self, group: Group, partial: PartialCompletions, temperature: float) -> bool:
        """Keep what a rollout left of a group, drawn at this temperature; not where more of it is there already."""
        keeps = group.partial is None or partial.num_tokens >= group.partial.num_tokens
        if keeps:
            group.partial, group.temperature = partial, temperature
        return keeps

    def retry(self, group: Group, *, hopeless: bool = False) -> None:
        """Throw a group's completions away: generate it again, or discard it after `max_tries`."""
        if hopeless or group.tries >= self.max_tries:
            group.tries += 1
            self.discard(group)
        else:
            self.again(group, group.tries + 1)

    def again(self, group: Group, tries: int) -> None:
        """Have a group generated again, whose completions were thrown away for the `tries`-th time."""
        group.tries = tries
        group.trajectories, group.tensors, group.buffers, group.rewards = (), (), (), ()
        group.scoring = group.teaching = group.generated_by = ""
        group.taught, group.partial = False, None
        self.move(group, GroupState.WAITING)

    def discard(self, group: Group) -> None:
        """Give a group up."""
        self.num_discarded += 1
        self.move(group, GroupState.DISCARDED)


def _waits(group: Group) -> bool:
    return group.state is GroupState.WAITING


def wants_scores(group: Group) -> bool:
    """Say whether a group has completions without rewards, and nobody scores them."""
    return group.state is GroupState.GENERATED and not group.scoring and not group.rewards


def wants_teacher(group: Group) -> bool:
    """Say whether a group has completions that no teacher has seen or sees."""
    return group.state is GroupState.GENERATED and not group.teaching and not group.taught
