"""Which commands fit the version that the policy holds. Pure: the shell does what this allows."""

from __future__ import annotations

from dataclasses import dataclass

from starling.common.wire.messages import PublishWeights, SaveCheckpoint, TrainStep


@dataclass
class Progress:
    """The policy's weight version, and what it offered of it."""

    version: int = 0
    published: int = -1
    """The newest version of which a snapshot was made."""

    def must_wait(self, command: TrainStep | PublishWeights | SaveCheckpoint) -> bool:
        """Say whether `command` has overtaken the publication of the weights that it changes."""
        match command:
            case TrainStep(step=step, published=published):
                return step == self.version + 1 and published > self.published
            case _:
                return False

    def objection(self, command: TrainStep | PublishWeights | SaveCheckpoint) -> str | None:
        """Say why `command` cannot be done on the present weights, or None when it can."""
        match command:
            case TrainStep(step=step) if step != self.version + 1:
                return f"step {step} needs version {step - 1}, and this policy holds version {self.version}"
            case TrainStep(groups=groups, examples=examples) if bool(groups) == bool(examples):
                return f"step {command.step} must have groups or examples, and not both"
            case PublishWeights(version=version) if version != self.version:
                return f"version {version} cannot be published: this policy holds version {self.version}"
            case PublishWeights(version=version) if version <= self.published:
                return f"version {version} is published already"
            case SaveCheckpoint(step=step) if step != self.version:
                return f"step {step} cannot be saved: this policy holds version {self.version}"
            case _:
                return None
