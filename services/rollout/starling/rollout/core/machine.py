"""State machine of a rollout replica (stop 10 of the walk): when it generates, pulls and switches weights. Pure.

    stale ---> pulling ---> staged ---> current ---> pulling (the next version)
                  |           ^  |
                  |           |  +--> torn (the engine does not hold the published version)
                  +--> draining (mode `finish`: until nothing runs, at most `finish_timeout_s`)

A pull that fails returns to `current`, or to `stale` in a replica that holds no version.

The engine generates during the pull and pauses only for the switch. Without memory for a staging area (`in_place`) it
pauses for the whole pull, and a pull that fails leaves it torn; under `finish` it drains before the pull. A torn
replica generates nothing until it has adopted another version. A replica can publish the version that it holds, once
proven, to other replicas, between two tokens. An asleep replica has released its memory and does nothing; it falls
asleep on an order of the controller or when its membership lease expires (`fenced`).

Every wait has a limit: a pull `pull_timeout_s`, draining `finish_timeout_s`, and a group that needs newer weights
`version_timeout_s`. Time advances with `tick`; a wait counts from the first `tick` after it began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from starling.common.wire.messages import AdoptWeights, GenerateGroup, PublishWeights, Sleep, Wait, Wake

Adoption = Literal["stale", "pulling", "draining", "staged", "current", "torn"]
AdoptionMode = Literal["keep", "recompute", "salt", "finish"]


@dataclass(frozen=True)
class StartGroup:
    """Start this group in the engine."""

    message: GenerateGroup
    buffers: tuple[bytes, ...] = ()
    """Partial completions from another replica."""


@dataclass(frozen=True)
class PullWeights:
    """Start to pull a version during generation, or in place while the engine is paused."""

    message: AdoptWeights
    buffers: tuple[bytes, ...]
    in_place: bool = False


@dataclass(frozen=True)
class SwitchWeights:
    """Switch to the pulled version before the next token."""

    lease: str
    mode: Literal["keep", "recompute", "salt"] = "keep"


@dataclass(frozen=True)
class CancelGroup:
    """Remove this group from the engine."""

    lease: str


@dataclass(frozen=True)
class FailLease:
    """Report to the controller that a lease failed."""

    lease: str
    reason: str


@dataclass(frozen=True)
class PublishVersion:
    """Offer the version in use to other replicas, before the next token."""

    message: PublishWeights


@dataclass(frozen=True)
class FallAsleep:
    """Interrupt what runs, release the engine's memory, and confirm it; only confirm it when `repeated`."""

    lease: str
    """Empty without an order, so that there is no answer."""
    repeated: bool = False


@dataclass(frozen=True)
class WakeUp:
    """Allocate the engine's memory again and confirm it; only confirm it when `repeated`."""

    lease: str
    repeated: bool = False


Action = StartGroup | PullWeights | SwitchWeights | CancelGroup | FailLease | PublishVersion | FallAsleep | WakeUp


@dataclass(frozen=True)
class _LeaseWait:
    """Wait of a lease: its reason, the component that can end it, and its limit."""

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
    """Leases in the engine."""
    mode: AdoptionMode = "keep"
    """What running requests do when new weights arrive."""
    in_place: bool = False
    """A pull overwrites the weights in use: the engine pauses for it."""
    pull_timeout_s: float = 60.0
    """Limit of a pull, enforced by the puller."""
    version_timeout_s: float = 600.0
    """How long a group may wait for weights that are new enough."""
    finish_timeout_s: float = 300.0
    """How long new weights wait for running requests under `finish`."""
    asleep: bool = False
    _newest: int = -1
    """Newest version ever in use. A torn replica must not go back to an older one either."""
    _waiting_groups: dict[str, StartGroup] = field(default_factory=dict)
    _buffers: tuple[bytes, ...] = ()
    """Offer and plan of the version that is being adopted, until the pull starts."""
    _waiting_since: dict[tuple[str, str], float] = field(default_factory=dict)
    """When each wait began, in monotonic seconds, by lease and by what it waits for."""

    def __post_init__(self) -> None:
        """Start as current where the engine has loaded weights itself."""
        if self.version >= 0:
            self.adoption, self._newest = "current", self.version

    @property
    def may_generate(self) -> bool:
        """Whether the engine may sample the next token."""
        writing = self.in_place and self.adoption in ("pulling", "staged")
        return self.version >= 0 and self.adoption != "torn" and not writing and not self.asleep

    def generate(self, message: GenerateGroup, buffers: tuple[bytes, ...] = ()) -> list[Action]:
        """Take a group; it is held back while the weights are too old for it."""
        self._waiting_groups[message.lease] = StartGroup(message, buffers)
        return self._admit()

    def adopt(self, message: AdoptWeights, buffers: tuple[bytes, ...]) -> list[Action]:
        """Begin to adopt a version."""
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
        """The pull for `lease` ended; `problem` is the reason if it failed."""
        if self.adopting is None or self.adopting.lease != lease:
            return []
        if problem is not None:
            if self.in_place:
                self.adoption, self.version = "torn", -1
            return self._adoption_failed(problem)
        if not self.in_place and self._must_drain():
            self.adoption = "draining"
            return []
        return self._switch()

    def switched(self, lease: str, *, proven: bool, answered: bool = False) -> list[Action]:
        """The switch is done.

        Args:
            lease: that of the adoption.
            proven: the digests of the engine's weights match the published ones.
            answered: the lease is answered with these digests, because the source may be at fault.
        """
        assert self.adopting is not None, "a switch follows a pull"
        assert self.adopting.lease == lease, "a switch follows its own pull"
        version, self.adopting = self.adopting.version, None
        if not proven:
            self.adoption, self.version = "torn", -1
            if answered:
                return []
            return [FailLease(lease, f"after the switch the engine does not hold version {version} bit for bit")]
        self.adoption, self.version, self._newest = "current", version, version
        return self._admit()

    def switch_failed(self, problem: str) -> list[Action]:
        """The engine had nothing to switch to and keeps its weights."""
        return self._adoption_failed(problem)

    def publish(self, message: PublishWeights) -> list[Action]:
        """Offer the version in use to other replicas. A pull under way does not prevent that, unless in place."""
        if message.version == self.version and self.may_generate:
            return [PublishVersion(message)]
        holds = f"holds version {self.version}" if self.version >= 0 else "holds no version that it could prove"
        if self.adopting is not None:
            holds += f" and adopts version {self.adopting.version}"
        elif self.asleep:
            holds += " and sleeps"
        return [FailLease(message.lease, f"version {message.version} cannot be published: this rollout {holds}")]

    def sleep(self, message: Sleep) -> list[Action]:
        """Sleep, so that other replicas can use the devices."""
        if self.adopting is not None:
            return [
                FailLease(message.lease, f"version {self.adopting.version} is being adopted: this rollout cannot sleep")
            ]
        repeated, self.asleep = self.asleep, True
        return [FallAsleep(message.lease, repeated)]

    def fenced(self) -> list[Action]:
        """The membership lease expired: sleep without an order, unless asleep. A pull under way is discarded."""
        if self.asleep:
            return []
        self.asleep = True
        actions: list[Action] = []
        if self.adopting is not None:
            if self.in_place and self.adoption == "pulling":
                self.adoption, self.version = "torn", -1
            actions = self._adoption_failed("this rollout fell asleep meanwhile, as the controller did not answer")
        return [*actions, FallAsleep("")]

    def wake(self, message: Wake) -> list[Action]:
        """Wake up: the devices are free."""
        return [WakeUp(message.lease, repeated=not self.asleep)]

    def woken(self, version: int) -> list[Action]:
        """The engine has its memory back, with the weights of `version`; -1 for none."""
        self.asleep = False
        return self._adopt_directly(version)

    def lost(self) -> list[Action]:
        """The engine and its weights are lost. The caller reports each of its groups as `finished`."""
        self.version, self.adoption = -1, "stale"
        return [] if self.adopting is None else self._adoption_failed("the engine was lost meanwhile")

    def replaced(self, version: int) -> list[Action]:
        """A new engine is up, with the weights of `version`; -1 for none."""
        self.asleep = False
        return self._adopt_directly(version)

    def tick(self, now: float) -> list[Action]:
        """Advance the time: fail groups that waited too long for weights, and end a drain that took too long."""
        waiting = self._waits_by_lease()
        self._waiting_since = {
            (lease, wait.what): self._waiting_since.get((lease, wait.what), now) for lease, wait in waiting.items()
        }
        actions: list[Action] = []
        for lease, wait in waiting.items():
            if now - self._waiting_since[lease, wait.what] < wait.limit_s:
                continue
            if self.adopting is None or lease != self.adopting.lease:
                actions += self.cancelled((lease,))
                actions.append(FailLease(lease, f"{wait.what} did not come within {wait.limit_s:g} s"))
            elif self.adoption == "draining":
                actions += self._after_drain()
        return actions

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return the waits at `now`: the pull, and for each version that groups need the longest wait.

        Groups count from the first `tick` after they arrived.
        """
        found: dict[str, Wait] = {}
        for lease, waiting in self._waits_by_lease().items():
            since_s = now - self._waiting_since.get((lease, waiting.what), now)
            left_s = max(0.0, waiting.limit_s - since_s)
            wait = Wait(what=waiting.what, on=waiting.on, since_s=since_s, seconds_left=left_s)
            if wait.what not in found or found[wait.what].since_s < since_s:
                found[wait.what] = wait
        return tuple(found.values())

    def finished(self, lease: str) -> list[Action]:
        """A group left the engine."""
        self.running.discard(lease)
        return self._after_drain() if self.adoption == "draining" and not self.running else []

    def cancelled(self, leases: tuple[str, ...]) -> list[Action]:
        """The controller cancelled these leases. A running pull continues: its version is needed sooner or later."""
        actions: list[Action] = []
        for lease in leases:
            self._waiting_groups.pop(lease, None)
            if lease in self.running:
                actions += [CancelGroup(lease), *self.finished(lease)]
        return actions

    def _must_drain(self) -> bool:
        return self.mode == "finish" and bool(self.running) and self.may_generate

    def _after_drain(self) -> list[Action]:
        """Continue the adoption after the drain ended or timed out."""
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
        # Requests that did not finish in time, and those of the HTTP API, are recomputed under the new weights.
        return [SwitchWeights(self.adopting.lease, "recompute" if self.mode == "finish" else self.mode)]

    def _adoption_failed(self, problem: str) -> list[Action]:
        assert self.adopting is not None, "an adoption fails once"
        lease, self.adopting = self.adopting.lease, None
        if self.adoption != "torn":
            self.adoption = "current" if self.version >= 0 else "stale"
        return [FailLease(lease, problem), *self._admit()]

    def _adopt_directly(self, version: int) -> list[Action]:
        """The engine holds `version` without an adoption."""
        if self.adoption != "torn":
            self.version, self.adoption = version, "current" if version >= 0 else "stale"
            self._newest = max(self._newest, version)
        return self._admit()

    def _waits_by_lease(self) -> dict[str, _LeaseWait]:
        """Return the wait of each lease that waits."""
        waiting: dict[str, _LeaseWait] = {}
        if self.adopting is not None:
            version = self.adopting.version
            pull = _LeaseWait(
                f"the weights of version {version}", self.adopting.source or "policy", self.pull_timeout_s
            )
            drain = _LeaseWait(
                f"running requests, before version {version} is adopted", "engine", self.finish_timeout_s
            )
            waiting[self.adopting.lease] = drain if self.adoption == "draining" else pull
        for lease, held in self._waiting_groups.items():
            what = f"an order to adopt version {max(0, held.message.min_version)} or newer"
            if self.asleep:
                what = "an order to wake up"
            elif held.message.min_version <= self.version:
                what = "the adoption that is under way"
            waiting[lease] = _LeaseWait(what, "controller", self.version_timeout_s)
        if self.adoption == "torn":
            torn = _LeaseWait(
                "an order to adopt a version, as this engine is torn", "controller", self.version_timeout_s
            )
            waiting |= dict.fromkeys(sorted(self.running), torn)
        return waiting

    def _admit(self) -> list[Action]:
        if not self.may_generate or self.adoption == "draining":
            return []
        ready = [held for held in self._waiting_groups.values() if held.message.min_version <= self.version]
        for held in ready:
            del self._waiting_groups[held.message.lease]
            self.running.add(held.message.lease)
        return list(ready)
