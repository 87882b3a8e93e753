"""Stop 10 of the walk, decided: when a replica generates, pulls and switches. Pure.

    stale -> pulling -> staged -> switching -> current
      ^         |                    |
      +---------+ (the pull failed)  +--> torn (what the engine holds is not what was published)

The engine generates through the whole pull and pauses only for the switch. A torn replica generates nothing until it
has adopted another version. What it holds proven it can publish to others, between two tokens.

Nothing is waited for without an end: a pull has `pull_s`, and a group `version_s` for weights that may sample it. Time
comes with `tick`, and what has come since the tick before counts from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from starling.common.wire.messages import AdoptWeights, GenerateGroup, PublishWeights, Wait

Adoption = Literal["stale", "pulling", "staged", "current", "torn"]


@dataclass(frozen=True)
class Generate:
    """Give this group to the engine."""

    message: GenerateGroup


@dataclass(frozen=True)
class Pull:
    """Start to pull a version, beside the generation."""

    message: AdoptWeights
    buffers: tuple[bytes, ...]


@dataclass(frozen=True)
class Switch:
    """Put the staged version in place, before the next token."""

    lease: str


@dataclass(frozen=True)
class Forget:
    """Take this group out of the engine."""

    lease: str


@dataclass(frozen=True)
class Fail:
    """Tell the controller that a lease cannot be met."""

    lease: str
    reason: str


@dataclass(frozen=True)
class Publish:
    """Put the version in use on offer, before the next token."""

    message: PublishWeights


Action = Generate | Pull | Switch | Forget | Fail | Publish


@dataclass
class Rollout:
    """The state of one rollout replica."""

    version: int = -1
    """Version in use; -1 for none."""
    adoption: Adoption = "stale"
    adopting: AdoptWeights | None = None
    running: set[str] = field(default_factory=set)
    """Leases that the engine holds."""
    pull_s: float = 60.0
    """How long a pull may take; whoever pulls sees to it."""
    version_s: float = 600.0
    """How long a group may wait for weights that may sample it."""
    _newest: int = -1
    """Newest version ever in use. A torn replica goes forward too, so that no group gets tokens that are too old."""
    _held_back: dict[str, GenerateGroup] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)
    """Since when each lease that waits does so, in monotonic seconds."""

    @property
    def may_generate(self) -> bool:
        """Say whether the engine may sample the next token."""
        return self.version >= 0 and self.adoption != "torn" and bool(self.running)

    def generate(self, message: GenerateGroup) -> list[Action]:
        """A group was asked for; it is held back while the weights are too old for it."""
        self._held_back[message.lease] = message
        return self._admit()

    def adopt(self, message: AdoptWeights, buffers: tuple[bytes, ...]) -> list[Action]:
        """A version is to be adopted."""
        if self.adopting is not None:
            return [Fail(message.lease, f"version {self.adopting.version} is being adopted")]
        if message.version < self._newest:
            return [Fail(message.lease, f"version {message.version} is older than version {self._newest}, used before")]
        self.adopting = message
        if self.adoption != "torn":
            self.adoption = "pulling"
        return [Pull(message, buffers)]

    def pulled(self, lease: str, problem: str | None) -> list[Action]:
        """The pull for `lease` ended; `problem` says why it failed, if it did."""
        if self.adopting is None or self.adopting.lease != lease:
            return []
        if problem is None:
            if self.adoption != "torn":
                self.adoption = "staged"
            return [Switch(lease)]
        self.adopting = None
        if self.adoption != "torn":
            self.adoption = "current" if self.version >= 0 else "stale"
        return [Fail(lease, problem)]

    def switched(self, lease: str, *, proven: bool) -> list[Action]:
        """The staged version is in place, and what the engine holds was compared with what was published."""
        assert self.adopting is not None, "a switch follows a pull"
        assert self.adopting.lease == lease, "a switch follows its own pull"
        version, self.adopting = self.adopting.version, None
        if not proven:
            self.adoption, self.version = "torn", -1
            return [Fail(lease, f"after the switch the engine does not hold version {version} bit for bit")]
        self.adoption, self.version, self._newest = "current", version, version
        return self._admit()

    def publish(self, message: PublishWeights) -> list[Action]:
        """The version in use is to be offered to others. A pull under way does not hinder that."""
        if message.version == self.version:
            return [Publish(message)]
        holds = f"holds version {self.version}" if self.version >= 0 else "holds no version that it could prove"
        if self.adopting is not None:
            holds += f" and adopts version {self.adopting.version}"
        return [Fail(message.lease, f"version {message.version} cannot be published: this rollout {holds}")]

    def tick(self, now: float) -> list[Action]:
        """Time has passed: give back the groups that have waited for their weights for too long."""
        waiting = self._waiting()
        self._since = {lease: self._since.get(lease, now) for lease in waiting}
        actions: list[Action] = []
        for lease, wanted in waiting.items():
            if (self.adopting is None or lease != self.adopting.lease) and now - self._since[lease] >= self.version_s:
                actions += self.given_up((lease,))
                actions.append(Fail(lease, f"{wanted} did not come within {self.version_s:g} s"))
        return actions

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what is waited for at `now`: the pull, and for each version that groups need the one that is longest.

        Groups count from the first `tick` after they came.
        """
        found: dict[str, Wait] = {}
        for lease, wanted in self._waiting().items():
            since_s = now - self._since.get(lease, now)
            if self.adopting is not None and lease == self.adopting.lease:
                source, limit_s = self.adopting.source or "policy", self.pull_s
            else:
                source, limit_s = "controller", self.version_s
            wait = Wait(what=wanted, on=source, since_s=since_s, seconds_left=max(0.0, limit_s - since_s))
            if wanted not in found or found[wanted].since_s < since_s:
                found[wanted] = wait
        return tuple(found.values())

    def finished(self, lease: str) -> None:
        """The engine is done with a group."""
        self.running.discard(lease)

    def given_up(self, leases: tuple[str, ...]) -> list[Action]:
        """Nobody wants these any more. A pull under way goes on: its version is wanted sooner or later."""
        actions: list[Action] = []
        for lease in leases:
            self._held_back.pop(lease, None)
            if lease in self.running:
                self.running.discard(lease)
                actions.append(Forget(lease))
        return actions

    def _waiting(self) -> dict[str, str]:
        """Return what each lease waits for that does, in words."""
        waiting: dict[str, str] = {}
        if self.adopting is not None:
            waiting[self.adopting.lease] = f"the weights of version {self.adopting.version}"
        for message in self._held_back.values():
            waiting[message.lease] = f"an order to adopt version {max(0, message.min_version)} or newer"
        if self.adoption == "torn":
            waiting |= dict.fromkeys(sorted(self.running), "an order to adopt a version, as this engine is torn")
        return waiting

    def _admit(self) -> list[Action]:
        ready = [message for message in self._held_back.values() if message.min_version <= self.version]
        for message in ready:
            del self._held_back[message.lease]
            self.running.add(message.lease)
        return [Generate(message) for message in ready]
