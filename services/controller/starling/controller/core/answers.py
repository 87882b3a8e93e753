"""The groups of a run without a policy: each prompt is answered once, and what was answered is written to files.

A file takes the place of a step: it is sealed when the next `prompts_per_step` prompts are answered, in their order,
and its groups leave when it is on disk. A prompt whose completions could not be had has its place in it all the same,
with the reason. So which prompt stands in which file does not depend on who answered it, or when.
"""

from __future__ import annotations

from starling.controller.core.groups import Group, GroupState
from starling.controller.core.ledger import Ledger
from starling.controller.core.plan import RunPlan


class Answers(Ledger):
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


class Recalled(Ledger):
    """The groups of a run that trains what another one has generated: nothing is admitted to be generated."""

    def free_slots(self) -> int:
        """Return 0."""
        return 0


def ledger_of(plan: RunPlan) -> Ledger:
    """Return the empty ledger of a run."""
    if not plan.has_policy:
        return Answers(plan)
    return (Recalled if plan.replays else Ledger)(
        num_steps=plan.num_steps,
        prompts_per_step=plan.prompts_per_step,
        max_staleness=plan.max_staleness,
        max_tries=plan.max_tries,
        is_taught=plan.is_taught,
    )
