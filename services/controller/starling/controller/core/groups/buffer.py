"""Stop 1 of the walk, and the memory of all the others: the groups to train, in the order of their admission.

Capacity is derived from the states of the groups; nothing is counted on the side, so nothing can leak. What follows
next (whether a step is full) is found in a time that does not depend on how many groups there are.
"""

from __future__ import annotations

import bisect

from starling.algo.staleness import num_slots
from starling.common.wire.messages import Prompt
from starling.controller.core.groups.group import Group, Groups, GroupState
from starling.controller.core.plan import RunPlan


class TrainBuffer(Groups):
    """The groups to train. At most `num_slots` are live; steps take them in the order of admission."""

    def __init__(
        self, *, num_steps: int, prompts_per_step: int, max_staleness: int, max_tries: int, is_taught: bool = False
    ) -> None:
        """`max_staleness` bounds the number of groups: see `starling.algo.staleness`."""
        super().__init__("train", max_tries, is_taught=is_taught)
        self.num_steps, self.prompts_per_step, self.max_staleness = num_steps, prompts_per_step, max_staleness
        self.num_sealed = 0
        """Steps that were sealed so far."""
        self.num_trained_groups = 0
        self._begun_steps = self._begun_at = 0
        """Steps that another run has made, and where in the data it ended."""
        self.num_filtered = 0
        """Groups that were set aside, for all their rewards were equal."""
        self.num_filtered_in_a_row = 0
        """How many of them came last, without a group between them that was kept."""
        self._filtered: list[tuple[int, float]] = []
        """Ordinals, ascending, of those that no step has passed over yet, each with the reward of its completions."""
        self._passed: dict[int, list[float]] = {}
        """By step, until it is published: the rewards of those that were passed over for it."""
        self._unsealed: list[int] = []
        """Live ordinals that no step has, in order."""
        self._num_ready = 0
        """How many of the first of them, up to a step's worth, are scored."""
        self._discarded: list[int] = []
        """Ordinals, ascending, of those that were admitted after some live group, filtered ones among them."""
        self._num_forgotten = 0
        """How many others were discarded."""
        self._sealed: dict[int, list[Group]] = {}
        """By step, until it is published."""

    def begin(self, num_steps: int, position: int) -> None:
        """Take it that so many steps were made of the prompts before `position`, by another run."""
        assert not self.num_admitted, "nothing was admitted before the beginning"
        self.num_sealed = self._begun_steps = num_steps
        self.num_admitted = self.num_trained_groups = self._begun_at = position

    @property
    def has_sealed(self) -> bool:
        """Say whether any step was sealed in this run."""
        return self.num_sealed > self._begun_steps

    @property
    def num_slots(self) -> int:
        """Groups that may be live."""
        return num_slots(self.prompts_per_step, self.max_staleness)

    def free_slots(self) -> int:
        """Return how many prompts may be admitted now."""
        num_kept = self.num_admitted - self._begun_at - self.num_discarded - self.num_filtered
        wanted = (self.num_steps - self._begun_steps) * self.prompts_per_step - num_kept
        return max(0, min(self.num_slots - self.num_live, wanted))

    def admit(self, prompt: Prompt, expected_tokens: int = 1) -> Group:
        """Take in a prompt as a waiting group."""
        group = super().admit(prompt, expected_tokens)
        self._unsealed.append(group.ordinal)
        return group

    def block(self, group: Group) -> int:
        """Return which step's worth of prompts a group is in, as they were admitted: about what trains together."""
        return (group.ordinal - self._begun_at) // self.prompts_per_step

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
        self.num_filtered_in_a_row = 0
        super().scored(group, rewards, components)

    def _complete(self, group: Group) -> None:
        super()._complete(group)
        self._look_ahead()

    def discard(self, group: Group) -> None:
        """Give a group up."""
        super().discard(group)
        self._close_up(group)

    def filter(self, group: Group, reward: float) -> None:
        """Set a group aside whose rewards are all the same: nothing can be learnt from it, and nothing was lost."""
        self.num_filtered += 1
        self.num_filtered_in_a_row += 1
        bisect.insort(self._filtered, (group.ordinal, reward))
        self.move(group, GroupState.DISCARDED)
        self._close_up(group)

    def _close_up(self, group: Group) -> None:
        """Let the groups behind one that is gone move up."""
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
        # All that were admitted before the last of them are gone, or in a step: whoever was filtered among them was
        # passed over for this one, also when the records of a journal are gone through.
        num = bisect.bisect_left(self._filtered, (groups[-1].ordinal, 0.0)) if groups else 0
        self._passed[step] = [reward for _, reward in self._filtered[:num]]
        del self._filtered[:num]
        self._sealed[step] = groups
        self.num_sealed += 1
        self._num_ready = 0
        self._look_ahead()

    def recall(self, step: int, groups: list[Group]) -> list[Group]:
        """Take in groups that another run has generated and scored, as those of `step`."""
        taken = []
        for found in groups:
            group = self.admit(found.prompt)
            assert group.ordinal == found.ordinal, "files are read in order"
            group.temperature = found.temperature
            self.generated(group, found.trajectories, found.tensors, found.buffers)
            self.scored(group, found.rewards, found.components)
            taken.append(group)
        self.take(step, taken)
        return taken

    def recalled(self) -> None:
        """Count one more step that was made of such groups, before the controller began again."""
        self.num_sealed += 1
        self.num_admitted += self.prompts_per_step
        self.num_trained_groups += self.prompts_per_step

    def sealed(self, step: int) -> list[Group]:
        """Return the groups that were sealed for `step`, in the order of admission, until it is published."""
        return self._sealed.get(step, [])

    def trained(self, step: int) -> None:
        """Retire the groups of `step`, which frees their slots: it has been published."""
        sealed = self._sealed.pop(step, [])
        self._passed.pop(step, None)
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

    def passed(self, step: int) -> list[float]:
        """Return the rewards of the groups that were filtered out on the way to a step's, until it is published."""
        return self._passed.get(step, [])


# JOINED from starling.controller.core.answers: The groups of a run without a policy: each prompt is answered
# once, and what was answered is written to files.  A file takes the place of a step: it is sealed when the
# next `prompts_per_step` prompts are answered, in their order, and its groups leave when it is on disk. A
# prompt whose completions could not be had has its place in it all the same, with the reason. So which prompt
# stands in which file does not depend on who answered it, or when.


class AnswerBuffer(TrainBuffer):
    """The prompts at the positions `0 .. num_prompts - 1` of the data; the last file may have fewer of them."""

    def __init__(self, plan: RunPlan) -> None:
        """`plan.num_steps` is the number of files that `plan.num_prompts` fill."""
        super().__init__(
            num_steps=plan.num_steps,
            prompts_per_step=plan.prompts_per_step,
            max_staleness=plan.max_staleness,
            max_tries=plan.max_tries,
            is_taught=plan.is_taught,
        )
        self.num_prompts = plan.num_prompts

    def free_slots(self) -> int:
        """Return how many prompts may be admitted now."""
        return max(0, min(self.num_slots - self.num_live, self.num_prompts - self.num_admitted))

    def discard(self, group: Group) -> None:
        """Give a group up: that is its answer."""
        self.num_discarded += 1
        group.trajectories, group.tensors, group.buffers, group.rewards = (), (), (), ()
        group.scoring = group.teaching = ""
        self.move(group, GroupState.SCORED)
        self._look_ahead()

    def is_full(self) -> bool:
        """Say whether the next file can be sealed."""
        wanted = min(self.prompts_per_step, self.num_prompts - self.num_sealed * self.prompts_per_step)
        return 0 < wanted == self._num_ready


class ReplayBuffer(TrainBuffer):
    """The groups of a run that trains what another one has generated: nothing is admitted to be generated."""

    def free_slots(self) -> int:
        """Return 0."""
        return 0


def ledger_of(plan: RunPlan) -> TrainBuffer:
    """Return the empty ledger of a run."""
    if not plan.has_policy:
        return AnswerBuffer(plan)
    return (ReplayBuffer if plan.replays else TrainBuffer)(
        num_steps=plan.num_steps,
        prompts_per_step=plan.prompts_per_step,
        max_staleness=plan.max_staleness,
        max_tries=plan.max_tries,
        is_taught=plan.is_taught,
    )
