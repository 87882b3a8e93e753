"""A rollout process with vLLM, as its clients see it: requests and failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import verifiers as vf
from datasets import Dataset
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import exit_code, replica
from service import CALL, CONTEXT, NAME, ROWS, Service, make_checkpoints, service, settings

from starling.common.folder_digests import model_digest
from starling.common.wire import messages as wire
from starling.weightsync.plan.layout import Layout, decode_layout

HELLO: Any = [{"role": "user", "content": "hello"}]
ADD: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WORLD = '''
class World:
    """Reports the room; rewards the length of actions."""

    def reset(self, *, seed, options):
        self._left, self._letters = 2, 0
        return f"room {seed}"

    def step(self, action):
        self._left -= 1
        self._letters += len(action)
        return f"left {self._left}", float(len(action)), self._left == 0, False, {"letters": self._letters}
'''


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    base = tmp_path_factory.mktemp("service")
    (base / "world.py").write_text(WORLD)
    options = f'{{ environment = "{base / "world.py"}:World" }}'
    world = ("--rollout.environment.kind", "gym", "--rollout.environment.options", options)
    turns = ("--rollout.environment.turn-max-tokens", "8")
    with service(base, *world, *turns, "--rollout.api.tool-parser", "hermes") as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Service) -> openai.OpenAI:
    return served.client()


@pytest.mark.campaign
def test_rollout_of_a_run_without_policy_tells_its_checkpoint_and_no_layout(tmp_path: Path) -> None:
    folders = make_checkpoints(tmp_path)
    with closing(FakeHub()) as hub, replica(hub, NAME, tmp_path / "run", *settings("serve", folders[0]), fresh=True):
        hello, (layout,) = hub.hello(NAME)
    digests = [model_digest(folder) for folder in folders]
    assert hello.checkpoint == digests[0] != digests[1]
    assert decode_layout(layout) == Layout(replica=NAME, tensors=(), ranks=())


def test_chat_returns_tokens_and_logprobs(served: Service, client: openai.OpenAI) -> None:
    asked: Any = {"model": served.model, "messages": HELLO, "max_tokens": 20, "seed": 1, "n": 3, "temperature": 0.7}
    answer = client.chat.completions.create(**asked, logprobs=True)
    prompt = answer.starling["prompt_token_ids"][0]  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt) == len("u:hello;a:")
    assert len({choice.message.content for choice in answer.choices}) == 3, "completions of a request must differ"
    for choice in answer.choices:
        logprobs = [one.logprob for one in choice.logprobs.content]  # type: ignore[union-attr]
        assert served.check(prompt, choice.starling, logprobs, 0.7) == {served.version}  # type: ignore[attr-defined]
    again = client.chat.completions.create(**asked)
    assert [one.message.content for one in again.choices] == [one.message.content for one in answer.choices]
    other = client.chat.completions.create(**{**asked, "seed": 2})
    assert [one.message.content for one in other.choices] != [one.message.content for one in answer.choices]


def test_stream_equals_the_whole_answer(served: Service, client: openai.OpenAI) -> None:
    asked: Any = {"model": served.model, "messages": HELLO, "max_tokens": 30, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, finishes, usage = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_with_a_stop_string(
    served: Service, client: openai.OpenAI, stream: bool
) -> None:
    asked: Any = {"model": served.model, "prompt": "abc", "max_tokens": 40, "seed": 8, "logprobs": 0}
    first, second = client.completions.create(**{**asked, "prompt": ["xyz", "abc"]}).choices
    text, stop = second.text, second.text[10:12]
    assert first.text != text
    if stream:
        *_, last = pieces = list(client.completions.create(**asked, stop=[stop, "never said"], stream=True))
        returned_text, choice = "".join(piece.choices[0].text for piece in pieces), last.choices[0]
        logprobs = [value for piece in pieces if (found := piece.choices[0].logprobs) for value in found.token_logprobs]
    else:
        choice = client.completions.create(**asked, stop=stop).choices[0]
        returned_text, logprobs = choice.text, choice.logprobs.token_logprobs  # type: ignore[union-attr]
    assert returned_text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert served.check(encoded(client, served, "abc"), choice.starling, logprobs) == {served.version}  # type: ignore[union-attr]


def test_prompt_logprobs_with_and_without_a_cached_prefix(served: Service, client: openai.OpenAI) -> None:
    asked: Any = {"model": served.model, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    shared = "the same beginning, " * 20
    for prompts in ([shared + "one"], [shared + "two", "q", "another"]):
        answer = client.completions.create(prompt=prompts, **asked)
        for prompt, choice in zip(answer.starling["prompt_token_ids"], answer.choices, strict=True):  # type: ignore[attr-defined]
            starling, logprobs = choice.starling, choice.logprobs  # type: ignore[attr-defined]
            assert starling["prompt_version"] == served.version
            ids = [*prompt, *starling["token_ids"]]
            wanted = served.logprobs(served.version, ids[:1], ids[1:])
            np.testing.assert_allclose(logprobs.token_logprobs[1:], wanted, atol=1e-4)
            best = [max(top.values()) for top in logprobs.top_logprobs[1:]]
            assert (np.array(best) >= logprobs.token_logprobs[1:]).all()
            assert best[-1] == logprobs.token_logprobs[-1]


def encoded(client: openai.OpenAI, served: Service, text: str) -> list[int]:
    answer = client.completions.create(model=served.model, prompt=text, max_tokens=1)
    ids: list[int] = answer.starling["prompt_token_ids"][0]  # type: ignore[attr-defined]
    return ids


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"prompt": "a" * CONTEXT}, f"maximum context length is {CONTEXT} tokens"),
        ({"prompt": ""}, "prompt is empty; give at least one token"),
        ({"prompt": [1, 5000]}, "prompt token id 5000 is outside the model's vocabulary"),
        ({"prompt": [1, -1]}, "prompt token id -1 is outside the model's vocabulary"),
        ({"prompt": [1, 5000], "stream": True}, "prompt token id 5000 is outside the model's vocabulary"),
        ({"prompt": "a", "extra_body": {"stop_token_ids": [5000]}}, "stop token id 5000 is outside"),
        ({"prompt": "a", "temperature": 0.001}, "vLLM samples at 0 or at 0.01 and more"),
        ({"prompt": "a", "n": ROWS + 1}, f"at most {ROWS} completions can be generated together"),
    ],
)
def test_invalid_requests_are_rejected(
    served: Service, client: openai.OpenAI, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.completions.create(model=served.model, **asked)
    client.completions.create(model=served.model, prompt="a", max_tokens=2)  # the server still answers


def test_request_without_the_api_key_is_rejected(served: Service) -> None:
    stranger = openai.OpenAI(base_url=served.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="no API key, or a wrong one"):
        stranger.chat.completions.create(model=served.model, messages=HELLO)


class Running:
    """A streamed completion that a thread reads to its end."""

    def __init__(self, client: openai.OpenAI, model: str, num_tokens: int, **more: Any) -> None:
        self._asked: Any = {"model": model, "prompt": "q", "max_tokens": num_tokens, "stream": True, **more}
        self._client, self.begun, self.pieces = client, threading.Event(), list[Any]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self.begun.wait(DEADLINE_S)

    def _read(self) -> None:
        for piece in self._client.completions.create(**self._asked, logprobs=0):
            self.pieces.append(piece)
            self.begun.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self.alive


NEVER_ENDS: Any = {"temperature": 0}
"""Request whose greedy completion never ends by itself."""


def test_disconnected_client_cancels_its_request(served: Service, client: openai.OpenAI) -> None:
    beside = Running(client, served.model, CONTEXT - 200, **NEVER_ENDS)
    with client.completions.create(
        model=served.model, prompt="q", n=8, max_tokens=CONTEXT - 100, stream=True, **NEVER_ENDS
    ) as stream:
        next(iter(stream))
    # Without the cancellation it would outlast the other stream, which would never run alone.
    alone = served.hub.heartbeat(NAME, lambda status: status.gauges.get("rows") == 1.0)
    assert 0 < alone.gauges["kv_cache_share"] < 1
    beside.end()
    idle = served.hub.heartbeat(NAME, lambda status: status.gauges.get("rows") == 0.0)
    assert idle.gauges["kv_cache_share"] == 0


def test_tool_calls_are_parsed(served: Service, client: openai.OpenAI) -> None:
    asked: Any = {"model": served.model, "tools": ADD, "max_tokens": 80, "seed": 5}
    answer = client.chat.completions.create(messages=HELLO, n=ROWS, **asked)
    calling = [choice for choice in answer.choices if choice.message.tool_calls]
    assert calling, "none of some thousand tokens is the call token"
    for choice in calling:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        call = choice.message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
    returned_text = calling[0].message.model_dump(exclude_none=True)
    assert returned_text["tool_calls"]
    result = {"role": "tool", "tool_call_id": returned_text["tool_calls"][0]["id"], "content": "3"}
    second = client.chat.completions.create(messages=[*HELLO, returned_text, result], **asked)
    prompt = second.starling["prompt_token_ids"][0]  # type: ignore[attr-defined]
    first = answer.starling["prompt_token_ids"][0]  # type: ignore[attr-defined]
    assert prompt[: len(first)] == first
    assert len(prompt) > len(first)
    assert CALL not in str(second.choices[0].message.content)


class Nagging(vf.MultiTurnEnv):
    """Says `more` after each reply."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [{"role": "user", "content": "more"}]


def test_verifiers_environment_is_a_client_of_the_endpoint(served: Service) -> None:
    def letters(completion: Any) -> float:
        return float(sum(len(message["content"] or "") for message in completion if message["role"] == "assistant"))

    rows = Dataset.from_list([{"question": word, "answer": ""} for word in ("hello", "world", "again")])
    environment = Nagging(dataset=rows, max_turns=3, rubric=vf.Rubric(funcs=[letters]))

    async def evaluate() -> Any:
        async with served.async_client() as client:
            sampling: Any = {"max_tokens": 12, "logprobs": True, **NEVER_ENDS}  # an empty reply would end its rollout
            return await environment.evaluate(
                client, served.model, sampling, num_examples=3, rollouts_per_example=2, max_concurrent=6
            )

    outputs = asyncio.run(evaluate())["outputs"]
    assert [len(one["completion"]) for one in outputs] == [5] * 6, "three replies and two environment turns"
    assert all(0 < one["reward"] == letters(one["completion"]) for one in outputs)


def world_group(served: Service) -> wire.GenerateGroup:
    """Return the command for four trajectories in the environment."""
    prompt = wire.Prompt(id="p", messages=(wire.ChatMessage(role="user", content="go"),), metadata={"seed": 7})
    return wire.GenerateGroup(
        lease=served.hub.lease("generate"),
        purpose="train",
        prompt=prompt,
        num_completions=4,
        sampling=wire.Sampling(max_tokens=24, seed=3),
        min_version=0,
    )


def test_environment_group_returns_tokens_and_logprobs(served: Service) -> None:
    message = world_group(served)
    generated, buffers = served.hub.ask(NAME, message, wire.GroupGenerated)
    kinds = (np.int32, np.int32, np.float32, np.int32, np.uint8)
    prompt_ids, ids, logprobs, versions, mask = (
        np.frombuffer(buffer, kind) for buffer, kind in zip(buffers, kinds, strict=True)
    )
    ends = np.cumsum([trajectory.num_tokens for trajectory in generated.trajectories])[:-1]
    columns = (np.split(array, ends) for array in (ids, logprobs, versions, mask))
    for trajectory, tokens, token_logprobs, stamps, bits in zip(generated.trajectories, *columns, strict=True):
        sampled = bits.astype(bool)
        assert trajectory.status in (wire.Status.OK, wire.Status.TRUNCATED)
        assert set(stamps[sampled]) == {served.version}
        wanted = served.logprobs(served.version, prompt_ids.tolist(), tokens.tolist())
        np.testing.assert_allclose(token_logprobs[sampled], wanted[sampled], atol=1e-4)
        assert trajectory.num_turns == 2
        assert "left 1" in trajectory.text
        assert trajectory.reward == trajectory.metrics["letters"]


def test_requests_complete_during_adoptions(served: Service) -> None:
    over = threading.Event()
    answers: list[tuple[Any, Any]] = []

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        while not over.is_set():
            # Of several lengths: requests that all ended at once would leave a version without tokens.
            length = 40 + 4 * number
            asked: Any = {"model": served.model, "prompt": f"q{number}", "max_tokens": length, "n": 2, "logprobs": 0}
            if number % 2:
                answer = await client.completions.create(**asked)
                answers.append((answer.starling["prompt_token_ids"][0], answer.choices))  # type: ignore[attr-defined]
            else:
                stream = await client.completions.create(**asked, stream=True)
                answers.append((None, [piece.choices[0] async for piece in stream]))

    async def load() -> None:
        async with served.async_client() as client:
            await asyncio.gather(*(ask(client, number) for number in range(12)))

    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(load())
        except BaseException as error:  # noqa: BLE001 - raised by the test's own thread, below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    first = served.version
    for _ in range(12):
        served.adopt()
    over.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "a request was never answered"
    assert not failed, failed
    seen = [served.check(prompt, choice.starling, choice.logprobs.token_logprobs)
            for prompt, choices in answers if prompt for choice in choices]  # fmt: skip
    assert any(len(versions) > 1 for versions in seen), "no request spanned an adoption"
    assert set(range(first + 1, served.version)) <= set().union(*seen)
    for prompt, pieces in answers:
        if prompt is None:
            for index in range(2):
                of_choice = [piece for piece in pieces if piece.index == index]
                num = sum(len(piece.logprobs.token_logprobs) for piece in of_choice if piece.logprobs)
                assert len(of_choice[-1].starling["token_ids"]) == num
                assert of_choice[-1].finish_reason in ("stop", "length")


def test_killed_engine_is_restarted_and_loses_no_token(served: Service, client: openai.OpenAI) -> None:
    """The last test of this file: the weights are those of the folder afterwards."""
    stream = Running(client, served.model, CONTEXT - 200, seed=4, **NEVER_ENDS)
    message = world_group(served)
    served.hub.send(NAME, message)
    before = served.version
    ours = []
    for process in psutil.Process(served.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "EngineCore" in " ".join(process.cmdline()):
                ours.append(process)
    assert ours
    for process in ours:
        process.kill()
    served.hub.answer(NAME, message.lease, wire.GroupGenerated)
    stream.end()
    last = stream.pieces[-1].choices[0]
    assert last.finish_reason == "length"
    assert len(last.starling["token_ids"]) == CONTEXT - 200
    logprobs = [value for one in stream.pieces if (found := one.choices[0].logprobs) for value in found.token_logprobs]
    assert served.check(encoded(client, served, "q"), last.starling, logprobs) == {before, 0}
    answer = client.chat.completions.create(model=served.model, messages=HELLO, max_tokens=5)
    assert answer.choices[0].starling["versions"][0]["version"] == 0  # type: ignore[attr-defined]
    served.process.terminate()
    assert exit_code(served.process) == 0
