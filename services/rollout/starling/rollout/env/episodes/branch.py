"""An episode whose conversation may be taken up again at an earlier place.

Programs that keep the conversation themselves do so: they ask twice, drop what has become too long, or give a part of
the work to a conversation beside. Each such conversation is a branch; what was sampled on the way to where it leaves
another one stays as it was sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from starling.algo.text import conversation_text, encode_text
from starling.common.wire.messages import ChatMessage, Status
from starling.rollout.env.base import ModelReply
from starling.rollout.env.episodes.episode import EpisodeTask, TokenEpisode, turn_seed

if TYPE_CHECKING:
    from starling.rollout.engine.base import Completion


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a reply ends."""

    num_tokens: int
    num_messages: int
    ending: str


class Branch(TokenEpisode):
    """One conversation of an episode, which begins with messages of its own.

    Args:
        origin: the episode.
        messages: what it begins with, at least one, in the form that chat templates take.
        tools: functions that the model may call, as JSON schemas.
        number: from 0, another one for each branch of `origin`: it decides, too, what is drawn.

    Raises:
        ConfigError: the chat template refuses the messages.
    """

    def __init__(
        self,
        origin: TokenEpisode,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        number: int,
    ) -> None:
        self._origin, self.number = origin, number
        super().__init__(_task_of(origin, number), origin.index, origin._tokenizer, origin._ask)
        begun = tuple(ChatMessage(role=str(one["role"]), content=str(one["content"])) for one in messages)
        prompt = msgspec.structs.replace(origin.prompt, messages=begun)
        self._task = replace(self._task, prompt=prompt, tools=tuple(tools))
        self._messages = [dict(message) for message in messages]
        text = conversation_text(self._tokenizer, self._messages, self._task.tools, of=self._title)
        self._context = encode_text(self._tokenizer, text)
        self._marks: list[_Mark] = []

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, sampled ones and others."""
        return (*self._context, *self._token_ids)

    def fork(self, num_turns: int, number: int) -> Branch:
        """Return a branch that is as this one was behind its reply `num_turns`, of at least 1; both go on apart."""
        mark, other = self._marks[num_turns - 1], copy.copy(self)
        task = _task_of(self._origin, number)
        other.number = number
        other._task = replace(self._task, lease=task.lease, sampling=task.sampling)
        other._token_ids = self._token_ids[: mark.num_tokens]
        other._logprobs = self._logprobs[: mark.num_tokens]
        other._versions = self._versions[: mark.num_tokens]
        other._sampled = self._sampled[: mark.num_tokens]
        other._messages = [dict(message) for message in self._messages[: mark.num_messages]]
        other._turns, other._marks = self._turns[:num_turns], self._marks[:num_turns]
        other._said, other._texts, other._ending = [], ([], []), mark.ending
        other._beginning = None
        other._ran_out = other._replying = False
        other._truncated = other._turns[-1].status is Status.TRUNCATED
        return other

    def _record(self, completion: Completion) -> ModelReply:
        reply = super()._record(completion)
        self._marks.append(_Mark(len(self._token_ids), len(self._messages), self._ending))
        return reply


def _task_of(origin: TokenEpisode, number: int) -> EpisodeTask:
    """Return the task of a branch: what it asks the engine for has names of its own, and it draws for itself."""
    task = origin._task
    if not number:
        return task
    seed = turn_seed(task.sampling.seed, origin.index, -number)
    return replace(
        task, lease=f"{task.lease}/branch{number}", sampling=msgspec.structs.replace(task.sampling, seed=seed)
    )
