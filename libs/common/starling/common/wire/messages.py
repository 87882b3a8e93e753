"""Every message between services, declared once.

Two tagged unions: `Up` (replica to controller) and `Down` (controller to replica). A message may be followed by raw
buffer frames, which the message describes by `TensorMeta`; the controller forwards them without decoding them.

Growth: a new field comes last and has a default that means "absent"; a tag is never reused. `schema.json` beside this
file records what was agreed, and a test compares.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from starling.common.ids import Purpose, Role

PROTOCOL_VERSION = 1


class Status(enum.StrEnum):
    """How one trajectory ended. A failure is a status, never a reward of 0."""

    OK = "ok"
    TRUNCATED = "truncated"
    ENV_ERROR = "env_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_ERROR = "reward_error"
    INFRA_LOST = "infra_lost"
    CANCELLED_STALE = "cancelled_stale"


USABLE = frozenset({Status.OK, Status.TRUNCATED})
"""The statuses of trajectories that may be trained."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Who says the message that follows, as which incarnation, and in answer to what."""

    protocol: int
    """Protocol version of the sender; a receiver drops any other than its own."""
    run: str
    """Run id; replicas of another run are refused."""
    sender: str
    """Name of the sending replica, for example ``rollout-0``."""
    epoch: int
    """Incarnation of the sender: greater after every start."""
    seq: int
    """Position of this message in what the sender said to this peer during this epoch, from 1."""
    cause: str = ""
    """Id of the event that caused the message: ``<peer>/<epoch>/<seq>`` or ``tick``."""


class TensorMeta(msgspec.Struct, frozen=True, kw_only=True):
    """One buffer frame: its element type (numpy name), shape, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, in the form that chat templates take."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One input with its reference answer."""

    id: str
    """Unique in the run, for example ``train/0/17``: dataset, pass, row."""
    messages: tuple[ChatMessage, ...] = ()
    """A conversation for the model's chat template; empty when `text` is the prompt."""
    text: str = ""
    """The prompt as plain text, tokenized as it stands; used when `messages` is empty."""
    reference: str = ""
    """The reference answer; the response to learn in SFT."""
    metadata: dict[str, Any] = {}
    """What the scorers of this dataset need besides (JSON values)."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens."""

    max_tokens: int
    """Most tokens of one completion; one that reaches it is `truncated`."""
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose probabilities sum to this; 1 keeps all."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides the tokenizer's end-of-sequence token."""
    seed: int = 0
    """With the completion's index, decides every draw, whatever else shares the batch."""


class TrajectoryMeta(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a group; its tokens are in the group's buffers."""

    status: Status
    num_tokens: int
    """Sampled tokens, the stop token included."""
    text: str
    """The completion decoded without special tokens, for scorers that read text."""
    oldest_version: int
    """The least weight version among the sampled tokens."""
    newest_version: int
    """The greatest weight version among the sampled tokens."""


class CompletionText(msgspec.Struct, frozen=True, kw_only=True):
    """What a scorer sees of one completion."""

    text: str
    status: Status
    num_tokens: int


class ScoredTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a training step: its length, versions and reward."""

    num_tokens: int
    oldest_version: int
    reward: float
    status: Status = Status.OK


class TrainGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a training step. Its buffers follow in the order of `tensors`.

    The tensors are: prompt token ids (int32, [prompt]), completion token ids (int32, [sum of num_tokens]),
    log-probabilities (float32, the same shape), weight versions (int32, the same shape).
    """

    prompt_id: str
    trajectories: tuple[ScoredTrajectory, ...]
    tensors: tuple[TensorMeta, ...]
    temperature: float = 0.0
    """Divisor of the logits under which it was sampled; 0 for that of the step."""


class LeaseProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a piece of work has come that moves bytes."""

    bytes_done: int
    bytes_total: int
    seconds_left: float | None = None
    """By the rate so far; absent before anything has arrived."""

    def __str__(self) -> str:
        """Say it in words: ``43 %, 2.1 s left``."""
        share = self.bytes_done * 100 // self.bytes_total if self.bytes_total else 100
        return f"{share} %" if self.seconds_left is None else f"{share} %, {self.seconds_left:.1f} s left"


class HeldLease(msgspec.Struct, frozen=True, kw_only=True):
    """One lease in a replica's heartbeat."""

    lease: str
    phase: Literal["queued", "working", "answered"]
    """`answered`: the result was sent and the controller has not released the lease yet."""
    progress: LeaseProgress | None = None
    """Of a pull that is under way."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a service waits for now. Every wait has an end: there is none without `seconds_left`."""

    what: str
    """In words: ``buckets of version 7``."""
    on: str
    """Who or what can end it: a replica's name, ``controller``, ``disk``, ``engine``, ..."""
    since_s: float
    """For so long already."""
    seconds_left: float
    """After which the one who waits gives up."""


# --- Up: replica to controller -------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A replica announces itself. Buffer 0, when `has_layout`: a `weightsync.Layout` in MessagePack."""

    role: Role
    host: str
    pid: int
    num_slots: int = 0
    """Groups that the replica works on at a time (rollout, reward)."""
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


class GroupScored(msgspec.Struct, frozen=True, kw_only=True, tag="group_scored"):
    """The rewards of one group, in the order of its completions; null where a scorer failed."""

    lease: str
    rewards: tuple[float | None, ...]
    statuses: tuple[Status, ...]
    components: dict[str, tuple[float | None, ...]] = {}
    """Each scorer's unweighted score, by name."""
    problems: tuple[str, ...] = ()
    """One sentence for each failure."""


class StepTrained(msgspec.Struct, frozen=True, kw_only=True, tag="step_trained"):
    """A step is done: the policy's weights are version `step` now."""

    lease: str
    step: int
    metrics: dict[str, float]


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


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
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


OperatorUp = Ask | ChangeSetting | RequestEvaluation | RequestStop

Up = (
    Hello
    | Heartbeat
    | Leave
    | GroupGenerated
    | GroupScored
    | StepTrained
    | WeightsPublished
    | WeightsAdopted
    | CheckpointSaved
    | LeaseFailed
    | OperatorUp
)

MAY_SAY: dict[Role, frozenset[type]] = {
    "controller": frozenset(),
    "policy": frozenset(
        {Hello, Heartbeat, Leave, StepTrained, WeightsPublished, WeightsAdopted, CheckpointSaved, LeaseFailed}
    ),
    "rollout": frozenset({Hello, Heartbeat, Leave, GroupGenerated, WeightsPublished, WeightsAdopted, LeaseFailed}),
    "reward": frozenset({Hello, Heartbeat, Leave, GroupScored, LeaseFailed}),
    "operator": frozenset({Ask, ChangeSetting, RequestEvaluation, RequestStop}),
}
"""What each role may say. The controller drops anything else, whatever key it came with."""


# --- Down: controller to replica -----------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The replica is a member; also the answer to each heartbeat, so that silence means a lost controller.

    It heartbeats every `heartbeat_s` and is forgotten after `lease_s` of silence.
    """

    heartbeat_s: float
    lease_s: float


class Introduce(msgspec.Struct, frozen=True, kw_only=True, tag="introduce"):
    """The controller does not know the sender (any more): say `Hello` again."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The replica is not a member and must leave, for the reason given."""

    reason: str


class GenerateGroup(msgspec.Struct, frozen=True, kw_only=True, tag="generate_group"):
    """Generate `num_completions` completions of `prompt`."""

    lease: str
    purpose: Purpose
    prompt: Prompt
    num_completions: int
    sampling: Sampling
    min_version: int
    """Oldest weight version that may sample a token of this group."""


class ScoreGroup(msgspec.Struct, frozen=True, kw_only=True, tag="score_group"):
    """Score the completions of `prompt`."""

    lease: str
    prompt: Prompt
    completions: tuple[CompletionText, ...]


class TrainStep(msgspec.Struct, frozen=True, kw_only=True, tag="train_step"):
    """Make version `step` out of version `step - 1`, from scored groups or from supervised examples."""

    lease: str
    step: int
    groups: tuple[TrainGroup, ...] = ()
    examples: tuple[Prompt, ...] = ()
    temperature: float = 1.0
    """Divisor of the logits under which the groups were sampled."""
    num_steps: int = 0
    """Steps of this kind in the whole run, for schedules of the learning rate."""
    ordinal: int = 0
    """Which of them this is, from 1."""
    published: int = -1
    """The version whose snapshot must be taken before this step changes the weights; -1 for none."""
    replica: int = 0
    """Which of `num_replicas` policy replicas this is; `groups` or `examples` is its share of the step."""
    num_replicas: int = 1
    num_groups: int = 0
    """Groups (or examples) of the whole step, over all replicas; 0 when it has one replica."""
    replayed: bool = False
    """The step was made before, by a replica that is gone: make it again, exactly so."""
    settings: dict[str, float] = {}
    """What operators changed since the start, by key of the recipe, as it is for this step."""


class PublishWeights(msgspec.Struct, frozen=True, kw_only=True, tag="publish_weights"):
    """Copy the present weights into a snapshot and offer it. The next step may begin as soon as the copy is made.

    Who has that version on offer already answers with that offer.
    """

    lease: str
    version: int


class AdoptWeights(msgspec.Struct, frozen=True, kw_only=True, tag="adopt_weights"):
    """Pull a version and switch to it. Buffers: a `weightsync.Offer`, a `weightsync.Plan`, both in MessagePack."""

    lease: str
    version: int
    source: str = ""
    """The replica that has it on offer."""
    with_state: bool = False
    """To a policy: with the optimizer's state, so that it can do the next step."""


class SaveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="save_checkpoint"):
    """Write the present weights in Hugging Face form, or, with `state`, all that is needed to continue from here."""

    lease: str
    step: int
    state: bool = False


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Forget these leases: their results have arrived, or are wanted no longer."""

    leases: tuple[str, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Nothing more will come: say `Leave` and exit with 0."""

    reason: str


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to an operator."""

    request: str
    ok: bool
    text: str
    """In words: the answer, or why not."""
    data: dict[str, Any] = {}
    """The same for programs (JSON values)."""


Work = GenerateGroup | ScoreGroup | TrainStep | PublishWeights | AdoptWeights | SaveCheckpoint
"""The commands that hand out a lease."""

Down = Welcome | Introduce | Refused | Work | Release | Drain | Reply
