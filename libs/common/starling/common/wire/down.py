"""What the controller says to replicas and operators."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from starling.common.ids import Purpose
from starling.common.wire.structs import CompletionText, PartialCompletionMeta, Prompt, Sampling, TensorMeta, TrainGroup


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The replica is a member; also the answer to each heartbeat, so that silence means a lost controller.

    It heartbeats every `heartbeat_s` and is forgotten after `lease_s` of silence.
    """

    heartbeat_s: float
    lease_s: float
    shares_devices: bool = False
    """Others may take its devices when it is lost: it must give them away itself when nothing that it said within
    `lease_s` was answered."""


class RequestHello(msgspec.Struct, frozen=True, kw_only=True, tag="introduce"):
    """The controller does not know the sender (any more): say `Hello` again."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The replica is not a member and must leave, for the reason given."""

    reason: str


class GenerateGroup(msgspec.Struct, frozen=True, kw_only=True, tag="generate_group"):
    """Generate `num_completions` completions of `prompt`.

    Where another replica began it, buffers follow in the order of `tensors`: completion token ids (int32, [sum of
    num_tokens]), log-probabilities (float32), weight versions (int32), to go on from.
    """

    lease: str
    purpose: Purpose
    prompt: Prompt
    num_completions: int
    sampling: Sampling
    min_version: int
    """Oldest weight version that may sample a token of this group."""
    partial: tuple[PartialCompletionMeta, ...] = ()
    """What another replica left of each completion; empty to begin."""
    tensors: tuple[TensorMeta, ...] = ()


class ScoreGroup(msgspec.Struct, frozen=True, kw_only=True, tag="score_group"):
    """Score the completions of `prompt`."""

    lease: str
    prompt: Prompt
    completions: tuple[CompletionText, ...]


class ScoreTokens(msgspec.Struct, frozen=True, kw_only=True, tag="score_tokens"):
    """To a teacher: say how likely the tokens of these completions are. Buffers follow in the order of `tensors`.

    The tensors are prompt token ids (int32, [prompt]) and completion token ids (int32, [sum of lengths]).
    """

    lease: str
    prompt_id: str
    lengths: tuple[int, ...]
    """Tokens of each completion."""
    temperature: float
    """Divisor of the logits, as when they were sampled; 0 stands for 1."""
    tensors: tuple[TensorMeta, ...]


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
    objective: Literal["", "sft", "dpo", "reward_model"] = ""
    """What `examples` are to teach; empty for `sft`, and for groups."""
    next_prompt: int = -1
    """Position in the data of the first prompt that no step up to this one trains; -1 for as before."""
    max_tokens: int = 0
    """Most tokens that a completion of these groups could have had; 0 for not told."""


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
    metrics: dict[str, float] = {}
    """What the controller knows of this version, for whoever keeps the best: of its step, and as ``eval/...`` of the
    newest evaluation that is over."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """Give the devices' memory to others that share them: to a policy or a rollout. Answered by `Slept`."""

    lease: str


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """Take the devices' memory back, which the others have given up. Answered by `Awake`."""

    lease: str


class ReleaseLeases(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Forget these leases: their results have arrived, or are wanted no longer."""

    leases: tuple[str, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Nothing more will come: say `Leave` and exit with 0."""

    reason: str


class OperatorReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to an operator."""

    request: str
    ok: bool
    text: str
    """In words: the answer, or why not."""
    data: dict[str, Any] = {}
    """The same for programs (JSON values)."""


LeasedCommand = (
    GenerateGroup | ScoreGroup | ScoreTokens | TrainStep | PublishWeights | AdoptWeights | SaveCheckpoint | Sleep | Wake
)
"""The commands that hand out a lease."""

Down = Welcome | RequestHello | Refused | LeasedCommand | ReleaseLeases | Drain | OperatorReply
