"""What the rollout asks of a generation engine, and the words it is asked in.

Token ids go in and token ids come out; text is the affair of `starling.algo.text`. One thread holds an engine and
calls it; only `pull` is called from another one, while generation goes on.

    add ──> waiting ──> running ──step──> GroupResult | GroupFailed
                           │
       pull (beside) ──> adopt (between two tokens) ──> the same sequences go on, with the new weights

An engine may compute inside `step`, as the embedded one does, or by itself in other threads and processes, as vLLM
does. `ready` tells the two apart for whoever holds it: while it is true, `step` is called again at once; otherwise the
engine calls `EngineSpec.wake` when that changes.

A weight version is pulled by the engine itself, straight into the memory of its workers: nothing of it passes through
the thread that holds the engine. `adopt` then puts it in place. Tokens that were sampled before keep their version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from starling.common.errors import StarlingError
from starling.common.settings import ModelSettings, WeightsSettings
from starling.common.wire.messages import Sampling, Status
from starling.rollout.settings import RolloutSettings

if TYPE_CHECKING:
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.plan.offer import Offer
    from starling.weightsync.plan.planner import Plan
    from starling.weightsync.puller.fetch import PullProgress
    from starling.weightsync.puller.puller import PullReport

CacheMode = Literal["keep", "recompute", "salt"]
"""What becomes of keys and values that older weights computed, when new ones are adopted.

``keep``: they stay, and whatever shares a prefix with them uses them. ``recompute``: those of running sequences are
computed anew, so that what is sampled next is sampled exactly as the new weights would have it. ``salt``: running
sequences keep theirs, and no sequence that starts later shares any of them.
"""

TokenListener = Callable[[int, Sequence[int], Sequence[float]], None]
"""Told of the tokens of a completion as they come: its index, token ids, log-probabilities."""


class RequestError(StarlingError, ValueError):
    """One group cannot be generated as asked; the engine and its other groups are unaffected."""


class EngineLostError(StarlingError):
    """The engine, or a process that it stands on, is gone: what it ran is lost but for what `interrupt` returns."""


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """What is there of a completion that was interrupted; the three arrays have one element per sampled token."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    status: Status | None = None
    """How it ended; None while it goes on."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What the model makes of a prompt: of each token but the first, behind those before it.

    The three arrays have one element less than the prompt; probabilities are those of softmax(logits) over the whole
    vocabulary.
    """

    logprobs: npt.NDArray[np.float32]
    """Natural logarithm of each token's probability."""
    top_ids: npt.NDArray[np.int32]
    """The likeliest token in its place."""
    top_logprobs: npt.NDArray[np.float32]
    """That one's; the very same number as in `logprobs` where it is the token."""
    version: int
    """The weight version that computed the prompt's end."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Ask for `num_completions` completions of one prompt."""

    lease: str
    """Names the request; unique among those that the engine holds."""
    prompt_ids: list[int]
    """The prompt's token ids; at least one."""
    num_completions: int
    """Completions to sample; at most the engine's `max_rows`."""
    sampling: Sampling
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """What the model takes of the prompt's images and videos, and where its tokens stand, as `TrainGroup` names them;
    empty for a prompt of text."""
    partial: tuple[PartialCompletion, ...] = ()
    """What is there already of each completion, to go on from; empty to begin. Each counts into `max_tokens`."""
    listener: TokenListener | None = None
    """Called as tokens come, by whichever thread they come from; it must not block."""
    score_prompt: bool = False
    """Tell what the model makes of the prompt; only of text, and of a group that begins."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled token sequence; the three arrays have one element per sampled token, the stop token included."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Natural logarithm of each token's probability under softmax(logits / temperature) over the whole vocabulary;
    at temperature 0, under softmax(logits)."""
    versions: npt.NDArray[np.int32]
    """The weight version that sampled each token."""
    status: Status
    """`OK` when a stop token ended it, `TRUNCATED` when `max_tokens` or the context did."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """All completions of one group, in the order of their indices."""

    lease: str
    prompt_ids: npt.NDArray[np.int32]
    completions: tuple[Completion, ...]
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Those of the request."""
    prompt_scores: PromptLogprobs | None = None
    """Where they were asked for, of an engine that tells them."""


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group that was accepted and could not be finished; `reason` is one sentence for people."""

    lease: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """What an adoption did."""

    version: int
    proven: bool
    """What the engine holds now was compared with what was published, and is the same, bit for bit."""
    root: str
    """Digest of what it holds."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values were computed anew, or have to be before their sequences go on."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is made of: an engine of one's own is a class that takes one of these."""

    path: Path
    """The model's folder."""
    model: ModelSettings
    rollout: RolloutSettings
    weights: WeightsSettings
    name: str
    """The replica's name, which its layout bears."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end every completion."""
    max_model_len: int | None
    """Most tokens of a sequence; None for what the model declares."""
    wake: Callable[[], None]
    """To be called, from any thread, when `ready` became true."""


class Engine(Protocol):
    """A generation engine with continuous batching."""

    @property
    def num_running(self) -> int:
        """Sequences that are being extended; groups still waiting for room are not among them."""
        ...

    @property
    def num_waiting(self) -> int:
        """Groups that wait for room."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that it has sampled since it was made."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and completion together."""
        ...

    @property
    def version(self) -> int:
        """The weight version that samples the next token; -1 before there is one."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `step` has something to do, or to return, or to raise, now; a paused engine has nothing to do."""
        ...

    @property
    def serves(self) -> bool:
        """Whether `tensors` holds all of the weights, so that this replica can offer them to others."""
        ...

    def add(self, request: GroupRequest) -> None:
        """Queue a group; groups start in the order in which they came.

        Raises:
            RequestError: the group cannot be generated (empty prompt, a token id outside the vocabulary, a prompt that
                leaves no room in the context, images that its placeholders do not fit, impossible sampling, a lease
                that the engine already holds).
        """
        ...

    def step(self) -> list[GroupResult | GroupFailed]:
        """Go on where there is something to do, for one token at most, and return the groups that ended. Never waits.

        Raises:
            EngineLostError: it cannot go on, now or ever.
        """
        ...

    def cancel(self, lease: str) -> bool:
        """Forget a group and free its room at once; returns whether the engine held it."""
        ...

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        """Take a group out and return what is there of its completions, or None when the engine does not hold it.

        Works on an engine that is lost, too: no token that reached it is thrown away.
        """
        ...

    def pause(self) -> None:
        """Sample nothing more until `resume`; running sequences stay. A second call changes nothing."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def layout(self) -> Layout:
        """Return which shard of which tensor each of its workers holds: one rank of the layout for each."""
        ...

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[PullProgress], None],
        in_place: bool = False,
    ) -> PullReport:
        """Bring a version into the workers' staging areas, while generation goes on. Called from a thread of its own.

        Args:
            offer: the version, from all source ranks that the plan reads.
            plan: made from the source's layout and this engine's.
            deadline_s: seconds from now by which it must be done.
            cancelled: asked between any two steps; True ends the pull.
            progress: told now and then how far it is, over all workers.
            in_place: write into the live weights instead, of an engine that is paused: it needs no staging, and is torn
                when it fails.

        Raises:
            WeightsError: it failed; without `in_place` the engine keeps its version.
        """
        ...

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Put the version that was pulled last in place, between two tokens, and prove what the workers hold.

        Raises:
            WeightsError: nothing is staged; then nothing was touched.
            EngineLostError: a worker is gone.
        """
        ...

    def sleep(self) -> None:
        """Give the device memory of weights and cache to others until `wake_up`; what ran must be taken out before."""
        ...

    def wake_up(self) -> None:
        """Take the memory back. The weights are undefined unless the engine says otherwise: adopt some."""
        ...

    def tensors(self) -> Mapping[str, Any]:
        """Return the live weights by Hugging Face name, tied ones once, where `serves`; otherwise nothing."""
        ...

    def close(self) -> None:
        """End everything that it started. Waits for it, within a deadline."""
        ...
