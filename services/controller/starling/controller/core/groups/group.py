"""Groups of one purpose, each in exactly one state, and the indexes of the groups that are due next.

    waiting -> leased -> generated -> scored -> frozen -> trained
       ^_________|___________|
          (generated again, or discarded)

`TRANSITIONS` lists every legal transition, and `Groups.move` enforces it.

A rollout that leaves gracefully gives back the tokens so far of its groups. Such a group waits with these partial
completions, and the next rollout resumes from them. This is no failure of the group and does not count as a try. If the
result is of no use, the partial completions may be why: the group begins anew, once, and takes no others.

In a run with teachers a generated group is scored once it has both its rewards and its teacher's log-probabilities. The
two come from different replicas, in either order.

The group that is due next (the first that waits, the first to be scored) is found in a time that does not depend on the
number of groups.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from starling.common.ids import LeaseKind, Purpose
from starling.common.wire.messages import Prompt, TensorMeta, TrajectoryMeta
from starling.common.wire.tensors import LATENTS
from starling.controller.core.events import Buffers
from starling.controller.core.groups.partial import NO_TOKENS, PartialCompletions
from starling.controller.core.records import GroupSummary, RewardsStored
from starling.controller.core.replicas.routing.estimates import length_class


class GroupState(enum.StrEnum):
    """State of a group."""

    WAITING = "waiting"
    LEASED = "leased"
    GENERATED = "generated"
    SCORED = "scored"
    FROZEN = "frozen"
    TRAINED = "trained"
    DISCARDED = "discarded"


WAITING: Final = GroupState.WAITING
LEASED: Final = GroupState.LEASED
GENERATED: Final = GroupState.GENERATED
SCORED: Final = GroupState.SCORED
FROZEN: Final = GroupState.FROZEN
TRAINED: Final = GroupState.TRAINED
"""States by names of their own: each look at a member of an enumeration takes as long as a call."""
GONE: Final = frozenset({GroupState.TRAINED, GroupState.DISCARDED})

TRANSITIONS: Final[dict[tuple[GroupState, GroupState], str]] = {
    (GroupState.WAITING, GroupState.LEASED): "dispatched to a rollout",
    (GroupState.LEASED, GroupState.GENERATED): "its completions arrived",
    (GroupState.GENERATED, GroupState.SCORED): "its rewards, and its teacher's log-probabilities, are complete",
    (GroupState.SCORED, GroupState.FROZEN): "a step, or a file, takes it",
    (GroupState.FROZEN, GroupState.TRAINED): "its step is published, or its file is written",
    # Generated again
    (GroupState.LEASED, GroupState.WAITING): "its rollout left or failed",
    (GroupState.GENERATED, GroupState.WAITING): "its completions cannot be scored",
    (GroupState.WAITING, GroupState.WAITING): "its partial completions were dropped",
    (GroupState.SCORED, GroupState.WAITING): "its prompt has changed, or it cannot be trained",
    # Discarded
    (GroupState.WAITING, GroupState.DISCARDED): "the time of its evaluation is over, or it is out of tries",
    (GroupState.LEASED, GroupState.DISCARDED): "as above",
    (GroupState.GENERATED, GroupState.DISCARDED): "as above, or all its rewards are equal",
    # Stored by an older controller, or found by a policy
    (GroupState.FROZEN, GroupState.SCORED): "a group of its step cannot be trained, so the step was reopened",
    (GroupState.SCORED, GroupState.DISCARDED): "it cannot be trained, and it is out of tries",
    # Discarded in a run without a policy: its place in the file then holds the reason
    (GroupState.WAITING, GroupState.SCORED): "out of tries",
    (GroupState.LEASED, GroupState.SCORED): "out of tries",
    # Restored from the journal, which records no leases, or loaded from a file
    (GroupState.WAITING, GroupState.GENERATED): "its completions are in the journal or in the file",
    (GroupState.WAITING, GroupState.FROZEN): "its step was committed, and its completions are pruned from the journal",
    (GroupState.GENERATED, GroupState.FROZEN): "its step was committed, and its rewards are pruned from the journal",
}
"""Every legal transition, with its cause."""


def read_by_scorers(tensors: tuple[TensorMeta, ...], buffers: Buffers) -> tuple[tuple[TensorMeta, ...], Buffers]:
    """Return those tensors of a group that reward replicas get, and their buffers: samples of a diffusion model."""
    indices = [index for index, tensor in enumerate(tensors) if tensor.name == LATENTS]
    return tuple(tensors[index] for index in indices), tuple(buffers[index] for index in indices)


class Group(msgspec.Struct, gc=False):
    """The completions of one prompt, on their way through the walk."""

    ordinal: int
    """Position in the order of admission, which is the order of training."""
    prompt: Prompt
    purpose: Purpose
    state: GroupState = GroupState.WAITING
    step: int = 0
    """The step that trains it, once it is frozen."""
    tries: int = 0
    """How often its completions were thrown away."""
    min_version: int = 0
    """Oldest weight version that may sample for it, as of its dispatch."""
    trajectories: tuple[TrajectoryMeta, ...] = ()
    tensors: tuple[TensorMeta, ...] = ()
    buffers: Buffers = ()
    rewards: tuple[float | None, ...] = ()
    components: dict[str, tuple[float | None, ...]] = {}
    evaluation_scores: dict[str, tuple[float | None, ...]] = {}
    """Scores that are no part of the rewards."""
    score_lease: str = ""
    """The lease under which a reward replica scores it; empty when none does."""
    teacher_lease: str = ""
    """The lease under which a teacher scores its tokens; empty when none does."""
    has_teacher_logprobs: bool = False
    """The teacher's tensors follow those of its completions."""
    floor: tuple[int, int] = (0, 0)
    """Incarnation and number of the newest lease when its completions were last thrown away. Work under a lease up to
    this one is about completions that are gone."""
    generated_by: str = ""
    """The lease under which its completions were generated. Leases to score these completions are all newer."""
    generator: str = ""
    """The rollout that generated its completions; empty if a controller stored them that did not record it."""
    giver: str | None = None
    """Set if they were resumed from partial completions of another rollout: its name if all of these had ended, so that
    they are all its own, and empty otherwise."""
    is_anew: bool = False
    """It began anew because of such partial completions, and takes no more."""
    temperature: float = 1.0
    """Divisor of the logits, as of its dispatch."""
    failed_by: str = ""
    """The reward replica or teacher that could not score it last: its next try is another one's, if there is one."""
    spoiled_by: str = ""
    """The rollout that had generated what could not be scored: another one with a free slot generates it next."""
    problem: str = ""
    """Why it was discarded."""
    num_lost_engines: int = 0
    """Engines that died while they worked on it, since its tries were counted last."""
    partial: PartialCompletions | None = None
    """Tokens so far of its completions, from a rollout that could not finish them."""
    expected_tokens: int = 1
    """Expected tokens of all its completions, estimated at its admission."""
    key: str = ""
    """Its name in lease ids and in the journal: the initial of its purpose, and its ordinal."""

    def __post_init__(self) -> None:
        self.key = f"{self.purpose[0]}{self.ordinal}"

    @property
    def num_tokens(self) -> int:
        """Tokens of its completions, once it is generated."""
        return sum([trajectory.num_tokens for trajectory in self.trajectories])


class Groups:
    """Groups of one purpose. Waiting groups, and groups to be scored, come in the order of admission."""

    def __init__(self, purpose: Purpose, max_tries: int, *, needs_teacher: bool = False) -> None:
        """`max_tries`: how often a group is generated again before it is discarded."""
        self.purpose, self.max_tries, self.needs_teacher = purpose, max_tries, needs_teacher
        self.num_admitted = 0
        self.num_discarded = 0
        """Groups that were discarded, because their completions could not be generated or scored."""
        self.num_env_errors = 0
        """Groups whose completions were thrown away because an environment failed, since this controller started."""
        self._live: dict[int, Group] = {}
        self._counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        self._waiting: list[int] = []
        self._longest: list[tuple[int, int, int]] = []
        """Waiting groups by block, the longest first."""
        self.waiting_tokens = 0
        """Expected tokens of all waiting groups."""
        self._to_score: list[int] = []
        self._to_teacher: list[int] = []

    def admit(self, prompt: Prompt, expected_tokens: int = 1) -> Group:
        """Add a prompt as a waiting group of `expected_tokens`."""
        group = Group(self.num_admitted, prompt, self.purpose, expected_tokens=expected_tokens)
        self.num_admitted += 1
        self._live[group.ordinal] = group
        self._counts[WAITING] += 1
        self._push(group)
        return group

    def _push(self, group: Group) -> None:
        heapq.heappush(self._waiting, group.ordinal)
        heapq.heappush(self._longest, (self.block(group), -length_class(group.expected_tokens), group.ordinal))
        self.waiting_tokens += group.expected_tokens

    def block(self, group: Group) -> int:
        """Return the block of a group, within which the longest group is dispatched first. Here there is only one."""
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
        found = self._first(self._waiting, _is_waiting)
        if found is None:
            self._longest.clear()  # all its entries are stale
        return found

    def next_longest(self) -> Group | None:
        """Return the longest group of the first block that has a waiting one; the order of admission breaks ties."""
        # As in `_first`: an entry counts only while the state of its group says so.
        while self._longest:
            group = self._live.get(self._longest[0][2])
            if group is not None and _is_waiting(group):
                return group
            heapq.heappop(self._longest)
        return None

    def next_to_score(self) -> Group | None:
        """Return the first group with completions that no reward replica has scored or scores."""
        return self._first(self._to_score, is_unscored)

    def next_to_teacher(self) -> Group | None:
        """Return the first group with completions whose tokens no teacher has scored or scores."""
        return self._first(self._to_teacher, lacks_teacher)

    def _first(self, heap: list[int], is_due: Callable[[Group], bool]) -> Group | None:
        # An ordinal stays in its heap when its group moves on, and may be in it twice: the state of the group decides.
        while heap:
            group = self._live.get(heap[0])
            if group is not None and is_due(group):
                return group
            heapq.heappop(heap)
        return None

    def move(self, group: Group, state: GroupState) -> None:
        """Put `group` into `state`, which must be a legal transition."""
        assert (group.state, state) in TRANSITIONS, f"{group.key} may not go from {group.state} to {state}"
        if group.state is WAITING:
            self.waiting_tokens -= group.expected_tokens
        self._counts[group.state] -= 1
        self._counts[state] += 1
        group.state = state
        if state is WAITING:
            self._push(group)
        elif state in GONE:
            del self._live[group.ordinal]
            self._counts[state] -= 1

    def lease(self, group: Group, min_version: int) -> None:
        """Note that a rollout generates the group, with weights of `min_version` or newer."""
        group.min_version = min_version
        self.move(group, LEASED)

    def store_completions(
        self,
        group: Group,
        trajectories: tuple[TrajectoryMeta, ...],
        tensors: tuple[TensorMeta, ...],
        buffers: Buffers,
        lease: str = "",
    ) -> None:
        """Store the completions of a group, which were generated under `lease`."""
        group.trajectories, group.tensors, group.buffers = trajectories, tensors, buffers
        group.generated_by, group.partial = lease, None
        self.move(group, GENERATED)
        heapq.heappush(self._to_score, group.ordinal)
        if self.needs_teacher:
            heapq.heappush(self._to_teacher, group.ordinal)

    def store_rewards(self, group: Group, stored: RewardsStored) -> None:
        """Store the rewards of a generated group."""
        group.score_lease, group.rewards = "", stored.rewards
        group.components, group.evaluation_scores = stored.components, stored.evaluation_scores
        self._complete(group)

    def store_teacher_logprobs(self, group: Group, tensors: tuple[TensorMeta, ...], buffers: Buffers) -> None:
        """Store a teacher's log-probabilities of a generated group, behind the tensors of its completions."""
        group.teacher_lease, group.has_teacher_logprobs = "", True
        group.tensors, group.buffers = (*group.tensors, *tensors), (*group.buffers, *buffers)
        self._complete(group)

    def _complete(self, group: Group) -> None:
        """Note that a group is scored, if it is complete."""
        if group.rewards and (group.has_teacher_logprobs or not self.needs_teacher):
            self.move(group, SCORED)

    def requeue(self, group: Group, kind: LeaseKind) -> None:
        """Put a group back whose replica was lost with work of this kind.

        This is no failure of the group, so its seed stays and the same tokens are due again.
        """
        match kind:
            case "generate" if group.state is GroupState.LEASED:
                self.move(group, GroupState.WAITING)
            case "score":
                group.score_lease = ""
                heapq.heappush(self._to_score, group.ordinal)
            case "teach":
                group.teacher_lease = ""
                heapq.heappush(self._to_teacher, group.ordinal)

    def store_partial(self, group: Group, partial: PartialCompletions, temperature: float) -> bool:
        """Keep partial completions that were sampled at this temperature, unless the group has longer ones."""
        is_longer = group.partial is None or partial.num_tokens >= group.partial.num_tokens
        if is_longer:
            group.partial, group.temperature = partial, temperature
        return is_longer

    def retry(self, group: Group, floor: tuple[int, int], *, retryable: bool = True) -> None:
        """Throw a group's completions away: generate it again, or discard it after `max_tries`.

        `floor`: the newest lease, see `Group.floor`.
        """
        if not retryable or group.tries >= self.max_tries:
            group.tries += 1
            self.discard(group)
        else:
            self.regenerate(group, group.tries + 1, floor)

    def regenerate(self, group: Group, tries: int, floor: tuple[int, int]) -> None:
        """Let a group wait again, whose completions were thrown away for the `tries`-th time."""
        group.tries, group.floor = tries, floor
        group.trajectories, group.tensors, group.buffers, group.rewards = (), (), (), ()
        group.score_lease = group.teacher_lease = group.generated_by = group.generator = ""
        group.has_teacher_logprobs, group.partial, group.giver = False, None, None
        self.move(group, GroupState.WAITING)

    def regenerate_all(self, floor: tuple[int, int]) -> None:
        """Let every group that is not frozen wait again without completions, because its prompt may differ.

        `floor`: the newest lease that may be about the prompt before.
        """
        has_completions = (GroupState.GENERATED, GroupState.SCORED)
        for group in sorted(self._live.values(), key=lambda group: group.ordinal):
            if group.state in has_completions or group.partial is not None:
                self.regenerate(group, group.tries, floor)
            else:
                group.floor = floor

    def discard(self, group: Group) -> None:
        """Discard a group."""
        self.num_discarded += 1
        self.move(group, GroupState.DISCARDED)

    # --- compaction ---------------------------------------------------------------------------------------------

    def summaries(self) -> tuple[GroupSummary, ...]:
        """Return the live groups as a restarted controller knows them: without leases, in the order of admission."""
        return tuple(_summary(self._live[ordinal]) for ordinal in sorted(self._live))

    def restore_group(self, summary: GroupSummary, prompt: Prompt) -> Group:
        """Add a live group from its summary. `fill` adds its completions."""
        state = GroupState(summary.state)
        group = self._live[summary.ordinal] = Group(
            summary.ordinal,
            prompt,
            self.purpose,
            state,
            tries=summary.tries,
            trajectories=summary.trajectories,
            rewards=summary.rewards,
            components=summary.components,
            evaluation_scores=summary.evaluation_scores,
            has_teacher_logprobs=summary.has_teacher_logprobs,
            floor=summary.floor,
            generated_by=summary.generated_by,
            temperature=summary.temperature,
            partial=NO_TOKENS if summary.has_partial else None,
            problem=summary.problem,
            generator=summary.generator,
            giver=summary.giver,
            is_anew=summary.is_anew,
            expected_tokens=summary.expected_tokens,
        )
        self._counts[state] += 1
        if state is GroupState.WAITING:
            self._push(group)
        elif state is GroupState.GENERATED:
            heapq.heappush(self._to_score, group.ordinal)
            if self.needs_teacher:
                heapq.heappush(self._to_teacher, group.ordinal)
        return group


def _summary(group: Group) -> GroupSummary:
    state: Literal["waiting", "generated", "scored", "frozen"] = "waiting"
    match group.state:
        case GroupState.GENERATED:
            state = "generated"
        case GroupState.SCORED:
            state = "scored"
        case GroupState.FROZEN:
            state = "frozen"
    # The journal deletes the completions of an evaluation when they are scored.
    keeps_trajectories = group.purpose == "evaluate"
    return GroupSummary(
        ordinal=group.ordinal,
        state=state,
        expected_tokens=group.expected_tokens,
        tries=group.tries,
        rewards=group.rewards,
        components=group.components,
        evaluation_scores=group.evaluation_scores,
        has_teacher_logprobs=group.has_teacher_logprobs,
        floor=group.floor,
        generated_by=group.generated_by,
        temperature=group.temperature if group.trajectories or group.partial is not None else 1.0,
        has_partial=group.partial is not None,
        trajectories=tuple(replace(t, text="") for t in group.trajectories) if keeps_trajectories else (),
        problem=group.problem if group.state is GroupState.SCORED and not group.trajectories else "",
        generator=group.generator,
        giver=group.giver,
        is_anew=group.is_anew,
    )


def _is_waiting(group: Group) -> bool:
    return group.state is WAITING


def is_unscored(group: Group) -> bool:
    """Say whether a group has completions without rewards, and no reward replica scores them."""
    return group.state is GENERATED and not group.score_lease and not group.rewards


def lacks_teacher(group: Group) -> bool:
    """Say whether a group has completions whose tokens no teacher has scored or scores."""
    return group.state is GENERATED and not group.teacher_lease and not group.has_teacher_logprobs
