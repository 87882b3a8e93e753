"""What an environment is, and what it is given: an episode, which it plays to its end.

An environment is a coroutine function. It is called once for each trajectory with an `Episode`, asks the model for
replies, says what comes between them, and returns what came of it:

    async def guess(episode: Episode, *, most: int = 10) -> float:
        for _ in range(most):
            reply = await episode.reply()
            if reply.text.strip() == episode.prompt.reference:
                return 1.0
            episode.say({"role": "user", "content": "No. Try again."})
        return 0.0

The model's tokens are never made into text and back: an episode is one growing sequence of token ids, in which sampled
tokens stay what they were, and what the environment says is encoded once and marked as not to be trained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from starling.common.errors import StarlingError
from starling.common.wire.messages import Prompt, Status


class EpisodeOver(StarlingError):
    """The episode has no turn or token left: what is there of it counts."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One reply of the model."""

    text: str
    """Without special tokens."""
    token_ids: tuple[int, ...]
    """As sampled, the stop token included."""
    finish: Literal["stop", "length"]
    """What ended it: a stop token or a stop text, or a bound on tokens."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What came of an episode."""

    reward: float | None = None
    """The environment's own judgement; None leaves it to the scorers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What it measured besides, for the metrics of the run."""
    status: Status | None = None
    """Why the trajectory cannot be trained, where it cannot; None for what the last reply says."""
    problem: str = ""
    """One sentence, with a `status` that is a failure."""


class Episode(Protocol):
    """One trajectory while it is being made."""

    @property
    def prompt(self) -> Prompt:
        """What it began with; `prompt.reference` and `prompt.metadata` are for judging."""
        ...

    @property
    def index(self) -> int:
        """Which of the trajectories of its group it is, from 0."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation so far, in the form of chat templates; empty where the prompt is plain text."""
        ...

    @property
    def num_turns(self) -> int:
        """Replies so far."""
        ...

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be sampled, by `sampling.max_tokens` and by the context."""
        ...

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ModelReply:
        """Have the model say something.

        Args:
            max_tokens: most tokens of this reply; None for what the settings and `tokens_left` allow.
            stop: texts after which it ends, besides the model's own stop tokens; the reply has them.

        Raises:
            EpisodeOver: no turn or token is left; an environment that lets it pass ends well.
        """
        ...

    def say(self, *messages: Mapping[str, Any]) -> None:
        """Add messages, as of a user or a tool: written by the chat template, and not to be trained.

        Raises:
            StarlingError: the prompt is plain text, or the next reply is to begin with a text already.
        """
        ...

    def say_text(self, text: str) -> None:
        """Add text as it stands, without a template, not to be trained: to the last reply or, behind messages, for the
        next reply to begin with."""
        ...


Environment = Callable[..., Awaitable[EpisodeOutcome | float | None]]
"""Takes an `Episode` and its options by name; a number is an `EpisodeOutcome` with that reward."""
