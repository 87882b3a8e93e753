"""Environments of every kind on vLLM: the log-probabilities of sampled tokens equal those of a forward pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import DEADLINE_S, forward_logprobs, read_model, spec_of
from service import CALL, CONTEXT, make_checkpoints
from transformers import AutoTokenizer

from starling.algo.text import decode, encode_prompt
from starling.common.wire import messages as wire
from starling.rollout.api.model import served_model
from starling.rollout.api.server import ApiServer
from starling.rollout.engine.model_config import end_token_ids
from starling.rollout.engine.preparation import PreparedPrompt
from starling.rollout.engine.queue import EngineQueue
from starling.rollout.engine.vllm.engine import VllmEngine
from starling.rollout.env.episodes.trajectory import PlayedGroup, Trajectory
from starling.rollout.env.registry import make_environment
from starling.rollout.env.runner import EpisodeRunner
from starling.rollout.settings import EnvironmentSettings

FILES = '''
import openai
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


class Nagging(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "more"}]


def letters(completion):
    return float(sum(len(message["content"]) for message in completion if message["role"] == "assistant"))


def nag():
    rows = Dataset.from_list([{"question": "a", "answer": "a"}])
    return Nagging(dataset=rows, max_turns=3, rubric=vf.Rubric(funcs=[letters]))


async def agent(task):
    messages = list(task.messages)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for number in range(2):
            answer = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=6)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": f"and {number}?"})
    return 1.0


async def own(episode, *, turns):
    for _ in range(turns):
        await episode.reply(max_tokens=5)
        episode.say({"role": "user", "content": "go on"})
    return float(turns)
'''


class EpisodeHarness:
    """A replica without a controller: vLLM with an engine queue, the HTTP endpoint, and environment episodes."""

    def __init__(self, folder: Path) -> None:
        self._wake, self._ended = threading.Event(), threading.Event()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = read_model(folder)
        ends = end_token_ids(self.tokenizer, folder)
        spec = spec_of(folder, self._wake.set, load_weights=True, vllm={"kv_cache_mb": 32})
        spec = replace(spec, eos_token_ids=ends, max_model_len=CONTEXT)
        self._engine = VllmEngine(spec)
        self._engine_queue = EngineQueue(self._wake.set)
        served = served_model(spec, self.tokenizer, CONTEXT, lambda: self._engine.version)
        self._server = ApiServer(self._engine_queue, served, spec.rollout.api, replica="rollout-0", folder=None)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def play(self, prompt: wire.Prompt, num_completions: int, max_tokens: int, **environment: Any) -> PlayedGroup:
        """Run the episodes of one group to their end."""
        settings = EnvironmentSettings(**environment)
        chosen = make_environment(settings)
        assert chosen is not None
        if chosen.connect is not None:
            chosen.connect(self._server)
        played: queue.Queue[Any] = queue.Queue()
        runner = EpisodeRunner(
            settings, chosen, self.tokenizer, self._engine_queue, played.put, max_model_len=self._engine.max_model_len
        )
        message = wire.GenerateGroup(
            lease="generate:0",
            purpose="train",
            prompt=prompt,
            num_completions=num_completions,
            sampling=wire.Sampling(max_tokens=max_tokens, seed=5),
            min_version=0,
        )
        try:
            runner.begin(PreparedPrompt(message, encode_prompt(self.tokenizer, prompt, chosen.tools)))
            group: PlayedGroup = played.get(timeout=DEADLINE_S)
            assert runner.take(message.lease)
            return group
        finally:
            runner.close()

    def check_text(self, played: PlayedGroup, trajectory: Trajectory) -> list[tuple[int, str]]:
        """Check the log-probabilities of the sampled tokens; return the text as runs of sampled and of other tokens."""
        assert trajectory.status in (wire.Status.OK, wire.Status.TRUNCATED), trajectory.problem
        mask = trajectory.loss_mask.astype(bool)
        wanted = forward_logprobs(self.model, played.prompt_ids.tolist(), trajectory.token_ids.tolist())
        np.testing.assert_allclose(trajectory.logprobs[mask], wanted[mask], atol=1e-4)
        assert set(trajectory.versions[mask]) == {0}
        edges = np.flatnonzero(np.diff(trajectory.loss_mask)) + 1
        runs = zip(np.split(trajectory.loss_mask, edges), np.split(trajectory.token_ids, edges), strict=True)
        return [(int(bits[0]), decode(self.tokenizer, ids)) for bits, ids in runs]

    def close(self) -> None:
        """Close server, queue and engine."""
        self._ended.set()
        self._wake.set()
        self._thread.join(DEADLINE_S)
        self._engine_queue.close()
        self._server.close()
        self._engine.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            self._engine_queue.serve(self._engine, admit=True)
            if self._engine.ready:
                for result in self._engine.step():
                    self._engine_queue.settle(result)
            else:
                self._wake.wait(1.0)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodeHarness]:
    made = EpisodeHarness(make_checkpoints(tmp_path_factory.mktemp("models"), 1)[0])
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "environments.py"
    path.write_text(FILES)
    return path


PROMPT = wire.Prompt(id="p", messages=(wire.ChatMessage(role="user", content="hello"),), reference="e")


def test_tools_environment_masks_tool_results(harness: EpisodeHarness, file: Path) -> None:
    options = {"tools": [f"{file}:add"]}
    settings: dict[str, Any] = {"kind": "tools", "options": options, "max_turns": 3, "turn_max_tokens": 60}
    played = harness.play(PROMPT, 16, 180, **settings)
    assert decode(harness.tokenizer, played.prompt_ids) == "[add]u:hello;a:"
    called = 0
    for trajectory in played.trajectories:
        runs = harness.check_text(played, trajectory)
        sampled = [text for mask, text in runs if mask]
        others = "".join(text for mask, text in runs if not mask)
        answered = sum(text.count(CALL) for text in sampled[:-1])  # calls of the last reply are not answered
        assert others.count("t:3;") == answered <= trajectory.metrics["tool_calls"]
        assert trajectory.metrics["tool_errors"] == 0.0
        called += answered
    assert called, "none of some thousand tokens is the call token"


def test_verifiers_environment(harness: EpisodeHarness, file: Path) -> None:
    settings: dict[str, Any] = {"kind": "verifiers", "options": {"environment": f"{file}:nag"}, "turn_max_tokens": 6}
    played = harness.play(PROMPT, 4, 60, **settings)
    for trajectory in played.trajectories:
        runs = harness.check_text(played, trajectory)
        assert [text for mask, text in runs if not mask] == [";u:more;a:"] * (trajectory.num_turns - 1)
        text = [text for mask, text in runs if mask]
        assert trajectory.reward == sum(map(len, text))
        assert trajectory.num_turns in range(1, 4)


def test_agent_environment_with_an_openai_client(harness: EpisodeHarness, file: Path) -> None:
    played = harness.play(PROMPT, 4, 60, kind="agent", options={"program": f"{file}:agent"}, max_turns=4)
    for trajectory in played.trajectories:
        runs = harness.check_text(played, trajectory)
        assert [mask for mask, _ in runs] == [1, 0, 1]
        assert runs[1][1] == ";u:and 0?;a:"
        assert (trajectory.reward, trajectory.num_turns) == (1.0, 2)


def test_custom_environment(harness: EpisodeHarness, file: Path) -> None:
    played = harness.play(PROMPT, 4, 60, kind=f"{file}:own", options={"turns": 3}, max_turns=4)
    for trajectory in played.trajectories:
        runs = harness.check_text(played, trajectory)
        assert [text for mask, text in runs if not mask] == [";u:go on;a:"] * 2
        assert trajectory.reward == 3.0
