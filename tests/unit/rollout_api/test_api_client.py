"""OpenAI's client against a real engine: requests are answered with the sampled tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from api_lone import CONTEXT, DEADLINE_S, LoneEngine, forward_logprobs
from transformers import AutoModelForCausalLM

HELLO: Any = [{"role": "user", "content": "hello"}]
ENDLESS: Any = {"prompt": "q", "max_tokens": 1900, "temperature": 0}
"""Greedy sampling, with which this model repeats itself and never ends."""
WEATHER: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def client(lone: LoneEngine) -> openai.OpenAI:
    return openai.OpenAI(base_url=lone.base_url, api_key=lone.api_key, max_retries=0, timeout=DEADLINE_S)


def test_response_matches_sampled_tokens(client: openai.OpenAI, lone: LoneEngine, api_model: Path) -> None:
    answer = client.chat.completions.create(
        model=lone.model, messages=HELLO, max_tokens=20, seed=1, n=3, temperature=0.7, logprobs=True
    )
    prompt = answer.starling["prompt_token_ids"][0]  # type: ignore[attr-defined]
    assert len({choice.message.content for choice in answer.choices}) == 3, "completions of a request must differ"
    for choice in answer.choices:
        starling = choice.starling  # type: ignore[attr-defined]
        token_logprobs = choice.logprobs.content
        assert "".join(one.token for one in token_logprobs) in (
            choice.message.content,
            f"{choice.message.content}<eos>",
        )
        expected = forward_logprobs(api_model, prompt, starling["token_ids"], 0.7)
        torch.testing.assert_close(torch.tensor([one.logprob for one in token_logprobs]), expected, atol=1e-5, rtol=0)
        assert starling["versions"] == [{"version": 0, "start": 0, "end": len(token_logprobs)}]
        assert choice.finish_reason == ("stop" if token_logprobs[-1].token == "<eos>" else "length")
    assert answer.usage.prompt_tokens == len(prompt) == len("u:hello;a:")
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


def test_seed_makes_requests_repeatable(client: openai.OpenAI, lone: LoneEngine) -> None:
    def say(**more: Any) -> str:
        answer = client.chat.completions.create(model=lone.model, messages=HELLO, max_completion_tokens=24, **more)
        return answer.choices[0].message.content or ""

    assert say(seed=5) == say(seed=5) != say(seed=-5) == say(seed=-5)
    assert say(seed=(1 << 63) - 1) != say(seed=1 - (1 << 63))
    assert say() != say()
    assert say(temperature=0) == say(temperature=0)


def test_stream_equals_complete_response(client: openai.OpenAI, lone: LoneEngine) -> None:
    asked: Any = {"model": lone.model, "messages": HELLO, "max_tokens": 30, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, finishes, roles, usage = ["", ""], ["", ""], [], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles.append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert roles[:2] == ["assistant", "assistant"]
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_stop_text_ends_generation(client: openai.OpenAI, lone: LoneEngine, stream: bool) -> None:
    asked: Any = {"model": lone.model, "prompt": "abc", "max_tokens": 1200, "seed": 8}
    text = client.completions.create(**{**asked, "max_tokens": 40}).choices[0].text
    stop = text[10:12]
    before, _ = lone.sampled()
    if stream:
        pieces = list(client.completions.create(**asked, stop=[stop, "never said"], stream=True))
        returned_text = "".join(piece.choices[0].text for piece in pieces)
        finish, starling = pieces[-1].choices[0].finish_reason, pieces[-1].choices[0].starling  # type: ignore[union-attr]
    else:
        choice = client.completions.create(**asked, stop=stop).choices[0]
        returned_text, finish, starling = choice.text, choice.finish_reason, choice.starling  # type: ignore[attr-defined]
    assert returned_text == text[: text.index(stop)]
    assert finish == "stop"
    assert len(starling["token_ids"]) == text.index(stop) + 2, (
        "the tokens of the stop text are returned, its text is not"
    )
    assert starling["versions"] == [{"version": 0, "start": 0, "end": len(starling["token_ids"])}]
    sampled, running = lone.sampled()
    assert running == 0
    assert sampled - before < 600, "the engine sampled hundreds of tokens after the stop text"


def test_prompts_may_be_text_or_token_ids(client: openai.OpenAI, lone: LoneEngine, api_model: Path) -> None:
    ids = client.completions.create(model=lone.model, prompt="abc", max_tokens=1).starling["prompt_token_ids"][0]  # type: ignore[attr-defined]
    asked: Any = {"model": lone.model, "max_tokens": 9, "seed": 4, "n": 2, "logprobs": 0}
    by_text = client.completions.create(prompt="abc", **asked)
    by_ids = client.completions.create(prompt=ids, **asked)
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    many = client.completions.create(prompt=["abc", "xyz"], **asked)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in many.choices[:2]] == [choice.text for choice in by_text.choices]
    first = by_text.choices[0]
    expected = forward_logprobs(api_model, ids, first.starling["token_ids"], 1.0)  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.tensor(first.logprobs.token_logprobs), expected, atol=1e-5, rtol=0)
    assert first.logprobs.text_offset == list(range(9))


def forward_distributions(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return log-probabilities of every next token after each of `ids` but the last, [tokens - 1, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


def test_echo_returns_prompt_logprobs(client: openai.OpenAI, lone: LoneEngine, api_model: Path) -> None:
    prompts = ["hello, world", "a"]
    asked: Any = {"model": lone.model, "temperature": 0, "logprobs": 1, "echo": True, "stop": ["never said"]}
    answer = client.completions.create(prompt=prompts, max_tokens=3, n=2, **asked)
    assert answer.usage.completion_tokens == 12
    for index, choice in enumerate(answer.choices):
        prompt, token_logprobs, starling = prompts[index // 2], choice.logprobs, choice.starling  # type: ignore[attr-defined]
        assert choice.text.startswith(prompt)
        assert "".join(token_logprobs.tokens) in (choice.text, f"{choice.text}<eos>")
        assert token_logprobs.text_offset == [
            sum(map(len, token_logprobs.tokens[:at])) for at in range(len(token_logprobs.tokens))
        ]
        assert (token_logprobs.token_logprobs[0], token_logprobs.top_logprobs[0]) == (None, None), (
            "the first token has no log-probability"
        )
        assert starling["prompt_version"] == 0
        ids = [*answer.starling["prompt_token_ids"][index // 2], *starling["token_ids"]]  # type: ignore[attr-defined]
        expected = forward_distributions(api_model, ids)
        found = torch.tensor(token_logprobs.token_logprobs[1:])
        torch.testing.assert_close(found, expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-5, rtol=0)
        best = torch.tensor([max(top.values()) for top in token_logprobs.top_logprobs[1:]])
        torch.testing.assert_close(best, expected.max(-1).values, atol=1e-5, rtol=0)
        likeliest = expected.argmax(-1) == torch.tensor(ids[1:])
        assert (found == best).tolist() == likeliest.tolist(), "evaluation harnesses read the greedy token from it"
        assert likeliest[-3:].all()


def test_echo_without_completion(client: openai.OpenAI, lone: LoneEngine) -> None:
    asked: Any = {"model": lone.model, "prompt": "hello"}
    scored = client.completions.create(**asked, echo=True, max_tokens=0, logprobs=1)
    (choice,) = scored.choices
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert choice.logprobs.tokens == list("hello")
    assert choice.starling == {"token_ids": [], "versions": [], "prompt_version": 0}  # type: ignore[attr-defined]
    assert scored.usage.completion_tokens == 0
    own = client.completions.create(**asked, echo=True, max_tokens=0, logprobs=0).choices[0].logprobs
    assert own.token_logprobs == choice.logprobs.token_logprobs
    assert own.top_logprobs is None
    with_special = {**asked, "prompt": "he<eos>llo"}
    special = client.completions.create(**with_special, echo=True, max_tokens=0, logprobs=0).choices[0]
    assert special.text == "".join(special.logprobs.tokens) == "he<eos>llo"
    plain = client.completions.create(**asked, echo=True, max_tokens=4, seed=1).choices[0]
    assert plain.logprobs is None
    assert plain.text == "hello" + client.completions.create(**asked, max_tokens=4, seed=1).choices[0].text


def test_model_listing_and_health(client: openai.OpenAI, lone: LoneEngine) -> None:
    (model,) = client.models.list()
    assert (model.id, model.starling["version"]) == (lone.model, 0)  # type: ignore[attr-defined]
    assert client.models.retrieve(lone.model).id == lone.model
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4o' is not served; this replica serves 'tiny'"):
        client.chat.completions.create(model="gpt-4o", messages=HELLO)


@pytest.mark.parametrize("key", ["wrong", ""])
def test_request_without_key_is_rejected(lone: LoneEngine, key: str) -> None:
    stranger = openai.OpenAI(base_url=lone.base_url, api_key=key or "x", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="no API key, or a wrong one"):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError, match=r"api/<replica>\.json"):
        stranger.chat.completions.create(model=lone.model, messages=HELLO)


def test_requests_beyond_limits_are_rejected(client: openai.OpenAI, lone: LoneEngine) -> None:
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT} tokens") as refused:
        client.completions.create(model=lone.model, prompt="a" * CONTEXT)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n = 65: at most 64 completions"):
        client.completions.create(model=lone.model, prompt="a", n=65)
    with pytest.raises(openai.BadRequestError, match="prompt token id 5000 is outside the model's vocabulary of 99"):
        client.completions.create(model=lone.model, prompt=[1, 5000])
    with pytest.raises(openai.BadRequestError, match="prompt token id 5000 is outside"):
        client.completions.create(model=lone.model, prompt=[1, 5000], stream=True)
    with pytest.raises(openai.BadRequestError, match="prompt is empty; give at least one token"):
        client.completions.create(model=lone.model, prompt="")
    client.completions.create(model=lone.model, prompt="a", max_tokens=2)  # the server still answers


def test_concurrent_requests(lone: LoneEngine) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        if number % 2:
            answer = await client.completions.create(model=lone.model, prompt="q", max_tokens=16, seed=number // 2)
            return answer.choices[0].text
        stream = await client.completions.create(
            model=lone.model, prompt="q", max_tokens=16, seed=number // 2, stream=True
        )
        return "".join([piece.choices[0].text async for piece in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=lone.base_url, api_key=lone.api_key, max_retries=0, timeout=DEADLINE_S
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    texts = asyncio.run(all_of_them())
    assert texts[0::2] == texts[1::2], "answers are equal, streamed or not, in any batch"
    assert len(set(texts)) > 16


def test_excess_requests_get_retry_after(lone: LoneEngine) -> None:
    async def flood() -> None:
        async with openai.AsyncOpenAI(
            base_url=lone.base_url, api_key=lone.api_key, max_retries=0, timeout=DEADLINE_S
        ) as client:
            held = await asyncio.gather(
                *(client.completions.create(model=lone.model, stream=True, **ENDLESS) for _ in range(64))
            )
            with pytest.raises(openai.RateLimitError, match=r"raise rollout\.api\.max_requests") as refused:
                await client.completions.create(model=lone.model, prompt="q")
            assert refused.value.response.headers["retry-after"] == "1"
            assert (await client.models.list()).data, "requests without generation are still answered"
            for stream in held:
                await stream.close()

    asyncio.run(flood())
    idle(lone)


def idle(lone: LoneEngine) -> int:
    """Wait until the engine is idle; return the number of sampled tokens."""
    until = time.monotonic() + DEADLINE_S
    while True:
        sampled, running = lone.sampled()
        if not running:
            return sampled
        assert time.monotonic() < until, "the engine did not stop"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_generation(lone: LoneEngine, client: openai.OpenAI, stream: bool) -> None:
    before = idle(lone)
    asked = json.dumps({"model": lone.model, "n": 8, "stream": stream, **ENDLESS})
    host, port = lone.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {lone.api_key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n{asked}".encode())
        until = time.monotonic() + DEADLINE_S
        while lone.sampled()[1] == 0:
            assert time.monotonic() < until, "the engine did not start"
    sampled = idle(lone) - before
    assert sampled < 8 * ENDLESS["max_tokens"], "the completion was generated to its end"
    client.completions.create(model=lone.model, prompt="a", max_tokens=2)  # the server still answers


def test_client_cancellation_cancels_generation(lone: LoneEngine) -> None:
    before = idle(lone)

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=lone.base_url, api_key=lone.api_key, max_retries=0) as client:
            stream = await client.completions.create(model=lone.model, n=8, stream=True, **ENDLESS)
            async for _ in stream:
                await stream.close()
                break

    asyncio.run(leave())
    assert idle(lone) - before < 8 * ENDLESS["max_tokens"]


def test_request_tools_are_in_the_prompt(client: openai.OpenAI, lone: LoneEngine) -> None:
    asked: Any = {"model": lone.model, "messages": HELLO, "max_tokens": 4, "seed": 1}
    with_tools = client.chat.completions.create(**asked, tools=WEATHER)
    assert with_tools.usage.prompt_tokens == len("[weather]u:hello;a:")
    without = client.chat.completions.create(**asked, tools=WEATHER, tool_choice="none")
    assert without.usage.prompt_tokens == len("u:hello;a:")
