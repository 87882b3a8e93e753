"""Group buffer: the live groups of a run, in the order of their admission, and the slots that bound their number.

Stop 1 of the walk. The number of free slots is derived from the states of the groups and never counted separately, so
no slot can leak. Whether the next step is full is known in a time that does not depend on the number of groups.

`GroupBuffer` holds the groups of reinforcement learning. Runs without a policy, and runs that train from files, use it
with other rules of admission: `AnswerBuffer` and `ReplayBuffer`. The groups of evaluations are not in it.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from starling.algo.staleness import num_slots
from starling.common.kinds import RunKind
from starling.common.wire.messages import Prompt
from starling.controller.core.groups.digest import digest_of_prompts
from starling.controller.core.groups.filtering import FilteredGroups, of_unknown
from starling.controller.core.groups.group import FROZEN, SCORED, TRAINED, Group, Groups, GroupState
from starling.controller.core.records import BufferSummary, RewardsStored, StepFrozen


class GroupBuffer(Groups):
    """The groups of a run. At most `num_slots` are live; steps take them in the order of admission."""

    def __init__(
        self,
        *,
        num_steps: int,
        prompts_per_step: int,
        max_staleness: int,
        max_tries: int,
        needs_teacher: bool = False,
        num_prompts: int = 0,
    ) -> None:
        """`max_staleness` bounds the number of groups: see `starling.algo.staleness`.

        `num_prompts`: how many prompts there are, in a run that answers each of them once.
        """
        super().__init__("train", max_tries, needs_teacher=needs_teacher)
        self.num_steps, self.prompts_per_step, self.max_staleness = num_steps, prompts_per_step, max_staleness
        self.num_prompts = num_prompts
        self.num_frozen_steps = 0
        """Steps whose groups are frozen, so far."""
        self.num_trained_groups = 0
        self._initial_steps = self._initial_position = 0
        """Steps of the run that this one continues, and the position in the data where that run ended."""
        self.num_filtered = 0
        """Groups that were filtered out because all their rewards were equal."""
        self.filtering = FilteredGroups()
        """How many of them, and of the others, each rollout and reward replica had to do with."""
        self.num_discarded_in_a_row = 0
        """Groups discarded, also those of an evaluation, since the last group that was scored."""
        self.discarded_by: dict[str, Counter[str]] = {"answer": Counter(), "rollout": Counter()}
        """How many of these each replica's answer led to, and each rollout generated; an empty name stands for all
        other causes."""
        self.last_discarded = ""
        """The prompt that was discarded last, and why."""
        self._filtered: list[tuple[int, float]] = []
        """Ordinals, ascending, of filtered groups that no step has passed over yet, each with its reward."""
        self._passed_over: dict[int, list[tuple[int, float]]] = {}
        """By step, until it is published: the filtered groups that it passed over."""
        self._unfrozen: list[int] = []
        """Live ordinals that no step has taken, in order."""
        self._num_ready = 0
        """How many of the first unfrozen groups, up to the groups of one step, are scored."""
        self._discarded: list[int] = []
        """Ordinals, ascending, of discarded and filtered groups that were admitted after some live group."""
        self._num_discarded_before = 0
        """Discarded and filtered groups that were admitted before every live group."""
        self._frozen: dict[int, list[Group]] = {}
        """Frozen groups by step, until it is published."""

    def begin(self, num_steps: int, position: int) -> None:
        """Continue after a run that made `num_steps` steps of the prompts before `position`."""
        assert not self.num_admitted, "nothing was admitted before the beginning"
        self.num_frozen_steps = self._initial_steps = num_steps
        self.num_admitted = self.num_trained_groups = self._initial_position = position

    @property
    def has_frozen(self) -> bool:
        """Whether the groups of any step were frozen in this run."""
        return self.num_frozen_steps > self._initial_steps

    @property
    def num_slots(self) -> int:
        """Groups that may be live."""
        return num_slots(self.prompts_per_step, self.max_staleness)

    def num_free_slots(self) -> int:
        """Return how many prompts may be admitted now."""
        return max(0, min(self.num_slots - self.num_live, self._num_wanted()))

    def _num_wanted(self) -> int:
        """Return how many more prompts the steps of the run need."""
        num_kept = self.num_admitted - self._initial_position - self.num_discarded - self.num_filtered
        return (self.num_steps - self._initial_steps) * self.prompts_per_step - num_kept

    def needs_slots(self) -> bool:
        """Say whether no group waits to be generated, and none can be admitted although the run needs more."""
        return not self.count(GroupState.WAITING) and self._num_wanted() > 0 and not self.num_free_slots()

    def admit(self, prompt: Prompt, expected_tokens: int = 1) -> Group:
        """Add a prompt as a waiting group of `expected_tokens`."""
        group = super().admit(prompt, expected_tokens)
        self._unfrozen.append(group.ordinal)
        return group

    def block(self, group: Group) -> int:
        """Return in which block of `prompts_per_step` admitted prompts a group is: these train about together."""
        return (group.ordinal - self._initial_position) // self.prompts_per_step

    def rank(self, group: Group) -> int:
        """Return how many live groups were admitted before this one.

        A group of rank r is trained at most ``r // prompts_per_step`` steps after the next one. A discarded group
        brings later groups nearer to their step and never farther from it.
        """
        # Steps take groups in order, so all trained groups were admitted before any live one.
        num_discarded = self._num_discarded_before + bisect.bisect_left(self._discarded, group.ordinal)
        return group.ordinal - self.num_trained_groups - num_discarded

    def store_rewards(self, group: Group, stored: RewardsStored) -> None:
        """Store the rewards of a generated group."""
        self.filtering.note_kept(group.generator, stored.scorer, is_first_try=not group.tries)
        super().store_rewards(group, stored)

    def _complete(self, group: Group) -> None:
        super()._complete(group)
        self._count_ready()

    def discard(self, group: Group) -> None:
        """Discard a group."""
        super().discard(group)
        self._remove(group)

    def regenerate_all(self, floor: tuple[int, int]) -> None:
        """Let every group that is not frozen wait again without completions, because its prompt may differ."""
        super().regenerate_all(floor)
        self._num_ready = 0

    def note_discarded_by(self, generator: str, replica: str) -> None:
        """Note which rollout generated a group that is discarded, if one did, and whose answer led to that."""
        self.discarded_by["rollout"][generator or replica] += 1
        self.discarded_by["answer"][replica] += 1

    def note_not_discarded(self) -> None:
        """Begin to count discarded groups anew."""
        self.num_discarded_in_a_row = 0
        for names in self.discarded_by.values():
            names.clear()

    def filter(self, group: Group, reward: float, scorer: str) -> None:
        """Discard a group whose rewards, by `scorer`, are all equal: it has no advantage to learn from, and did not
        fail."""
        self.num_filtered += 1
        self.filtering.note_filtered(group.generator, scorer, is_first_try=not group.tries)
        bisect.insort(self._filtered, (group.ordinal, reward))
        self.move(group, GroupState.DISCARDED)
        self._remove(group)

    def _remove(self, group: Group) -> None:
        """Let the groups behind a discarded one move up."""
        bisect.insort(self._discarded, group.ordinal)
        position = bisect.bisect_left(self._unfrozen, group.ordinal)
        del self._unfrozen[position]
        self._num_ready = min(self._num_ready, position)
        self._count_ready()

    def regenerate(self, group: Group, tries: int, floor: tuple[int, int]) -> None:
        """Let a group wait again, whose completions were thrown away for the `tries`-th time."""
        if group.state is SCORED:
            self._num_ready = min(self._num_ready, bisect.bisect_left(self._unfrozen, group.ordinal))
        super().regenerate(group, tries, floor)

    def is_full(self) -> bool:
        """Say whether the groups of the next step can be frozen."""
        return self._num_ready == self.prompts_per_step and self.num_frozen_steps < self.num_steps

    def freeze_next(self, step: int) -> list[Group]:
        """Freeze and return the groups of `step`, the next one, once they are all scored; else return nothing.

        The groups of the step before may still wait for its publication. They are frozen, and come first.
        """
        if not self.is_full():
            return []
        first = [self._live[ordinal] for ordinal in self._unfrozen[: self.prompts_per_step]]
        self.freeze(step, first)
        return first

    def freeze(self, step: int, groups: list[Group]) -> None:
        """Freeze these groups, the first unfrozen ones, for `step`."""
        assert self._unfrozen[: len(groups)] == [group.ordinal for group in groups], "steps take groups in order"
        del self._unfrozen[: len(groups)]
        for group in groups:
            group.step = step
            self.move(group, FROZEN)
        # All groups admitted before the last of these are gone or frozen. So this step passed over the filtered ones
        # among them, also while the records of a journal are replayed.
        num = bisect.bisect_left(self._filtered, (groups[-1].ordinal, 0.0)) if groups else 0
        self._passed_over[step] = self._filtered[:num]
        del self._filtered[:num]
        self._frozen[step] = groups
        self.num_frozen_steps += 1
        self._num_ready = 0
        self._count_ready()

    def reopen(self, step: int) -> list[Group]:
        """Let the groups of `step`, the last that was frozen, be scored groups again, and return them."""
        assert step == max(self._frozen), "steps after it would take its groups"
        groups = self._frozen.pop(step)
        for group in groups:
            group.step = 0
            self.move(group, SCORED)
        self._unfrozen[:0] = [group.ordinal for group in groups]
        self._filtered[:0] = self._passed_over.pop(step)
        self.num_frozen_steps -= 1
        self._num_ready = 0
        self._count_ready()
        return groups

    def load(self, step: int, groups: list[Group]) -> list[Group]:
        """Admit groups that another run has generated and scored, as the groups of `step`."""
        loaded = []
        for stored in groups:
            group = self.admit(stored.prompt)
            assert group.ordinal == stored.ordinal, "files are read in order"
            group.temperature = stored.temperature
            self.store_completions(group, stored.trajectories, stored.tensors, stored.buffers)
            scores = RewardsStored(
                key=group.key,
                rewards=stored.rewards,
                components=stored.components,
                evaluation_scores=stored.evaluation_scores,
            )
            self.store_rewards(group, scores)
            loaded.append(group)
        self.freeze(step, loaded)
        return loaded

    def skip_loaded(self) -> None:
        """Count one more step that was made of loaded groups before the controller restarted."""
        self.num_frozen_steps += 1
        self.num_admitted += self.prompts_per_step
        self.num_trained_groups += self.prompts_per_step

    def frozen_groups(self, step: int) -> list[Group]:
        """Return the groups that are frozen for `step`, in the order of admission, until it is published."""
        return self._frozen.get(step, [])

    def retire(self, step: int) -> None:
        """Retire the groups of `step`, which is published: this frees their slots."""
        groups = self._frozen.pop(step, [])
        self._passed_over.pop(step, None)
        self.num_trained_groups += len(groups)
        for group in groups:
            self.move(group, TRAINED)
        if groups:
            # No live group was admitted before these.
            num = bisect.bisect_left(self._discarded, groups[-1].ordinal)
            del self._discarded[:num]
            self._num_discarded_before += num

    def _count_ready(self) -> None:
        end = min(self.prompts_per_step, len(self._unfrozen))
        while self._num_ready < end and self._live[self._unfrozen[self._num_ready]].state is SCORED:
            self._num_ready += 1

    def filtered_rewards(self, step: int) -> list[float]:
        """Return the rewards of the filtered groups that `step` passed over, until it is published."""
        return [reward for _, reward in self._passed_over.get(step, ())]

    # --- compaction ---------------------------------------------------------------------------------------------

    def frozen_record(self, step: int) -> StepFrozen:
        """Return the record of the groups that are frozen for `step`."""
        groups = self._frozen[step]
        ordinals, prompts = tuple(group.ordinal for group in groups), tuple(group.prompt.id for group in groups)
        digest = digest_of_prompts(group.prompt for group in groups)
        return StepFrozen(step=step, ordinals=ordinals, prompts=prompts, digest=digest)

    def summary(self) -> BufferSummary:
        """Return the state of the buffer as a restarted controller knows it."""
        return BufferSummary(
            num_admitted=self.num_admitted,
            num_discarded=self.num_discarded,
            num_frozen_steps=self.num_frozen_steps,
            num_trained_groups=self.num_trained_groups,
            num_filtered=self.num_filtered,
            num_filtered_in_a_row=self.filtering.num_in_a_row,
            num_discarded_before=self._num_discarded_before,
            discarded=tuple(self._discarded),
            filtered=tuple(self._filtered),
            passed_over={step: tuple(filtered) for step, filtered in self._passed_over.items()},
            frozen=tuple(self.frozen_record(step) for step in self._frozen),
            groups=self.summaries(),
            filtering=self.filtering.summary(),
        )

    def restore(self, summary: BufferSummary, prompt: Callable[[int], Prompt]) -> None:
        """Bring a fresh buffer to the state of `summary`; `prompt` returns the prompt of an ordinal."""
        self.num_admitted, self.num_discarded = summary.num_admitted, summary.num_discarded
        self.num_frozen_steps, self.num_trained_groups = summary.num_frozen_steps, summary.num_trained_groups
        self.num_filtered = summary.num_filtered
        self.filtering.restore(summary.filtering or of_unknown(summary.num_filtered_in_a_row))
        self._discarded, self._num_discarded_before = list(summary.discarded), summary.num_discarded_before
        self._filtered = list(summary.filtered)
        self._passed_over = {step: list(filtered) for step, filtered in summary.passed_over.items()}
        groups = [self.restore_group(one, prompt(one.ordinal)) for one in summary.groups]
        self._unfrozen = [group.ordinal for group in groups if group.state is not FROZEN]
        for frozen in summary.frozen:
            self._frozen[frozen.step] = [self._live[ordinal] for ordinal in frozen.ordinals]
            for group in self._frozen[frozen.step]:
                group.step = frozen.step
        self._count_ready()


class AnswerBuffer(GroupBuffer):
    """The groups of a run without a policy: each prompt of the data is answered once, and written to a file.

    A file takes the place of a step: its groups are frozen when the next `prompts_per_step` prompts are answered, in
    their order, and retired when it is on disk. The last file may have fewer. A prompt without completions keeps its
    place in the file, with the reason. So the file of a prompt does not depend on when, or by which rollout, it was
    answered.
    """

    def num_free_slots(self) -> int:
        """Return how many prompts may be admitted now."""
        return max(0, min(self.num_slots - self.num_live, self.num_prompts - self.num_admitted))

    def discard(self, group: Group) -> None:
        """Discard a group: the reason is its answer."""
        self.num_discarded += 1
        group.trajectories, group.tensors, group.buffers, group.rewards = (), (), (), ()
        group.score_lease = group.teacher_lease = ""
        self.move(group, SCORED)
        self._count_ready()

    def is_full(self) -> bool:
        """Say whether the groups of the next file can be frozen."""
        wanted = min(self.prompts_per_step, self.num_prompts - self.num_frozen_steps * self.prompts_per_step)
        return 0 < wanted == self._num_ready


class ReplayBuffer(GroupBuffer):
    """The groups of a run that trains from trajectory files: `load` admits them, and none is generated."""

    def num_free_slots(self) -> int:
        """Return 0."""
        return 0

    def needs_slots(self) -> bool:
        """Return False: nothing waits for slots."""
        return False

    def summary(self) -> BufferSummary:
        """Return the state of the buffer without the groups of the active step, which are loaded again."""
        return replace(
            super().summary(),
            num_admitted=self.num_admitted - self.num_live,
            num_frozen_steps=self.num_frozen_steps - len(self._frozen),
            passed_over={},
            frozen=(),
            groups=(),
        )


def buffer_class(kind: RunKind) -> type[GroupBuffer]:
    """Return the class of the buffer of a run of this kind."""
    if not kind.trains:
        return AnswerBuffer
    return ReplayBuffer if kind.reads_trajectories else GroupBuffer
