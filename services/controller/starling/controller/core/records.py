"""Records of the journal, from which a controller recovers, and of trajectory files.

A record is on disk before any message that follows from it is sent to a replica. What no record holds (which replica
has which lease) the replicas report in their heartbeats.

| record              | says                                            | needed until               |
|---------------------|-------------------------------------------------|----------------------------|
| `RunBegun`          | the run of this journal, and its plan            | the end                    |
| `ControllerStarted` | another incarnation of the controller            | the end                    |
| `DataRead`          | digest of the data that the run has read         | the end                    |
| `MemberJoined`, `MemberLeft` | the replicas that a restarted controller waits for | the next incarnation |
| `GroupsOpened`      | positions of the data that are groups now        | the end                    |
| `CompletionsStored`    | completions, with their payload                  | two saved states cover its step |
| `PartialCompletionsStored`  | partial completions, with their payload          | they are generated, or thrown away |
| `RewardsStored`       | rewards                                          | as above                   |
| `TeacherLogprobsStored`       | a teacher's log-probabilities, with their payload | as above                  |
| `GroupRequeued`     | completions were thrown away; how often so far   | as above                   |
| `GroupDiscarded`    | a prompt that was discarded, or filtered out     | the end                    |
| `StepFrozen`        | which groups a step trains                       | the end                    |
| `StepReopened`      | its groups wait for another freeze               | the end                    |
| `StepCommitted`     | the step is made: its version exists             | the end                    |
| `VersionPublished`  | a version was on offer, and its root             | the end                    |
| `VersionAdopted`    | a replica has proven to hold a version           | its next one               |
| `EvaluationOpened`, `EvaluationClosed` | one evaluation of one version | the end                    |
| `EvaluationRequested` | a request of an operator that was granted     | it is opened               |
| `StopAsked`, `RunStopped` | an operator's stop was granted; the run has stopped | the end  |
| `SettingChanged`    | an operator's change, and from which step on     | the end                    |
| `CheckpointWritten` | a checkpoint, or a state to resume from          | the end                    |
| `RunEnded`          | no more records will follow                      | the end                    |
"""

from __future__ import annotations

from typing import Any

import msgspec

from starling.common.ids import Role
from starling.common.wire.messages import PartialCompletionMeta, Prompt, TensorMeta, TrajectoryMeta


class RunBegun(msgspec.Struct, frozen=True, kw_only=True, tag="run_begun"):
    """The first record."""

    run: str
    plan: dict[str, Any]
    """The numbers that may not differ when the run resumes: `RunPlan.journaled`."""


class ControllerStarted(msgspec.Struct, frozen=True, kw_only=True, tag="controller_started"):
    """An incarnation of the controller started, counted from 1."""

    incarnation: int


class DataRead(msgspec.Struct, frozen=True, kw_only=True, tag="data_read"):
    """The data of the run, as the first incarnation has read it, or one that was to accept a change."""

    digest: str
    """Of the prompts, examples and held-out prompts, in the order of the first epoch."""
    num_rows: int
    source: str = ""
    """`data.source`."""
    revision: str = ""
    """Of the source, if it has one."""
    is_changed: bool = False
    """It differs from the data before. Groups that no step has taken are generated again, from their new prompts."""


class MemberJoined(msgspec.Struct, frozen=True, kw_only=True, tag="member_joined"):
    """A replica is a member."""

    name: str
    role: Role
    epoch: int = -1
    """Its incarnation; -1 in old journals, which lack it."""


class MemberLeft(msgspec.Struct, frozen=True, kw_only=True, tag="member_left"):
    """A replica has left."""

    name: str


class GroupsOpened(msgspec.Struct, frozen=True, kw_only=True, tag="groups_opened"):
    """The prompts at positions `first .. first + num - 1` of the data are groups; their ordinals are the positions."""

    first: int
    num: int


class CompletionsStored(msgspec.Struct, frozen=True, kw_only=True, tag="group_generated"):
    """A group has its completions; payload: its tensors. For an evaluation the payload is empty.

    The journal returns neither payload nor texts of a group that a committed step has taken, that was thrown away, or
    that an evaluation has scored.
    """

    key: str
    """``t17`` for the group of ordinal 17, ``e3`` for the fourth of an evaluation."""
    trajectories: tuple[TrajectoryMeta, ...]
    tensors: tuple[TensorMeta, ...]
    temperature: float = 1.0
    """Divisor of the logits under which they were sampled."""
    lease: str = ""
    """The lease under which they were generated."""


class PartialCompletionsStored(msgspec.Struct, frozen=True, kw_only=True, tag="group_interrupted"):
    """A group waits again, with partial completions; payload: their tensors.

    The journal returns the payload until a later record of the group replaces it: its completions, further partial
    completions, or the record that they were thrown away.
    """

    key: str
    partial: tuple[PartialCompletionMeta, ...]
    tensors: tuple[TensorMeta, ...]
    oldest_version: int
    """Oldest, and below newest, weight version among the tokens."""
    newest_version: int
    temperature: float
    """Divisor of the logits under which they were sampled."""


class TeacherLogprobsStored(msgspec.Struct, frozen=True, kw_only=True, tag="group_taught"):
    """A group has its teacher's log-probabilities; payload: their tensors, kept as long as those of its
    completions."""

    key: str
    tensors: tuple[TensorMeta, ...]


class RewardsStored(msgspec.Struct, frozen=True, kw_only=True, tag="group_scored"):
    """A group has its rewards."""

    key: str
    rewards: tuple[float | None, ...]
    components: dict[str, tuple[float | None, ...]] = {}


class GroupRequeued(msgspec.Struct, frozen=True, kw_only=True, tag="group_returned"):
    """A group waits again; its completions were thrown away for the `tries`-th time."""

    key: str
    tries: int
    floor: tuple[int, int] = (0, 0)
    """Incarnation and number of the newest lease at that time. No lease up to this one is reclaimed for the group; old
    journals lack it."""


class GroupDiscarded(msgspec.Struct, frozen=True, kw_only=True, tag="group_discarded"):
    """A group was discarded."""

    key: str
    prompt: str
    reason: str
    filtered: bool = False
    """It did not fail, but all its rewards are equal."""
    reward: float = 0.0
    """The reward of its completions, if it was filtered out."""


class StepFrozen(msgspec.Struct, frozen=True, kw_only=True, tag="step_sealed"):
    """Step `step` trains the groups of these ordinals, and no other."""

    step: int
    ordinals: tuple[int, ...]
    prompts: tuple[str, ...]
    digest: str = ""
    """Of the prompts; empty in old journals, which lack it."""


class StepReopened(msgspec.Struct, frozen=True, kw_only=True, tag="step_reopened"):
    """The groups of the frozen step `step` are scored groups again, because one of them cannot be trained.

    Records that throw completions away (`GroupRequeued`, `GroupDiscarded`) follow. The step is frozen anew when its
    groups are complete.
    """

    step: int
    reason: str


class StepCommitted(msgspec.Struct, frozen=True, kw_only=True, tag="step_committed"):
    """Version `step` exists."""

    step: int
    metrics: dict[str, Any] = {}
    """Its line in metrics.jsonl."""


class VersionPublished(msgspec.Struct, frozen=True, kw_only=True, tag="version_published"):
    """A version was put on offer; a replica that adopts it proves this `root`."""

    version: int
    root: str


class VersionAdopted(msgspec.Struct, frozen=True, kw_only=True, tag="version_adopted"):
    """The replica `name`, in its incarnation `epoch`, has proven to hold `version`."""

    name: str
    epoch: int
    version: int


class EvaluationOpened(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_opened"):
    """Evaluation `number`, of `version`, begins; its groups have the ordinals from `first` on."""

    number: int
    version: int
    cause: str
    """start, step, end, or request."""
    num_completions: int
    first: int
    request: str = ""
    """The request of an operator; empty for other causes."""


class EvaluationClosed(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_closed"):
    """Evaluation `number` is over."""

    number: int
    summary: dict[str, Any]


class EvaluationRequested(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_requested"):
    """An operator's request for an evaluation is queued, until `EvaluationOpened` of the same request."""

    request: str
    num_completions: int
    """Of each prompt; 0 for the number in the recipe."""


class StopAsked(msgspec.Struct, frozen=True, kw_only=True, tag="stop_asked"):
    """An operator was promised that the run stops early.

    This holds until the run has stopped, whatever crashes meanwhile: a run that resumes before stops first. A signal to
    the controller's process writes no such record: it is about the process, and a restart of it resumes the run.
    """

    reason: str


class RunStopped(msgspec.Struct, frozen=True, kw_only=True, tag="run_stopped"):
    """The run has ended early, gracefully or not: from here on it can resume."""

    reason: str


class SettingChanged(msgspec.Struct, frozen=True, kw_only=True, tag="setting_changed"):
    """From `step` on, `key` has `value`."""

    key: str
    value: float
    step: int
    request: str


class CheckpointWritten(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_written"):
    """Version `step` is on disk; with `state`, a policy can resume from it."""

    step: int
    path: str
    state: bool = False


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag="run_ended"):
    """The last record."""

    ok: bool
    reason: str


Record = (
    RunBegun
    | ControllerStarted
    | DataRead
    | MemberJoined
    | MemberLeft
    | GroupsOpened
    | CompletionsStored
    | PartialCompletionsStored
    | RewardsStored
    | TeacherLogprobsStored
    | GroupRequeued
    | GroupDiscarded
    | StepFrozen
    | StepReopened
    | StepCommitted
    | VersionPublished
    | VersionAdopted
    | EvaluationOpened
    | EvaluationClosed
    | EvaluationRequested
    | StopAsked
    | RunStopped
    | SettingChanged
    | CheckpointWritten
    | RunEnded
)


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A group in a trajectory file: the completions of one prompt. Buffers are as `TrainGroup` lists them."""

    ordinal: int
    """Position of the prompt in the data of the run that wrote it."""
    prompt: Prompt
    trajectories: tuple[TrajectoryMeta, ...] = ()
    """Empty where the group was discarded."""
    rewards: tuple[float | None, ...] = ()
    """In the order of the trajectories; empty where nothing scores."""
    components: dict[str, tuple[float | None, ...]] = {}
    """Each scorer's unweighted score, by name."""
    tensors: tuple[TensorMeta, ...] = ()
    buffers: tuple[bytes, ...] = ()
    """One for each of `tensors`; both are empty where tokens are not kept."""
    temperature: float = 1.0
    """Divisor of the logits under which they were sampled."""
    problem: str = ""
    """Why it was discarded, in one sentence."""


class JournalEntry(msgspec.Struct, frozen=True):
    """One record as the journal returns it."""

    record: Record
    payload: tuple[bytes, ...] = ()
