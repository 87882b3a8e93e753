"""What replicas and operators say to the controller."""

from __future__ import annotations

from typing import Literal

import msgspec

from starling.common.ids import Role
from starling.common.wire.structs import (
    Alarm,
    HeldLease,
    PartialCompletionMeta,
    Status,
    TensorMeta,
    TrajectoryMeta,
    Wait,
)


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A replica announces itself. Buffer 0, when `has_layout`: a `weightsync.Layout` in MessagePack."""

    role: Role
    host: str
    pid: int
    num_slots: int = 0
    """Groups that the replica works on at a time (rollout, reward, teacher)."""
    version: int = -1
    """Weight version that it holds; -1 for none."""
    has_layout: bool = False
    serves: bool = False
    """Can put the version that it holds on offer to other replicas (`PublishWeights`)."""
    shares_steps: bool = False
    """Policy: can take weights and optimizer state from another policy, and do its share of a step beside it."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A replica's whole state. The controller answers with whatever differs from its own view."""

    leases: tuple[HeldLease, ...] = ()
    version: int = -1
    """Weight version in use; -1 for none."""
    gauges: dict[str, float] = {}
    """Measurements for the screen: tokens_per_s, queue_depth, ..."""
    offered: int = -1
    """The newest version that it has on offer; -1 for none."""
    waits: tuple[Wait, ...] = ()
    """Everything that it waits for now."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """A replica's last message: everything it held is free."""

    reason: str


class GroupGenerated(msgspec.Struct, frozen=True, kw_only=True, tag="group_generated"):
    """The completions of one prompt. The buffers follow as `TrainGroup` lists them."""

    lease: str
    trajectories: tuple[TrajectoryMeta, ...]
    tensors: tuple[TensorMeta, ...]
    temperature: float = -1.0
    """Divisor of the logits under which they were drawn, as it was asked for; -1 for not told."""


class GroupInterrupted(msgspec.Struct, frozen=True, kw_only=True, tag="group_interrupted"):
    """A group that this replica cannot finish, with what is there of it. The buffers follow as `GenerateGroup` lists
    them; another replica goes on from them."""

    lease: str
    reason: str
    partial: tuple[PartialCompletionMeta, ...]
    tensors: tuple[TensorMeta, ...]
    temperature: float = -1.0
    """Divisor of the logits under which they were drawn, as it was asked for; -1 for not told."""
    lost: bool = False
    """The engine died with it in hand: of this very group, it may be."""


class GroupScored(msgspec.Struct, frozen=True, kw_only=True, tag="group_scored"):
    """The rewards of one group, in the order of its completions; null where a scorer failed."""

    lease: str
    rewards: tuple[float | None, ...]
    statuses: tuple[Status, ...]
    components: dict[str, tuple[float | None, ...]] = {}
    """Each scorer's unweighted score, by name."""
    problems: tuple[str, ...] = ()
    """One sentence for each failure."""


class TokensScored(msgspec.Struct, frozen=True, kw_only=True, tag="tokens_scored"):
    """What a teacher makes of the completions of one group. The buffers follow in the order of `tensors`.

    The tensors are, by name: `teacher_logprobs` (float32, [sum of lengths]), the log-probability of each token; and
    where the teacher tells its likeliest tokens, `teacher_top_ids` (int32, [sum of lengths, k]) and
    `teacher_top_logprobs` (float32, the same shape), the likeliest first. All are of a softmax over the whole
    vocabulary.
    """

    lease: str
    tensors: tuple[TensorMeta, ...]


class StepTrained(msgspec.Struct, frozen=True, kw_only=True, tag="step_trained"):
    """A step is done: the policy's weights are version `step` now."""

    lease: str
    step: int
    metrics: dict[str, float]
    alarms: tuple[Alarm, ...] = ()
    """All that are on as of this step, whether they began with it or before."""


class WeightsPublished(msgspec.Struct, frozen=True, kw_only=True, tag="weights_published"):
    """A version may be pulled. Buffer 0: a `weightsync.Offer` in MessagePack."""

    lease: str
    version: int
    publish_s: float
    """Seconds that training waited for the snapshot."""
    offer_s: float = 0.0
    """Seconds from there to the offer, for which training need not wait: the digests."""


class WeightsAdopted(msgspec.Struct, frozen=True, kw_only=True, tag="weights_adopted"):
    """A rollout generates with `version` now; `root` is the digest of what its engine holds."""

    lease: str
    version: int
    root: str
    pull_s: float
    """Seconds of the transfer, while generation went on."""
    pause_s: float
    """Seconds that generation paused for the switch."""
    size_bytes: int
    """Of the weights that it holds."""
    transport: str
    sent_bytes: int = 0
    """What travelled for it: less where only what changed was sent."""
    lanes: tuple[str, ...] = ()
    """Over what the bytes really went, for example ``cma/memory``."""
    split: dict[str, float] = {}
    """Seconds of the parts of `pull_s`: ``prepare_s``, ``read_s`` (in it ``unpack_s``, ``digest_s``), ``confirm_s``."""
    mode: str = ""
    """What became of running requests: ``keep``, ``recompute``, ``salt`` or ``finish``."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values the new weights computed again."""
    drain_s: float = 0.0
    """Seconds that the weights waited for running requests, under ``finish``."""


class Slept(msgspec.Struct, frozen=True, kw_only=True, tag="slept"):
    """The replica's devices are free for others."""

    lease: str


class Woken(msgspec.Struct, frozen=True, kw_only=True, tag="awake"):
    """The replica has its devices again."""

    lease: str


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """A checkpoint is on disk."""

    lease: str
    step: int
    path: str
    state: bool = False
    """It is a state to continue from, not an export."""


class LeaseFailed(msgspec.Struct, frozen=True, kw_only=True, tag="lease_failed"):
    """The replica cannot do this piece of work; it goes on and holds the lease no longer."""

    lease: str
    status: Status
    reason: str
    fatal: bool = False
    """No other attempt at this replica could succeed."""
    version: int = -1
    """The weight version that a policy holds, which may be why; -1 for not told."""


class QueryRun(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """An operator wants to know the state of the run, or what it waits for. Answered by `Reply`."""

    request: str
    """Chosen by the sender, and repeated in the reply."""
    about: Literal["status", "why"]


class ChangeSetting(msgspec.Struct, frozen=True, kw_only=True, tag="change_setting"):
    """An operator changes what may change in a running job. Answered by `Reply`; the same request counts once."""

    request: str
    key: str
    """As in the recipe, for example ``policy.optimizer.learning_rate``."""
    value: float | int | bool | str


class RequestEvaluation(msgspec.Struct, frozen=True, kw_only=True, tag="request_evaluation"):
    """An operator wants the newest version evaluated. Answered by `Reply`; the same request counts once."""

    request: str
    num_completions: int = 0
    """Completions of each prompt; 0 for what the recipe says."""


class RequestStop(msgspec.Struct, frozen=True, kw_only=True, tag="request_stop"):
    """An operator wants the run to end in good order. Answered by `Reply`."""

    request: str
    reason: str


OperatorMessage = QueryRun | ChangeSetting | RequestEvaluation | RequestStop

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
    | Slept
    | Woken
    | CheckpointSaved
    | LeaseFailed
    | OperatorMessage
)

ALLOWED_MESSAGES: dict[Role, frozenset[type]] = {
    "controller": frozenset(),
    "policy": frozenset(
        {Hello, Heartbeat, Leave, StepTrained, WeightsPublished, WeightsAdopted, Slept, Woken, CheckpointSaved}
        | {LeaseFailed}
    ),
    "rollout": frozenset(
        {Hello, Heartbeat, Leave, GroupGenerated, GroupInterrupted, WeightsPublished, WeightsAdopted, Slept, Woken}
        | {LeaseFailed}
    ),
    "reward": frozenset({Hello, Heartbeat, Leave, GroupScored, LeaseFailed}),
    "teacher": frozenset({Hello, Heartbeat, Leave, TokensScored, LeaseFailed}),
    "operator": frozenset({QueryRun, ChangeSetting, RequestEvaluation, RequestStop}),
}
"""What each role may say. The controller drops anything else, whatever key it came with."""
