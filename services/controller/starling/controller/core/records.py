"""Records of the journal, from which a controller recovers, and of trajectory files.

A record is on disk before any message that follows from it is sent to a replica. What no record holds (which replica
has which lease) the replicas report in their heartbeats.

| record              | says                                            | needed until               |
|---------------------|-------------------------------------------------|----------------------------|
| `RunBegun`          | the run of this journal, and its plan            | the end                    |
| `StateCompacted`    | the state after all earlier records, which are deleted | the next compaction |
| `ControllerStarted` | another incarnation of the controller            | the next compaction |
| `DataRead`          | digest of the data that the run has read         | the next compaction |
| `MemberJoined`, `MemberLeft` | the replicas that a restarted controller waits for | the next incarnation |
| `GroupsOpened`      | positions of the data that are groups now        | the next compaction |
| `CompletionsStored`    | completions, with their payload                  | two saved states cover its step |
| `PartialCompletionsStored`  | partial completions, with their payload          | they are generated, or thrown away |
| `RewardsStored`       | rewards                                          | as above                   |
| `TeacherLogprobsStored`       | a teacher's log-probabilities, with their payload | as above                  |
| `GroupRequeued`     | completions were thrown away; how often so far   | as above                   |
| `GroupDiscarded`    | a prompt that was discarded, or filtered out     | the next compaction |
| `FilterCountReset`  | a replica was evicted for filtered groups        | the next compaction |
| `StepFrozen`        | which groups a step trains                       | the next compaction |
| `StepReopened`      | its groups wait for another freeze               | the next compaction |
| `StepCommitted`     | the step is made: its version exists             | the next compaction |
| `VersionPublished`  | a version was on offer, and its root             | the next compaction |
| `CheckpointLoaded`  | digest of the checkpoint of a run without a policy | the next compaction |
| `VersionAdopted`    | a replica has proven to hold a version           | its next one               |
| `EvaluationOpened`, `EvaluationClosed` | one evaluation of one version | the next compaction |
| `EvaluationRequested` | a request of an operator that was granted     | it is opened               |
| `CheckpointRequested` | likewise for a state to resume from           | a state is saved           |
| `StopAsked`, `RunStopped` | an operator's stop was granted; the run has stopped | the next compaction |
| `ReplicasScaled`    | how many replicas of a role are desired          | the next compaction |
| `SettingChanged`    | an operator's change, and from which step on     | the next compaction |
| `CheckpointWritten` | a checkpoint, or a state to resume from          | the next compaction |
| `RunEnded`          | no more records will follow                      | the end                    |
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from starling.common.ids import Purpose, Role
from starling.common.wire.messages import Alarm, ModelLimits, PartialCompletionMeta, Prompt, TensorMeta, TrajectoryMeta
from starling.controller.core.groups.filtering import FilterCount


class RunBegun(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="run_begun"):
    """The first record."""

    run: str
    plan: dict[str, Any]
    """The numbers that may not differ when the run resumes: `RunPlan.journaled`."""


class ControllerStarted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="controller_started"):
    """An incarnation of the controller started, counted from 1."""

    incarnation: int


class DataRead(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="data_read"):
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


class MemberJoined(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="member_joined"):
    """A replica is a member."""

    name: str
    role: Role
    epoch: int = -1
    """Its incarnation; -1 in old journals, which lack it."""
    limits: ModelLimits | None = None
    """Of a policy: what its model can read. A restarted controller checks groups by it until a policy says it again."""


class MemberLeft(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="member_left"):
    """A replica has left."""

    name: str


class GroupsOpened(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="groups_opened"):
    """The prompts at positions `first .. first + num - 1` of the data are groups; their ordinals are the positions."""

    first: int
    num: int


class CompletionsStored(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_generated"):
    """A group has its completions; payload: its tensors. Of an evaluation it has only those that scorers read.

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
    generator: str = ""
    """The rollout that generated them; empty in old journals, which lack it."""
    giver: str | None = None
    """As `Group.giver`; old journals lack it."""


class PartialCompletionsStored(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_interrupted"):
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
    giver: str = ""
    """The rollout that generated them; empty if it resumed those of another, and in old journals, which lack it."""


class TeacherLogprobsStored(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_taught"):
    """A group has its teacher's log-probabilities; payload: their tensors, kept as long as those of its
    completions."""

    key: str
    tensors: tuple[TensorMeta, ...]


class RewardsStored(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_scored"):
    """A group has its rewards."""

    key: str
    rewards: tuple[float | None, ...]
    components: dict[str, tuple[float | None, ...]] = {}
    scorer: str = ""
    """The reward replica that gave them; empty if none did, and in old journals."""
    evaluation_scores: dict[str, tuple[float | None, ...]] = {}
    """Scores that are no part of the rewards."""


class GroupRequeued(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_returned"):
    """A group waits again; its completions were thrown away for the `tries`-th time."""

    key: str
    tries: int
    floor: tuple[int, int] = (0, 0)
    """Incarnation and number of the newest lease at that time. No lease up to this one is reclaimed for the group; old
    journals lack it."""
    anew: bool = False
    """They were resumed from partial completions of another rollout: that counts no try, and the group takes no more of
    these."""


class GroupDiscarded(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_discarded"):
    """A group was discarded."""

    key: str
    prompt: str
    reason: str
    filtered: bool = False
    """It did not fail, but all its rewards are equal."""
    reward: float = 0.0
    """The reward of its completions, if it was filtered out, and below the replicas that generated and scored them."""
    generator: str = ""
    """Empty if it is not known, and in old journals, which lack both."""
    scorer: str = ""


class StepFrozen(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="step_sealed"):
    """Step `step` trains the groups of these ordinals, and no other."""

    step: int
    ordinals: tuple[int, ...]
    prompts: tuple[str, ...]
    digest: str = ""
    """Of the prompts; empty in old journals, which lack it."""


class StepReopened(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="step_reopened"):
    """The groups of the frozen step `step` are scored groups again, because one of them cannot be trained.

    Records that throw completions away (`GroupRequeued`, `GroupDiscarded`) follow. The step is frozen anew when its
    groups are complete.
    """

    step: int
    reason: str


class StepCommitted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="step_committed"):
    """Version `step` exists."""

    step: int
    metrics: dict[str, Any] = {}
    """Its line in metrics.jsonl."""


class VersionPublished(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="version_published"):
    """A policy put a version on offer; a replica that adopts it proves its layout root, or this `root`."""

    version: int
    root: str
    layout_roots: dict[str, str] = {}
    """By key of the policy's and the rollout's layout; old journals lack it."""


class CheckpointLoaded(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="checkpoint_loaded"):
    """The checkpoint of a run without a policy, its version 0, has this digest."""

    digest: str
    name: str
    """`controller`, which has read it itself; or the first rollout that has loaded it, where the controller cannot."""


class VersionAdopted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="version_adopted"):
    """The replica `name`, in its incarnation `epoch`, has proven to hold `version`."""

    name: str
    epoch: int
    version: int


class EvaluationOpened(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="evaluation_opened"):
    """Evaluation `number`, of `version`, begins; its groups have the ordinals from `first` on."""

    number: int
    version: int
    cause: str
    """start, step, end, or request."""
    num_completions: int
    first: int
    request: str = ""
    """The request of an operator; empty for other causes."""


class EvaluationClosed(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="evaluation_closed"):
    """Evaluation `number` is over."""

    number: int
    summary: dict[str, Any]


class EvaluationRequested(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="evaluation_requested"):
    """An operator's request for an evaluation is queued, until `EvaluationOpened` of the same request."""

    request: str
    num_completions: int
    """Of each prompt; 0 for the number in the recipe."""


class CheckpointRequested(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="checkpoint_requested"):
    """An operator was promised a state of `version`, or of a newer one: a restarted controller has it saved, too."""

    version: int


class StopAsked(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="stop_asked"):
    """An operator was promised that the run stops early.

    This holds until the run has stopped, whatever crashes meanwhile: a run that resumes before stops first. A signal to
    the controller's process writes no such record: it is about the process, and a restart of it resumes the run.
    """

    reason: str


class ReplicaCounted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="replica_counted"):
    """A replica was counted as invalid: a restarted controller admits it no more often than this one."""

    name: str
    num: int
    """How often so far."""


class FilterCountReset(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="filter_count_reset"):
    """A replica was evicted because of groups that were filtered out: its own, and those in a row, are counted anew."""

    name: str


class SourceEvicted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="source_evicted"):
    """A rollout was evicted on the word of a reader, which it had sent other weights than were published.

    A restarted controller lets the rollout offer nothing and the reader accuse no second one, as this one does.
    """

    name: str
    reader: str


class ReplicasScaled(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="replicas_scaled"):
    """An operator, or the rule of `controller.autoscale`, has set how many replicas of a role the run should have."""

    role: Role
    num: int
    drained: str = ""
    """The replica that an operator chose to drain with it; empty for none."""
    request: str = ""
    """Of the operator; empty for the rule."""
    answer: str = ""
    """To the operator, whose request may arrive again."""


class RunStopped(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="run_stopped"):
    """The run has ended early, gracefully or not: from here on it can resume."""

    reason: str


class SettingChanged(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="setting_changed"):
    """From `step` on, `key` has `value`."""

    key: str
    value: float
    step: int
    request: str


class CheckpointWritten(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="checkpoint_written"):
    """Version `step` is on disk; with `state`, a policy can resume from it."""

    step: int
    path: str
    state: bool = False


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="run_ended"):
    """The last record."""

    ok: bool
    reason: str


# --- compaction -------------------------------------------------------------------------------------------------------


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A live group. Its completions and tensors, which are large, stay in the journal and follow as kept entries."""

    ordinal: int
    state: Literal["waiting", "generated", "scored", "frozen"]
    expected_tokens: int = 1
    tries: int = 0
    rewards: tuple[float | None, ...] = ()
    components: dict[str, tuple[float | None, ...]] = {}
    evaluation_scores: dict[str, tuple[float | None, ...]] = {}
    has_teacher_logprobs: bool = False
    floor: tuple[int, int] = (0, 0)
    generated_by: str = ""
    temperature: float = 1.0
    has_partial: bool = False
    trajectories: tuple[TrajectoryMeta, ...] = ()
    """Without their texts; only of an evaluation, whose completions the journal deletes when they are scored."""
    problem: str = ""
    """Why it was given up, in a run that answers each prompt once."""
    generator: str = ""
    """The rollout that generated its completions; old journals lack it, and what follows."""
    giver: str | None = None
    is_anew: bool = False


class BufferSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The train buffer; names as there."""

    num_admitted: int
    num_discarded: int
    num_frozen_steps: int
    num_trained_groups: int
    num_filtered: int
    num_filtered_in_a_row: int
    num_discarded_before: int
    discarded: tuple[int, ...]
    filtered: tuple[tuple[int, float], ...]
    passed_over: dict[int, tuple[tuple[int, float], ...]]
    frozen: tuple[StepFrozen, ...]
    """The steps that are not published yet."""
    groups: tuple[GroupSummary, ...]
    """In the order of admission."""
    filtering: tuple[FilterCount, ...] = ()
    """Which replicas had to do with groups that were filtered out, and that were not; old journals lack it."""


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The evaluation that is running."""

    number: int
    version: int
    cause: str
    num_completions: int
    first: int
    max_tries: int
    num_prompts: int
    num_discarded: int
    groups: tuple[GroupSummary, ...]


class EvaluationsSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The history and queue of evaluations; names as in `Evaluations`."""

    current: EvaluationSummary | None
    evaluated: dict[str, int]
    requested: tuple[EvaluationRequested, ...]
    granted: tuple[str, ...]
    num_begun: int
    num_groups: int


class ReplicasSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of replicas, and the expected lengths of completions; names as in `Membership`."""

    awaited: tuple[str, ...]
    """The members, too: a restarted controller awaits them."""
    incarnations: dict[str, int]
    proven: dict[str, tuple[int, int]]
    gone: tuple[str, ...]
    had_quorum: bool
    mean_lengths: dict[Purpose, float]
    lengths: dict[str, float]
    """By prompt, in the order in which they were first measured."""
    num_invalid: dict[str, int] = {}
    """How often each was counted as invalid."""
    accused: tuple[str, ...] = ()
    """Rollouts that were evicted on the word of a reader."""
    accusers: tuple[str, ...] = ()
    """The readers."""
    desired: dict[Role, int] = {}
    """Desired numbers, by role."""
    chosen: tuple[str, ...] = ()
    """Replicas that operators chose to drain, and that have not left."""
    scale_requests: dict[str, str] = {}
    """Answers to requests to scale."""


class WeightsSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The newest publication, and the roots of all that may still be adopted, the oldest first."""

    version: int
    roots: tuple[tuple[int, tuple[str, ...]], ...]
    layout_roots: tuple[tuple[int, dict[str, tuple[str, ...]]], ...] = ()
    """As `roots`; by key of two layouts."""
    checkpoint: str = ""
    """The digest of the checkpoint of a run without a policy."""


class EvaluatedStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step with a score of an evaluation scorer."""

    step: int
    reward: float
    """Mean of its rewards."""
    score: float
    """Mean of the scorer's scores."""


class TrainingSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Saved states, alarms, changed settings, and the metrics of the newest step and evaluation."""

    saved: int
    saved_before: int
    alarms: tuple[Alarm, ...]
    changes: tuple[tuple[str, float, int], ...]
    """Key, value, and the first step of each change."""
    requests: dict[str, int]
    step_metrics: dict[str, float]
    evaluation_metrics: dict[str, float]
    limits: ModelLimits | None = None
    """What the model can read, as a policy said it last."""
    evaluated: dict[str, tuple[EvaluatedStep, ...]] = {}
    """The last steps with evaluation scores, by scorer."""
    saving_asked: int = -1
    """As `SavedStates.asked`; old journals lack it."""


class MetricsSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the first `size_bytes` of metrics.jsonl say; names as in `MetricsHistory`."""

    size_bytes: int
    step: dict[str, Any]
    rewards: tuple[float, ...]
    curve: tuple[float, ...]
    pending: tuple[float, ...]
    """Of older journals: the rewards that are not in the curve yet, one by one."""
    steps_per_point: int
    evaluations: tuple[dict[str, Any], ...]
    num_evaluations: int
    pending_sum: float = 0.0
    """Of the rewards that are not in the curve yet."""
    num_pending: int = 0


class StateCompacted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="state_compacted"):
    """The state after all earlier records but the first, which are deleted."""

    incarnation: int
    """The newest so far."""
    version: int
    buffer: BufferSummary
    evaluations: EvaluationsSummary
    replicas: ReplicasSummary
    weights: WeightsSummary
    training: TrainingSummary
    data: DataRead | None = None
    """The data as it was read last. This and the metrics are of the controller's shell."""
    metrics: MetricsSummary | None = None


Record = (
    RunBegun
    | StateCompacted
    | ControllerStarted
    | DataRead
    | MemberJoined
    | MemberLeft
    | ReplicaCounted
    | FilterCountReset
    | SourceEvicted
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
    | CheckpointLoaded
    | VersionAdopted
    | EvaluationOpened
    | EvaluationClosed
    | EvaluationRequested
    | CheckpointRequested
    | StopAsked
    | RunStopped
    | ReplicasScaled
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
    evaluation_scores: dict[str, tuple[float | None, ...]] = {}
    """Score of each evaluation scorer, by name; no part of the rewards."""
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
    kept: bool = False
    """It is from before the `StateCompacted` that it follows: the contents of a live group whose state is in there."""
