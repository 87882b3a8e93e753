"""One trajectory in progress: a sequence of token ids that only grows."""

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

from starling.algo.routing import Experts, fill, join_experts, no_experts
from starling.algo.text import conversation, conversation_text, decode, encode_text
from starling.algo.truncation import NO_IDS, IntArray, mean_nats
from starling.common.counts import counted
from starling.common.errors import StarlingError
from starling.common.wire.messages import Prompt, Sampling, Status
from starling.rollout.engine.base import GroupRequest, GroupResult, TokenListener
from starling.rollout.engine.queue import LEASE_PREFIX, EngineQueue
from starling.rollout.env.base import EpisodeOutcome, EpisodeOver, ModelReply
from starling.rollout.env.episodes.trajectory import EndedEpisode
from starling.rollout.env.episodes.turns import StopTexts, encode_continuation, strip_end_token, text_between

if TYPE_CHECKING:
    from starling.rollout.engine.base import Completion


_request_numbers: Final = itertools.count()
"""Numbers the requests of this process: a reply that is cancelled and requested again is a new request."""


class EpisodeError(StarlingError, ValueError):
    """An environment requested something that this episode cannot do."""


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """Common parts of the episodes of one group."""

    lease: str
    prompt: Prompt
    prompt_ids: list[int]
    sampling: Sampling
    max_turns: int
    turn_max_tokens: int
    """Limit on the tokens of one reply; 0 for none."""
    max_model_len: int
    max_branches: int = 1
    """Limit on the conversations of a program that keeps them itself."""
    tools: tuple[Mapping[str, Any], ...] = ()
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


GenerateFunction = Callable[[GroupRequest, Callable[[], bool]], Awaitable[GroupResult]]
"""Generates a group in the engine. The second argument is called whenever tokens arrive and returns whether they are
enough; the result then has at least those."""


class TokenEpisode:
    """An `Episode` (see `base`) over token ids. Used from one event loop."""

    def __init__(self, task: EpisodeTask, index: int, tokenizer: Any, generate: GenerateFunction) -> None:
        """Begin with the prompt of `task`, as trajectory `index` of its group."""
        self._task, self._index, self._tokenizer, self._generate = task, index, tokenizer, generate
        self._messages: list[dict[str, Any]] = conversation(task.prompt)
        self._context = list(task.prompt_ids)
        """All tokens before the first sampled one."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sampled: list[bool] = []
        self._kept: list[IntArray] = []
        """The kept tokens of `_token_ids` up to the last one for which they were recorded, none where it was not
        sampled; empty if they are not recorded."""
        self._routing: Experts | None = None
        """The experts of the tokens so far, those of the context included, up to the last reply; None if they are not
        recorded."""
        self._pending_messages: list[Mapping[str, Any]] = []
        """Messages that are not encoded yet."""
        self._pending_texts: tuple[list[str], list[str]] = ([], [])
        """Texts that are not encoded yet: those before `_pending_messages`, and those after them."""
        self._turns: list[Completion] = []
        self._end_token_text = ""
        """Text of the token that ended the last reply; empty if none did."""
        self._reply_prefix: str | None = ""
        """Text with which the next reply's message begins; None where the reply continues the last message."""
        self._ran_out = self._replying = False
        self._truncated = False
        self._replacement: TokenEpisode | None = None

    @property
    def prompt(self) -> Prompt:
        """The prompt."""
        return self._task.prompt

    @property
    def index(self) -> int:
        """Index of this trajectory in its group, from 0."""
        return self._index

    @property
    def max_branches(self) -> int:
        """Limit on the conversations of a program that keeps them itself."""
        return self._task.max_branches

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, for the episode's event loop only."""
        return self._tokenizer

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters."""
        return self._task.sampling

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation so far; empty for a prompt of plain text."""
        return (*self._messages, *self._pending_messages)

    @property
    def num_turns(self) -> int:
        """Number of replies so far."""
        return len(self._turns)

    @property
    def turns(self) -> Sequence[Completion]:
        """The replies from the engine, each cut after its stop text if it has one."""
        return tuple(self._turns)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be sampled."""
        room = self._task.max_model_len - len(self._context) - len(self._token_ids)
        return max(0, min(self._task.sampling.max_tokens - sum(self._sampled), room))

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Functions that the model may call, as JSON schemas."""
        return self._task.tools

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> ModelReply:
        """Sample one reply of the model; see `Episode`.

        Raises:
            EpisodeOver: no turn or token is left.
            EpisodeError: another reply is in progress, or the chat template refuses the conversation.
        """
        if self._replying:
            raise EpisodeError("a reply was requested while another one is in progress: an episode is one sequence")
        if max_tokens is not None and max_tokens < 1:
            raise EpisodeError(f"a reply of {max_tokens} tokens was requested; give at least 1")
        if self.num_turns >= self._task.max_turns:
            raise EpisodeOver(f"the model has had its {self._task.max_turns} turns")
        self._replying = True
        try:
            self._encode_pending()
            if not (budget := self._budget(max_tokens)):
                self._ran_out = True
                raise EpisodeOver("no token is left, by sampling.max_tokens or by the context")
            stops = StopTexts(self._tokenizer, stop)
            whole = await self._sample(budget, stops)
        finally:
            self._replying = False
        completion = stops.cut(whole)
        by_token = whole is completion and completion.status is Status.OK
        self._end_token_text = decode_all(self._tokenizer, completion.token_ids[-1:].tolist()) if by_token else ""
        return self._record(completion)

    def say(self, *messages: Mapping[str, Any]) -> None:
        """Add messages, written by the chat template; see `Episode`.

        Raises:
            EpisodeError: the prompt is plain text, or has images and nothing was sampled yet, or text was already added
                as the beginning of the next reply.
        """
        if not messages:
            return
        if not self._task.prompt.messages:
            raise EpisodeError(
                f"prompt {self._task.prompt.id!r} is plain text, to which no message can be added: "
                "give the dataset as conversations, or use say_text"
            )
        if self._pending_texts[1] or (self._pending_texts[0] and not self._turns):
            raise EpisodeError(
                "messages were added after a text with which the next reply begins: add the messages first"
            )
        self._check_images_allow_text()
        self._pending_messages.extend(messages)

    def say_text(self, text: str) -> None:
        """Add text without a template; see `Episode`.

        Raises:
            EpisodeError: the prompt has images and nothing was sampled yet.
        """
        self._check_images_allow_text()
        if text:
            self._pending_texts[bool(self._pending_messages)].append(text)

    def replace_by(self, other: TokenEpisode) -> None:
        """Let `other` be the trajectory that `end` returns."""
        self._replacement = other

    def end(self, outcome: EpisodeOutcome) -> EndedEpisode:
        """Return the trajectory with its outcome, without what the environment added after the last reply.

        A trajectory without a sampled token is a failure.
        """
        if self._replacement is not None:
            return self._replacement.end(outcome)
        last = max((at + 1 for at, sampled in enumerate(self._sampled) if sampled), default=0)
        status, problem = outcome.status, outcome.problem
        if status is None:
            status = Status.TRUNCATED if self._ran_out or self._truncated else Status.OK
            if not last:
                status = Status.ENV_ERROR
                problem = (
                    f"nothing was sampled: its prompt of {counted(len(self._context), 'token')} leaves no room in the "
                    f"context of {self._task.max_model_len}"
                    if self._ran_out
                    else "the environment ended without a reply of the model: ask for one"
                )
        return EndedEpisode(
            context=self._context,
            token_ids=self._token_ids[:last],
            logprobs=self._logprobs[:last],
            versions=self._versions[:last],
            sampled=self._sampled[:last],
            kept=self._kept + [NO_IDS] * (last - len(self._kept)) if self._kept else [],
            truncation_nats=mean_nats(turn.truncation_nats for turn in self._turns),
            routing=None if self._routing is None or not last else self._routing[: len(self._context) + last],
            status=status,
            reward=outcome.reward,
            metrics=outcome.metrics,
            num_turns=self.num_turns,
            problem=problem,
        )

    # --- pending messages and texts to tokens ------------------------------------------------------------------------

    def _check_images_allow_text(self) -> None:
        if self._task.tensors and not self._turns:
            raise EpisodeError("an environment cannot add to a prompt with images before the model's first reply")

    def _encode_pending(self) -> None:
        """Encode the pending messages and texts."""
        (before, behind), said = map("".join, self._pending_texts), self._pending_messages
        self._pending_texts, self._pending_messages = ([], []), []
        if said and not self._turns:
            whole = conversation_text(self._tokenizer, [*self._messages, *said], self._task.tools, of=self._description)
            self._context = encode_text(self._tokenizer, whole)
            self._append(behind)
        elif said:
            after = text_between(self._tokenizer, self._messages, said, self._task.tools, of=self._description)
            self._append(before + strip_end_token(after, "" if before else self._end_token_text) + behind)
        else:
            self._append(before)
        if self._reply_prefix is not None:
            self._reply_prefix += before
        elif before and self._messages:
            self._messages[-1]["content"] += before
        if said:
            self._messages.extend(dict(message) for message in said)
            self._reply_prefix = behind

    @property
    def _description(self) -> str:
        return f"the conversation of prompt {self._task.prompt.id!r}"

    def _append(self, text: str) -> None:
        """Add tokens that were not sampled."""
        if not text:
            return
        ids = encode_continuation(self._tokenizer, text)
        if not self._turns:
            self._context.extend(ids)
            return
        self._token_ids.extend(ids)
        self._logprobs.extend([0.0] * len(ids))
        self._versions.extend(self._versions[-1:] * len(ids))
        self._sampled.extend([False] * len(ids))

    # --- sampling ----------------------------------------------------------------------------------------------------

    def _budget(self, max_tokens: int | None) -> int:
        bounds = [self.tokens_left]
        if max_tokens is not None:
            bounds.append(max_tokens)
        if self._task.turn_max_tokens:
            bounds.append(self._task.turn_max_tokens)
        return min(bounds)

    async def _sample(self, max_tokens: int, stops: StopTexts) -> Completion:
        """Request one completion of all tokens so far from the engine."""
        turn, ids = self.num_turns, [*self._context, *self._token_ids]
        seed = turn_seed(self._task.sampling.seed, self._index, turn)
        request = GroupRequest(
            lease=f"{LEASE_PREFIX}{self._task.lease}/{self._index}/{turn}/{next(_request_numbers)}",
            prompt_ids=ids,
            num_completions=1,
            sampling=msgspec.structs.replace(self._task.sampling, max_tokens=max_tokens, seed=seed),
            tensors=_extend_positions(self._task.tensors, len(ids)),
            listener=stops.listener,
        )
        result = await self._generate(request, stops.reached)
        (completion,) = result.completions
        self._record_routing(result.prompt_routing, len(ids), stops.cut(completion))
        return completion

    def _record_routing(self, prompt: Experts | None, num_prompt: int, completion: Completion) -> None:
        """Note the experts of a prompt, which has all tokens so far, and of the reply to it.

        Tokens that an earlier reply was sampled from keep those of then.
        """
        joined = join_experts([(prompt, num_prompt), (completion.routing, len(completion.token_ids))])
        if joined is None:
            return
        if self._routing is not None:
            known = self._routing[: len(joined)]
            joined = fill(np.concatenate([known, no_experts(len(joined) - len(known), known)]), joined)
        self._routing = joined

    def _record(self, completion: Completion) -> ModelReply:
        ids = [int(token) for token in completion.token_ids]
        self._token_ids.extend(ids)
        self._logprobs.extend(map(float, completion.logprobs))
        self._versions.extend(map(int, completion.versions))
        self._sampled.extend([True] * len(ids))
        if completion.kept is not None:
            self._kept.extend([NO_IDS] * (len(self._token_ids) - len(ids) - len(self._kept)))
            self._kept.extend(completion.kept.rows())
        text = decode(self._tokenizer, ids)
        self._turns.append(completion)
        self._truncated = completion.status is Status.TRUNCATED
        if self._messages and self._reply_prefix is None:
            self._messages[-1]["content"] += text
        elif self._messages:
            self._messages.append({"role": "assistant", "content": f"{self._reply_prefix}{text}"})
        self._reply_prefix = None
        finish: Literal["stop", "length"] = "length" if self._truncated else "stop"
        return ModelReply(text=text, token_ids=tuple(ids), finish=finish)


def turn_seed(seed: int, index: int, turn: int) -> int:
    """Return the seed of one reply, derived from the group's seed, the trajectory's index and the reply's number."""
    digest = hashlib.sha256(f"{seed}/{index}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def decode_all(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids`, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


async def generate_through(engine_queue: EngineQueue, request: GroupRequest, enough: Callable[[], bool]) -> GroupResult:
    """Generate `request` through the engine's queue; see `GenerateFunction`. Cancelling it abandons the request."""
    loop, own = asyncio.get_running_loop(), request.listener

    def check() -> None:
        if enough():
            engine_queue.finish(request.lease)

    def on_tokens(index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        assert own is not None, "only a listener is wrapped"
        own(index, token_ids, logprobs)
        # This runs in the engine's thread, which must not fail because the event loop has been closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(check)

    listener: TokenListener | None = on_tokens if own is not None else None
    future = asyncio.wrap_future(engine_queue.submit(replace(request, listener=listener)))
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks its exception as retrieved
    try:
        # Shielded: the queue settles its futures, and nothing else may cancel them.
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        engine_queue.abandon(request.lease)
        raise


def _extend_positions(tensors: Mapping[str, npt.NDArray[Any]], num_tokens: int) -> Mapping[str, npt.NDArray[Any]]:
    """Return the prompt's tensors with position ids for `num_tokens` tokens, counting on after the prompt."""
    positions = tensors.get("position_ids")
    if positions is None:
        return tensors
    more = np.arange(1, num_tokens - positions.shape[1] + 1) + positions[:, -1].max()
    added = np.repeat(more[None].astype(positions.dtype), 3, axis=0)
    return {**tensors, "position_ids": np.concatenate([positions, added], axis=1)}
