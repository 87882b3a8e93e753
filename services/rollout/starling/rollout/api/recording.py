"""Recording of an episode's requests: each is a turn of the episode, and the tokens of its turns are the trajectory.

A client sends the whole conversation with each request. Messages that are known keep their tokens, as the template
wrote them or as they were sampled; new messages are added, and the model replies.

    request        = known messages, the last a reply    + new ones   -> continues that branch
    request        = known up to an earlier reply        + new ones   -> a branch from that reply
    request        = known up to no reply                             -> a new branch

Messages are compared by `message_key`, replies in the form in which the client got them. A different list of tools is
a different conversation, since tools are part of the prompt. The branch of the last reply is the trajectory; the others
are only counted.

Requests arrive in the server's event loop; the episode runs in another one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starling.common.counts import counted
from starling.common.errors import ConfigError, StarlingError
from starling.rollout.api.episode_limits import EpisodeLimits, RequestsInProgress
from starling.rollout.api.errors import ApiError
from starling.rollout.api.generation import Choice, choice_of
from starling.rollout.api.messages import MessageKey, ReadCalls, message_key, reply_message
from starling.rollout.api.requests import ChatCompletionRequest, RequestOptions
from starling.rollout.env.base import EpisodeOver
from starling.rollout.env.episodes.branch import Branch
from starling.rollout.env.episodes.episode import EpisodeError, TokenEpisode

OVERRULED: Final = ("temperature", "top_p", "top_k", "seed")
"""Parameters that the run sets, since training needs the distribution that tokens are sampled from."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One reply of an episode."""

    choice: Choice
    prompt_ids: tuple[int, ...]
    overruled: tuple[str, ...]
    """Parameters of the client that the run overrules."""


@dataclass(slots=True)
class _Conversation:
    """One branch, as its client sees it."""

    branch: Branch
    tools: str
    size_bytes: int
    """Of the request that it is from."""
    keys: list[MessageKey] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)
    """Number of messages up to and including each reply."""
    num_continuations: int = 0
    """Requests in progress that continue it from its end."""


class Recording:
    """The conversations of one episode.

    Args:
        episode: the episode; its event loop is the running one.
        decode: decodes token ids, without special tokens.
        read_calls: parser of tool calls in a reply, as for the client.
        limits: on its requests.
    """

    def __init__(
        self,
        episode: TokenEpisode,
        decode: Callable[[Sequence[int]], str],
        read_calls: ReadCalls,
        limits: EpisodeLimits,
    ) -> None:
        self._episode, self._decode, self._read_calls, self._limits = episode, decode, read_calls, limits
        self.requests = RequestsInProgress(limits)
        """Requests that are not answered yet; for the server's event loop."""
        self._loop = asyncio.get_running_loop()
        self._conversations: list[_Conversation] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_begun = self._num_beginning = 0
        """Branches that have begun, and of these those without their first reply."""
        self._closed = False
        self.problem: StarlingError | None = None
        """Why the last request failed, if it did: the cause of what its client raises."""

    @property
    def num_branches(self) -> int:
        """Number of conversations with a reply that are not part of another one."""
        return len(self._conversations)

    async def turn(self, chat: ChatCompletionRequest, size_bytes: int) -> RecordedTurn:
        """Sample a reply to a request of `size_bytes`; called in the server's event loop.

        Raises:
            ApiError: the episode is over, or does not support the request.
            StarlingError: the engine failed.
        """
        if chat.options.num_completions > 1:
            raise ApiError(
                f"n = {chat.options.num_completions}: an episode is one trajectory; ask for one reply at a time",
                "unsupported_parameter",
                "n",
            )
        if chat.options.stop_token_ids:
            raise ApiError(
                "stop_token_ids is not supported in an episode; give texts as stop", "unsupported_parameter", "stop"
            )
        submitted = asyncio.run_coroutine_threadsafe(self._turn(chat, size_bytes), self._loop)
        try:
            return await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _ended() from None  # the episode was cancelled, not the request

    async def close(self) -> None:
        """Cancel the requests in progress, and select the trajectory; called in the episode's event loop."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._conversations:
            self._episode.replace_by(self._conversations[-1].branch)

    async def _turn(self, chat: ChatCompletionRequest, size_bytes: int) -> RecordedTurn:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        if self._closed:
            raise _ended()
        self._tasks.add(task)
        try:
            turn = await self._reply(chat, size_bytes)
            self.problem = None
        except EpisodeOver as error:
            self.problem = error
            # Several kinds of clients recognise this wording and stop without a failure.
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

    async def _reply(self, chat: ChatCompletionRequest, size_bytes: int) -> RecordedTurn:
        keys = [message_key(message) for message in chat.messages]
        known, num_turns = self._find(keys, chat)
        continues = known is not None and num_turns == len(known.replies) and not known.num_continuations
        self._check_kept(size_bytes, known if continues else None)
        if known is None:
            branch, num_known = Branch(self._episode, chat.messages, chat.tools, self._number()), len(keys)
        else:
            branch = known.branch.fork(num_turns, known.branch.number if continues else self._number())
            num_known = known.replies[num_turns - 1]
            known.num_continuations += num_turns == len(known.replies)
        self._num_beginning += not continues
        try:
            branch.say(*chat.messages[num_known:])
            await branch.reply(max_tokens=chat.options.max_tokens, stop=chat.options.stop)
        finally:
            self._num_beginning -= not continues
            if known is not None:
                known.num_continuations -= num_turns == len(known.replies)
        choice = choice_of(branch.turns[-1], self._decode, chat.options.stop)
        self._add(chat, keys, branch, choice, known, num_turns, size_bytes)
        num_sampled = len(branch.turns[-1].token_ids)
        return RecordedTurn(choice, tuple(branch.token_ids[:-num_sampled]), _overruled(chat.options, self._episode))

    def _check_kept(self, size_bytes: int, continued: _Conversation | None) -> None:
        """Raise ApiError if there is no room for a conversation: a new one, or one that takes the place of another."""
        kept, limits = [one for one in self._conversations if one is not continued], self._limits
        if continued is None and len(kept) + self._num_beginning >= limits.max_branches:
            raise ApiError(
                f"this episode has {counted(len(kept) + self._num_beginning, 'conversation')} already; continue one of "
                "them, or raise rollout.environment.max_branches",
                "too_many_requests",
            )
        total = size_bytes + sum(one.size_bytes for one in kept)
        if total > limits.total_bytes:
            raise ApiError(
                f"the conversations of this episode have {total} bytes with this one, and {limits.total_bytes} are "
                "allowed; begin fewer, with fewer bytes of messages and tools",
                "request_too_large",
            )

    def _find(self, keys: Sequence[MessageKey], chat: ChatCompletionRequest) -> tuple[_Conversation | None, int]:
        """Return the newest conversation with the longest known prefix, and the number of its replies in that prefix.

        The last message is never part of the prefix: the model replies to it.
        """
        best, most, num_turns = None, 0, 0
        tools = _canonical(chat)
        for conversation in self._conversations:
            if conversation.tools != tools:
                continue
            for turns, size in enumerate(conversation.replies, start=1):
                if most <= size < len(keys) and conversation.keys[:size] == keys[:size]:
                    best, most, num_turns = conversation, size, turns
        return best, num_turns

    def _add(
        self,
        chat: ChatCompletionRequest,
        keys: list[MessageKey],
        branch: Branch,
        choice: Choice,
        known: _Conversation | None,
        num_turns: int,
        size_bytes: int,
    ) -> None:
        """Store a conversation with a new reply, as the newest one."""
        reply = reply_message(choice.text, self._read_calls if chat.tools else None)
        before = known.replies[:num_turns] if known is not None else []
        if known in self._conversations and num_turns == len(known.replies):
            self._conversations.remove(known)  # the new one continues it
        new = _Conversation(branch, _canonical(chat), size_bytes, [*keys, message_key(reply)], [*before, len(keys) + 1])
        self._conversations.append(new)

    def _number(self) -> int:
        """Return a number that no branch has yet."""
        self._num_begun += 1
        return self._num_begun - 1


def _overruled(options: RequestOptions, episode: TokenEpisode) -> tuple[str, ...]:
    sampling = episode.sampling
    return tuple(
        name for name in OVERRULED if name in options.given and getattr(options, name) != getattr(sampling, name)
    )


def _canonical(chat: ChatCompletionRequest) -> str:
    return json.dumps(chat.tools, sort_keys=True)


def _ended() -> ApiError:
    return ApiError("this episode has ended, and its key is no longer valid", "invalid_api_key")
