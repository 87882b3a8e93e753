"""Well-formed lies against the whole controller with a real journal, while other replicas work.

    python bench/fuzz_controller.py [--quick | --lies N] [--seed S]

One rollout, one reward replica and one teacher lie: they answer with valid types and false contents, under their own
leases, those of others and made-up ones, early, late and twice, and they send messages that answer nothing
(`starling.sim.replicas.lies`). When the controller evicts one, it comes back, at last under another name, as a thief of
many keys would. Two of each role and the policy tell the truth. The controller is killed and restarted from its journal
now and then, and an operator asks it why it waits.

    crashes             exceptions of the controller, and runs that failed
    unproven_versions   versions or roots that no policy brought, in the journal or in a command
    poisoned_steps      dispatched steps that the policy's decoder does not read, or of unlike teachers' data
    lost_prompts        prompts that were admitted and neither trained, nor discarded, nor are live; or trained twice;
                        or leased to no replica
    bad_lines           notes that are no JSON
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec
from figure import machine, print_figure, progress, rounded, versions
from msgspec.structs import replace

from starling.common.errors import StarlingError
from starling.common.ids import lease_subject
from starling.common.wire import messages as wire
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.core.events import Command, Event, Fetch, Fetched, FinishRun, Note, Prune, Send, Ticked
from starling.controller.core.events import Write as WriteRecord
from starling.controller.core.groups.arrival import received
from starling.controller.core.groups.group import GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.plan import LeaseTimeouts, RunPlan
from starling.controller.core.records import (
    GroupDiscarded,
    StepCommitted,
    StepFrozen,
    StepReopened,
    VersionAdopted,
    VersionPublished,
)
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.journal.resume import start_incarnation
from starling.controller.shell.status import MetricsHistory, snapshot
from starling.policy.train.data.groups import groups_from_wire
from starling.sim.replicas.lies import lie, strange_hello, unasked
from starling.sim.replicas.weights import adopted, encoded_layout, encoded_offer, offer_of, published

GROUP_SIZE, TOKENS = 2, 3
FLIPPED = bytes(15) + b"!"
"""Weights that no policy has published."""
RESTARTS_PER_HEARTBEAT = 0.3
STRANGE_HELLOS = 0.3
"""Share of the hellos of liars."""
HONEST = ("policy-0", "rollout-0", "rollout-1", "reward-0", "reward-1", "teacher-0", "teacher-1")
TAKEN: dict[str, tuple[type, ...]] = {
    "rollout": (wire.GenerateGroup, wire.PublishWeights, wire.AdoptWeights), "reward": (wire.ScoreGroup,),
    "teacher": (wire.ScoreTokens,),
}  # fmt: skip
"""Commands that each of the roles that lie is sent."""
TOGETHER = 64
"""Events in one transaction of the journal."""
EVENT_S, HEARTBEAT_S = 0.002, 2.0
LIES_PER_RESTART = 20_000
PLAN = RunPlan(
    seed=0,
    sampling=wire.Sampling(max_tokens=TOKENS),
    eval_sampling=wire.Sampling(max_tokens=TOKENS),
    num_steps=1_000_000,
    prompts_per_step=4,
    group_size=GROUP_SIZE,
    max_staleness=1,
    save_every=20,
    evaluate_every=50,
    heartbeat_s=HEARTBEAT_S,
    lease_s=30.0,
    num_teachers=1,
    teacher_top_k=1,
    timeouts=LeaseTimeouts(generate_s=20.0, score_s=20.0, teach_s=20.0),
)
LIMITS = wire.ModelLimits(vocabulary_size=1000, longest=64)
METAS = tuple(
    wire.TensorMeta(dtype=dtype, shape=(num,), nbytes=4 * num)
    for dtype, num in (("int32", 1), *((kind, GROUP_SIZE * TOKENS) for kind in ("int32", "float32", "int32")))
)


class Prompts:
    """Prompts by position."""

    def prompt(self, position: int) -> wire.Prompt:
        """Return the prompt at `position`."""
        return wire.Prompt(id=f"train/0/{position}", text="x")


class Findings:
    """What went wrong, and what the run has done, read from the commands of the controller."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.frozen: dict[int, tuple[int, ...]] = {}
        self.trained: list[int] = []
        self.discarded: set[int] = set()
        self.committed = 0

    def note(self, kind: str, what: str) -> None:
        """Count a finding, and show the first ones."""
        self.counts[kind] += 1
        if self.counts[kind] <= 5:
            progress(f"{kind}: {what}")

    def check(self, command: Command) -> None:
        """Check one command."""
        match command:
            case WriteRecord(record=VersionPublished(version=version, root=root)):
                if version > self.committed or root != offer_of(version).root:
                    self.note("unproven_versions", f"version {version} of root {root} was journaled")
            case WriteRecord(record=StepFrozen(step=step, ordinals=ordinals)):
                self.frozen[step] = ordinals
            case WriteRecord(record=StepReopened(step=step)):
                del self.frozen[step]
            case WriteRecord(record=StepCommitted(step=step)):
                self.committed = step
                self.trained += self.frozen.pop(step)
            case WriteRecord(record=GroupDiscarded(key=key)) if key.startswith("t"):
                self.discarded.add(int(key[1:]))
            case Send(message=wire.AdoptWeights(version=version)) if version > self.committed:
                self.note("unproven_versions", f"version {version} is to be adopted")
            case Send(message=wire.TrainStep() as message, buffers=buffers):
                try:
                    groups = groups_from_wire(message.groups, buffers, LIMITS)
                    if len({one.teacher.top_ids.shape[1] if one.teacher and one.teacher.top_ids is not None else 0
                            for one in groups} | {1}) > 1:  # fmt: skip
                        self.note("poisoned_steps", "teachers sent other numbers of likeliest tokens")
                    if {one.temperature for one in groups} != {PLAN.sampling.temperature}:
                        self.note("poisoned_steps", f"temperatures {[one.temperature for one in groups]}")
                except StarlingError as error:
                    self.note("poisoned_steps", str(error))
            case Note(kind=kind, fields=fields):
                try:
                    json.dumps(fields, allow_nan=False)
                except ValueError:
                    self.note("bad_lines", f"{kind}: {fields}")
            case FinishRun(ok=False, reason=reason):
                self.note("crashes", f"the run failed: {reason}")
            case _:
                pass


class Fuzzer:
    """A controller with its journal, and the replicas around it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._path, self._rng, self.found = folder / "journal.sqlite", random.Random(seed), Findings()
        self.now = self._beat_at = 0.0
        self.num_events = self.num_lies = self.num_restarts = 0
        self.kinds: Counter[str] = Counter()
        self._held: dict[str, dict[str, Send]] = {}
        self._incarnations: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._answers: deque[tuple[str, wire.Up, tuple[bytes, ...]]] = deque()
        self._seen: deque[Send] = deque(maxlen=200)
        """Commands that some replica was sent."""
        self._told: deque[tuple[wire.Up, tuple[bytes, ...]]] = deque(maxlen=100)
        self.liars = {"rollout": 2, "reward": 2, "teacher": 2}
        """Numbers of the liars' present names."""
        self._accused: set[str] = set()
        """Honest rollouts that were evicted because a liar says that they sent it other weights: each once at most."""
        self._holds_lies: set[str] = set()
        """Honest rollouts whose weights, which a liar sent them, are not those of their version."""
        self._wanted = -1
        self._open()
        for name in (*HONEST, "rollout-2", "reward-2", "teacher-2"):
            self._join(name)

    def _open(self) -> None:
        self._journal = Journal(self._path)
        incarnation = start_incarnation(self._journal, "fuzz", PLAN)
        held_out = [wire.Prompt(id=f"held-out/{n}", text="x") for n in range(3)]
        self._journal.commit()
        entries = list(self._journal.read())
        self.controller = Controller(PLAN, Prompts(), Prompts(), held_out, journal=entries, incarnation=incarnation)

    def restart(self) -> None:
        """Kill the controller, and start it again from its journal, which holds no leases."""
        for key in orphans(self.controller):
            self.found.note("lost_prompts", f"{key} is leased to no replica")
        self._journal.commit()
        self._journal.close()
        self.num_restarts += 1
        self._open()

    def close(self) -> None:
        """Close the journal."""
        self._journal.commit()
        self._journal.close()

    # --- the controller ---

    def _handle(self, event: Event) -> None:
        self.now += EVENT_S
        self.num_events += 1
        for command in self.controller.step(event):
            self.found.check(command)
            match command:
                case WriteRecord(record=VersionAdopted(name=name, version=version)) if name in self._holds_lies:
                    self.found.note("unproven_versions", f"{name} is said to hold version {version}")
            match command:
                case WriteRecord(record=record, payload=payload):
                    self._journal.append(record, payload)
                case Prune(step=step):
                    self._journal.prune(step)
                case Fetch(step=step):
                    self._wanted = step
                case Send():
                    self._deliver(command)
        if self.num_events % TOGETHER == 0:
            self._journal.commit()
            if self._wanted >= 0:
                step, self._wanted = self._wanted, -1
                self._handle(Fetched(self.now, step, self._journal.fetch(step)))

    def _receive(self, name: str, message: wire.Up, buffers: tuple[bytes, ...] = ()) -> None:
        incarnation = self._incarnations.get(name, 1)
        self._handle(received(self.controller.state, self.now, name, incarnation, message, buffers))

    # --- replicas ---

    def _join(self, name: str) -> None:
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        self._held[name] = {}
        self._versions[name] = self.found.committed if name.startswith("policy") else -1
        self._hello(name)

    def _hello(self, name: str) -> None:
        role: Any = name.rpartition("-")[0]
        has_layout = role in ("policy", "rollout")
        hello = wire.Hello(
            role=role,
            host=name[-1] if name.startswith("policy") else "h",  # rollouts pull from each other
            pid=1,
            num_slots=2 if name in HONEST else 4,
            version=self._versions[name],
            has_layout=has_layout,
            serves=has_layout,
            limits=LIMITS if role == "policy" else None,
        )
        if name not in HONEST and self._rng.random() < STRANGE_HELLOS:
            hello = strange_hello(hello, self._rng)
            role = self._rng.choice(("rollout", "policy"))
        self._receive(name, hello, (encoded_layout(f"{role}-0" if name not in HONEST else name),) if has_layout else ())

    def _deliver(self, send: Send) -> None:
        name, message = send.peer, send.message
        if name == "operator-0":
            return
        match message:
            case wire.ReleaseLeases(leases=leases):
                for lease in leases:
                    self._held[name].pop(lease, None)
            case wire.Refused(reason=reason):
                self._replace(name, reason)
            case wire.RequestHello():
                self._answers.append((name, wire.RequestHello(), ()))  # type: ignore[arg-type]
            case _ if (lease := getattr(message, "lease", "")) and lease not in self._held[name]:
                self._held[name][lease] = send
                self._seen.append(send)
                if name in HONEST:
                    self._answers.append((name, *self._truth(name, send)))

    def _replace(self, name: str, reason: str) -> None:
        """Bring a liar back that was evicted: as another process, or under another name."""
        role = name.rpartition("-")[0]
        if name in HONEST and (name in self._accused or "than were published" not in reason):
            self.found.note("crashes", f"{name} was refused: {reason}")
            return
        self.kinds["evictions"] += 1
        if name in HONEST:
            self._accused.add(name)
        elif "start a replica of another name" in reason:
            self.liars[role] += 1
            name = f"{role}-{self.liars[role]}"
        self._incarnations.setdefault(name, 0)
        self._answers.append((name, wire.Drain(reason=""), ()))  # type: ignore[arg-type]

    def _truth(self, name: str, send: Send) -> tuple[wire.Up, tuple[bytes, ...]]:
        """Return the answer of a replica that works."""
        version, message = self._versions[name], send.message
        match message:
            case wire.GenerateGroup(lease=lease, num_completions=num):
                meta = wire.TrajectoryMeta(status=wire.Status.OK, num_tokens=TOKENS, text=lease,
                                           oldest_version=version, newest_version=version)  # fmt: skip
                metas = METAS if num == GROUP_SIZE else tuple(
                    replace(m, shape=(TOKENS * num,), nbytes=4 * TOKENS * num) if i else m for i, m in enumerate(METAS)
                )  # fmt: skip
                buffers = (*(bytes(m.nbytes) for m in metas[:3]), struct.pack("<i", version) * (TOKENS * num))
                return wire.GroupGenerated(lease=lease, trajectories=(meta,) * num, tensors=metas), buffers
            case wire.ScoreGroup(lease=lease, completions=completions):
                rewards = tuple(float(index % 2) for index in range(len(completions)))
                return wire.GroupScored(lease=lease, rewards=rewards, statuses=(wire.Status.OK,) * len(rewards)), ()
            case wire.ScoreTokens(lease=lease, lengths=lengths):
                num = sum(lengths)
                shapes = {"teacher_logprobs": (num,), "teacher_top_ids": (num, 1), "teacher_top_logprobs": (num, 1)}
                metas = tuple(
                    wire.TensorMeta(
                        dtype="int32" if "ids" in kind else "float32", shape=shape, nbytes=4 * num, name=kind
                    )
                    for kind, shape in shapes.items()
                )
                return wire.TokensScored(lease=lease, tensors=metas), (bytes(4 * num),) * 3
            case wire.TrainStep(lease=lease, step=step):
                self._versions[name] = step
                return wire.StepTrained(lease=lease, step=step, metrics={}), ()
            case wire.PublishWeights(version=wanted):
                return published(message, send.buffers), (encoded_offer(wanted),)
            case wire.AdoptWeights(lease=lease, version=wanted):
                if lease in self._held[name]:
                    self._versions[name] = wanted
                lies = message.source in (f"rollout-{number}" for number in range(2, self.liars["rollout"] + 1))
                if name in HONEST:
                    (self._holds_lies.add if lies else self._holds_lies.discard)(name)
                self.kinds["pulls_of_lies"] += lies
                return adopted(message, send.buffers, FLIPPED if lies else None), ()
            case wire.SaveCheckpoint(lease=lease, step=step, state=state):
                return wire.CheckpointSaved(lease=lease, step=step, path="/", state=state), ()
        raise AssertionError(f"{name} was sent {message}")

    def work(self) -> None:
        """Send what the replicas have to say, and heartbeats and ticks when they are due."""
        for _ in range(min(4, len(self._answers))):
            name, message, buffers = self._answers.popleft()
            match message:
                case wire.RequestHello():
                    self._hello(name)
                case wire.Drain():
                    self._join(name)
                case _:
                    self._receive(name, message, buffers)
        if self.now >= self._beat_at:
            self._beat_at = self.now + HEARTBEAT_S
            if self._rng.random() < RESTARTS_PER_HEARTBEAT:
                self._join("rollout-1")  # it pulls while others hold the version already
            for name in [*HONEST, *(f"{role}-{number}" for role, number in self.liars.items())]:
                if name in self._versions:
                    self._receive(name, self._heartbeat(name))
            self._handle(Ticked(self.now))
            for about in ("status", "why"):
                self._receive("operator-0", wire.QueryRun(request="", about=about))  # type: ignore[arg-type]
            view = snapshot(self.controller.state, MetricsHistory(0.0), self.now, 0)
            msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=RunSnapshot)

    def _heartbeat(self, name: str) -> wire.Heartbeat:
        held = tuple(wire.HeldLease(lease=lease, phase="answered") for lease in self._held[name])
        for send in self._held[name].values():  # an answer that was lost with a controller is sent again
            if name in HONEST and len(self._answers) < 100 and self._rng.random() < 0.2:
                self._answers.append((name, *self._truth(name, send)))
        return wire.Heartbeat(leases=held, version=self._versions[name])

    def tell_lie(self) -> None:
        """Let one of the liars send a false message."""
        rng = self._rng
        role = rng.choice(("rollout", "rollout", "reward", "teacher"))
        name = f"{role}-{self.liars[role]}"
        if name not in self._versions:
            self._join(name)
        held = list(self._held[name].values())
        if self._told and rng.random() < 0.1:
            message, buffers = rng.choice(self._told)
        elif rng.random() < 0.2:
            message, buffers = unasked(role, [send.message.lease for send in held], rng)  # type: ignore[union-attr]
        elif rng.random() < 0.01:
            self.num_lies += 1
            self._hello(name)
            return
        else:
            others = [send for send in self._seen if type(send.message) in TAKEN[role]]
            if held and rng.random() < 0.7:
                message, buffers = self._truth(name, rng.choice(held))
            elif others and rng.random() < 0.8:
                message, buffers = self._truth(name, rng.choice(others))
            else:
                message, buffers = self._heartbeat(name), ()
            if rng.random() < (0.3 if isinstance(message, wire.WeightsAdopted | wire.WeightsPublished) else 0.9):
                message, buffers = lie(message, buffers, rng)
            if isinstance(message, wire.GroupGenerated | wire.GroupScored) and others and rng.random() < 0.2:
                other: Any = rng.choice(others).message
                message = replace(message, lease=other.lease)
            self._told.append((message, buffers))
        if type(message) not in wire.ALLOWED_MESSAGES[role]:  # type: ignore[index]
            return
        is_group = isinstance(message, wire.GroupGenerated | wire.TokensScored | wire.GroupInterrupted)
        if is_group and [len(b) for b in buffers] != [meta.nbytes for meta in message.tensors]:
            return  # the codec refuses it
        self.num_lies += 1
        self.kinds[type(message).__name__] += 1
        self._receive(name, message, buffers)


def orphans(controller: Controller) -> list[str]:
    """Return the groups that are leased to no replica: no result can come, and no deadline ends the wait."""
    state = controller.state
    leased = [group.key for group in state.buffer.within(GroupState.LEASED)]
    held = {
        lease_subject(lease)
        for member in state.replicas.membership.of("rollout")
        for lease in state.replicas.leases.of(member.name, "generate")
    }
    return [key for key in leased if key not in held]


def count_lost(fuzzer: Fuzzer) -> int:
    """Return how many admitted prompts are unaccounted for, or were trained twice or out of order."""
    found, buffer = fuzzer.found, fuzzer.controller.state.buffer
    trained = found.trained
    live = {group.ordinal for group in buffer.live()}
    accounted = set(trained) | found.discarded | live
    missing = set(range(buffer.num_admitted)) - accounted
    wrong = len(trained) - len(set(trained)) + (trained != sorted(trained)) + len(set(trained) & found.discarded)
    return len(missing) + wrong + len(orphans(fuzzer.controller)) + found.counts["lost_prompts"]


def main() -> None:
    """Send the given number of lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50,000 lies instead of 1,000,000")
    parser.add_argument("--lies", type=int, default=0, help="number of lies")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num = arguments.lies or (50_000 if arguments.quick else 1_000_000)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="starling-fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder), arguments.seed)
        restart_at = LIES_PER_RESTART
        while fuzzer.num_lies < num and not fuzzer.found.counts["crashes"]:
            try:
                fuzzer.tell_lie()
                fuzzer.work()
                if fuzzer.num_lies >= restart_at:
                    restart_at += LIES_PER_RESTART
                    fuzzer.restart()
            except Exception as error:  # noqa: BLE001 (what is looked for)
                fuzzer.found.note("crashes", f"{type(error).__name__}: {error}")
        lost = count_lost(fuzzer)
        fuzzer.close()
    detail = {
        "seed": arguments.seed,
        "lies": fuzzer.num_lies,
        "by_kind": dict(fuzzer.kinds),
        "events": fuzzer.num_events,
        "restarts": fuzzer.num_restarts,
        "steps": fuzzer.found.committed,
        "discarded": len(fuzzer.found.discarded),
        "names_of_liars": dict(fuzzer.liars),
        "seconds": rounded(time.monotonic() - begin),
        **machine(),
        **versions("msgspec", "numpy"),
    }
    for figure in ("crashes", "unproven_versions", "poisoned_steps", "bad_lines"):
        value = fuzzer.found.counts[figure]
        print_figure("fuzz_controller", figure, value, unit="findings", goal=0, better="lower", detail=detail)
    print_figure("fuzz_controller", "lost_prompts", lost, unit="prompts", goal=0, better="lower", detail=detail)


if __name__ == "__main__":
    main()
