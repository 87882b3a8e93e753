"""Every message between services, declared once. All code imports messages and their structs from here.

Two tagged unions: `Up` (replica or operator to controller) and `Down` (controller to replica or operator). The messages
are declared by family, each request next to its answer: `weight_sync`, `rollout`, `training`, `membership` and
`operations`; `structs` holds what several of them contain. A message may be followed by raw buffer frames, which it
describes by `TensorMeta`; the controller forwards them without decoding them.

Messages contain no cycles, so none of them is tracked by the garbage collector (`gc=False`): it would scan the parts of
all groups that are in progress again and again.

Growth: a new field comes last and has a default that means "absent"; a tag is never reused. `schema.json` in this
folder records the wire format, and a test compares.
"""

from __future__ import annotations

from typing import Final

from starling.common.ids import Role
from starling.common.wire.membership import (
    Drain,
    Heartbeat,
    Hello,
    LeaseFailed,
    Leave,
    Refused,
    ReleaseLeases,
    ReportFault,
    RequestHello,
    RequestSettings,
    RoleSettings,
    Sleep,
    Slept,
    Wake,
    Welcome,
    Woken,
)
from starling.common.wire.operations import (
    ChangeSetting,
    DrainReplica,
    OperatorReply,
    Profile,
    QueryRun,
    RequestCheckpoint,
    RequestEvaluation,
    RequestProfile,
    RequestStop,
    ScaleReplicas,
)
from starling.common.wire.rollout import (
    GenerateGroup,
    GroupGenerated,
    GroupInterrupted,
    GroupScored,
    ScoreGroup,
    ScoreTokens,
    TokensScored,
)
from starling.common.wire.structs import (
    PROTOCOL_VERSION,
    TRAINABLE_STATUSES,
    Alarm,
    ChatMessage,
    CompletionText,
    DenoisingForm,
    Envelope,
    HeldLease,
    LeaseProgress,
    Media,
    MediaInputs,
    ModelExperts,
    ModelFile,
    ModelLimits,
    PartialCompletionMeta,
    ProfileReport,
    Prompt,
    Sampling,
    ScoredTrajectory,
    ScorerScores,
    Status,
    TensorMeta,
    TrainGroup,
    TrajectoryMeta,
    Wait,
)
from starling.common.wire.training import CheckpointSaved, SaveCheckpoint, StepTrained, TrainStep
from starling.common.wire.weight_sync import (
    MAX_READS,
    AdoptWeights,
    PublishWeights,
    RankRead,
    RelayOffered,
    WeightsAdopted,
    WeightsPublished,
)

OperatorMessage = (
    QueryRun
    | ChangeSetting
    | RequestEvaluation
    | RequestCheckpoint
    | RequestStop
    | RequestProfile
    | ScaleReplicas
    | DrainReplica
)

Up = (
    Hello
    | Heartbeat
    | Leave
    | GroupGenerated
    | GroupInterrupted
    | GroupScored
    | TokensScored
    | StepTrained
    | WeightsPublished
    | WeightsAdopted
    | RelayOffered
    | Slept
    | Woken
    | CheckpointSaved
    | LeaseFailed
    | OperatorMessage
    | RequestSettings
    | ReportFault
)

LeasedCommand = (
    GenerateGroup | ScoreGroup | ScoreTokens | TrainStep | PublishWeights | AdoptWeights | SaveCheckpoint | Sleep | Wake
)
"""The commands that hand out a lease."""

Down = Welcome | RequestHello | Refused | LeasedCommand | ReleaseLeases | Drain | OperatorReply | Profile | RoleSettings

ALLOWED_MESSAGES: Final[dict[Role, frozenset[type]]] = {
    "controller": frozenset(),
    "policy": frozenset(
        {Hello, Heartbeat, Leave, StepTrained, WeightsPublished, WeightsAdopted, Slept, Woken, CheckpointSaved}
        | {LeaseFailed, RequestSettings, ReportFault}
    ),
    "rollout": frozenset(
        {
            Hello,
            Heartbeat,
            Leave,
            GroupGenerated,
            GroupInterrupted,
            WeightsPublished,
            RelayOffered,
            WeightsAdopted,
            Slept,
            Woken,
        }
        | {LeaseFailed, RequestSettings, ReportFault}
    ),
    "reward": frozenset({Hello, Heartbeat, Leave, GroupScored, LeaseFailed, RequestSettings, ReportFault}),
    "teacher": frozenset({Hello, Heartbeat, Leave, TokensScored, LeaseFailed, RequestSettings, ReportFault}),
    "operator": frozenset(
        {
            QueryRun,
            ChangeSetting,
            RequestEvaluation,
            RequestCheckpoint,
            RequestStop,
            RequestProfile,
            ScaleReplicas,
            DrainReplica,
        }
    ),
}
"""Messages that each role may send. The controller drops any other, whatever key it was sent with."""

__all__ = [
    "ALLOWED_MESSAGES",
    "MAX_READS",
    "PROTOCOL_VERSION",
    "TRAINABLE_STATUSES",
    "AdoptWeights",
    "Alarm",
    "ChangeSetting",
    "ChatMessage",
    "CheckpointSaved",
    "CompletionText",
    "DenoisingForm",
    "Down",
    "Drain",
    "DrainReplica",
    "Envelope",
    "GenerateGroup",
    "GroupGenerated",
    "GroupInterrupted",
    "GroupScored",
    "Heartbeat",
    "HeldLease",
    "Hello",
    "LeaseFailed",
    "LeaseProgress",
    "LeasedCommand",
    "Leave",
    "Media",
    "MediaInputs",
    "ModelExperts",
    "ModelFile",
    "ModelLimits",
    "OperatorMessage",
    "OperatorReply",
    "PartialCompletionMeta",
    "Profile",
    "ProfileReport",
    "Prompt",
    "PublishWeights",
    "QueryRun",
    "RankRead",
    "Refused",
    "RelayOffered",
    "ReleaseLeases",
    "ReportFault",
    "RequestCheckpoint",
    "RequestEvaluation",
    "RequestHello",
    "RequestProfile",
    "RequestSettings",
    "RequestStop",
    "RoleSettings",
    "Sampling",
    "SaveCheckpoint",
    "ScaleReplicas",
    "ScoreGroup",
    "ScoreTokens",
    "ScoredTrajectory",
    "ScorerScores",
    "Sleep",
    "Slept",
    "Status",
    "StepTrained",
    "TensorMeta",
    "TokensScored",
    "TrainGroup",
    "TrainStep",
    "TrajectoryMeta",
    "Up",
    "Wait",
    "Wake",
    "WeightsAdopted",
    "WeightsPublished",
    "Welcome",
    "Woken",
]
