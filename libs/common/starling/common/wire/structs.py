"""Structs that several messages contain, and the envelope before each of them."""

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
"""Statuses of trajectories that may be trained."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sender, incarnation and position of the message that follows, and the event that caused it."""

    protocol: int
    """Protocol version of the sender; a receiver drops every other than its own."""
    run: str
    """Run id; replicas of another run are refused."""
    sender: str
    """Name of the sending replica, for example ``rollout-0``."""
    incarnation: int = msgspec.field(name="epoch")
    """Incarnation of the sender: greater after every start."""
    seq: int
    """Number of this message among those of this incarnation to this peer, from 1."""
    cause: str = ""
    """Id of the event that caused the message: ``<peer>/<incarnation>/<seq>`` or ``tick``."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A small file of a model folder, such as its tokenizer: one buffer with its bytes."""

    name: str
    """Without a folder."""
    nbytes: int
    digest: str
    """xxh3 of 128 bits, as 32 hexadecimal digits."""


class TensorMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One buffer frame: its element type (numpy name), shape, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    name: str = ""
    """Name of the tensor where its position does not identify it, for example ``pixel_values``."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a conversation, as chat templates take it."""

    role: str
    content: str


class Media(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One image or video of a prompt, opened by the rollout."""

    kind: Literal["image", "video"]
    uri: str
    """A path on the rollout's host (a video may be an animated image, or a folder of frames in the order of their
    names), a ``file://`` URL, or a short ``data:`` URL in base64, which travels with the prompt."""
    fps: float = 0.0
    """Frames per second of a video; 0 if unknown, which counts as 2."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One input with its reference answer."""

    id: str
    """Unique in the run, for example ``train/0/17``: dataset, epoch, row."""
    messages: tuple[ChatMessage, ...] = ()
    """A conversation for the model's chat template; empty if `text` is the prompt."""
    text: str = ""
    """The prompt as plain text, tokenized without a template; used if `messages` is empty."""
    reference: str = ""
    """The reference answer; in SFT, the response to learn."""
    metadata: dict[str, Any] = {}
    """Further input of this dataset's scorers (JSON values)."""
    rejected: str = ""
    """The worse of two responses in preference training; `reference` is the better one."""
    media: tuple[Media, ...] = ()
    """Images and videos for the ``<image>`` and ``<video>`` markers of the conversation, in their order."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sampling parameters."""

    max_tokens: int
    """Maximum number of tokens of one completion; a completion that reaches it is `truncated`."""
    temperature: float = 1.0
    """Divisor of the logits; 0 for greedy decoding."""
    top_p: float = 1.0
    """Nucleus: the smallest set of most likely tokens whose probabilities sum to this; 1 keeps all."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides the tokenizer's end-of-sequence token."""
    seed: int = 0
    """With the completion's index it determines every token, whatever else is in the batch."""
    min_p: float = 0.0
    """Tokens are kept whose probability is at least this share of the most likely token's; 0 keeps all. Applied before
    `top_k`, which is applied before `top_p`."""
    logprobs: Literal["full", "truncated"] = "full"
    """Log-probabilities over the whole vocabulary, or renormalised over the tokens that `min_p`, `top_k` and `top_p`
    kept, which are then recorded."""
    routing: Literal["own", "replayed"] = "own"
    """Whether training chooses the experts of a mixture by its own routers, or replays those that the rollout's chose,
    which are then recorded."""


class MediaInputs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The form in which a vision-language model takes the images and videos of a prompt."""

    image_token_id: int
    """Placeholder token of images: one for each merged square of patches."""
    video_token_id: int
    """Placeholder token of videos."""
    patch_values: int
    """Values of one patch: the columns of ``pixel_values``."""
    merge_size: int
    """Rows, and columns, of patches that are merged into one token."""
    num_positions: int = 0
    """Positions that a token can have: the context length; 0 for no limit."""


class ModelExperts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The experts of a mixture, whose routers can be made to choose recorded ones."""

    num_layers: int
    """Layers with experts."""
    num_experts: int
    """Experts of each of these."""
    num_chosen: int
    """Experts of each token in each of these."""


class DenoisingForm(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The denoising trajectories that a diffusion model is trained on."""

    first_step: int
    """Number of the first step that is recorded; the token ids of a trajectory are the numbers of these steps."""
    num_steps: int
    """Steps that are recorded."""
    num_states: int
    """States of each trajectory that are sent: one more than its steps that add noise, 0 if there are none."""
    dtype: Literal["float32", "float16"]
    """Element type of states and latents."""
    latents: tuple[int, ...]
    """Shape of a sample: [C, H, W] or [C, T, H, W]."""
    text_length: int
    """Most embeddings of a prompt."""
    text_width: int
    """Numbers of each of them."""
    pooled_width: int = 0
    """Numbers of the pooled embedding of a prompt; 0 if the model reads none."""
    takes_frames: bool = False
    """Prompts may give first frames."""


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the trained model can read of a group."""

    vocabulary_size: int = 0
    """Number of token ids that it has an embedding for; 0 if it is not known."""
    longest: int = 0
    """Most tokens of a prompt and one of its completions; 0 for no limit."""
    media: MediaInputs | None = None
    """Images and videos of prompts; absent if the model reads only text."""
    experts: ModelExperts | None = None
    """Absent if the model has none, or if its routers cannot be made to choose others than their own."""
    denoising: DenoisingForm | None = None
    """Absent if the model is a language model."""


class TrajectoryMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One trajectory of a generated group; its tokens are in the group's buffers."""

    status: Status
    num_tokens: int
    """Tokens after the prompt: the sampled ones with the stop token, and those of the environment between them."""
    text: str
    """The completion without special tokens, for scorers that read text."""
    oldest_version: int
    """Oldest weight version among the sampled tokens."""
    newest_version: int
    """Newest weight version among the sampled tokens."""
    reward: float | None = None
    """Reward of the environment, if it gives one; scorers may read it."""
    metrics: dict[str, float] = {}
    """Metrics of the environment."""
    num_turns: int = 1
    """Number of the model's replies."""
    problem: str = ""
    """One sentence, if `status` is a failure."""
    num_masked: int = 0
    """How many of its tokens come from an environment; the others were sampled."""
    truncation_nats: float | None = None
    """Mean over its sampled tokens of ``-log(sum of the kept tokens' probabilities)``; absent without top_p, top_k or
    min_p, and where the engine does not measure it."""


class PartialCompletionMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The sampled part of an interrupted completion; its tokens are in the buffers of the message."""

    num_tokens: int
    status: Status | None = None
    """How it ended; absent if it is not complete."""


class CompletionText(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One completion as a scorer sees it."""

    text: str
    status: Status
    num_tokens: int
    """Sampled tokens, the stop token included."""
    reward: float | None = None
    """Reward of the environment, if it gives one."""


class ScoredTrajectory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One trajectory of a training step: its length, versions and reward."""

    num_tokens: int
    oldest_version: int
    reward: float
    status: Status = Status.OK


class ScorerScores(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Scores of the completions of one group by one scorer that counts in the reward."""

    label: str
    """The scorer's name in metrics."""
    weight: float
    values: tuple[float | None, ...]
    """One for each completion, unweighted, within the scorer's bounds; null where it gave none."""


class TrainGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One group of a training step. Its buffers follow in the order of `tensors`.

    The tensors are: prompt token ids (int32, [prompt]), completion token ids (int32, [sum of num_tokens]),
    log-probabilities (float32, the same shape), weight versions (int32, the same shape). The inputs of images and
    videos follow by name, as the model takes them: ``pixel_values`` (float32, [patches, values]) with
    ``image_grid_thw`` (int64, [images, 3]), ``pixel_values_videos`` with ``video_grid_thw``, and ``position_ids``
    (int32, [3, prompt]: time, height, width). Tokens of an environment between the model's replies are among the
    completion's, and ``loss_mask`` (uint8, the shape of the token ids) is 0 for them and 1 for sampled ones; their
    log-probability is 0 and their version is that of the token before. If `Sampling.logprobs` is ``truncated``,
    ``kept_counts`` (int32, the shape of the token ids) says how many tokens were kept at each position, 0 for the whole
    vocabulary and for tokens of an environment, and ``kept_ids`` (int32, [sum of the counts]) has their ids, position
    after position, ascending in each; the log-probability of a token is then the one among these. If
    `Sampling.routing` is ``replayed``, ``prompt_routing`` ([prompt, layers, chosen]) and ``routing`` ([sum of
    num_tokens, layers, chosen]) have the experts of each token in each layer with experts, by `ModelExperts`: uint8 for
    at most 255 experts, else uint16. A token whose experts were not recorded, as a completion's last one, has the
    largest number of the type everywhere. If a teacher scored the group, the tensors of `TokensScored` follow.

    A completion of a diffusion model is a denoising trajectory, and its token ids are the numbers of its recorded
    steps. Its tensors, by name, are the conditions of the prompt, ``text_embeddings`` (float32, [tokens, width]) with
    ``text_mask`` (uint8, [tokens]), ``pooled_embeddings`` (float32, [width]) and ``given_frames`` (float32, [C, F, H,
    W], latents of the first frames); ``states`` ([trajectories, states, ...], from before the first noisy step to after
    the last one) and ``latents`` ([trajectories, ...], where they end), float32 or float16.
    """

    prompt_id: str
    trajectories: tuple[ScoredTrajectory, ...]
    tensors: tuple[TensorMeta, ...]
    temperature: float = 0.0
    """Divisor of the logits under which it was sampled; 0 for the one of the step."""
    scores: tuple[ScorerScores, ...] = ()
    """Scores by each scorer that counts in the reward, where the algorithm may take them; else empty."""


class LeaseProgress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Progress of leased work that moves bytes."""

    bytes_done: int
    bytes_total: int
    seconds_left: float | None = None
    """At the rate so far; absent before the first byte has arrived."""

    def __str__(self) -> str:
        """Return it in words: ``43 %, 2.1 s left``."""
        share = self.bytes_done * 100 // self.bytes_total if self.bytes_total else 100
        return f"{share} %" if self.seconds_left is None else f"{share} %, {self.seconds_left:.1f} s left"


class HeldLease(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One lease in a replica's heartbeat."""

    lease: str
    phase: Literal["queued", "working", "answered"]
    """`answered`: the result was sent and the controller has not released the lease yet."""
    progress: LeaseProgress | None = None
    """Progress of a pull."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that a service waits for now. Every wait has a deadline."""

    what: str
    """In words: ``buckets of version 7``."""
    on: str
    """What can end it: a replica's name, ``controller``, ``disk``, ``engine``, ..."""
    since_s: float
    """Seconds since it began."""
    seconds_left: float
    """Seconds until the service gives up."""


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How far the newest profile of a process is."""

    profile: str
    """Its id."""
    state: Literal["active", "ended", "failed"]
    text: str
    """What was recorded, or why nothing was, in words."""
    folder: str = ""
    """Where the files are, on the host of the process."""
    files: tuple[str, ...] = ()
    """Their names."""


class Alarm(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A metric of a step that is out of bounds, and its meaning."""

    name: str
    value: float
    """As of this step; NaN if this step did not measure it."""
    bound: float
    text: str
    """One sentence: its meaning and the remedy."""
    since: int
    """First step of the alarm."""
    fatal: bool = False
    """The recipe ends the run for it."""

    def __str__(self) -> str:
        """Return it in words: ``clip: 0.7 against a bound of 0.5 since step 12: most tokens are clipped ...``."""
        return f"{self.name}: {self.value:.3g} against a bound of {self.bound:g} since step {self.since}: {self.text}"
