"""Events in, lines out: a controller under test, and how its commands read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiny_weights import encoded_layout, encoded_offer, offer_of

from starling.common.wire import messages as wire
from starling.controller.core.events import Command, Finish, Note, PeerLost, Received, Send, StopRequested, Ticked
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan

SMALL = RunPlan(
    seed=0,
    sampling=wire.Sampling(max_tokens=4),
    eval_sampling=wire.Sampling(max_tokens=4, temperature=0.0),
    num_steps=2,
    prompts_per_step=2,
    group_size=2,
    max_staleness=0,
    max_tries=1,
)
"""Two steps of two groups of two completions, synchronous."""


class Stream:
    """Prompts by position."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prompt(self, position: int) -> wire.Prompt:
        """Return the prompt at `position`."""
        return wire.Prompt(id=f"{self.name}{position}", text="x")


def line(command: Command) -> str:
    """Write a command as one line."""
    match command:
        case Finish(ok=ok, reason=reason):
            return f"{'done' if ok else 'failed'}: {reason}"
        case Note(kind=kind, fields=fields):
            subject = fields.get("replica") or fields.get("prompt") or fields.get("version") or fields.get("step", "")
            return f"({kind} {subject})"
        case Send(peer=peer, message=message):
            return f"{peer} <- {_said(message)}"


def _said(message: wire.Down) -> str:
    match message:
        case wire.GenerateGroup():
            return f"{message.lease} {message.prompt.id} >= v{message.min_version}"
        case wire.TrainStep():
            subjects = [group.prompt_id for group in message.groups] + [prompt.id for prompt in message.examples]
            return f"{message.lease} {' '.join(subjects)}"
        case wire.Release(leases=leases):
            return f"release {' '.join(leases)}"
        case wire.Refused(reason=reason) | wire.Drain(reason=reason):
            return f"{type(message).__name__.lower()}: {reason}"
        case wire.Welcome() | wire.Introduce():
            return type(message).__name__.lower()
        case _:
            return message.lease


class Script:
    """A controller that is told one event after the other, and answers in lines."""

    def __init__(self, plan: RunPlan = SMALL, num_held_out: int = 2, **changes: Any) -> None:
        self.plan = replace(plan, **changes)
        held_out = [Stream("held").prompt(i) for i in range(num_held_out)]
        self.controller = Controller(self.plan, Stream("train"), Stream("sft"), held_out)
        self.state = self.controller.state
        self.now = 0.0
        self.commands: list[Command] = []
        self.log: list[str] = []

    def hears(self, sender: str, message: wire.Up, *buffers: bytes, epoch: int = 1) -> list[str]:
        """`sender` says `message`."""
        return self._step(Received(self.now, sender, epoch, message, buffers))

    def loses(self, peer: str) -> list[str]:
        """The connection of `peer` closes."""
        return self._step(PeerLost(self.now, peer))

    def waits(self, seconds: float) -> list[str]:
        """Time passes."""
        self.now += seconds
        return self._step(Ticked(self.now))

    def stops(self, reason: str = "enough") -> list[str]:
        """Somebody wants the run to end."""
        return self._step(StopRequested(self.now, reason))

    def _step(self, event: Received | PeerLost | Ticked | StopRequested) -> list[str]:
        self.commands = self.controller.step(event)
        lines = [line(command) for command in self.commands]
        self.log += lines
        return lines

    @property
    def sent(self) -> list[Send]:
        """What the last event made it say."""
        return [command for command in self.commands if isinstance(command, Send)]

    def sent_lines(self) -> list[str]:
        """Return the last event's messages as lines."""
        return [line(send) for send in self.sent]

    # --- what replicas usually say ---------------------------------------------------------------------------------

    def joins(self, name: str, *, slots: int = 2, epoch: int = 1, version: int = 0) -> list[str]:
        """`name` says hello as it should."""
        role: Any = name.rpartition("-")[0]
        layout = () if role == "reward" else (encoded_layout(name),)
        hello = wire.Hello(
            role=role,
            host="h",
            pid=1,
            num_slots=0 if role == "policy" else slots,
            version=version if role == "policy" else -1,
            has_layout=role != "reward",
        )
        return self.hears(name, hello, *layout, epoch=epoch)

    def beats(
        self, name: str, *held: str, version: int = -1, epoch: int = 1, progress: wire.LeaseProgress | None = None
    ) -> list[str]:
        """`name` sends its heartbeat; `progress` is that of all that it holds."""
        leases = tuple(wire.HeldLease(lease=lease, phase="working", progress=progress) for lease in held)
        return self.hears(name, wire.Heartbeat(leases=leases, version=version), epoch=epoch)

    def publishes(self, version: int, lease: str | None = None) -> list[str]:
        """The policy offers a version."""
        lease = lease or f"publish:{version}:0"
        published = wire.WeightsPublished(lease=lease, version=version, publish_s=0.0)
        return self.hears("policy-0", published, encoded_offer(version))

    def adopts(self, name: str, version: int, attempt: int = 0, root: str | None = None) -> list[str]:
        """`name` switched to a version."""
        adopted = wire.WeightsAdopted(
            lease=f"adopt:{version}:{attempt}",
            version=version,
            root=offer_of(version).root if root is None else root,
            pull_s=0.0,
            pause_s=0.0,
            size_bytes=16,
            transport="local",
        )
        return self.hears(name, adopted)

    def generates(self, name: str, lease: str, version: int = 0, num: int = 2) -> list[str]:
        """`name` has generated a group, all tokens by `version`."""
        meta = wire.TrajectoryMeta(
            status=wire.Status.OK, num_tokens=1, text="y", oldest_version=version, newest_version=version
        )
        tensors = tuple(
            wire.TensorMeta(dtype=kind, shape=(n,), nbytes=4 * n)
            for kind, n in (("int32", 1), ("int32", num), ("float32", num), ("int32", num))
        )
        buffers = tuple(bytes(t.nbytes) for t in tensors)
        generated = wire.GroupGenerated(lease=lease, trajectories=(meta,) * num, tensors=tensors)
        return self.hears(name, generated, *buffers)

    def scores(self, lease: str, *rewards: float | None, name: str = "reward-0") -> list[str]:
        """The reward replica has scored a group; None where the scorer failed."""
        rewards = rewards or (1.0, 0.0)
        statuses = tuple(wire.Status.OK if r is not None else wire.Status.REWARD_ERROR for r in rewards)
        return self.hears(name, wire.GroupScored(lease=lease, rewards=rewards, statuses=statuses))

    def trains(self, step: int, attempt: int = 0) -> list[str]:
        """The policy has made a step."""
        return self.hears("policy-0", wire.StepTrained(lease=f"train:{step}:{attempt}", step=step, metrics={}))

    def fails(self, name: str, lease: str, reason: str = "no luck", *, fatal: bool = False) -> list[str]:
        """`name` cannot do a piece of work."""
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=reason, fatal=fatal)
        return self.hears(name, failed)

    def leaves(self, name: str) -> list[str]:
        """`name` says farewell."""
        return self.hears(name, wire.Leave(reason="drained"))

    # --- whole stretches -------------------------------------------------------------------------------------------

    def begins(self, *rollouts: str, slots: int = 2) -> list[str]:
        """Everybody joins, version 0 is published and adopted; returns the last answer."""
        self.joins("policy-0")
        self.joins("reward-0", slots=8)
        for name in rollouts or ("rollout-0",):
            self.joins(name, slots=slots)
        lines = self.publishes(0)
        for attempt, name in enumerate(rollouts or ("rollout-0",)):
            lines = self.adopts(name, 0, attempt)
        return lines

    def makes_groups(self, *ordinals: int, version: int = 0, attempt: int = 0) -> list[str]:
        """`rollout-0` generates groups and `reward-0` scores them; returns the last answer."""
        lines: list[str] = []
        for n in ordinals:
            self.generates("rollout-0", f"generate:t{n}:{attempt}", version)
            lines = self.scores(f"score:t{n}:{attempt}")
        return lines
