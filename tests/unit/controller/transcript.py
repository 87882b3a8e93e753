"""Test harness of the controller's core: feeds it events, and returns its commands as lines."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec

from starling.common.wire import messages as wire
from starling.common.wire.tensors import TEACHER_TENSORS
from starling.controller.core.compaction import compact
from starling.controller.core.events import (
    CheckpointRead,
    Command,
    Event,
    Fetch,
    Fetched,
    FinishRun,
    Note,
    ProfileSelf,
    Prune,
    Received,
    ReplicaDisconnected,
    Send,
    StopRequested,
    Store,
    Ticked,
    Write,
)
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    CompletionsStored,
    JournalEntry,
    RewardsStored,
    RunStopped,
    StepFrozen,
    TeacherLogprobsStored,
)
from starling.sim.replicas.weights import adopted, encoded_layout, encoded_offer, encoded_plan, published

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
    """Prompt source with generated prompts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prompt(self, position: int) -> wire.Prompt:
        """Return the prompt at `position`."""
        return wire.Prompt(id=f"{self.name}{position}", text="x")


class Aliases:
    """Short names of leases for tests: ``generate:t0:1`` is the second lease to generate group t0."""

    def __init__(self) -> None:
        self._short: dict[str, str] = {}
        self._long: dict[str, str] = {}
        self._num: Counter[str] = Counter()

    def short(self, lease: str) -> str:
        """Return the short name of one of the controller's leases."""
        if lease in self._short:
            return self._short[lease]
        if "." not in lease.rpartition(":")[2]:
            return lease
        subject = lease.rpartition(":")[0]
        self._short[lease] = short = f"{subject}:{self._num[subject]}"
        self._long[short] = lease
        self._num[subject] += 1
        return short

    def long(self, lease: str) -> str:
        """Return the lease with a short name; an unknown name is returned as it is."""
        return self._long.get(lease, lease)


def line(command: Command, aliases: Aliases) -> str:
    """Return a command as one line."""
    match command:
        case FinishRun(ok=ok, reason=reason):
            return f"{'done' if ok else 'failed'}: {reason}"
        case Note(kind=kind, fields=fields):
            subject = fields.get("replica") or fields.get("prompt") or fields.get("version") or fields.get("step", "")
            return f"({kind} {subject})"
        case Send(peer=peer, message=message):
            return f"{peer} <- {_message_text(message, aliases)}"
        case Write(record=record):
            return f"journal <- {type(record).__name__}"
        case Store(step=step, groups=groups):
            return f"files <- {step}: {' '.join(group.prompt.id for group in groups)}"
        case ProfileSelf(order=order):
            return f"profile {order.profile}"
        case Prune(step=step) | Fetch(step=step):
            return f"journal: {type(command).__name__.lower()} {step}"


def _message_text(message: wire.Down, aliases: Aliases) -> str:
    lease = aliases.short(getattr(message, "lease", ""))
    match message:
        case wire.GenerateGroup():
            return f"{lease} {message.prompt.id} >= v{message.min_version}"
        case wire.TrainStep():
            subjects = [group.prompt_id for group in message.groups] + [prompt.id for prompt in message.examples]
            return f"{lease} {' '.join(subjects)}"
        case wire.ReleaseLeases(leases=leases):
            return f"release {' '.join(map(aliases.short, leases))}"
        case wire.Refused(reason=reason) | wire.Drain(reason=reason):
            return f"{type(message).__name__.lower()}: {reason}"
        case wire.OperatorReply(ok=ok, text=text):
            return f"{'yes' if ok else 'no'}: {text}"
        case wire.Welcome() | wire.RequestHello():
            return str(type(message).__struct_config__.tag)
        case _:
            return lease


class Script:
    """A controller and methods that feed it one event each and return its commands as lines."""

    def __init__(self, plan: RunPlan = SMALL, num_held_out: int = 2, **changes: Any) -> None:
        self.plan = replace(plan, **changes)
        held_out = [Stream("held").prompt(i) for i in range(num_held_out)]
        self.held_out = held_out
        self.aliases = Aliases()
        self.journal: list[Write] = []
        self.controller = Controller(self.plan, Stream("train"), Stream("sft"), held_out)
        self.state = self.controller.state
        self.now = 0.0
        self.commands: list[Command] = []
        self.log: list[str] = []
        self.commands_sent: dict[str, Send] = {}

    def receive(self, sender: str, message: wire.Up, *buffers: bytes, incarnation: int = 1) -> list[str]:
        """Deliver `message` from `sender`."""
        if hasattr(message, "lease"):
            message = msgspec.structs.replace(message, lease=self.aliases.long(message.lease))
        return self._step(Received(self.now, sender, incarnation, message, buffers))

    def disconnect(self, peer: str) -> list[str]:
        """Close the connection of `peer`."""
        return self._step(ReplicaDisconnected(self.now, peer))

    def happens(self, event: Event) -> list[str]:
        """Let any event happen."""
        return self._step(event)

    def advance_time(self, seconds: float) -> list[str]:
        """Let time pass, then tick."""
        self.now += seconds
        return self._step(Ticked(self.now))

    def request_stop(self, reason: str = "enough") -> list[str]:
        """Request a stop, as a signal does."""
        return self._step(StopRequested(self.now, reason))

    def restart(self, *, compacted: bool = False, stopped: bool = False) -> None:
        """Replace the controller by one that has read the journal, which was compacted, or whose run was stopped."""
        entries = [JournalEntry(write.record, write.payload) for write in self.journal]
        if compacted:
            record = compact(self.state)
            assert record is not None
            entries = [JournalEntry(record)]
        if stopped:
            entries.append(JournalEntry(RunStopped(reason="enough")))
        streams = Stream("train"), Stream("sft")
        self.controller = Controller(self.plan, *streams, self.held_out, journal=entries, incarnation=2)
        self.state = self.controller.state

    def _step(self, event: Event) -> list[str]:
        self.commands = self.controller.step(event)
        lines = [line(command, self.aliases) for command in self.commands]
        self.commands_sent |= {getattr(send.message, "lease", ""): send for send in self.sent}
        self.journal += [command for command in self.commands if isinstance(command, Write)]
        self.log += lines
        return [text for text in lines if not text.startswith("journal")]

    @property
    def sent(self) -> list[Send]:
        """Messages sent because of the last event."""
        return [command for command in self.commands if isinstance(command, Send)]

    def sent_lines(self) -> list[str]:
        """Return the last event's messages as lines."""
        return [line(send, self.aliases) for send in self.sent]

    # --- work replicas usually say ---------------------------------------------------------------------------------

    def joins(
        self,
        name: str,
        *,
        slots: int = 2,
        incarnation: int = 1,
        version: int = 0,
        limits: wire.ModelLimits | None = None,
    ) -> list[str]:
        """`name` sends a valid hello. `limits`: of a policy's model."""
        role: Any = name.rpartition("-")[0]
        has_layout = role in ("policy", "rollout")
        layout = (encoded_layout(name),) if has_layout else ()
        hello = wire.Hello(
            role=role,
            host="h",
            pid=1,
            num_slots=0 if role == "policy" else slots,
            version=version if role == "policy" else -1,
            has_layout=has_layout,
            limits=limits,
        )
        return self.receive(name, hello, *layout, incarnation=incarnation)

    def heartbeats(
        self, name: str, *held: str, version: int = -1, incarnation: int = 1, progress: wire.LeaseProgress | None = None
    ) -> list[str]:
        """`name` sends a heartbeat with the leases `held`, all of them with `progress`."""
        leases = tuple(
            wire.HeldLease(lease=self.aliases.long(lease), phase="working", progress=progress) for lease in held
        )
        return self.receive(name, wire.Heartbeat(leases=leases, version=version), incarnation=incarnation)

    def publishes(self, version: int, lease: str | None = None) -> list[str]:
        """The policy has published a version."""
        lease = lease or f"publish:{version}:0"
        sent = self.commands_sent.get(self.aliases.long(lease))
        command = wire.PublishWeights(lease=lease, version=version)
        plans = ()
        if sent is not None and isinstance(sent.message, wire.PublishWeights):
            command, plans = msgspec.structs.replace(sent.message, version=version), sent.buffers
        return self.receive("policy-0", published(command, plans), encoded_offer(version))

    def adopts(
        self, name: str, version: int, attempt: int = 0, root: str | None = None, content: bytes | None = None
    ) -> list[str]:
        """`name` has adopted a version, and holds `content`, by default that version; it attests `root`."""
        lease = f"adopt:{version}:{attempt}"
        sent = self.commands_sent.get(self.aliases.long(lease))
        if sent is not None and isinstance(sent.message, wire.AdoptWeights):
            answer = adopted(sent.message, sent.buffers, content)
        else:
            command = wire.AdoptWeights(lease=lease, version=version, source="policy-0")
            answer = adopted(command, (encoded_offer(version), encoded_plan("policy-0", name)))
        if root is not None:
            answer = msgspec.structs.replace(answer, root=root, layout_root=root)
        return self.receive(name, answer)

    def generates(self, name: str, lease: str, version: int = 0, num: int = 2) -> list[str]:
        """`name` has generated a group, with all tokens of `version`."""
        meta = wire.TrajectoryMeta(
            status=wire.Status.OK, num_tokens=1, text="y", oldest_version=version, newest_version=version
        )
        tensors = tuple(
            wire.TensorMeta(dtype=kind, shape=(n,), nbytes=4 * n)
            for kind, n in (("int32", 1), ("int32", num), ("float32", num), ("int32", num))
        )
        buffers = (*(bytes(t.nbytes) for t in tensors[:3]), struct.pack("<i", version) * num)
        generated = wire.GroupGenerated(lease=lease, trajectories=(meta,) * num, tensors=tensors)
        return self.receive(name, generated, *buffers)

    def interrupts(
        self, name: str, lease: str, *lengths: int, version: int = 0, temperature: float = -1.0, lost: bool = False
    ) -> list[str]:
        """`name` returns an interrupted group with partial completions of these `lengths`, sampled by `version`."""
        num = sum(lengths)
        tensors = tuple(
            wire.TensorMeta(dtype=kind, shape=(num,), nbytes=4 * num) for kind in ("int32", "float32", "int32")
        )
        interrupted = wire.GroupInterrupted(
            lease=lease,
            reason="it leaves",
            partial=tuple(wire.PartialCompletionMeta(num_tokens=length) for length in lengths),
            tensors=tensors,
            temperature=temperature,
            lost=lost,
        )
        return self.receive(name, interrupted, bytes(4 * num), bytes(4 * num), struct.pack("<i", version) * num)

    def scores(self, lease: str, *rewards: float | None, name: str = "reward-0") -> list[str]:
        """The reward replica has scored a group; None where the scorer failed."""
        rewards = rewards or (1.0, 0.0)
        statuses = tuple(wire.Status.OK if r is not None else wire.Status.REWARD_ERROR for r in rewards)
        return self.receive(name, wire.GroupScored(lease=lease, rewards=rewards, statuses=statuses))

    def scores_tokens(
        self,
        lease: str,
        *,
        name: str = "teacher-0",
        num_tokens: int = 2,
        k: int = 0,
        names: tuple[str, ...] = tuple(TEACHER_TENSORS),
    ) -> list[str]:
        """The teacher has scored the tokens of a group, with its `k` most likely tokens at each position."""
        kinds = (("float32", (num_tokens,)), ("int32", (num_tokens, k)), ("float32", (num_tokens, k)))
        tensors = tuple(
            wire.TensorMeta(dtype=kind, shape=shape, nbytes=4 * math.prod(shape), name=tensor)
            for tensor, (kind, shape) in zip(names, kinds if k else kinds[:1], strict=False)
        )
        # The content of each buffer identifies its tensor.
        buffers = tuple(bytes([position + 1] * meta.nbytes) for position, meta in enumerate(tensors))
        return self.receive(name, wire.TokensScored(lease=lease, tensors=tensors), *buffers)

    def trains(self, step: int, attempt: int = 0, *, name: str = "policy-0", incarnation: int = 1) -> list[str]:
        """The policy has made a step."""
        trained = wire.StepTrained(lease=f"train:{step}:{attempt}", step=step, metrics={})
        return self.receive(name, trained, incarnation=incarnation)

    def saves_state(self, step: int) -> list[str]:
        """The policy has saved a state that it can resume from."""
        return self.receive("policy-0", wire.CheckpointSaved(lease=f"save:{step}:0", step=step, path="/s", state=True))

    def reads_checkpoint(self, digest: str) -> list[str]:
        """The controller has read the model's folder; an empty digest: it cannot be read."""
        return self._step(CheckpointRead(self.now, digest))

    def fetched(self, step: int) -> list[str]:
        """The journal returns the groups of `step`."""
        return self._step(Fetched(self.now, step, self.records_of(step)))

    def records_of(self, step: int) -> tuple[JournalEntry, ...]:
        """Return the records of the groups of `step`, as a journal fetches them."""
        [frozen] = [w.record for w in self.journal if isinstance(w.record, StepFrozen) and w.record.step == step]
        entries = []
        for ordinal in frozen.ordinals:
            for kind in (CompletionsStored, TeacherLogprobsStored, RewardsStored):
                writes = [w for w in self.journal if isinstance(w.record, kind) and w.record.key == f"t{ordinal}"]
                entries += [JournalEntry(last.record, last.payload) for last in writes[-1:]]
        return tuple(entries)

    def complete_groups(self, *leases: str, version: int = 0) -> list[str]:
        """Generate these groups on the rollouts that lease them, score them on `reward-0`; return the last lines."""
        lines: list[str] = []
        for short in leases:
            lease = self.state.replicas.leases.get(self.aliases.long(short))
            assert lease is not None, f"{short} is not granted"
            self.generates(lease.peer, short, version)
            lines = self.scores(short.replace("generate", "score"))
        return lines

    def attempt_of(self, name: str, work: str) -> int:
        """Return the attempt number of the replica's present lease for `work`."""
        aliases = [self.aliases.short(lease.id) for lease in self.state.replicas.leases.all_of(name)]
        [entries] = [short for short in aliases if short.startswith(work + ":")]
        return int(entries.rpartition(":")[2])

    def fails(self, name: str, lease: str, reason: str = "no luck", *, fatal: bool = False) -> list[str]:
        """`name` reports the failure of a lease."""
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=reason, fatal=fatal)
        return self.receive(name, failed)

    def leaves(self, name: str) -> list[str]:
        """`name` sends a goodbye."""
        return self.receive(name, wire.Leave(reason="drained"))

    # --- several events --------------------------------------------------------------------------------------------

    def start_run(self, *rollouts: str, slots: int = 2, limits: wire.ModelLimits | None = None) -> list[str]:
        """Let all replicas join, publish and adopt version 0; return the last lines."""
        self.joins("policy-0", limits=limits)
        if self.plan.num_rewards:
            self.joins("reward-0", slots=8)
        for number in range(self.plan.num_teachers):
            self.joins(f"teacher-{number}", slots=8)
        for name in rollouts or ("rollout-0",):
            self.joins(name, slots=slots)
        lines = self.publishes(0)
        for attempt, name in enumerate(rollouts or ("rollout-0",)):
            lines = self.adopts(name, 0, attempt)
        return lines

    def generate_and_score(self, *ordinals: int, version: int = 0, attempt: int = 0) -> list[str]:
        """Generate groups on `rollout-0` and score them on `reward-0`; return the last lines."""
        lines: list[str] = []
        for n in ordinals:
            self.generates("rollout-0", f"generate:t{n}:{attempt}", version)
            lines = self.scores(f"score:t{n}:{attempt}")
        return lines
