"""Stop 10 of the walk, decided: when a replica generates, pulls and switches. Pure.

    stale -> pulling -> staged -> switching -> current
      ^         |                    |
      +---------+ (the pull failed)  +--> torn (what the engine holds is not what was published)

The engine generates through the whole pull and pauses only for the switch. A torn replica generates nothing until it
has adopted another version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from starling.common.wire.messages import AdoptWeights, GenerateGroup

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


Action = Generate | Pull | Switch | Forget | Fail


@dataclass
class Rollout:
    """The state of one rollout replica."""

    version: int = -1
    """Version in use; -1 for none."""
    adoption: Adoption = "stale"
    adopting: AdoptWeights | None = None
    running: set[str] = field(default_factory=set)
    """Leases that the engine holds."""
    _newest: int = -1
    """Newest version ever in use. A torn replica goes forward too, so that no group gets tokens that are too old."""
    _held_back: dict[str, GenerateGroup] = field(default_factory=dict)

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

    def _admit(self) -> list[Action]:
        ready = [message for message in self._held_back.values() if message.min_version <= self.version]
        for message in ready:
            del self._held_back[message.lease]
            self.running.add(message.lease)
        return [Generate(message) for message in ready]
