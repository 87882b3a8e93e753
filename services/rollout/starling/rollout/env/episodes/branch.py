"""Branches of an episode: conversations that continue it from an earlier reply, or start over.

Programs that keep the conversation themselves branch: they ask twice, drop old messages, or hand part of the work to a
second conversation. Branches share the tokens up to the reply where they part.
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
class _ReplyEnd:
    """Sizes of the episode at the end of a reply."""

    num_tokens: int
    num_messages: int
    ending: str


class Branch(TokenEpisode):
    """One conversation of an episode, with its own first messages.

    Args:
        origin: the episode.
        messages: first messages, at least one, in the form of chat templates.
        tools: functions that the model may call, as JSON schemas.
        number: unique among the branches of `origin`, from 0; it selects the seed.

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
        super().__init__(_branch_task(origin, number), origin.index, origin._tokenizer, origin._generate)
        begun = tuple(ChatMessage(role=str(one["role"]), content=str(one["content"])) for one in messages)
        prompt = msgspec.structs.replace(origin.prompt, messages=begun)
        self._task = replace(self._task, prompt=prompt, tools=tuple(tools))
        self._messages = [dict(message) for message in messages]
        text = conversation_text(self._tokenizer, self._messages, self._task.tools, of=self._description)
        self._context = encode_text(self._tokenizer, text)
        self._reply_ends: list[_ReplyEnd] = []

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, those of the context and of the environment included."""
        return (*self._context, *self._token_ids)

    def fork(self, num_turns: int, number: int) -> Branch:
        """Return a branch that continues after this branch's reply `num_turns` (1 or more), independent of this one."""
        reply_end, other = self._reply_ends[num_turns - 1], copy.copy(self)
        task = _branch_task(self._origin, number)
        other.number = number
        other._task = replace(self._task, lease=task.lease, sampling=task.sampling)
        other._token_ids = self._token_ids[: reply_end.num_tokens]
        other._logprobs = self._logprobs[: reply_end.num_tokens]
        other._versions = self._versions[: reply_end.num_tokens]
        other._sampled = self._sampled[: reply_end.num_tokens]
        other._kept = self._kept[: reply_end.num_tokens]
        if self._routing is not None:
            other._routing = self._routing[: len(self._context) + reply_end.num_tokens]
        other._messages = [dict(message) for message in self._messages[: reply_end.num_messages]]
        other._turns, other._reply_ends = self._turns[:num_turns], self._reply_ends[:num_turns]
        other._pending_messages, other._pending_texts, other._end_token_text = [], ([], []), reply_end.ending
        other._reply_prefix = None
        other._ran_out = other._replying = False
        other._truncated = other._turns[-1].status is Status.TRUNCATED
        return other

    def _record(self, completion: Completion) -> ModelReply:
        reply = super()._record(completion)
        self._reply_ends.append(_ReplyEnd(len(self._token_ids), len(self._messages), self._end_token_text))
        return reply


def _branch_task(origin: TokenEpisode, number: int) -> EpisodeTask:
    """Return the task of a branch, with a lease and a seed of its own."""
    task = origin._task
    if not number:
        return task
    seed = turn_seed(task.sampling.seed, origin.index, -number)
    return replace(
        task, lease=f"{task.lease}/branch{number}", sampling=msgspec.structs.replace(task.sampling, seed=seed)
    )
