"""Recording of an episode's requests: which of them continue a conversation. Tests script the model's replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_lone import DEADLINE_S
from transformers import AutoTokenizer

from starling.algo.text import decode, encode_prompt, encode_text
from starling.common.wire.messages import ChatMessage, Prompt, Sampling, Status
from starling.rollout.api.episode_limits import EpisodeLimits, RequestsInProgress
from starling.rollout.api.errors import ApiError
from starling.rollout.api.messages import make_call_reader
from starling.rollout.api.recording import RecordedTurn, Recording
from starling.rollout.api.requests import read_chat
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult
from starling.rollout.env.base import EpisodeOutcome
from starling.rollout.env.episodes.episode import EpisodeTask, TokenEpisode

LIMITS = EpisodeLimits(max_requests=8, max_branches=8, max_model_len=2000)
PROMPT = Prompt(id="p", messages=(ChatMessage(role="user", content="1+2?"),))
USER: Any = {"role": "user", "content": "1+2?"}
ADD: Any = [{"type": "function", "function": {"name": "add"}}]
CALL = 'let me see <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class ScriptedModel:
    """A model with scripted replies; None for a reply that never arrives."""

    def __init__(self, tokenizer: Any, *texts: str | None) -> None:
        self._tokenizer, self._texts = tokenizer, list(texts)
        self.asked: list[GroupRequest] = []
        self.is_asked, self.is_asked_again = asyncio.Event(), asyncio.Event()

    async def ask(self, request: GroupRequest, enough: Callable[[], bool]) -> GroupResult:
        self.asked.append(request)
        self.is_asked.set()
        text = self._texts.pop(0)
        if text is None:
            self.is_asked_again.set()
            await asyncio.Event().wait()
        ids = np.array([*encode_text(self._tokenizer, text or ""), self._tokenizer.eos_token_id], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        completion = Completion(ids, zeros.astype(np.float32), zeros, Status.OK)
        return GroupResult(request.lease, np.array(request.prompt_ids, np.int32), (completion,))


@pytest.fixture(scope="module")
def tokenizer(api_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(api_model)


Ask = Callable[..., Awaitable[RecordedTurn]]


def recorded(
    tokenizer: Any,
    model: ScriptedModel,
    play: Callable[[Recording, Ask], Awaitable[None]],
    limits: EpisodeLimits = LIMITS,
) -> tuple[Recording, Any]:
    """Run an episode with a recording; return the recording and the trajectory."""

    async def run_episode() -> tuple[Recording, Any]:
        task = EpisodeTask(
            lease="generate:1",
            prompt=PROMPT,
            prompt_ids=encode_prompt(tokenizer, PROMPT),
            sampling=Sampling(max_tokens=400, temperature=0.8),
            max_turns=8,
            turn_max_tokens=0,
            max_model_len=2000,
        )
        episode = TokenEpisode(task, 0, tokenizer, model.ask)
        recording = Recording(episode, lambda ids: decode(tokenizer, ids), make_call_reader("", None), limits)

        async def ask(*messages: Any, **more: Any) -> RecordedTurn:
            body = {"model": "m", "messages": list(messages), **more}
            return await recording.turn(read_chat(body), len(json.dumps(body)))

        await play(recording, ask)
        await recording.close()
        return recording, episode.end(EpisodeOutcome(reward=1.0))

    return asyncio.run(run_episode())


def test_returned_call_is_recognised(tokenizer: Any) -> None:
    async def play(recording: Recording, ask: Ask) -> None:
        first = await ask(USER, tools=ADD, temperature=0.1, max_tokens=300)
        assert first.overruled == ("temperature",)
        assert first.choice.text == CALL
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        back = {"role": "assistant", "content": "let me see", "tool_calls": [call], "refusal": None}
        result = {"role": "tool", "tool_call_id": "x", "content": "3"}
        second = await ask(USER, back, result, tools=ADD)
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        between = second.prompt_ids[len(first.prompt_ids) :]
        assert between[: len(first.choice.token_ids)] == first.choice.token_ids, (
            "the tokens as sampled, not as a template renders them"
        )
        assert decode(tokenizer, between[len(first.choice.token_ids) :]) == ";t:3;a:"

    recording, ended = recorded(tokenizer, ScriptedModel(tokenizer, CALL, "it is 3"), play)
    assert (recording.num_branches, ended.num_turns) == (1, 2)
    assert decode(tokenizer, ended.context) == "[add]u:1+2?;a:"
    assert sum(ended.sampled) == len(CALL) + len("it is 3") + 2


def test_different_tools_start_another_conversation(tokenizer: Any) -> None:
    async def play(recording: Recording, ask: Ask) -> None:
        await ask(USER, tools=ADD)
        await ask(USER, {"role": "assistant", "content": "a"}, USER)

    recording, ended = recorded(tokenizer, ScriptedModel(tokenizer, "a", "b"), play)
    assert recording.num_branches == 2
    assert decode(tokenizer, ended.context) == "u:1+2?;a:a;u:1+2?;a:"
    assert decode(tokenizer, ended.token_ids) == "b"


def test_cancelled_request_leaves_no_trace(tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "a"}

    async def play(recording: Recording, ask: Ask) -> None:
        await ask(USER)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(USER, answer, USER), 0.05)
        await ask(USER, answer, USER)

    model = ScriptedModel(tokenizer, "a", None, "b")
    recording, ended = recorded(tokenizer, model, play)
    assert recording.num_branches == 1
    assert model.asked[1].prompt_ids == model.asked[2].prompt_ids
    assert decode(tokenizer, [*ended.context, *ended.token_ids]) == "u:1+2?;a:a;u:1+2?;a:b"


def test_branches_have_own_seeds_and_leases(tokenizer: Any) -> None:
    async def play(recording: Recording, ask: Ask) -> None:
        await asyncio.gather(*(ask(USER) for _ in range(3)))
        await ask(USER, {"role": "assistant", "content": "b"}, USER)
        await ask({"role": "user", "content": "else"})
        await ask(USER, {"role": "assistant", "content": "a"}, USER)

    model = ScriptedModel(tokenizer, "a", "b", "c", "d", "e", "f")
    recording, ended = recorded(tokenizer, model, play)
    assert recording.num_branches == 4
    assert len({request.lease for request in model.asked}) == 6
    assert len({request.sampling.seed for request in model.asked}) == 6
    assert decode(tokenizer, [*ended.context, *ended.token_ids]) == "u:1+2?;a:a;u:1+2?;a:f"


def test_request_after_episode_end_is_rejected(tokenizer: Any) -> None:
    async def play(recording: Recording, ask: Ask) -> None:
        waiting = asyncio.create_task(ask(USER))
        await asyncio.wait_for(model.is_asked.wait(), DEADLINE_S)
        await recording.close()
        for late in (waiting, ask(USER)):
            with pytest.raises(ApiError, match="this episode has ended") as refused:
                await late
            assert refused.value.status == 401

    model = ScriptedModel(tokenizer, None)
    recorded(tokenizer, model, play)


@pytest.mark.parametrize(
    ("parser", "template", "text", "found"),
    [
        ("", None, "hello", ("hello", ())),
        ("", None, CALL, ("let me see", (("add", '{"a": 1, "b": 2}'),))),
        ("", None, "<tool_call>{oops</tool_call>", ("<tool_call>{oops</tool_call>", ())),
        ("", "<|python_tag|>", '{"name": "f", "parameters": {}}', (None, (("f", "{}"),))),
        ("llama", None, '{"name": "f", "parameters": {"x": "é"}}', (None, (("f", '{"x": "é"}'),))),
        ("hermes", "<|python_tag|>", '{"name": "f", "parameters": {}}', ('{"name": "f", "parameters": {}}', ())),
    ],
)
def test_reply_calls_are_read(parser: Any, template: str | None, text: str, found: Any) -> None:
    assert make_call_reader(parser, template)(text) == found


def test_conversations_of_an_episode_are_bounded(tokenizer: Any) -> None:
    """Those that continue another one take its place: they are no more, however many requests there are."""

    async def play(recording: Recording, ask: Ask) -> None:
        await ask(USER)
        await ask(USER, {"role": "assistant", "content": "a"}, USER)
        beginning = asyncio.create_task(ask({"role": "user", "content": "2+3?"}))
        await model.is_asked_again.wait()
        with pytest.raises(ApiError, match="this episode has 2 conversations already; continue one of them, or") as one:
            await ask({"role": "user", "content": "3+4?"})
        assert one.value.status == 429
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await ask({"role": "user", "content": "3+4?"})
        with pytest.raises(ApiError, match="this episode has 2 conversations already"):
            await ask(USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "other"})
        await ask({"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "c"}, USER)

    model = ScriptedModel(tokenizer, "a", "b", None, "c", "d")
    limits = EpisodeLimits(max_requests=8, max_branches=2, max_model_len=2000)
    recording, _ = recorded(tokenizer, model, play, limits)
    assert recording.num_branches == 2


def test_bytes_of_the_conversations_of_an_episode_are_bounded(tokenizer: Any) -> None:
    """Tools and fields of messages that the template does not write are kept without taking a token."""
    tools = [{"type": "function", "function": {"name": "add", "description": "x" * LIMITS.body_bytes}}]

    async def play(recording: Recording, ask: Ask) -> None:
        for number in range(15):
            await ask({"role": "user", "content": f"{number}+1?"}, tools=tools)
        with pytest.raises(ApiError, match=f"and {LIMITS.total_bytes} are allowed; begin fewer") as error:
            await ask(USER, tools=tools)
        assert error.value.status == 413
        await ask(USER)

    many = EpisodeLimits(max_requests=8, max_branches=1000, max_model_len=2000)
    recorded(tokenizer, ScriptedModel(tokenizer, *["a"] * 17), play, many)


def test_requests_in_progress_of_an_episode_are_bounded() -> None:
    requests = RequestsInProgress(EpisodeLimits(max_requests=20, max_branches=1, max_model_len=0))
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(requests.request()).add(1 << 20)
        with requests.request() as one, pytest.raises(ApiError, match=r"the requests in progress .* wait") as error:
            one.add(1)
        assert error.value.status == 429
        for _ in range(4):
            stack.enter_context(requests.request())
        with (
            pytest.raises(ApiError, match="20 requests of this episode are in progress already") as error,
            requests.request(),
        ):
            pass
        assert error.value.status == 429
    with requests.request() as one, pytest.raises(ApiError, match="more than 1048576 bytes") as error:
        one.add((1 << 20) + 1)
    assert error.value.status == 413
