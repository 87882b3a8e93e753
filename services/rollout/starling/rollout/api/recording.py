"""Requests with the key of an episode: each is a turn of it, and the tokens of its turns are the trajectory.

A client sends the whole conversation with each request. What of it is known stays the tokens that it was: read as the
template wrote it, or as sampled. The rest is said, and the model replies.

    request        = known messages, the last a reply   + new ones   -> that branch goes on
    another one    = known up to an earlier reply       + new ones   -> a branch that leaves the known one there
    another one    = known up to no reply                            -> a branch of its own

Messages are compared by what they say (`key_of`), replies as they were told to the client. Another list of tools is
another conversation, for it stands in the prompt. The branch whose reply came last is the trajectory; the others are
counted.

The client is served in the endpoint's event loop, the episode lives in another one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starling.common.errors import ConfigError, StarlingError
from starling.rollout.api.errors import ApiError
from starling.rollout.api.generation import Choice, choice_of
from starling.rollout.api.messages import Key, ReadCalls, key_of, reply_message
from starling.rollout.api.requests import ChatCompletionRequest, RequestOptions
from starling.rollout.env.base import EpisodeOver
from starling.rollout.env.episodes.branch import Branch
from starling.rollout.env.episodes.episode import EpisodeError, TokenEpisode

OVERRULED: Final = ("temperature", "top_p", "top_k", "seed")
"""What the run decides, as its policy has to know how its tokens were drawn."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One reply of an episode."""

    made: Choice
    prompt_ids: tuple[int, ...]
    overruled: tuple[str, ...]
    """Parameters that the client gave and the run decides."""


@dataclass(slots=True)
class _Conversation:
    """One branch, as its client knows it."""

    branch: Branch
    tools: str
    keys: list[Key] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)
    """How many of the messages there were behind each reply."""
    num_busy: int = 0
    """Requests under way that go on from its end."""


class Recording:
    """The conversations of one episode.

    Args:
        episode: the episode; its event loop is the running one.
        decode: the text of token ids, without special ones.
        read_calls: finds the calls of tools in a reply, as for the client.
    """

    def __init__(self, episode: TokenEpisode, decode: Callable[[Sequence[int]], str], read_calls: ReadCalls) -> None:
        self._episode, self._decode, self._read_calls = episode, decode, read_calls
        self._loop = asyncio.get_running_loop()
        self._conversations: list[_Conversation] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_begun = 0
        self._closed = False
        self.problem: StarlingError | None = None
        """Why the last request had no reply, where it had none: what its client raises then is for this."""

    @property
    def num_branches(self) -> int:
        """Conversations that had a reply, and are not part of another one."""
        return len(self._conversations)

    async def turn(self, chat: ChatCompletionRequest) -> RecordedTurn:
        """Have the model reply to a request; called in the endpoint's event loop.

        Raises:
            ApiError: the episode is over, or cannot do what is asked for.
            StarlingError: the engine could not.
        """
        if chat.ask.num_completions > 1:
            raise ApiError(
                f"n = {chat.ask.num_completions}: an episode is one trajectory; ask for one reply at a time",
                "unsupported_parameter",
                "n",
            )
        if chat.ask.stop_token_ids:
            raise ApiError(
                "stop_token_ids is not supported in an episode; give texts as stop", "unsupported_parameter", "stop"
            )
        asked = asyncio.run_coroutine_threadsafe(self._turn(chat), self._loop)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _ended() from None  # it was the episode that ended, and not the request

    async def close(self) -> None:
        """Have nothing more said, and the branch that ended last be the trajectory; called in the episode's loop."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._conversations:
            self._episode.give_way(self._conversations[-1].branch)

    async def _turn(self, chat: ChatCompletionRequest) -> RecordedTurn:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        if self._closed:
            raise _ended()
        self._tasks.add(task)
        try:
            turn = await self._reply(chat)
            self.problem = None
        except EpisodeOver as error:
            self.problem = error
            # Clients of several kinds know by these words that it is not a failure.
            raise ApiError(
                f"the episode is over: it exceeds the configured limit ({error})", "context_length_exceeded"
            ) from None
        except (EpisodeError, ConfigError) as error:
            raise ApiError(str(error), parameter="messages") from None
        except StarlingError as error:
            self.problem = error
            raise
        finally:
            self._tasks.discard(task)
        return turn

    async def _reply(self, chat: ChatCompletionRequest) -> RecordedTurn:
        keys = [key_of(message) for message in chat.messages]
        known, num_turns = self._find(keys, chat)
        if known is None:
            branch, num_known = Branch(self._episode, chat.messages, chat.tools, self._number()), len(keys)
        else:
            goes_on = num_turns == len(known.replies) and not known.num_busy
            branch = known.branch.fork(num_turns, known.branch.number if goes_on else self._number())
            num_known = known.replies[num_turns - 1]
            known.num_busy += num_turns == len(known.replies)
        try:
            branch.say(*chat.messages[num_known:])
            await branch.reply(max_tokens=chat.ask.max_tokens, stop=chat.ask.stop)
        finally:
            if known is not None:
                known.num_busy -= num_turns == len(known.replies)
        made = choice_of(branch.turns[-1], self._decode, chat.ask.stop)
        self._add(chat, keys, branch, made, known, num_turns)
        sampled = len(branch.turns[-1].token_ids)
        return RecordedTurn(made, tuple(branch.token_ids[:-sampled]), _overruled(chat.ask, self._episode))

    def _find(self, keys: Sequence[Key], chat: ChatCompletionRequest) -> tuple[_Conversation | None, int]:
        """Return the conversation that knows most of the messages, the newest of such, and its replies among them.

        At least the last message must be new: the model replies to something.
        """
        best, most, num_turns = None, 0, 0
        for conversation in self._conversations:
            if conversation.tools != _canonical(chat):
                continue
            for turns, size in enumerate(conversation.replies, start=1):
                if most <= size < len(keys) and conversation.keys[:size] == keys[:size]:
                    best, most, num_turns = conversation, size, turns
        return best, num_turns

    def _add(
        self,
        chat: ChatCompletionRequest,
        keys: list[Key],
        branch: Branch,
        made: Choice,
        known: _Conversation | None,
        num_turns: int,
    ) -> None:
        """Keep a conversation that had a reply: the newest one stands last."""
        told = reply_message(made.text, self._read_calls if chat.tools else None)
        before = known.replies[:num_turns] if known is not None else []
        if known in self._conversations and num_turns == len(known.replies):
            self._conversations.remove(known)  # it goes on in the new one
        self._conversations.append(
            _Conversation(branch, _canonical(chat), [*keys, key_of(told)], [*before, len(keys) + 1])
        )

    def _number(self) -> int:
        """Return a number that no branch has."""
        self._num_begun += 1
        return self._num_begun - 1


def _overruled(ask: RequestOptions, episode: TokenEpisode) -> tuple[str, ...]:
    sampling = episode.sampling
    return tuple(name for name in OVERRULED if name in ask.given and getattr(ask, name) != getattr(sampling, name))


def _canonical(chat: ChatCompletionRequest) -> str:
    return json.dumps(chat.tools, sort_keys=True)


def _ended() -> ApiError:
    return ApiError("this episode has ended, and its key is not valid any more", "invalid_api_key")
