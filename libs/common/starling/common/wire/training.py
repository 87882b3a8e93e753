"""Training: steps of the policy, and the checkpoints of its weights."""

from __future__ import annotations

from typing import Literal

import msgspec

from starling.common.wire.structs import Alarm, Prompt, TrainGroup


class TrainStep(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="train_step"):
    """Train version `step` from version `step - 1`, on scored groups or on supervised examples. Sent when the batch of
    the step is complete; answered by `StepTrained`. Buffers follow as the groups' `tensors` list them."""

    lease: str
    step: int
    groups: tuple[TrainGroup, ...] = ()
    examples: tuple[Prompt, ...] = ()
    temperature: float = 1.0
    """Divisor of the logits under which the groups were sampled."""
    num_steps: int = 0
    """Number of steps of this kind in the whole run, for schedules of the learning rate."""
    ordinal: int = 0
    """Number of this step among them, from 1."""
    published: int = -1
    """Version whose snapshot must be taken before this step changes the weights; -1 for none."""
    peers: tuple[str, ...] = ()
    """`Hello.peer` of all policies that make the step together, each of which gets the same groups or examples; empty
    for a policy that makes it alone."""
    replica: int = 0
    """Index of this policy among `peers`."""
    group: str = ""
    """Name of their process groups: those of the step before, or, with a new name, new ones."""
    replayed: bool = False
    """Another replica, which is gone, trained this step before: repeat it exactly."""
    settings: dict[str, float] = {}
    """Settings that operators changed since the start, by key of the recipe, as of this step."""
    objective: Literal["", "sft", "dpo", "reward_model"] = ""
    """Objective of `examples`; empty for `sft`, and for groups."""
    next_prompt: int = -1
    """Position in the data of the first prompt that no step up to this one trains; -1 for unchanged."""
    max_tokens: int = 0
    """Maximum number of tokens that a completion of these groups could have; 0 if not reported."""

    @property
    def num_replicas(self) -> int:
        """Policies that make the step together."""
        return max(1, len(self.peers))


class StepTrained(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="step_trained"):
    """A step is done, and the policy holds version `step`. Sent when the optimizer has changed the weights."""

    lease: str
    step: int
    metrics: dict[str, float]
    alarms: tuple[Alarm, ...] = ()
    """All alarms that are on as of this step, new or not."""
    batch_digest: int = 0
    """Digest of the groups of the whole step, modulo 2^64: the sum over them (`docs/reference/metrics.md`); 0 for a
    step of examples."""


class SaveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="save_checkpoint"):
    """Write the present weights in Hugging Face format or, with `state`, everything needed to resume. Sent when the
    settings or the end of the run ask for it; answered by `CheckpointSaved`."""

    lease: str
    step: int
    state: bool = False
    metrics: dict[str, float] = {}
    """Metrics of this version, for choosing the best checkpoint: those of its step and, as ``eval/...``, those of the
    newest complete evaluation."""


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="checkpoint_saved"):
    """A checkpoint is on disk. Sent when it is complete."""

    lease: str
    step: int
    path: str
    state: bool = False
    """It is a state to resume from, not an export."""
