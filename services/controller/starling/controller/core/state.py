"""All that one run's controller knows, and the few ways to act on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starling.algo.staleness import num_slots
from starling.common.ids import LeaseKind, lease_id
from starling.common.wire import messages as wire
from starling.controller.core.evaluation import Evaluation
from starling.controller.core.events import Buffers, Command, Note, Prompts, Send
from starling.controller.core.finish import Ending, Stage
from starling.controller.core.leases import Leases
from starling.controller.core.ledger import Group, Groups, Ledger
from starling.controller.core.membership import Member, Membership
from starling.controller.core.plan import RunPlan
from starling.controller.core.rounds import Rounds


class State:
    """The small machines, which know nothing of each other, and what couples them."""

    def __init__(self, plan: RunPlan, prompts: Prompts, examples: Prompts, held_out: Sequence[wire.Prompt]) -> None:
        """`prompts` feed reinforcement learning, `examples` the supervised steps, `held_out` the evaluations."""
        self.plan, self.prompts, self.examples, self.held_out = plan, prompts, examples, list(held_out)
        self.membership = Membership(plan.lease_s)
        self.leases = Leases()
        self.rounds = Rounds()
        self.ending = Ending(plan.drain_s)
        self.ledger = Ledger(
            num_steps=plan.num_steps,
            prompts_per_step=plan.prompts_per_step,
            num_slots=num_slots(plan.prompts_per_step, plan.max_staleness),
            max_tries=plan.max_tries,
        )
        self.version = 0
        """The policy's weight version: how many steps it has made."""
        self.evaluation: Evaluation | None = None
        self.evaluated: list[int] = []
        self.waiting_for = "its first replica"
        self.missing_since: float | None = None
        """Since when a role that the run needs has had no replica."""
        self.drops_in_a_row = 0
        self.last_drop = ""
        """Which group was discarded last, and why."""
        self.out: list[Command] = []
        self._attempts: dict[str, int] = {}

    @property
    def phase(self) -> str:
        """What the run is doing: sft, grpo, or how it ends."""
        if self.ending.stage is not Stage.RUNNING:
            return str(self.ending.stage)
        return "sft" if self.version < self.plan.num_sft_steps else "grpo"

    def policy(self) -> Member | None:
        """Return the policy, if it has joined."""
        return next(iter(self.membership.of("policy")), None)

    def send(self, peer: str, message: wire.Down, buffers: Buffers = ()) -> None:
        """Say something that needs no answer."""
        self.out.append(Send(peer, message, buffers))

    def note(self, kind: str, **fields: Any) -> None:
        """Record something."""
        self.out.append(Note(kind, fields))

    def welcome(self, member: Member) -> None:
        """Tell a replica that it is a member."""
        self.send(member.name, wire.Welcome(heartbeat_s=self.plan.heartbeat_s, lease_s=self.plan.lease_s))

    def refuse(self, name: str, reason: str) -> None:
        """Tell a replica that it is no member, and why."""
        self.note("refused", replica=name, reason=reason)
        self.send(name, wire.Refused(reason=reason))

    def grant(
        self,
        member: Member,
        kind: LeaseKind,
        subject: int | str,
        now: float,
        command: Callable[[str], wire.Work],
        buffers: Buffers = (),
    ) -> None:
        """Give `member` a piece of work under a lease of its own."""
        name = f"{kind}:{subject}"
        self._attempts[name] = attempt = self._attempts.get(name, -1) + 1
        lease = lease_id(kind, subject, attempt)
        self.out.append(self.leases.grant(lease, Send(member.name, command(lease), buffers), now))

    def group_of(self, lease: str) -> tuple[Groups, Group] | None:
        """Return the group that a generate or score lease is about, and the book that it is in."""
        kind, subject, _ = lease.split(":")
        if kind not in ("generate", "score"):
            return None
        groups: Groups | None = self.ledger if subject.startswith("t") else self.evaluation
        group = groups.get(int(subject[1:])) if groups is not None else None
        return (groups, group) if groups is not None and group is not None else None
