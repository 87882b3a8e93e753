"""Invalid parameters are rejected by name, in OpenAI's form; those without effect are accepted."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from api_lone import CONTEXT, DEADLINE_S, LoneEngine, lone_engine

from starling.rollout.api.app import Endpoint
from starling.rollout.api.episode_limits import (
    BODIES,
    MAX_BODY_BYTES,
    MAX_COMPLETIONS,
    RequestsInProgress,
    ServerLimits,
)
from starling.rollout.api.errors import ApiError
from starling.rollout.api.keys import ApiKeys
from starling.rollout.api.messages import make_call_reader, message_key
from starling.rollout.api.model import ServedModel
from starling.rollout.api.requests import ACCEPTED_VALUES, read_body, read_chat, read_text
from starling.rollout.engine.queue import EngineQueue
from starling.rollout.settings import ApiSettings

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = "Bearer {}"
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}

BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model is missing; give one that /v1/models lists"),
    ({"messages": []}, "messages is missing or empty; give a list of {role, content}"),
    ({"messages": "hi"}, "messages is missing or empty; give a list of {role, content}"),
    ({"messages": [{"role": "boss"}]}, "messages[0] has no role of system, developer, user, assistant, tool; give"),
    ({"messages": [7]}, "messages[0] has no role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0]: content of type 'image_url' is not supported here; give text",
    ),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0]: content of type None is not supported here"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
        "messages[0]: a call in tool_calls is not a function; give {id, type, function: {name, arguments}}",
    ),
    ({"tools": {"a": 1}}, "tools is not a list"),
    ({"tools": [{"type": "function"}]}, "tools[0] is not a function"),
    ({"tool_choice": "required"}, 'tool_choice = "required" is not supported here; the model decides'),
    ({"temperature": -1}, "temperature = -1: give a number from 0 to 100"),
    ({"temperature": "hot"}, 'temperature = "hot": give a number'),
    ({"temperature": True}, "temperature = true: give a number"),
    ({"temperature": 10**400}, "...: give a number from 0 to 100"),
    ({"top_p": -(10**400)}, "...: give a number above 0 to 1"),
    ({"top_p": 0}, "top_p = 0: give a number above 0 to 1"),
    ({"top_p": 1.5}, "top_p = 1.5: give a number"),
    ({"n": 0}, "n = 0: give a whole number of at least 1"),
    ({"n": 1.5}, "n = 1.5: give a whole number"),
    ({"max_tokens": 0}, "max_tokens = 0: give a whole number of at least 1"),
    ({"max_completion_tokens": "many"}, 'max_completion_tokens = "many": give a whole number'),
    ({"seed": 1 << 63}, "seed = 9223372036854775808: give a whole number of 64 bits"),
    ({"stop": ["a", ""]}, 'stop = ["a", ""]: give a text, or a list of texts'),
    ({"stop": [str(n) for n in range(17)]}, "stop has 17 texts; give at most 16"),
    ({"stop": "x" * 1001}, "stop has a text of 1001 characters; give at most 1000"),
    ({"stop_token_ids": ["a"]}, 'stop_token_ids = ["a"]: give a list of token ids'),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1025 tokens; give at most 1024"),
    ({"stream": "yes"}, 'stream = "yes": give true or false'),
    ({"stream_options": {"include_usage": True}}, "it goes with stream = true"),
    ({"stream": True, "stream_options": {"chunk": 1}}, 'stream_options = {"chunk": 1}: it goes with'),
    ({"top_logprobs": 3}, "top_logprobs = 3 is not supported here; only the sampled token's log-probability"),
    ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported here; leave it out, or give 0"),
    ({"response_format": {"type": "json_object"}}, 'is not supported here; leave it out, or give {"type": "text"}'),
    ({"functions": []}, "functions is not supported here"),
    ({"temprature": 1}, "temprature is not supported here; did you mean temperature?"),
    ({"logit_bias": {"1": 5}}, "logit_bias = "),
]

BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt = null: give a text, a list of token ids, or a list of either"),
    ({"prompt": []}, "prompt = []: give a text"),
    ({"prompt": [1, "a"]}, 'prompt = [1, "a"]: give a text'),
    ({"prompt": [[1], []]}, "prompt = [[1], []]: give a text"),
    ({"prompt": ["a"] * 4097}, "prompt has 4097 prompts; give at most 4096"),
    ({"prompt": [True]}, "prompt = [true]: give a text"),
    ({"echo": True, "stream": True}, "echo = true is not supported here; the prompt comes with the whole answer"),
    ({"echo": "yes"}, 'echo = "yes": give true or false'),
    ({"echo": False, "max_tokens": 0}, "max_tokens = 0: give a whole number of at least 1"),
    ({"logprobs": 5, "temperature": 0}, "logprobs = 5 is not supported here; of sampled tokens only their own is "),
    ({"logprobs": 1, "echo": True}, "logprobs = 1 is not supported here; of sampled tokens only their own is known"),
    ({"best_of": 3}, "best_of = 3 is not supported here; no selection among completions is made: leave it out"),
    ({"suffix": "end"}, 'suffix = "end" is not supported here'),
]


@pytest.mark.parametrize(("change", "expected"), BAD_CHAT)
def test_invalid_chat_parameters_are_rejected(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_chat({**CHAT, **change})
    assert expected in str(refused.value)
    assert refused.value.status == 400
    assert refused.value.parameter is None or refused.value.parameter in {*change, "stream_options", "messages"}


@pytest.mark.parametrize(("change", "expected"), BAD_TEXT)
def test_invalid_completion_parameters_are_rejected(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_text({**TEXT, **change})
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body is [1]; send a JSON object"),
        (b"[" * 5000, "the body is nested too deeply"),
        (b'{"a": "\xff"}', "the body is not UTF-8 (invalid start byte); send a JSON object"),
        (b'"' + b"a" * (1 << 20) + b'"', 'the body is "aaaa'),
    ],
)
def test_invalid_bodies_are_rejected(raw: bytes, expected: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_body(raw)
    assert expected in str(refused.value)
    assert refused.value.code == "invalid_json"


class CountingTokenizer:
    """A tokenizer of single characters that counts how many it has encoded."""

    chat_template = ""
    num_encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_encoded += len(text)
        return [0] * len(text)


def model_of(tokenizer: CountingTokenizer) -> ServedModel:
    return ServedModel(
        name="m",
        tokenizer=tokenizer,
        max_model_len=CONTEXT,
        max_rows=1,
        eos_token_ids=(),
        version=lambda: 0,
        created_s=0,
        read_calls=make_call_reader("", None),
    )


LARGE = "x" * (1 << 20)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": LARGE}}}


@pytest.mark.parametrize(
    ("messages", "tools", "complaint"),
    [
        ([{"role": "user", "content": LARGE}], [], "more than 4096 tokens"),
        ([{"role": "user", "content": "x" * 100}] * 2000, [], "more than 4096 tokens"),
        ([{"role": "user", "content": ""}] * (CONTEXT + 1), [], f"{CONTEXT + 1} messages"),
        ([{"role": "user", "content": ""}], [CALL] * (CONTEXT + 1), f"{CONTEXT + 1} tools"),
        ([{"role": "user", "content": ""}], [CALL], "more than 4096 tokens"),
        ([{"role": "assistant", "content": "", "tool_calls": [CALL]}], [], "more than 4096 tokens"),
    ],
)
def test_conversation_far_beyond_the_context_is_refused_before_it_is_encoded(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], complaint: str
) -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(ApiError) as refused:
        model_of(tokenizer).check_conversation(messages, tools)
    assert refused.value.code == "context_length_exceeded"
    assert complaint in str(refused.value)
    assert tokenizer.num_encoded <= 1 << 15


def test_text_far_beyond_the_context_is_refused_before_it_is_encoded() -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(ApiError, match="more than 4096 tokens"):
        model_of(tokenizer).text_ids(LARGE)
    assert tokenizer.num_encoded <= 1 << 15
    assert len(model_of(tokenizer).text_ids("x" * 4000)) == 4000, "the engine's limit decides"


def test_other_requests_are_served_between_two_texts_of_a_request() -> None:
    class Tokenizer(CountingTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            seen.append("text")
            return super().encode(text, add_special_tokens=add_special_tokens)

    async def other() -> None:
        while seen.count("text") < 50:
            seen.append("other")
            await asyncio.sleep(0)

    async def both() -> None:
        body = read_text({**TEXT, "prompt": ["x" * 100] * 50})
        prompts, _ = await asyncio.gather(endpoint._tokenized(body), other())
        assert prompts == [[0] * 100] * 50

    seen: list[str] = []
    endpoint = Endpoint(EngineQueue(lambda: None), model_of(Tokenizer()), ApiSettings(), ApiKeys("k"))
    asyncio.run(both())
    assert seen.count("other") >= 49


def test_requests_with_the_key_of_the_server_are_bounded_together() -> None:
    requests = RequestsInProgress(ServerLimits(max_requests=100))
    with ExitStack() as stack:
        for _ in range(BODIES):
            stack.enter_context(requests.request()).add(MAX_BODY_BYTES)
        with (
            requests.request() as one,
            pytest.raises(ApiError, match=r"requests in progress have .* bytes, and") as error,
        ):
            one.add(1)
        assert error.value.status == 429
    with requests.request() as one, requests.request() as other:
        one.ask(MAX_COMPLETIONS)
        with pytest.raises(ApiError, match="requests in progress ask for 65537 completions, and 65536 are") as error:
            other.ask(1)
        assert error.value.status == 429
    with requests.request() as one:
        one.ask(MAX_COMPLETIONS)


def test_deeply_nested_arguments_stay_text() -> None:
    deep = "[" * 100_000
    function = {"name": "f", "arguments": deep}
    calls = [{"id": "1", "type": "function", "function": function}]
    (message,) = read_chat({**CHAT, "messages": [{"role": "assistant", "tool_calls": calls}]}).messages
    assert message["tool_calls"][0]["function"]["arguments"] == deep
    assert deep in message_key(message)[2][0][1]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"\\udfff": 1}'])
def test_arguments_that_are_no_unicode_stay_text(arguments: str) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    (message,) = read_chat({**CHAT, "messages": [{"role": "assistant", "tool_calls": calls}]}).messages
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert message_key(message)[2][0][1].isascii()


@pytest.mark.parametrize("parser", ["hermes", "llama"])
def test_call_of_a_reply_that_is_no_unicode_is_text(parser: Literal["hermes", "llama"]) -> None:
    call = '{"name": "f", "parameters": {"a": "\\ud800"}}'
    reply = f"<tool_call>{call}</tool_call>" if parser == "hermes" else call
    assert make_call_reader(parser, None)(reply) == (reply, ())
    assert make_call_reader(parser, None)(reply.replace("ud800", "u0041"))[1], "another text is a call"


@pytest.mark.parametrize("role", [["user"], {"a": 1}, 1, None], ids=str)
def test_role_that_is_no_text_is_rejected(role: Any) -> None:
    """It was an exception, and a traceback in the log."""
    with pytest.raises(ApiError, match="has no role"):
        read_chat({"model": "m", "messages": [{"role": role, "content": "x"}]})


def test_errors_do_not_repeat_a_whole_body(lone: LoneEngine) -> None:
    """Each answer waits until its client reads it, and its request is no longer in progress then."""
    body = json.dumps({**CHAT, "model": "m" * (1 << 20)}).encode()
    status, response = asked(lone, "/v1/chat/completions", body, KEY.format(lone.api_key))
    assert (status, response["error"]["message"][:9]) == (404, "model 'mm")
    assert len(response["error"]["message"]) < 10_000


def test_long_name_of_a_parameter_is_shortened() -> None:
    """It was compared with all names as a whole, for seconds."""
    with pytest.raises(ApiError) as caught:
        read_text({"model": "m", "prompt": "x", "e" * (8 << 20): 1})
    assert len(str(caught.value)) < 200


def test_parameters_without_effect_are_accepted() -> None:
    nothing: dict[str, Any] = {
        name: {"any": "thing"} if not isinstance(values[0], str | bool | int | list | dict) else values[0]
        for name, values in ACCEPTED_VALUES.items()
    }
    plain = read_chat(CHAT).options
    assert plain.max_tokens is None
    assert read_chat({**CHAT, **nothing}).options.stop == plain.stop
    absent = read_chat({**CHAT, **dict.fromkeys(("temperature", "n", "stop", "tools", "functions", "seed"))})
    assert absent.options == plain, "null counts as absent"


def test_all_parameters_are_read() -> None:
    ask = read_chat(
        {
            **CHAT,
            "max_completion_tokens": 5,
            "max_tokens": 9,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "seed": -4,
            "n": 2,
            "stop": "x",
            "stop_token_ids": [1, 2],
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).options
    assert (ask.max_tokens, ask.temperature, ask.top_p, ask.top_k, ask.seed) == (5, 0.0, 0.5, 3, -4)
    assert (ask.num_completions, ask.stop, ask.stop_token_ids) == (2, ("x",), (1, 2))
    assert (ask.logprobs, ask.stream, ask.include_usage) == (True, True, True)
    assert read_text(TEXT).options.max_tokens == 16, "OpenAI's own default"
    scored = read_text({**TEXT, "echo": True, "max_tokens": 0, "logprobs": 1})
    assert (scored.echo, scored.top_logprobs, scored.options.logprobs, scored.options.max_tokens) == (
        True,
        True,
        True,
        0,
    )
    likeliest = read_text({**TEXT, "temperature": 0, "logprobs": 1})
    assert (likeliest.echo, likeliest.top_logprobs) == (False, True)


def asked(lone: LoneEngine, path: str, body: bytes | None, key: str | None) -> tuple[int, dict[str, Any]]:
    """Send a raw HTTP request, as no client would; return status and body."""
    request = urllib.request.Request(lone.base_url.removesuffix("/v1") + path, data=body)
    if key is not None:
        request.add_header("Authorization", key)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("path", "body", "key", "status", "code"),
    [
        ("/v1/chat/completions", b"{", "Bearer {}", 400, "invalid_json"),
        ("/v1/chat/completions", json.dumps({**CHAT, "model": "tiny", "n": 0}).encode(), "Bearer {}", 400, None),
        ("/v1/chat/completions", b"{}", None, 401, "invalid_api_key"),
        ("/v1/chat/completions", b"{}", "Basic {}", 401, "invalid_api_key"),
        ("/v1/chat/completions", b"{}", "Bearer", 401, "invalid_api_key"),
        ("/v1/models", None, "bearer {}", 200, None),
        ("/v1/chat/completions", None, "Bearer {}", 405, "method_not_allowed"),
        ("/v1/embeddings", b"{}", "Bearer {}", 404, "not_found"),
        ("/v1/completions", b" " * (MAX_BODY_BYTES + 1), "Bearer {}", 413, "request_too_large"),
        ("/health", None, None, 200, None),
        ("/v1/completions", b'{"prompt": "\xff"}', "Bearer {}", 400, "invalid_json"),
    ],
)
def test_invalid_requests_over_http(
    lone: LoneEngine, path: str, body: bytes | None, key: str | None, status: int, code: str | None
) -> None:
    answered, response = asked(lone, path, body, None if key is None else key.format(lone.api_key))
    assert answered == status, response
    if status >= 400:
        assert response["error"].keys() == {"message", "type", "param", "code"}
        assert code is None or response["error"]["code"] == code


def test_json_of_any_depth_is_no_failure_of_the_server(lone: LoneEngine) -> None:
    """Python's limit on recursion depends on the depth of the caller: what was read may be too deep to be written."""
    body = json.dumps({**CHAT, "model": "tiny", "max_tokens": 1, "tools": [{"function": {"name": "f", "a": 0}}]})
    before, _, after = body.partition("0}}]")
    for depth in range(900, 1000, 2):
        raw = f"{before}{'[' * depth}{']' * depth}}}}}]{after}".encode()
        status, response = asked(lone, "/v1/chat/completions", raw, KEY.format(lone.api_key))
        assert status == 200 or response["error"]["code"] in ("invalid_json", "invalid_value"), response


def test_completions_of_one_request_are_bounded(lone: LoneEngine) -> None:
    body = json.dumps({"model": lone.model, "prompt": ["a"] * 4096, "n": 17, "max_tokens": 1}).encode()
    status, response = asked(lone, "/v1/completions", body, KEY.format(lone.api_key))
    assert (status, response["error"]["message"]) == (
        400,
        "the request asks for 69632 completions; ask for at most 65536: fewer prompts, or a smaller n",
    )


def test_request_counts_before_its_body_has_arrived(api_model: Path, tmp_path: Path) -> None:
    """Otherwise each of 4,096 connections could have a body of 32 MiB in memory."""
    with lone_engine(api_model, tmp_path, "--rollout.api.max-requests", "1") as lone:
        host, port = lone.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {lone.api_key}\r\n"
        body = json.dumps({"model": lone.model, "prompt": "ab", "max_tokens": 1}).encode()
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.sendall(f"{head}Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n".encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 100 "), "the server reads the body"
            status, response = asked(lone, "/v1/completions", body, KEY.format(lone.api_key))
            assert (status, response["error"]["message"]) == (
                429,
                "1 request is in progress already; wait for answers, or raise rollout.api.max_requests",
            )


WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def test_slow_body_times_out(lone: LoneEngine) -> None:
    host, port = lone.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {lone.api_key}\r\n"
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"model": '.encode())
        response = b""
        while part := connection.recv(4096):  # until the connection is closed
            response += part
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b"the body was not complete after 2 s; send it at once, or raise rollout.api.read_timeout_s" in response
    assert asked(lone, "/health", None, None)[0] == 200


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "parts",
    [[b""], [b"POST /v1/comp"], [b"GET /health HTTP/1.1\r\nHost: x\r\nAccept: "], [WHOLE, b"GET /h"]],
    ids=["nothing", "first line", "headers", "second request"],
)
def test_connection_without_complete_headers_is_closed(lone: LoneEngine, parts: list[bytes]) -> None:
    host, port = lone.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as connection:  # less than idle ones may stay
        for part in parts:
            connection.sendall(part)
            if part == WHOLE:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        while connection.recv(4096):  # until it is closed
            pass
    assert asked(lone, "/health", None, None)[0] == 200


def test_engine_without_prompt_scores_rejects_echo(api_model: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/extend/engine.md").read_text()
    found = dict(re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    (tmp_path / "plain_engine.py").write_text(found["python"])
    flags = ("--rollout.engine", f"{tmp_path / 'plain_engine.py'}:PlainEngine", "--rollout.max-model-len", "64")
    with lone_engine(api_model, tmp_path, *flags) as lone:
        body: dict[str, Any] = {"model": lone.model, "prompt": "ab", "max_tokens": 2, "echo": True}
        status, response = asked(
            lone, "/v1/completions", json.dumps({**body, "logprobs": 0}).encode(), KEY.format(lone.api_key)
        )
        assert (status, response["error"]["param"]) == (400, "echo")
        assert "this engine scores no prompts; leave out echo or logprobs" in response["error"]["message"]
        status, response = asked(lone, "/v1/completions", json.dumps(body).encode(), KEY.format(lone.api_key))
        assert status == 200
        assert response["choices"][0]["text"].startswith("ab")


def test_large_body_is_read_whole(lone: LoneEngine) -> None:
    body = json.dumps({**TEXT, "model": "tiny", "user": "x" * (1 << 20), "n": 0}).encode()
    assert asked(lone, "/v1/completions", body, f"Bearer {lone.api_key}")[0] == 400
