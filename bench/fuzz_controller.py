"""Well-formed lies against the whole controller with a real journal, while other replicas work.

    python bench/fuzz_controller.py [--quick | --lies N] [--seed S] [--variant NAME]

One rollout, one reward replica and one teacher lie: they answer with valid types and false contents, under their own
leases, those of others and made-up ones, early, late and twice; they send messages that answer nothing, close their
connections, claim former work, and send malformed layouts and offers (`starling.sim.replicas.lies`, `fuzz_answers`).
When the controller evicts one, it comes back, at last under another name, as a thief of many keys would. Two of each
role and the policy tell the truth; they fail, leave and lose their connections now and then. The controller is killed
and restarted from its journal, which was compacted or not, and an operator asks it why it waits, changes settings and
requests evaluations. Without `--variant` all runs of `fuzz_variants` take turns.

    crashes             exceptions of the controller, and runs that failed
    unproven_versions   versions or roots that no policy brought, in the journal or in a command
    poisoned_steps      dispatched steps that the policy's decoder does not read, or of unlike groups; partial
                        completions that no rollout can resume
    lost_prompts        prompts that were admitted and neither trained, nor discarded, nor are live; or trained twice;
                        or leased to no replica; or other ones in the compacted journal
    bad_lines           notes that are no JSON
    refused             honest replicas that are not admitted again
    stalls              times of ten simulated minutes without a step
    clashes             replicas that were woken while another one had their devices
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec
from figure import machine, print_figure, progress, rounded, versions
from fuzz_answers import Answer, generated, interrupted, plausible, scored, taught
from fuzz_findings import LIMITS, Findings, count_lost, orphans
from fuzz_variants import CHANGES, EVENT_S, VARIANTS
from msgspec.structs import replace

from starling.common.wire import messages as wire
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.core.compaction import compact
from starling.controller.core.events import (
    Event,
    Fetch,
    Fetched,
    Prune,
    ReplicaDisconnected,
    Send,
    Ticked,
)
from starling.controller.core.events import Write as WriteRecord
from starling.controller.core.groups.arrival import received
from starling.controller.core.machine import Controller
from starling.controller.core.records import VersionAdopted
from starling.controller.core.recovery import restore
from starling.controller.core.state import ControllerState, RunPrompts
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.journal.resume import start_incarnation
from starling.controller.shell.status import MetricsHistory, snapshot
from starling.sim.checks.recovery import difference
from starling.sim.replicas.lies import lie, malformed, strange_hello, unasked
from starling.sim.replicas.weights import adopted, encoded_layout, encoded_offer, encoded_relay_offer, published

FLIPPED = bytes(15) + b"!"
"""Weights that no policy has published."""
RESTARTS_PER_HEARTBEAT = 0.05
"""Of an honest replica, and of its connection: more than two a minute would not be admitted."""
STRANGE_HELLOS = 0.3
"""Share of the hellos of liars. Half of them have a malformed layout."""
HONEST = ("policy-0", "rollout-0", "rollout-1", "reward-0", "reward-1", "teacher-0", "teacher-1")
TAKEN: dict[str, tuple[type, ...]] = {
    "rollout": (wire.GenerateGroup, wire.PublishWeights, wire.AdoptWeights, wire.Sleep, wire.Wake),
    "reward": (wire.ScoreGroup,), "teacher": (wire.ScoreTokens,),
}  # fmt: skip
"""Commands that each of the roles that lie is sent."""
GIVEN_BACK, OPERATED, COMPACTED = 0.001, 0.1, 0.02
"""Shares of the groups that an honest rollout gives back, and of the heartbeats with a command and a compaction."""
ANNOUNCED = 0.5
"""Share of the answers of liars to commands to adopt that announce a relay, and end nothing."""
PLAUSIBLE = 0.25
"""Share of the answers of liars that keep to every form."""
FIGURES = {
    **dict.fromkeys(("crashes", "unproven_versions", "poisoned_steps", "bad_lines"), "findings"),
    "lost_prompts": "prompts", "refused": "replicas", "stalls": "stalls", "clashes": "findings",
}  # fmt: skip
"""Figures and their units."""
TOGETHER = 64
"""Events in one transaction of the journal."""
LIES_PER_RESTART = 5_000


def relay_offer(message: wire.AdoptWeights) -> tuple[wire.RelayOffered, tuple[bytes, ...]]:
    """Return what a rollout of one rank says that serves what it pulls."""
    said = wire.RelayOffered(lease=message.lease, version=message.version)
    return said, (encoded_relay_offer(message.version, 1),)


class Prompts:
    """Prompts by position."""

    def prompt(self, position: int) -> wire.Prompt:
        """Return the prompt at `position`."""
        return wire.Prompt(id=f"train/0/{position}", text="x")


class Fuzzer:
    """A controller with its journal, and the replicas around it."""

    def __init__(self, folder: Path, seed: int, variant: str) -> None:
        self._plan, self._event_s = VARIANTS[variant], EVENT_S.get(variant, 0.005)
        self._path, self._rng, self.found = folder / "journal.sqlite", random.Random(seed), Findings(self._plan)
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
        """Honest rollouts whose weights, which a liar sent them, or a relay of such, are not those of their version."""
        self._awake: set[str] = set()
        """Honest replicas that have the devices that both sides share."""
        self._wanted = -1
        self._data = RunPrompts(Prompts(), Prompts(), [wire.Prompt(id=f"held-out/{n}", text="x") for n in range(3)])
        self._open()
        for name in (*HONEST, "rollout-2", "reward-2", "teacher-2"):
            self._join(name)

    def _open(self) -> None:
        self._journal = Journal(self._path)
        incarnation = start_incarnation(self._journal, "fuzz", self._plan)
        self._journal.commit()
        entries, data = list(self._journal.read()), self._data
        self.controller = Controller(
            self._plan, data.prompts, data.examples, data.held_out, journal=entries, incarnation=incarnation
        )

    def restart(self) -> None:
        """Kill the controller, and start it again from its journal, which holds no leases."""
        for key in orphans(self.controller):
            self.found.note("lost_prompts", f"{key} is leased to no replica")
        self._journal.commit()
        if self._rng.random() < 0.5:
            self._compact()
        self._journal.close()
        self.num_restarts += 1
        self._open()
        name = f"rollout-{self.liars['rollout']}"
        if name in self._versions:  # it comes before those whose work it claims
            self._hello(name)
            self._receive(name, self._claim(name))

    def _restored(self) -> ControllerState:
        state = ControllerState(self._plan, self._data, self.controller.state.incarnation)
        restore(state, list(self._journal.read()))
        return state

    def _compact(self) -> None:
        """Compact the journal, which must then lead to the same state as before."""
        record = compact(self.controller.state)
        if record is not None:
            whole = self._restored()
            self._journal.compact(record)
            self.kinds["compactions"] += 1
            if problem := difference(whole, self._restored()):
                self.found.note("lost_prompts", f"the compacted journal restores another state: {problem}")

    def close(self) -> None:
        """Close the journal."""
        self._journal.commit()
        self._journal.close()

    def run(self, num: int) -> None:
        """Send `num` lies, unless the controller crashes."""
        restart_at = LIES_PER_RESTART
        while self.num_lies < num and not self.found.counts["crashes"]:
            try:
                self.tell_lie()
                self.work()
                if self.num_lies >= restart_at:
                    restart_at += LIES_PER_RESTART
                    self.restart()
            except Exception as error:  # noqa: BLE001 (what is looked for)
                self.found.note("crashes", f"{type(error).__name__}: {error}")

    def detail(self) -> dict[str, Any]:
        """Return what the run has done."""
        found = self.found
        return {
            "lies": self.num_lies,
            "by_kind": dict(self.kinds),
            "events": self.num_events,
            "simulated_s": rounded(self.now),
            "restarts": self.num_restarts,
            "steps": found.committed,
            "slowest_step_s": rounded(found.slowest_s),
            "discarded": len(found.discarded),
            "filtered": found.num_filtered,
            "resumed": found.num_resumed,
            "evaluated": found.num_evaluations,
            "names_of_liars": dict(self.liars),
        }

    # --- the controller ---

    def _handle(self, event: Event) -> None:
        self.now += self._event_s
        self.num_events += 1
        for command in self.controller.step(event):
            self.found.check(command, self.now)
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
        self._awake.discard(name)
        self._versions[name] = self.found.committed if name.startswith("policy") else -1
        self._hello(name)

    def _hello(self, name: str) -> None:
        role: Any = name.rpartition("-")[0]
        has_layout = role in ("policy", "rollout")
        hello = wire.Hello(
            role=role,
            host=self._host(name),
            pid=1,
            num_slots=2 if name in HONEST else 4,
            version=self._versions[name],
            has_layout=has_layout,
            serves=has_layout,
            limits=LIMITS if role == "policy" else None,
        )
        layout = encoded_layout(name if name in HONEST else f"{role}-0")
        if name not in HONEST and self._rng.random() < STRANGE_HELLOS:
            hello = strange_hello(hello, self._rng)
            layout = encoded_layout(self._rng.choice(("rollout-0", "policy-0")), num_ranks=self._rng.choice((1, 1, 2)))
            if has_layout and self._rng.random() < 0.5:
                self.kinds["malformed_layouts"] += 1
                layout = malformed(layout, self._rng)
        self._receive(name, hello, (layout,) if has_layout else ())

    def _host(self, name: str) -> str:
        """Return the host of a replica. Rollouts pull from each other: on one host, or as relays on several."""
        if name.startswith("policy"):
            return name[-1]
        return "h" if self._plan.relay_from_bytes else self._rng.choice("hijk")

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
                    self._use_devices(name, message)
                    if isinstance(message, wire.AdoptWeights) and message.announce:
                        self._answers.append((name, *relay_offer(message)))
                    self._answers.append((name, *self._truth(name, send)))

    def _use_devices(self, name: str, message: wire.Down) -> None:
        """Note that an honest replica sleeps or wakes, and check that no one else has its devices."""
        match message:
            case wire.Sleep():
                self._awake.discard(name)
            case wire.Wake():
                self._awake.add(name)
                if others := [one for one in self._awake if one[0] != name[0]]:
                    self.found.note("clashes", f"{name} is woken, and {others} have the devices")
            case wire.TrainStep() | wire.GenerateGroup() if self._plan.colocate and name not in self._awake:
                self.kinds["work_asleep"] += 1

    def _replace(self, name: str, reason: str) -> None:
        """Bring a liar back that was evicted: as another process, or under another name."""
        role = name.rpartition("-")[0]
        is_accused = name in HONEST and "than were published" in reason
        if name in HONEST and (name in self._accused if is_accused else "start a replica of another name" in reason):
            self.found.note("refused", f"{name}: {reason}")
            return
        self.kinds["evictions"] += 1
        if is_accused:
            self._accused.add(name)
        elif name in HONEST:
            self.kinds["honest_evictions"] += 1
            progress(f"{self.now:.0f} s: {name} was evicted: {reason}")
        elif "start a replica of another name" in reason:
            self.liars[role] += 1
            name = f"{role}-{self.liars[role]}"
        self._incarnations.setdefault(name, 0)
        self._answers.append((name, wire.Drain(reason=""), ()))  # type: ignore[arg-type]

    def _truth(self, name: str, send: Send) -> Answer:
        """Return the answer of a replica that works."""
        version, message = self._versions[name], send.message
        match message:
            case wire.GenerateGroup():
                if name in HONEST and self._rng.random() < GIVEN_BACK:
                    return interrupted(message, send.buffers, version, self._rng.randint(0, 2))
                return generated(message, send.buffers, version)
            case wire.ScoreGroup():
                return scored(message, self._rng)
            case wire.ScoreTokens():
                return taught(message, send.buffers, self._plan.teacher_top_k or 0, self._rng)
            case wire.Sleep(lease=lease):
                return wire.Slept(lease=lease), ()
            case wire.Wake(lease=lease):
                return wire.Woken(lease=lease), ()
            case wire.TrainStep(lease=lease, step=step):
                self._versions[name] = step
                return wire.StepTrained(lease=lease, step=step, metrics={}), ()
            case wire.PublishWeights(version=wanted):
                return published(message, send.buffers), (encoded_offer(wanted),)
            case wire.AdoptWeights(lease=lease, version=wanted):
                if lease in self._held[name]:
                    self._versions[name] = wanted
                source = message.relays[0] if message.relays else message.source
                lies = source in self._holds_lies or (source.startswith("rollout") and source not in HONEST)
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
            self._beat_at = self.now + self._plan.heartbeat_s
            self._disturb()
            self.found.check_progress(self.now)
            for name in [*HONEST, *(f"{role}-{number}" for role, number in self.liars.items())]:
                if name in self._versions:
                    self._receive(name, self._heartbeat(name))
            self._handle(Ticked(self.now))
            for about in ("status", "why"):
                self._receive("operator-0", wire.QueryRun(request="", about=about))  # type: ignore[arg-type]
            if self._rng.random() < OPERATED:
                self._operate()
            view = snapshot(self.controller.state, MetricsHistory(0.0), self.now, 0)
            msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=RunSnapshot)

    def _disturb(self) -> None:
        """Restart an honest replica or close its connection, and compact the journal, now and then."""
        rng = self._rng
        if rng.random() < RESTARTS_PER_HEARTBEAT:
            # It pulls while others hold the version already.
            for send in list(self._held["rollout-1"].values()):
                if isinstance(send.message, wire.GenerateGroup):
                    version = self._versions["rollout-1"]
                    self._receive("rollout-1", *interrupted(send.message, send.buffers, version, rng.randint(0, 2)))
            self._receive("rollout-1", wire.Leave(reason="it is restarted"))
            self._join("rollout-1")
        if rng.random() < RESTARTS_PER_HEARTBEAT:
            self._handle(ReplicaDisconnected(self.now, rng.choice(HONEST)))
        if rng.random() < COMPACTED:
            self._journal.commit()
            self._compact()

    def _operate(self) -> None:
        """Request an evaluation, or change a setting."""
        request = f"request {self.num_events}"
        key, values = self._rng.choice(CHANGES)
        change = wire.ChangeSetting(request=request, key=key, value=self._rng.choice(values))
        asked = wire.RequestEvaluation(request=request)
        self._receive("operator-0", change if self._rng.random() < 0.7 else asked)

    def _heartbeat(self, name: str) -> wire.Heartbeat:
        held = tuple(wire.HeldLease(lease=lease, phase="answered") for lease in self._held[name])
        for send in self._held[name].values():  # an answer that was lost with a controller is sent again
            if name in HONEST and len(self._answers) < 100 and self._rng.random() < 0.5:
                self._answers.append((name, *self._truth(name, send)))
        return wire.Heartbeat(leases=held, version=self._versions[name])

    def _claim(self, name: str) -> wire.Heartbeat:
        """Return a heartbeat that claims work which was last given to others, beside its own."""
        own = self._heartbeat(name)
        others = [getattr(send.message, "lease", "") for send in list(self._seen)[-10:]]
        return replace(own, leases=(*own.leases, *[wire.HeldLease(lease=one, phase="working") for one in others]))

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
        elif self._seen and rng.random() < 0.05:
            message, buffers = self._claim(name), ()
        elif rng.random() < 0.01:
            self.num_lies += 1
            self._hello(name)
            return
        elif rng.random() < 0.01:
            self.num_lies += 1
            self.kinds["closed_connections"] += 1
            self._handle(ReplicaDisconnected(self.now, name))
            return
        else:
            others = [send for send in self._seen if type(send.message) in TAKEN[role]]
            switches = [send for send in held if isinstance(send.message, wire.Sleep | wire.Wake)]
            command: Any = None
            if switches and rng.random() < 0.8:  # the run goes no faster than these are answered
                command = switches[0]
            elif held and rng.random() < 0.7:
                command = rng.choice(held)
            elif others and rng.random() < 0.8:
                command = rng.choice(others)
            message, buffers = self._heartbeat(name), ()
            if command is not None:
                message, buffers = self._truth(name, command)
                if isinstance(command.message, wire.AdoptWeights) and rng.random() < ANNOUNCED:
                    message, buffers = relay_offer(command.message)
            kind = rng.random()
            if command is not None and kind < PLAUSIBLE:
                message, buffers = plausible((message, buffers), command.message, command.buffers, rng)
            elif kind < (0.3 if isinstance(message, wire.WeightsAdopted | wire.WeightsPublished) else 0.9):
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


def main() -> None:
    """Send the given number of lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50,000 lies instead of 1,000,000")
    parser.add_argument("--lies", type=int, default=0, help="number of lies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="", help="one run instead of all in turn")
    arguments = parser.parse_args()
    num = arguments.lies or (50_000 if arguments.quick else 1_000_000)
    variants = [arguments.variant] if arguments.variant else list(VARIANTS)
    begin, counts, runs = time.monotonic(), Counter[str](), {}
    for index, variant in enumerate(variants):
        with tempfile.TemporaryDirectory(prefix="starling-fuzz-") as folder:
            fuzzer = Fuzzer(Path(folder), arguments.seed + index, variant)
            fuzzer.run(num // len(variants))
            counts += fuzzer.found.counts
            counts["lost_prompts"] += count_lost(fuzzer.found, fuzzer.controller)
            runs[variant] = fuzzer.detail()
            fuzzer.close()
    detail = {
        "seed": arguments.seed,
        "lies": sum(run["lies"] for run in runs.values()),
        "runs": runs,
        "seconds": rounded(time.monotonic() - begin),
        **machine(),
        **versions("msgspec", "numpy"),
    }
    for figure, unit in FIGURES.items():
        print_figure("fuzz_controller", figure, counts[figure], unit=unit, goal=0, better="lower", detail=detail)
        detail = {}


if __name__ == "__main__":
    main()
