"""What the rollout asks of a generation engine, and the words it is asked in.

An engine is driven from outside: nothing happens between two calls of `step`, so whoever holds the engine pauses it by
not calling, and may change the weights in place before the next call. Token ids go in and token ids come out; text is
the affair of `starling.algo.text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from starling.common.errors import StarlingError
from starling.common.wire.messages import Sampling, Status


class RequestError(StarlingError, ValueError):
    """One group cannot be generated as asked; the engine and its other groups are unaffected."""


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


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group that was accepted and could not be finished; `reason` is one sentence for people."""

    lease: str
    reason: str


class Engine(Protocol):
    """A generation engine with continuous batching.

    Not thread safe: one thread calls it. Weights are changed between two steps, in place, in what `tensors` returns;
    `set_version` then names them. Tokens sampled before keep their version, and the sequences go on.
    """

    @property
    def num_running(self) -> int:
        """Sequences that the next `step` extends; groups still waiting for room are not among them."""
        ...

    @property
    def num_waiting(self) -> int:
        """Groups that wait for room."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and completion together."""
        ...

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
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
        """Start waiting groups where room allows, sample one token of every sequence, return the groups that ended."""
        ...

    def cancel(self, lease: str) -> bool:
        """Forget a group and free its room at once; returns whether the engine held it."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live weights by Hugging Face name, tied ones once: writing into them is adopting."""
        ...

    def set_version(self, version: int) -> None:
        """Name the weights that are in place now; tokens sampled from here on carry `version`."""
        ...
