"""Admission of commands by the policy's weight version, and steps that wait for a publication. Pure.

A step may overtake the publication of the weights that it changes. It is then held until their snapshot is taken, for
at most `hold_s`: a publication that never comes must not block a step forever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from starling.common.wire.messages import (
    AdoptWeights,
    PublishWeights,
    SaveCheckpoint,
    Sleep,
    TrainStep,
    Wait,
    Wake,
)

PolicyCommand = TrainStep | PublishWeights | SaveCheckpoint | AdoptWeights | Sleep | Wake
"""Commands of the controller to a policy."""

HOLD_S: Final = 60.0


@dataclass
class _Held:
    step: TrainStep
    buffers: tuple[bytes, ...]
    since: float | None = None
    """Set at the first tick."""


@dataclass
class PolicyState:
    """Weight version of the policy, its newest published snapshot, and the steps that it holds."""

    version: int = 0
    published: int = -1
    """Newest version with a snapshot."""
    elastic: bool = False
    """It makes steps together with other policies, and copies its state from one of them."""
    asleep: bool = False
    """The devices are given to other processes."""
    hold_s: float = HOLD_S
    """Longest time to hold a step."""
    _held: dict[str, _Held] = field(default_factory=dict)

    def must_wait(self, command: PolicyCommand) -> bool:
        """Return whether `command` has overtaken the publication of the weights that it changes.

        A replayed step has not: the policy that made it first took that snapshot before it died.
        """
        match command:
            case TrainStep(step=step, published=published, replayed=False):
                return step == self.version + 1 and published > self.published
            case _:
                return False

    def objection(self, command: PolicyCommand) -> str | None:
        """Return why `command` cannot be executed on the present weights, or None if it can."""
        match command:
            case TrainStep() | PublishWeights() | SaveCheckpoint() | AdoptWeights() if self.asleep:
                return "this policy is asleep: wake it first"
            case TrainStep(step=step) if step != self.version + 1:
                return f"step {step} needs version {step - 1}, and this policy holds version {self.version}"
            case TrainStep(num_replicas=num) if num != 1 and not self.elastic:
                return (
                    f"step {command.step} is of {num} policies together, and this one trains alone: set "
                    "policy.parallel.elastic = true"
                )
            case TrainStep(groups=groups, examples=examples) if bool(groups) == bool(examples):
                return f"step {command.step} must have groups or examples, but not both"
            case PublishWeights(version=version) if version not in (self.version, self.published):
                return f"version {version} cannot be published: this policy holds version {self.version}"
            case SaveCheckpoint(step=step) if step != self.version:
                return f"step {step} cannot be saved: this policy holds version {self.version}"
            case AdoptWeights(version=version) if not self.elastic:
                return (
                    f"version {version} cannot be adopted: this policy makes its versions alone, and adopts none from "
                    "others"
                )
            case AdoptWeights(version=version) if version <= self.version:
                return f"version {version} is not newer than version {self.version}, which this policy holds"
            case _:
                return None

    def hold(self, step: TrainStep, buffers: tuple[bytes, ...]) -> None:
        """Hold a step that must wait."""
        self._held[step.lease] = _Held(step, buffers)

    def take_ready(self) -> list[tuple[TrainStep, tuple[bytes, ...]]]:
        """Return the steps that need not wait any longer, and release them."""
        ready = [held for held in self._held.values() if not self.must_wait(held.step)]
        self.give_up(tuple(held.step.lease for held in ready))
        return [(held.step, held.buffers) for held in ready]

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Drop the held steps of these leases."""
        for lease in leases:
            self._held.pop(lease, None)

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Drop the steps that were held for too long. Returns their leases, each with the reason."""
        for held in self._held.values():
            held.since = now if held.since is None else held.since
        expired = [held.step for held in self._held.values() if held.since is not None and self._left(held, now) <= 0]
        self.give_up(tuple(step.lease for step in expired))
        return [
            (
                step.lease,
                f"step {step.step} waited {self.hold_s:g} s for the publication of version {step.published}, "
                "whose snapshot must be taken before it: publish that version, then send the step again",
            )
            for step in expired
        ]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return the waits of the held steps at `now`."""
        return tuple(
            Wait(
                what=f"the command to publish version {held.step.published}, before step {held.step.step}",
                on="controller",
                since_s=now - (held.since if held.since is not None else now),
                seconds_left=max(0.0, self._left(held, now)),
            )
            for held in list(self._held.values())  # another thread may call this
        )

    def _left(self, held: _Held, now: float) -> float:
        return self.hold_s - (now - (held.since if held.since is not None else now))
