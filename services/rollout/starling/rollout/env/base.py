"""The interface of environments: a coroutine function that plays one episode and returns its outcome.

An environment is called once per trajectory with an `Episode`. It asks the model for replies, adds messages between
them, and returns the reward:

    async def guess(episode: Episode, *, most: int = 10) -> float:
        for _ in range(most):
            reply = await episode.reply()
            if reply.text.strip() == episode.prompt.reference:
                return 1.0
            episode.say({"role": "user", "content": "No. Try again."})
        return 0.0

Sampled tokens are never decoded and encoded again: an episode is one growing sequence of token ids. What the
environment adds is encoded once and masked from the loss.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from starling.common.errors import StarlingError
from starling.common.wire.messages import Prompt, Status


class EpisodeOver(StarlingError):
    """The episode has no turn or token left; the trajectory so far counts."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One reply of the model."""

    text: str
    """Without special tokens."""
    token_ids: tuple[int, ...]
    """As sampled, the stop token included."""
    finish: Literal["stop", "length"]
    """What ended it: `stop` is a stop token or a stop text, `length` a limit on tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """Result of an episode."""

    reward: float | None = None
    """The environment's own reward; None leaves it to the scorers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further measurements, for the metrics of the run."""
    status: Status | None = None
    """Why the trajectory cannot be trained, if it cannot; None for the status of the last reply."""
    problem: str = ""
    """One sentence, for a `status` that is a failure."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Argument of a program of the environment `agent`."""

    base_url: str
    """Address for an OpenAI client, ending in ``/v1``."""
    api_key: str
    """The key of this episode; revoked when the program has ended."""
    model: str
    """Name of the model; requests may name any."""
    messages: list[dict[str, str]]
    """The prompt as a conversation; a prompt of plain text is one user message."""
    reference: str
    """The reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The dataset row's other columns."""
    index: int = 0
    """Index of this trajectory in its group, from 0."""


class Episode(Protocol):
    """One trajectory in progress."""

    @property
    def prompt(self) -> Prompt:
        """The prompt; `prompt.reference` and `prompt.metadata` are for the reward."""
        ...

    @property
    def index(self) -> int:
        """Index of this trajectory in its group, from 0."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation so far, in the form of chat templates; empty for a prompt of plain text."""
        ...

    @property
    def num_turns(self) -> int:
        """Number of replies so far."""
        ...

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be sampled, limited by `sampling.max_tokens` and by the context."""
        ...

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ModelReply:
        """Sample one reply of the model.

        Args:
            max_tokens: limit of this reply; None for what the settings and `tokens_left` allow.
            stop: texts that end the reply, besides the model's own stop tokens; the reply includes them.

        Raises:
            EpisodeOver: no turn or token is left. An environment need not catch it.
        """
        ...

    def say(self, *messages: Mapping[str, Any]) -> None:
        """Add messages of a user or a tool, written by the chat template and not trained.

        Raises:
            StarlingError: the prompt is plain text, or text was already added as the beginning of the next reply.
        """
        ...

    def say_text(self, text: str) -> None:
        """Add text without a template, not trained: to the last reply or, after messages, as the beginning of the next
        reply."""
        ...


Environment = Callable[..., Awaitable[EpisodeOutcome | float | None]]
"""Takes an `Episode` and its options by name; a number is an `EpisodeOutcome` with that reward."""
