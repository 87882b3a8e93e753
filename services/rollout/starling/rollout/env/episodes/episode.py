"""One trajectory while it is being made: a sequence of token ids that only grows."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from starling.algo.text import conversation, conversation_text, decode, encode_text
from starling.common.errors import StarlingError
from starling.common.wire.messages import Prompt, Sampling, Status
from starling.rollout.engine.base import GroupRequest, GroupResult, TokenListener
from starling.rollout.env.base import EpisodeOutcome, EpisodeOver, ModelReply
from starling.rollout.env.episodes.trajectory import EndedEpisode
from starling.rollout.env.episodes.turns import StopTexts, encode_behind, text_between, without_ending
from starling.rollout.shell.request_queue import LEASE_PREFIX, EngineQueue

if TYPE_CHECKING:
    from starling.rollout.engine.base import Completion


_numbers: Final = itertools.count()
"""Of all that this process's episodes ask for: a reply that is given up and asked for again is another request."""


class EpisodeError(StarlingError, ValueError):
    """An environment asked for something that this episode cannot do."""


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """What the episodes of one group have in common."""

    lease: str
    prompt: Prompt
    prompt_ids: list[int]
    sampling: Sampling
    max_turns: int
    turn_max_tokens: int
    """Most tokens of one reply; 0 for no bound of its own."""
    max_model_len: int
    tools: tuple[Mapping[str, Any], ...] = ()
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


GenerateFunction = Callable[[GroupRequest, Callable[[], bool]], Awaitable[GroupResult]]
"""Have the engine generate a group. The second argument is asked, whenever tokens have come, whether they are enough;
the result then has those there are, at least."""


class TokenEpisode:
    """An `Episode` (see `base`) of token ids. Used from one event loop."""

    def __init__(self, task: EpisodeTask, index: int, tokenizer: Any, ask: GenerateFunction) -> None:
        """Begin with the prompt of `task`, as trajectory `index` of its group."""
        self._task, self._index, self._tokenizer, self._ask = task, index, tokenizer, ask
        self._messages: list[dict[str, Any]] = conversation(task.prompt)
        self._context = list(task.prompt_ids)
        """All tokens before the first sampled one."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sampled: list[bool] = []
        self._said: list[Mapping[str, Any]] = []
        """Messages that no token stands for yet."""
        self._texts: tuple[list[str], list[str]] = ([], [])
        """Texts that no token stands for yet: those before `_said`, and those behind it."""
        self._turns: list[Completion] = []
        self._ending = ""
        """Text of the token that ended the last reply; empty where none did."""
        self._beginning: str | None = ""
        """Text with which the next reply's message begins; None where it goes on with the last message."""
        self._ran_out = self._replying = False
        self._truncated = False
        self._successor: TokenEpisode | None = None

    @property
    def prompt(self) -> Prompt:
        """What it began with."""
        return self._task.prompt

    @property
    def index(self) -> int:
        """Which of the trajectories of its group it is, from 0."""
        return self._index

    @property
    def tokenizer(self) -> Any:
        """The model's, for its event loop alone."""
        return self._tokenizer

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn."""
        return self._task.sampling

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation so far; empty where the prompt is plain text."""
        return (*self._messages, *self._said)

    @property
    def num_turns(self) -> int:
        """Replies so far."""
        return len(self._turns)

    @property
    def turns(self) -> Sequence[Completion]:
        """The replies as the engine gave them, each cut behind its stop text where it has one."""
        return tuple(self._turns)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be sampled."""
        room = self._task.max_model_len - len(self._context) - len(self._token_ids)
        return max(0, min(self._task.sampling.max_tokens - sum(self._sampled), room))

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The functions that the model was told of, as JSON schemas."""
        return self._task.tools

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ModelReply:
        """Have the model say something; see `Episode`.

        Raises:
            EpisodeOver: no turn or token is left.
            EpisodeError: another reply is under way, or the conversation cannot be written.
        """
        if self._replying:
            raise EpisodeError("a reply was asked for while another one is under way: an episode is one sequence")
        if max_tokens is not None and max_tokens < 1:
            raise EpisodeError(f"a reply of {max_tokens} tokens was asked for; give at least 1")
        if self.num_turns >= self._task.max_turns:
            raise EpisodeOver(f"the model has had its {self._task.max_turns} turns")
        self._replying = True
        try:
            self._write()
            if not (budget := self._budget(max_tokens)):
                self._ran_out = True
                raise EpisodeOver("no token is left, by sampling.max_tokens or by the context")
            stops = StopTexts(self._tokenizer, stop)
            whole = await self._sample(budget, stops)
        finally:
            self._replying = False
        completion = stops.cut(whole)
        by_token = whole is completion and completion.status is Status.OK
        self._ending = decode_all(self._tokenizer, completion.token_ids[-1:].tolist()) if by_token else ""
        return self._record(completion)

    def say(self, *messages: Mapping[str, Any]) -> None:
        """Add messages, which the chat template writes; see `Episode`.

        Raises:
            EpisodeError: the prompt is no conversation, or has images and nothing was sampled yet, or the next reply is
                to begin with a text already.
        """
        if not messages:
            return
        if not self._task.prompt.messages:
            raise EpisodeError(
                f"prompt {self._task.prompt.id!r} is plain text, to which no message can be added: "
                "give the dataset as conversations, or use say_text"
            )
        if self._texts[1] or (self._texts[0] and not self._turns):
            raise EpisodeError(
                "messages were added behind a text with which the next reply is to begin: add the messages first"
            )
        self._check_may_begin()
        self._said.extend(messages)

    def say_text(self, text: str) -> None:
        """Add text as it stands; see `Episode`.

        Raises:
            EpisodeError: the prompt has images and nothing was sampled yet.
        """
        self._check_may_begin()
        if text:
            self._texts[bool(self._said)].append(text)

    def give_way(self, other: TokenEpisode) -> None:
        """Have `other` be the trajectory."""
        self._successor = other

    def end(self, outcome: EpisodeOutcome) -> EndedEpisode:
        """Return what is there, with what came of it; what the environment said last, and nobody answered, is left out.

        A trajectory in which nothing was sampled is a failure: there is nothing to judge.
        """
        if self._successor is not None:
            return self._successor.end(outcome)
        last = max((at + 1 for at, sampled in enumerate(self._sampled) if sampled), default=0)
        status, problem = outcome.status, outcome.problem
        if status is None:
            status = Status.TRUNCATED if self._ran_out or self._truncated else Status.OK
            if not last:
                status = Status.ENV_ERROR
                problem = (
                    f"nothing was sampled: its prompt of {len(self._context)} tokens leaves no room in the context of "
                    f"{self._task.max_model_len}"
                    if self._ran_out
                    else "the environment ended without a reply of the model: ask for one"
                )
        return EndedEpisode(
            context=self._context,
            token_ids=self._token_ids[:last],
            logprobs=self._logprobs[:last],
            versions=self._versions[:last],
            sampled=self._sampled[:last],
            status=status,
            reward=outcome.reward,
            metrics=outcome.metrics,
            num_turns=self.num_turns,
            problem=problem,
        )

    # --- from what was said to tokens --------------------------------------------------------------------------------

    def _check_may_begin(self) -> None:
        if self._task.tensors and not self._turns:
            raise EpisodeError("an environment cannot add to a prompt with images before the model's first reply")

    def _write(self) -> None:
        """Make what was said into tokens."""
        (before, behind), said = map("".join, self._texts), self._said
        self._texts, self._said = ([], []), []
        if said and not self._turns:
            whole = conversation_text(self._tokenizer, [*self._messages, *said], self._task.tools, of=self._title)
            self._context = encode_text(self._tokenizer, whole)
            self._append(behind)
        elif said:
            after = text_between(self._tokenizer, self._messages, said, self._task.tools, of=self._title)
            self._append(before + without_ending(after, "" if before else self._ending) + behind)
        else:
            self._append(before)
        if self._beginning is not None:
            self._beginning += before
        elif before and self._messages:
            self._messages[-1]["content"] += before
        if said:
            self._messages.extend(dict(message) for message in said)
            self._beginning = behind

    @property
    def _title(self) -> str:
        return f"the conversation of prompt {self._task.prompt.id!r}"

    def _append(self, text: str) -> None:
        """Add tokens that are not sampled."""
        if not text:
            return
        ids = encode_behind(self._tokenizer, text)
        if not self._turns:
            self._context.extend(ids)
            return
        self._token_ids.extend(ids)
        self._logprobs.extend([0.0] * len(ids))
        self._versions.extend(self._versions[-1:] * len(ids))
        self._sampled.extend([False] * len(ids))

    # --- from the engine's answer to a reply -------------------------------------------------------------------------

    def _budget(self, max_tokens: int | None) -> int:
        bounds = [self.tokens_left]
        if max_tokens is not None:
            bounds.append(max_tokens)
        if self._task.turn_max_tokens:
            bounds.append(self._task.turn_max_tokens)
        return min(bounds)

    async def _sample(self, max_tokens: int, stops: StopTexts) -> Completion:
        """Ask the engine for one completion of all tokens so far."""
        turn, ids = self.num_turns, [*self._context, *self._token_ids]
        seed = turn_seed(self._task.sampling.seed, self._index, turn)
        request = GroupRequest(
            lease=f"{LEASE_PREFIX}{self._task.lease}/{self._index}/{turn}/{next(_numbers)}",
            prompt_ids=ids,
            num_completions=1,
            sampling=msgspec.structs.replace(self._task.sampling, max_tokens=max_tokens, seed=seed),
            tensors=_placed(self._task.tensors, len(ids)),
            listener=stops.listener,
        )
        (completion,) = (await self._ask(request, stops.reached)).completions
        return completion

    def _record(self, completion: Completion) -> ModelReply:
        ids = [int(token) for token in completion.token_ids]
        self._token_ids.extend(ids)
        self._logprobs.extend(map(float, completion.logprobs))
        self._versions.extend(map(int, completion.versions))
        self._sampled.extend([True] * len(ids))
        text = decode(self._tokenizer, ids)
        self._turns.append(completion)
        self._truncated = completion.status is Status.TRUNCATED
        if self._messages and self._beginning is None:
            self._messages[-1]["content"] += text
        elif self._messages:
            self._messages.append({"role": "assistant", "content": f"{self._beginning}{text}"})
        self._beginning = None
        finish: Literal["stop", "length"] = "length" if self._truncated else "stop"
        return ModelReply(text=text, token_ids=tuple(ids), finish=finish)


def turn_seed(seed: int, index: int, turn: int) -> int:
    """Return the seed of one reply: of the group's seed, the trajectory's index, and the replies before it."""
    digest = hashlib.sha256(f"{seed}/{index}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def decode_all(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids`, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


async def ask_through(door: EngineQueue, request: GroupRequest, enough: Callable[[], bool]) -> GroupResult:
    """Have the engine behind `door` generate `request`; see `GenerateFunction`. Cancelled, it is wanted no longer."""
    loop, own = asyncio.get_running_loop(), request.listener

    def look() -> None:
        if enough():
            door.finish(request.lease)

    def heard(index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        assert own is not None, "nobody else is told"
        own(index, token_ids, logprobs)
        # In the engine's thread, which is not to learn that nobody listens any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(look)

    listener: TokenListener | None = heard if own is not None else None
    future = asyncio.wrap_future(door.submit(replace(request, listener=listener)))
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # told, wanted or not
    try:
        # Cancelling what the door holds would surprise whoever settles it.
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        door.abandon(request.lease)
        raise


def _placed(tensors: Mapping[str, npt.NDArray[Any]], num_tokens: int) -> Mapping[str, npt.NDArray[Any]]:
    """Return the tensors of a prompt with positions for `num_tokens` tokens: those behind the prompt count on."""
    positions = tensors.get("position_ids")
    if positions is None:
        return tensors
    more = np.arange(1, num_tokens - positions.shape[1] + 1) + positions[:, -1].max()
    added = np.repeat(more[None].astype(positions.dtype), 3, axis=0)
    return {**tensors, "position_ids": np.concatenate([positions, added], axis=1)}
