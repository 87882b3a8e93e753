"""The interface of a generation engine: the `Engine` protocol, its requests and its results.

Token ids go in and token ids come out; `starling.algo.text` converts from and to text. A single thread owns an engine
and calls it; only `pull` is called from another thread, while generation continues.

    add ──> waiting ──> running ──step──> GroupResult | GroupFailed
                           │
    pull (concurrently) ──> adopt (between two tokens) ──> the same sequences continue, with the new weights

An engine may compute inside `step`, as the embedded one does, or in threads and processes of its own, as vLLM does.
`ready` covers both: while it is true, the owner calls `step` again at once; otherwise the owner waits, and the engine
calls `EngineSpec.wake` when `ready` becomes true.

The engine pulls a weight version straight into the memory of its workers: no weights pass through the owner's thread.
`adopt` then puts the version in place. Tokens that were sampled before keep their version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from starling.algo.diffusion.settings import SamplerSettings
from starling.algo.routing import Experts
from starling.algo.truncation import KeptTokens
from starling.common.errors import StarlingError
from starling.common.settings import ModelSettings, WeightsSettings
from starling.common.wire.messages import Sampling, Status
from starling.rollout.settings import RolloutSettings

if TYPE_CHECKING:
    from starling.common.nodes.nodes import NodeSetup
    from starling.weightsync.offers.offer import Offer
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.plan.planner import Plan
    from starling.weightsync.puller.report import PullProgress, PullReport
    from starling.weightsync.transports.endpoints import ServingOptions

CacheMode = Literal["keep", "recompute", "salt"]
"""What an adoption does with the KV cache that older weights computed.

``keep``: the cache stays, and later sequences may share it as a prefix. ``recompute``: the cache of running sequences
is computed again, so that the next token is sampled exactly as the new weights would. ``salt``: running sequences keep
their cache, and no sequence that starts later shares it.
"""

TokenListener = Callable[[int, Sequence[int], Sequence[float]], None]
"""Callback for new tokens of a completion: its index in the group, token ids, log-probabilities."""


class RequestError(StarlingError, ValueError):
    """A group request is invalid; the engine and its other groups are unaffected."""


class EngineLostError(StarlingError):
    """The engine, or one of its processes, has died: of its groups only what `interrupt` returns is left."""


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The sampled part of an interrupted completion; the three arrays have one element per sampled token."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    status: Status | None = None
    """How it ended; None if it has not ended."""
    kept: KeptTokens | None = None
    """As `Completion.kept`; None if it was not recorded."""
    truncation_nats: npt.NDArray[np.float32] | None = None
    """As `Completion.truncation_nats`."""
    routing: Experts | None = None
    """As `Completion.routing`; None if it was not recorded."""
    prompt_routing: Experts | None = None
    """As `GroupResult.prompt_routing`; it does not travel to another replica, which computes the prompt again."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, each given the tokens before it.

    The three arrays have one element less than the prompt, as the first token has no context; probabilities are those
    of softmax(logits) over the whole vocabulary.
    """

    logprobs: npt.NDArray[np.float32]
    """Natural logarithm of each token's probability."""
    top_ids: npt.NDArray[np.int32]
    """The most likely token at each position."""
    top_logprobs: npt.NDArray[np.float32]
    """Its log-probability; bitwise equal to `logprobs` where the prompt has that token."""
    version: int
    """The weight version that computed the end of the prompt."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for `num_completions` completions of one prompt."""

    lease: str
    """Identifies the request; unique among those that the engine holds."""
    prompt_ids: list[int]
    """The prompt's token ids; at least one."""
    num_completions: int
    """Completions to sample; at most the engine's `max_rows`."""
    sampling: Sampling
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Pixels and grids of the prompt's images and videos, and the positions of its tokens, named as in `TrainGroup`;
    empty for a text prompt."""
    partial: tuple[PartialCompletion, ...] = ()
    """The sampled part of each completion to resume; empty for a new group. Its tokens count towards `max_tokens`."""
    listener: TokenListener | None = None
    """Called with new tokens, from any thread; it must not block."""
    score_prompt: bool = False
    """Return `GroupResult.prompt_logprobs`; only for text prompts, and not with `partial`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled token sequence; the three arrays have one element per sampled token, the stop token included."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Natural logarithm of each token's probability under softmax(logits / temperature), at temperature 0 under
    softmax(logits): over the whole vocabulary, or over `kept`."""
    versions: npt.NDArray[np.int32]
    """The weight version that sampled each token."""
    status: Status
    """`OK` when a stop token ended it, `TRUNCATED` when `max_tokens` or the context did."""
    kept: KeptTokens | None = None
    """The tokens that min_p, top_k and top_p kept at each position, with `Sampling.logprobs` ``truncated``; else
    None."""
    truncation_nats: npt.NDArray[np.float32] | None = None
    """``-log(sum of the kept tokens' probabilities)`` of each token that this engine sampled with top_p, top_k or
    min_p, NaN for others; None if there are none, or if it was not measured."""
    routing: Experts | None = None
    """The experts that the routers chose for each token, with `Sampling.routing` ``replayed``, unrecorded for tokens
    that were not computed, as the last one; else None."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The completions of one group, in the order of their indices."""

    lease: str
    prompt_ids: npt.NDArray[np.int32]
    completions: tuple[Completion, ...]
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """`GroupRequest.tensors`."""
    prompt_logprobs: PromptLogprobs | None = None
    """Set if the request has `score_prompt` and the engine supports it."""
    prompt_routing: Experts | None = None
    """The experts that the routers chose for each token of the prompt, with `Sampling.routing` ``replayed``; None if
    it was not recorded, or not computed because all completions had ended."""


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group that was accepted and could not be finished; `reason` is one sentence for the user."""

    lease: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """The outcome of an adoption."""

    version: int
    proven: bool
    """Whether the weights in place are bitwise equal to the published ones, by their digests."""
    root: str
    """Digest of the weights in place, by the offer that was pulled."""
    layout_root: str
    """Digest of the weights in place, whatever their source: `weightsync.offers.offer.layout_root` over the ranks."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values were computed again, or have to be before their sequences continue."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that an engine is built from: a custom engine is a class whose constructor takes an `EngineSpec`."""

    path: Path
    """The model's folder."""
    model: ModelSettings
    rollout: RolloutSettings
    weights: WeightsSettings
    name: str
    """The replica's name, used in its layout."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end every completion."""
    max_model_len: int | None
    """Maximum number of tokens of a sequence; None for the model's context length."""
    wake: Callable[[], None]
    """The engine calls this, from any thread, when `ready` becomes true."""
    serving: ServingOptions | None = None
    """How pulls that are announced are served to others; None: they are not."""
    nodes: NodeSetup | None = None
    """The other hosts of the engine, which this process is node 0 of; None for one host."""
    has_own_weights: bool = False
    """The weights of `path` are the run's only ones, because it has no policy: nothing will be pulled, and the layout
    of the engine may be empty."""
    diffusion: SamplerSettings | None = None
    """Samples of a diffusion model, whose pipeline is in `path`; None for a language model."""


class Engine(Protocol):
    """A generation engine with continuous batching."""

    @property
    def num_running(self) -> int:
        """Sequences that are being decoded, without those of waiting groups."""
        ...

    @property
    def num_waiting(self) -> int:
        """Groups that wait for a free row."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the engine was created."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one sequence, prompt and completion together."""
        ...

    @property
    def version(self) -> int:
        """The weight version that samples the next token; -1 before the first adoption if no weights were loaded."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `step` has something to compute, to return or to raise now; a paused engine computes nothing."""
        ...

    @property
    def serves(self) -> bool:
        """Whether `tensors` returns all weights, so that this replica can serve them to others."""
        ...

    def add(self, request: GroupRequest) -> None:
        """Queue a group; groups start in first-in, first-out order.

        Raises:
            RequestError: the group cannot be generated (empty prompt, a token id outside the vocabulary, a prompt that
                fills the context, placeholder tokens that do not match the images, invalid sampling parameters, a
                lease that the engine already holds).
        """
        ...

    def step(self) -> list[GroupResult | GroupFailed]:
        """Decode at most one token per sequence, and return the groups that ended. Never blocks on other processes.

        Raises:
            EngineLostError: the engine cannot continue.
        """
        ...

    def cancel(self, lease: str) -> bool:
        """Drop a group and free its rows at once; return whether the engine held it."""
        ...

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        """Remove a group and return its partial completions, or None if the engine does not hold it.

        Works on a lost engine, too: every token that has arrived is returned.
        """
        ...

    def pause(self) -> None:
        """Stop sampling until `resume`; running sequences stay. Idempotent."""
        ...

    def resume(self) -> None:
        """Continue after `pause`."""
        ...

    def layout(self) -> Layout:
        """Return the weights' layout: one rank per worker, with the shards that it holds."""
        ...

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        root_plan: Plan | None = None,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[PullProgress], None],
        in_place: bool = False,
        relays: Sequence[Offer] = (),
        announce: Callable[[Offer], None] | None = None,
    ) -> PullReport:
        """Pull a version into the workers' staging buffers while generation continues. Called from another thread.

        Args:
            offer: the version, from all source ranks that the plan reads.
            plan: computed from the source's layout and this engine's.
            root_plan: the plan from the policy's layout, whose boxes the layout root covers; None for `plan`.
            deadline_s: seconds from now until the pull fails.
            cancelled: polled between any two steps; True ends the pull.
            progress: called now and then with the progress over all workers.
            in_place: write into the live weights of a paused engine instead: no staging buffers are needed, and a
                failure leaves torn weights.
            relays: offers of the version by replicas of this layout, which are read first; the source where they fail.
            announce: serve what arrives, by `EngineSpec.serving`, and call this with the offer before the first byte
                has arrived; from any thread. Never together with `in_place`.

        Raises:
            WeightsError: the pull failed; without `in_place` the engine keeps its version.
        """
        ...

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Switch to the version that was pulled last, between two tokens, and verify the digests of what workers hold.

        Raises:
            WeightsError: nothing is staged; the engine is unchanged.
            EngineLostError: a worker has died.
        """
        ...

    def sleep(self) -> None:
        """Free the device memory of weights and cache until `wake_up`; all groups must have been removed before."""
        ...

    def wake_up(self) -> None:
        """Allocate the memory again. The weights are undefined afterwards unless the engine documents otherwise."""
        ...

    def tensors(self) -> Mapping[str, Any]:
        """Return the live weights by Hugging Face name, tied ones once, if `serves`; otherwise an empty mapping."""
        ...

    def close(self) -> None:
        """Stop all threads and processes that the engine started, within a deadline."""
        ...
