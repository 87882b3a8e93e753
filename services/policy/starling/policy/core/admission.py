"""Which commands fit the version that the policy holds, and which step waits for what. Pure: the shell does the rest.

A step may overtake the publication of the weights that it changes. It is then held back until their snapshot is taken,
for `hold_s` at most: a publication that never comes must not hold a step for ever.
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
"""What a policy is told to do."""

HOLD_S: Final = 60.0


@dataclass
class _Held:
    step: TrainStep
    buffers: tuple[bytes, ...]
    since: float | None = None
    """Known from the first tick on."""


@dataclass
class PolicyState:
    """The policy's weight version, what it offered of it, and the steps that it holds back."""

    version: int = 0
    published: int = -1
    """The newest version of which a snapshot was made."""
    asleep: bool = False
    """Others have the devices."""
    hold_s: float = HOLD_S
    """How long a step is held back at most."""
    _held: dict[str, _Held] = field(default_factory=dict)

    def must_wait(self, command: PolicyCommand) -> bool:
        """Say whether `command` has overtaken the publication of the weights that it changes.

        A step that is made again has not: who made it first took that snapshot, and is gone.
        """
        match command:
            case TrainStep(step=step, published=published, replayed=False):
                return step == self.version + 1 and published > self.published
            case _:
                return False

    def objection(self, command: PolicyCommand) -> str | None:
        """Say why `command` cannot be done on the present weights, or None when it can."""
        match command:
            case TrainStep() | PublishWeights() | SaveCheckpoint() if self.asleep:
                return "this policy sleeps: wake it first"
            case TrainStep(step=step) if step != self.version + 1:
                return f"step {step} needs version {step - 1}, and this policy holds version {self.version}"
            case TrainStep(num_replicas=num) if num != 1:
                return f"step {command.step} is shared by {num} policies, and this one can only do its steps alone"
            case TrainStep(groups=groups, examples=examples) if bool(groups) == bool(examples):
                return f"step {command.step} must have groups or examples, and not both"
            case PublishWeights(version=version) if version not in (self.version, self.published):
                return f"version {version} cannot be published: this policy holds version {self.version}"
            case SaveCheckpoint(step=step) if step != self.version:
                return f"step {step} cannot be saved: this policy holds version {self.version}"
            case AdoptWeights(version=version):
                return (
                    f"version {version} cannot be adopted: this policy makes its versions, and takes none from others"
                )
            case _:
                return None

    def hold(self, step: TrainStep, buffers: tuple[bytes, ...]) -> None:
        """Hold back a step that must wait."""
        self._held[step.lease] = _Held(step, buffers)

    def take_ready(self) -> list[tuple[TrainStep, tuple[bytes, ...]]]:
        """Return the steps that need not wait any longer, and hold them no more."""
        ready = [held for held in self._held.values() if not self.must_wait(held.step)]
        self.give_up(tuple(held.step.lease for held in ready))
        return [(held.step, held.buffers) for held in ready]

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Forget steps that nobody wants any more."""
        for lease in leases:
            self._held.pop(lease, None)

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Return the lease of each step that has been held back for too long, with the reason, and forget it."""
        for held in self._held.values():
            held.since = now if held.since is None else held.since
        expired = [held.step for held in self._held.values() if held.since is not None and self._left(held, now) <= 0]
        self.give_up(tuple(step.lease for step in expired))
        return [
            (
                step.lease,
                f"step {step.step} waited {self.hold_s:g} s for the publication of version {step.published}, "
                "whose snapshot must be taken before it: publish that version, then ask again",
            )
            for step in expired
        ]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what is waited for at `now`."""
        return tuple(
            Wait(
                what=f"the order to publish version {held.step.published}, before step {held.step.step}",
                on="controller",
                since_s=now - (held.since if held.since is not None else now),
                seconds_left=max(0.0, self._left(held, now)),
            )
            for held in list(self._held.values())  # another thread may ask
        )

    def _left(self, held: _Held, now: float) -> float:
        return self.hold_s - (now - (held.since if held.since is not None else now))
