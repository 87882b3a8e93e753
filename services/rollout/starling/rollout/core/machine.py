"""Stop 10 of the walk, decided: when a replica generates, pulls and switches. Pure.

    stale -> pulling -> staged -> switching -> current
      ^         |          |         |
      |         |          |         +--> torn (what the engine holds is not what was published)
      |         |          +--> draining -> switching (mode `finish`: until nothing runs, or for `finish_s`)
      +---------+ (the pull failed)

The engine generates through the whole pull and pauses only for the switch. Where there is no room for a staging area
(`in_place`) it pauses for the pull instead, which leaves it torn when it fails; under `finish` it drains before. A torn
replica generates nothing until it has adopted another version. What it holds proven it can publish to others, between
two tokens. A replica that sleeps has given its memory away and does nothing at all; it falls asleep by order or, when
it cannot know any more whose turn it is, by itself (`doze`).

Nothing is waited for without an end: a pull has `pull_s`, draining `finish_s`, and a group `version_s` for weights that
may sample it. Time comes with `tick`, and what has come since the tick before counts from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from starling.common.wire.messages import AdoptWeights, GenerateGroup, PublishWeights, Sleep, Wait, Wake

Adoption = Literal["stale", "pulling", "draining", "staged", "current", "torn"]
AdoptionMode = Literal["keep", "recompute", "salt", "finish"]


@dataclass(frozen=True)
class StartGroup:
    """Give this group to the engine."""

    message: GenerateGroup
    buffers: tuple[bytes, ...] = ()
    """What another replica left of it."""


@dataclass(frozen=True)
class PullWeights:
    """Start to pull a version, beside the generation; or in place, of an engine that is paused."""

    message: AdoptWeights
    buffers: tuple[bytes, ...]
    in_place: bool = False


@dataclass(frozen=True)
class SwitchWeights:
    """Put the version that was pulled in place, before the next token."""

    lease: str
    mode: Literal["keep", "recompute", "salt"] = "keep"


@dataclass(frozen=True)
class CancelGroup:
    """Take this group out of the engine."""

    lease: str


@dataclass(frozen=True)
class FailLease:
    """Tell the controller that a lease cannot be met."""

    lease: str
    reason: str


@dataclass(frozen=True)
class PublishVersion:
    """Put the version in use on offer, before the next token."""

    message: PublishWeights


@dataclass(frozen=True)
class FallAsleep:
    """Take out what runs, give the engine's memory away, and say so; only say so when `again`."""

    lease: str
    """Empty where nobody asked for it, and nobody is to be told."""
    again: bool = False


@dataclass(frozen=True)
class WakeUp:
    """Take the engine's memory back, and say so; only say so when `again`."""

    lease: str
    again: bool = False


Action = StartGroup | PullWeights | SwitchWeights | CancelGroup | FailLease | PublishVersion | FallAsleep | WakeUp


@dataclass(frozen=True)
class _Waiting:
    """What a lease waits for, who can end it, and after how long it is given up."""

    what: str
    on: str
    limit_s: float


@dataclass
class RolloutMachine:
    """The state of one rollout replica."""

    version: int = -1
    """Version in use; -1 for none."""
    adoption: Adoption = "stale"
    adopting: AdoptWeights | None = None
    running: set[str] = field(default_factory=set)
    """Leases that the engine holds."""
    mode: AdoptionMode = "keep"
    """What running requests do when new weights are there."""
    in_place: bool = False
    """A pull writes into the weights in use: it begins when the engine may pause, and the engine pauses for it."""
    pull_s: float = 60.0
    """How long a pull may take; whoever pulls sees to it."""
    version_s: float = 600.0
    """How long a group may wait for weights that may sample it."""
    finish_s: float = 300.0
    """How long new weights wait for running requests under `finish`."""
    asleep: bool = False
    _newest: int = -1
    """Newest version ever in use. A torn replica goes forward too, so that no group gets tokens that are too old."""
    _held_back: dict[str, StartGroup] = field(default_factory=dict)
    _buffers: tuple[bytes, ...] = ()
    """Of what is being adopted, until it is pulled."""
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    """Since when each lease that waits does so, in monotonic seconds, by the lease and what it waits for."""

    def __post_init__(self) -> None:
        """Begin with weights, where the engine has some."""
        if self.version >= 0:
            self.adoption, self._newest = "current", self.version

    @property
    def may_generate(self) -> bool:
        """Say whether the engine may sample the next token."""
        writing = self.in_place and self.adoption in ("pulling", "staged")
        return self.version >= 0 and self.adoption != "torn" and not writing and not self.asleep

    def generate(self, message: GenerateGroup, buffers: tuple[bytes, ...] = ()) -> list[Action]:
        """A group was asked for; it is held back while the weights are too old for it."""
        self._held_back[message.lease] = StartGroup(message, buffers)
        return self._admit()

    def adopt(self, message: AdoptWeights, buffers: tuple[bytes, ...]) -> list[Action]:
        """A version is to be adopted."""
        if self.asleep:
            return [
                FailLease(message.lease, f"version {message.version} cannot be adopted asleep: wake this rollout first")
            ]
        if self.adopting is not None:
            return [FailLease(message.lease, f"version {self.adopting.version} is being adopted")]
        if message.version < self._newest:
            return [
                FailLease(message.lease, f"version {message.version} is older than version {self._newest}, used before")
            ]
        self.adopting, self._buffers = message, buffers
        if self.in_place and self._must_drain():
            self.adoption = "draining"
            return []
        return self._pull()

    def pulled(self, lease: str, problem: str | None) -> list[Action]:
        """The pull for `lease` ended; `problem` says why it failed, if it did."""
        if self.adopting is None or self.adopting.lease != lease:
            return []
        if problem is not None:
            if self.in_place:
                self.adoption, self.version = "torn", -1
            return self._not_adopted(problem)
        if not self.in_place and self._must_drain():
            self.adoption = "draining"
            return []
        return self._switch()

    def switched(self, lease: str, *, proven: bool) -> list[Action]:
        """The staged version is in place, and what the engine holds was compared with what was published."""
        assert self.adopting is not None, "a switch follows a pull"
        assert self.adopting.lease == lease, "a switch follows its own pull"
        version, self.adopting = self.adopting.version, None
        if not proven:
            self.adoption, self.version = "torn", -1
            return [FailLease(lease, f"after the switch the engine does not hold version {version} bit for bit")]
        self.adoption, self.version, self._newest = "current", version, version
        return self._admit()

    def not_switched(self, problem: str) -> list[Action]:
        """The engine had nothing to switch to, and holds what it held."""
        return self._not_adopted(problem)

    def publish(self, message: PublishWeights) -> list[Action]:
        """The version in use is to be offered to others. A pull under way does not hinder that, unless in place."""
        if message.version == self.version and self.may_generate:
            return [PublishVersion(message)]
        holds = f"holds version {self.version}" if self.version >= 0 else "holds no version that it could prove"
        if self.adopting is not None:
            holds += f" and adopts version {self.adopting.version}"
        elif self.asleep:
            holds += " and sleeps"
        return [FailLease(message.lease, f"version {message.version} cannot be published: this rollout {holds}")]

    def sleep(self, message: Sleep) -> list[Action]:
        """The devices are wanted by others."""
        if self.adopting is not None:
            return [
                FailLease(message.lease, f"version {self.adopting.version} is being adopted: this rollout cannot sleep")
            ]
        again, self.asleep = self.asleep, True
        return [FallAsleep(message.lease, again)]

    def doze(self) -> list[Action]:
        """Nobody says any more whose turn it is: sleep, unless it does. What is being pulled is pulled in vain."""
        if self.asleep:
            return []
        self.asleep = True
        actions: list[Action] = []
        if self.adopting is not None:
            if self.in_place and self.adoption == "pulling":
                self.adoption, self.version = "torn", -1
            actions = self._not_adopted("this rollout fell asleep meanwhile, as the controller did not answer")
        return [*actions, FallAsleep("")]

    def wake(self, message: Wake) -> list[Action]:
        """The devices are free."""
        return [WakeUp(message.lease, again=not self.asleep)]

    def woken(self, version: int) -> list[Action]:
        """The engine has its memory again, and in it the weights of `version`; -1 for none."""
        self.asleep = False
        return self._holds(version)

    def lost(self) -> list[Action]:
        """The engine is gone, and what it held with it. What it ran is `finished` as far as it is concerned."""
        self.version, self.adoption = -1, "stale"
        return [] if self.adopting is None else self._not_adopted("the engine was lost meanwhile")

    def replaced(self, version: int) -> list[Action]:
        """There is another engine, with the weights of `version`; -1 for none."""
        self.asleep = False
        return self._holds(version)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: give back groups that waited for their weights for too long, and drain no longer."""
        waiting = self._waiting()
        self._since = {(lease, wait.what): self._since.get((lease, wait.what), now) for lease, wait in waiting.items()}
        actions: list[Action] = []
        for lease, wait in waiting.items():
            if now - self._since[lease, wait.what] < wait.limit_s:
                continue
            if self.adopting is None or lease != self.adopting.lease:
                actions += self.given_up((lease,))
                actions.append(FailLease(lease, f"{wait.what} did not come within {wait.limit_s:g} s"))
            elif self.adoption == "draining":
                actions += self._drained()
        return actions

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what is waited for at `now`: the pull, and for each version that groups need the one that is longest.

        Groups count from the first `tick` after they came.
        """
        found: dict[str, Wait] = {}
        for lease, waiting in self._waiting().items():
            since_s = now - self._since.get((lease, waiting.what), now)
            left_s = max(0.0, waiting.limit_s - since_s)
            wait = Wait(what=waiting.what, on=waiting.on, since_s=since_s, seconds_left=left_s)
            if wait.what not in found or found[wait.what].since_s < since_s:
                found[wait.what] = wait
        return tuple(found.values())

    def finished(self, lease: str) -> list[Action]:
        """The engine is done with a group."""
        self.running.discard(lease)
        return self._drained() if self.adoption == "draining" and not self.running else []

    def given_up(self, leases: tuple[str, ...]) -> list[Action]:
        """Nobody wants these any more. A pull under way goes on: its version is wanted sooner or later."""
        actions: list[Action] = []
        for lease in leases:
            self._held_back.pop(lease, None)
            if lease in self.running:
                actions += [CancelGroup(lease), *self.finished(lease)]
        return actions

    def _must_drain(self) -> bool:
        return self.mode == "finish" and bool(self.running) and self.may_generate

    def _drained(self) -> list[Action]:
        """Nothing runs any more, or it took too long."""
        return self._pull() if self.in_place else self._switch()

    def _pull(self) -> list[Action]:
        assert self.adopting is not None, "a pull is for an adoption"
        buffers, self._buffers = self._buffers, ()
        if self.adoption != "torn":
            self.adoption = "pulling"
        return [PullWeights(self.adopting, buffers, self.in_place)]

    def _switch(self) -> list[Action]:
        assert self.adopting is not None, "a switch follows a pull"
        if self.adoption != "torn":
            self.adoption = "staged"
        # What did not finish in time, and what others than the controller asked for, goes on as new.
        return [SwitchWeights(self.adopting.lease, "recompute" if self.mode == "finish" else self.mode)]

    def _not_adopted(self, problem: str) -> list[Action]:
        assert self.adopting is not None, "an adoption fails once"
        lease, self.adopting = self.adopting.lease, None
        if self.adoption != "torn":
            self.adoption = "current" if self.version >= 0 else "stale"
        return [FailLease(lease, problem), *self._admit()]

    def _holds(self, version: int) -> list[Action]:
        """The engine holds `version` now, without an adoption."""
        if self.adoption != "torn":
            self.version, self.adoption = version, "current" if version >= 0 else "stale"
            self._newest = max(self._newest, version)
        return self._admit()

    def _waiting(self) -> dict[str, _Waiting]:
        """Return what each lease waits for that does."""
        waiting: dict[str, _Waiting] = {}
        if self.adopting is not None:
            version = self.adopting.version
            pull = _Waiting(f"the weights of version {version}", self.adopting.source or "policy", self.pull_s)
            drain = _Waiting(f"running requests, before version {version} is adopted", "engine", self.finish_s)
            waiting[self.adopting.lease] = drain if self.adoption == "draining" else pull
        for lease, held in self._held_back.items():
            what = f"an order to adopt version {max(0, held.message.min_version)} or newer"
            if self.asleep:
                what = "an order to wake up"
            elif held.message.min_version <= self.version:
                what = "the adoption that is under way"
            waiting[lease] = _Waiting(what, "controller", self.version_s)
        if self.adoption == "torn":
            torn = _Waiting("an order to adopt a version, as this engine is torn", "controller", self.version_s)
            waiting |= dict.fromkeys(sorted(self.running), torn)
        return waiting

    def _admit(self) -> list[Action]:
        if not self.may_generate or self.adoption == "draining":
            return []
        ready = [held for held in self._held_back.values() if held.message.min_version <= self.version]
        for held in ready:
            del self._held_back[held.message.lease]
            self.running.add(held.message.lease)
        return list(ready)
