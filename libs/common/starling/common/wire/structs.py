"""What messages of both directions hold: declared once, like the messages themselves."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

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


TRAINABLE_STATUSES = frozenset({Status.OK, Status.TRUNCATED})
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
    name: str = ""
    """What it holds, where its place does not say so, for example ``pixel_values``."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, in the form that chat templates take."""

    role: str
    content: str


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """One image or video of a prompt, which the rollout opens."""

    kind: Literal["image", "video"]
    uri: str
    """A path on the rollout's host (a video may be an animated image, or a folder of frames in the order of their
    names), a ``file://`` URL, or a ``data:`` URL in base64. Short ones only: it travels with the prompt."""
    fps: float = 0.0
    """Frames a second of a video; 0 for not known, which counts as 2."""


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
    rejected: str = ""
    """The worse of two responses, `reference` being the better one, where preferences are learnt."""
    media: tuple[Media, ...] = ()
    """What stands in the conversation where its messages say ``<image>`` or ``<video>``, in the order of these."""


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
    """Tokens behind the prompt: sampled ones, the stop token included, and what an environment said between them."""
    text: str
    """The completion decoded without special tokens, for scorers that read text."""
    oldest_version: int
    """The least weight version among the sampled tokens."""
    newest_version: int
    """The greatest weight version among the sampled tokens."""
    reward: float | None = None
    """What the environment gives for it, where it judges; scorers may read it."""
    metrics: dict[str, float] = {}
    """What the environment measured besides."""
    num_turns: int = 1
    """Replies of the model in it."""
    problem: str = ""
    """One sentence, where `status` is a failure."""
    num_masked: int = 0
    """How many of its tokens an environment said; the others were sampled."""


class PartialCompletionMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What is there of one completion that was interrupted; its tokens are in the buffers beside it."""

    num_tokens: int
    status: Status | None = None
    """How it ended; absent while it goes on."""


class CompletionText(msgspec.Struct, frozen=True, kw_only=True):
    """What a scorer sees of one completion."""

    text: str
    status: Status
    num_tokens: int
    """Sampled ones, the stop token included."""
    reward: float | None = None
    """What the environment gives for it, where it judges."""


class ScoredTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a training step: its length, versions and reward."""

    num_tokens: int
    oldest_version: int
    reward: float
    status: Status = Status.OK


class TrainGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a training step. Its buffers follow in the order of `tensors`.

    The tensors are: prompt token ids (int32, [prompt]), completion token ids (int32, [sum of num_tokens]),
    log-probabilities (float32, the same shape), weight versions (int32, the same shape). What a prompt with images or
    videos has besides follows by name, as the model takes it: ``pixel_values`` (float32, [patches, values]) with
    ``image_grid_thw`` (int64, [images, 3]), ``pixel_values_videos`` with ``video_grid_thw``, and ``position_ids``
    (int32, [3, prompt]: time, height, width). Where an environment said something between the model's replies, its
    tokens are among the completion's, and ``loss_mask`` (uint8, as the token ids) is 0 for them and 1 for sampled ones;
    their log-probability is 0 and their version that of the token before. Of a group that was taught follows what
    `TokensScored` lists.
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


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A number of a step that is out of bounds, and what that means."""

    name: str
    value: float
    """As of this step; NaN when this step did not measure it."""
    bound: float
    text: str
    """One sentence: what it means and what to do."""
    since: int
    """The step at which it began."""
    fatal: bool = False
    """The recipe wants the run to end for it."""

    def __str__(self) -> str:
        """Say it in words: ``clip: 0.7 against a bound of 0.5 since step 12: most tokens are clipped ...``."""
        return f"{self.name}: {self.value:.3g} against a bound of {self.bound:g} since step {self.since}: {self.text}"
