"""What must hold in a simulated run, after every event and at its end."""

from __future__ import annotations

import struct
from collections import Counter

from starling.common.wire.messages import TrainStep
from starling.controller.core.events import Command, Finish, Send
from starling.controller.core.ledger import Groups, GroupState
from starling.controller.core.plan import RunPlan
from starling.controller.core.state import State


class Violation(AssertionError):
    """The run broke a promise."""


def demand(holds: bool, problem: str) -> None:
    """Complain about `problem` unless the promise `holds`."""
    if not holds:
        raise Violation(problem)


class Checks:
    """Knows the promises, and what it has seen of the run so far."""

    def __init__(self, plan: RunPlan, state: State) -> None:
        self.plan, self.state = plan, state
        self.trained_prompts: list[str] = []
        self.trained_steps: list[int] = []
        self.discarded_prompts: list[str] = []
        self._version, self._published, self._evaluated = 0, -1, 0
        self._max_live = (plan.max_staleness + 1) * plan.prompts_per_step

    def after_event(self, commands: list[Command]) -> None:
        """Look at the controller's state."""
        state = self.state
        demand(state.version >= self._version, f"version {state.version} follows version {self._version}")
        demand(state.rounds.version >= self._published, "an older version was published")
        self._version, self._published = state.version, state.rounds.version
        self._ledger()
        self._books()
        self._members()
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, TrainStep):
                demand(command.message.step == state.version + 1, f"step {command.message.step} was sent out of turn")
            fields = getattr(command, "fields", {})
            if getattr(command, "kind", "") == "discarded" and fields["prompt"].startswith("train"):
                self.discarded_prompts.append(fields["prompt"])

    def trained(self, message: TrainStep, buffers: tuple[bytes, ...]) -> None:
        """The policy takes up a step: look at every token of it."""
        plan = self.plan
        self.trained_steps.append(message.step)
        if message.examples:
            demand(message.step <= plan.num_sft_steps, f"step {message.step} is no supervised one")
            demand(len(message.examples) == plan.examples_per_step, "examples are missing")
            return
        demand(len(message.groups) == plan.prompts_per_step, f"step {message.step} has {len(message.groups)} groups")
        for position, group in enumerate(message.groups):
            self.trained_prompts.append(group.prompt_id)
            demand(len(group.trajectories) == plan.group_size, f"{group.prompt_id} is not whole")
            encoded = buffers[position * 4 + 3]
            versions = struct.unpack(f"<{len(encoded) // 4}i", encoded)
            demand(bool(versions), f"{group.prompt_id} has no tokens")
            stale = message.step - 1 - min(versions)
            demand(stale <= plan.max_staleness, f"{group.prompt_id} is {stale} versions stale in step {message.step}")
            demand(max(versions) < message.step, f"{group.prompt_id} was sampled by a version yet to be made")

    def at_end(self, finish: Finish, *, stopped: bool) -> None:
        """The run is over: is everything done, once, in order?"""
        demand(finish.ok, f"the run failed: {finish.reason}")
        plan, state = self.plan, self.state
        demand(self.trained_steps == list(range(1, state.version + 1)), f"the steps were {self.trained_steps}")
        admitted = [f"train/{n}" for n in range(state.ledger.num_admitted)]
        kept = [prompt for prompt in admitted if prompt not in set(self.discarded_prompts)]
        demand(self.trained_prompts == kept[: len(self.trained_prompts)], "prompts were trained twice or out of order")
        if not stopped:
            demand(state.version == plan.last_step, f"only {state.version} of {plan.last_step} steps were made")
            demand(self.trained_prompts == kept, "a prompt was lost")
            demand(len(kept) == plan.num_steps * plan.prompts_per_step, f"{len(kept)} prompts were trained")
            due = {plan.num_sft_steps} if plan.evaluate_at_start else set()
            due |= {plan.last_step} if plan.evaluate_at_end else set()
            demand(set(state.evaluated) == due, f"versions {state.evaluated} were evaluated instead of {due}")

    def _ledger(self) -> None:
        ledger = self.state.ledger
        demand(ledger.num_live <= self._max_live, f"{ledger.num_live} groups live, {self._max_live} may")
        accounted = ledger.num_live + ledger.num_trained_groups + ledger.num_discarded
        demand(ledger.num_admitted == accounted, f"{ledger.num_admitted} groups were admitted, {accounted} are known")

    def _books(self) -> None:
        state, leases = self.state, Counter[str]()
        for member in state.membership.members.values():
            leases.update(lease.rpartition(":")[0] for lease in state.leases.of(member.name, "generate", "score"))
        demand(all(num == 1 for num in leases.values()), f"work was dealt twice: {leases}")
        wanted = set()
        books: list[Groups] = [state.ledger] + ([state.evaluation] if state.evaluation is not None else [])
        for book in books:
            seen = Counter[int]()
            for group_state in GroupState:
                for group in book.within(group_state):
                    seen[group.ordinal] += 1
                    demand(group.state is group_state, f"group {group.key} is {group.state} and {group_state}")
                    if group_state is GroupState.LEASED:
                        wanted.add(f"generate:{group.key}")
                    elif group.scoring:
                        demand(group_state is GroupState.GENERATED, f"a group is scored while {group_state}")
                        wanted.add(f"score:{group.key}")
            demand(all(num == 1 for num in seen.values()), "a group is in two states")
            demand(len(seen) == book.num_live, "a live group is in no state")
        demand(wanted == set(leases), f"the groups need {wanted ^ set(leases)} otherwise")
        if state.evaluation is not None:
            self._evaluation(state.evaluation.within(GroupState.GENERATED), state.evaluation.version)

    def _evaluation(self, groups: list, version: int) -> None:
        for group in groups:
            encoded = group.buffers[3]
            versions = set(struct.unpack(f"<{len(encoded) // 4}i", encoded))
            demand(versions == {version}, f"the evaluation of version {version} holds tokens of {versions}")

    def _members(self) -> None:
        state = self.state
        for member in state.membership.members.values():
            if member.role == "policy":
                continue
            kind = "generate" if member.role == "rollout" else "score"
            num = len(state.leases.of(member.name, kind))
            demand(num <= member.num_slots, f"{member.name} has {num} leases and {member.num_slots} slots")
            demand(len(state.leases.of(member.name, "adopt")) <= 1, f"{member.name} adopts twice at a time")
            demand(member.version <= state.rounds.version, f"{member.name} holds a version that was not published")
