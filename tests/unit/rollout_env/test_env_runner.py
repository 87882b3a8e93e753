"""Episodes on a real engine: their trajectories, and failures of environments."""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from driven import CONTEXT, DrivenEngine, driven_engine, make_model, prepared_group
from tiny_chat import chat, tokenizer

from starling.algo.text import decode, encode_prompt
from starling.common.errors import ConfigError
from starling.common.wire.codec import MAX_MESSAGE_BYTES
from starling.common.wire.messages import GroupInterrupted, Prompt, Status
from starling.rollout.env.base import EpisodeOutcome
from starling.rollout.env.episodes.trajectory import PlayedGroup
from starling.rollout.env.registry import make_environment
from starling.rollout.env.runner import GRACE_S, outcome_of
from starling.rollout.settings import EnvironmentSettings
from starling.rollout.shell.groups import EnvironmentGroups
from starling.rollout.shell.results import played_message

torch.set_num_threads(1)

HERE = Path(__file__).with_name("some_environments.py")
LONG_S = 120.0
HELLO = chat("hello")
IDS = encode_prompt(tokenizer("chatml"), HELLO)


@pytest.fixture(scope="module")
def engine() -> Iterator[DrivenEngine]:
    with driven_engine(make_model()) as made:
        yield made


@pytest.fixture
def play(engine: DrivenEngine) -> Iterator[Callable[..., EnvironmentGroups]]:
    runners: list[EnvironmentGroups] = []

    def make(name: str, options: dict[str, Any] | None = None, **settings: Any) -> EnvironmentGroups:
        chosen = EnvironmentSettings(kind=f"{HERE}:{name}", options=options or {}, **settings)
        environment = make_environment(chosen)
        assert environment is not None
        runner = EnvironmentGroups(
            chosen, environment, tokenizer("chatml"), engine.engine_queue, engine.inbox.put, max_model_len=CONTEXT
        )
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def seen() -> list[str]:
    """Return the cleared list in which environments record their progress."""
    marks: list[str] = next(
        module.SEEN for module in list(sys.modules.values()) if getattr(module, "__file__", "") == str(HERE)
    )
    marks.clear()
    return marks


def wait_for_group(engine: DrivenEngine, runner: EnvironmentGroups, lease: str = "generate:t0") -> PlayedGroup:
    played = engine.inbox.get(timeout=LONG_S)
    assert isinstance(played, PlayedGroup)
    assert played.lease == lease
    assert runner.take(lease)
    assert not runner.take(lease)
    return played


def test_episode_logprobs_match_model(engine: DrivenEngine, play: Any) -> None:
    runner = play("two_turns", {"word": "no. try again"})
    runner.begin(prepared_group(HELLO, IDS, 3))
    played = wait_for_group(engine, runner)
    assert played.prompt_ids.tolist() == IDS
    model = make_model()
    for index, made in enumerate(played.trajectories):
        assert (made.status, made.reward, dict(made.metrics)) == (Status.TRUNCATED, 1.0 + index, {"turns": 2.0})
        assert made.num_turns == 2
        assert made.loss_mask.sum() <= 11
        assert (made.loss_mask == 0).sum() > 5
        assert set(made.versions.tolist()) == {5}
        ids = torch.tensor([[*IDS, *made.token_ids.tolist()]])
        with torch.no_grad():
            logs = model(input_ids=ids).logits[0].log_softmax(-1)
        at = np.flatnonzero(made.loss_mask)
        expected = [float(logs[len(IDS) - 1 + place, made.token_ids[place]]) for place in at]
        np.testing.assert_allclose(made.logprobs[at], expected, atol=1e-5)
        assert "no. try again" in tokenizer("chatml").decode(made.token_ids)
    again = play("two_turns", {"word": "no. try again"})
    again.begin(prepared_group(HELLO, IDS, 3))
    same = wait_for_group(engine, again)
    for one, other in zip(played.trajectories, same.trajectories, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist(), "trajectories depend on the seed"


def test_played_message_is_complete(engine: DrivenEngine, play: Any) -> None:
    runner = play("two_turns")
    runner.begin(prepared_group(HELLO, IDS, temperature=0.7))
    played = wait_for_group(engine, runner)
    message, buffers = played_message(played, lambda ids: decode(tokenizer("chatml"), ids))
    assert [tensor.name for tensor in message.tensors] == ["", "", "", "", "loss_mask"]
    assert [len(buffer) for buffer in buffers] == [tensor.nbytes for tensor in message.tensors]
    mask = np.frombuffer(buffers[-1], np.uint8)
    assert mask.tolist() == [flag for made in played.trajectories for flag in made.loss_mask]
    for meta, made in zip(message.trajectories, played.trajectories, strict=True):
        assert (meta.num_tokens, meta.num_masked) == (len(made.token_ids), int((made.loss_mask == 0).sum()))
        assert (meta.oldest_version, meta.newest_version) == (5, 5)
        assert (meta.reward, meta.metrics, meta.num_turns) == (made.reward, {"turns": 2.0}, 2)
        assert "try again" in meta.text
    assert message.temperature == 0.7


def test_fully_sampled_group_sends_no_mask(engine: DrivenEngine, play: Any) -> None:
    runner = play("forever", max_turns=1)
    runner.begin(prepared_group(HELLO, IDS))
    message, _ = played_message(wait_for_group(engine, runner), lambda ids: decode(tokenizer("chatml"), ids))
    assert [tensor.name for tensor in message.tensors] == [""] * 4
    assert [meta.num_masked for meta in message.trajectories] == [0, 0]


def test_environment_need_not_catch_episode_over(engine: DrivenEngine, play: Any) -> None:
    runner = play("forever", max_turns=100)
    runner.begin(prepared_group(HELLO, IDS, max_tokens=9))
    for made in wait_for_group(engine, runner).trajectories:
        assert (made.status, len(made.token_ids), made.problem) == (Status.TRUNCATED, 9, "")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "settings", "problem", "num_tokens"),
    [
        ("exits", {}, "the environment raised SystemExit: 3", 0),
        ("cancels_its_own", {}, "the environment raised CancelledError", 0),
        ("sleeps", {"timeout_s": 0.3}, "the environment took longer than 0.3 s", 2),
        ("returns_text", {}, "the environment returned a str: return a number, an EpisodeOutcome or None", 2),
        ("returns_nan", {}, "the environment returned nan as the reward: return a finite number", 2),
        ("speaks_wrongly", {}, "the environment raised EpisodeError: messages were added after a text", 0),
    ],
)
def test_environment_failures_are_described(
    engine: DrivenEngine, play: Any, name: str, settings: dict[str, Any], problem: str, num_tokens: int
) -> None:
    runner = play(name, **settings)
    runner.begin(prepared_group(HELLO, IDS))
    for made in wait_for_group(engine, runner).trajectories:
        assert made.status is Status.ENV_ERROR
        assert made.problem.startswith(problem)
        assert len(made.token_ids) <= num_tokens
    message, _ = played_message(wait_for_second_group(engine, runner), lambda ids: decode(tokenizer("chatml"), ids))
    assert {meta.status for meta in message.trajectories} == {Status.ENV_ERROR}
    if not num_tokens:
        assert {(meta.oldest_version, meta.newest_version) for meta in message.trajectories} == {(4, 4)}


def wait_for_second_group(engine: DrivenEngine, runner: EnvironmentGroups) -> PlayedGroup:
    runner.begin(prepared_group(HELLO, IDS, lease="generate:t0.1"))
    return wait_for_group(engine, runner, "generate:t0.1")


def test_failure_costs_one_trajectory(engine: DrivenEngine, play: Any) -> None:
    runner = play("raises")
    runner.begin(prepared_group(HELLO, IDS, 3))
    first, second, third = wait_for_group(engine, runner).trajectories
    assert (first.status, third.status) == (Status.TRUNCATED, Status.TRUNCATED)
    assert second.status == Status.ENV_ERROR
    file = Path(__file__).with_name("some_environments.py")
    assert re.fullmatch(rf"the environment raised KeyError: 'map' \({re.escape(str(file))}:\d+\)", second.problem)


def test_prompt_that_fills_context_fails(engine: DrivenEngine, play: Any) -> None:
    runner = play("two_turns")
    runner.begin(prepared_group(Prompt(id="p", text="x"), [9] * CONTEXT))
    for made in wait_for_group(engine, runner).trajectories:
        assert made.status is Status.ENV_ERROR
        assert f"its prompt of {CONTEXT} tokens leaves no room in the context of {CONTEXT}" in made.problem


def test_cancelled_group_is_not_answered(engine: DrivenEngine, play: Any) -> None:
    runner, marks = play("sleeps"), seen()
    runner.begin(prepared_group(HELLO, IDS))
    until(lambda: bool(runner.waits(time.monotonic() + 1.0)), "a wait")
    (wait,) = runner.waits(time.monotonic())
    assert wait.on == "environment"
    until(lambda: engine.engine.num_running == 0 and not engine.engine_queue.waiting, "the replies")
    runner.cancel("generate:t0")
    assert not runner.take("generate:t0")
    runner.close()
    assert len(marks) <= 2
    assert engine.inbox.empty()
    assert runner.waits(time.monotonic()) == ()


def test_leaving_replica_hands_over_groups(engine: DrivenEngine, play: Any) -> None:
    runner, answers = play("sleeps"), list[Any]()
    runner.begin(prepared_group(HELLO, IDS))
    runner.begin(prepared_group(HELLO, IDS, lease="generate:t1"))
    assert runner.interrupt("stopped by SIGTERM", lambda *answer: answers.append(answer)) == [
        "generate:t0",
        "generate:t1",
    ]
    for lease, message, buffers in answers:
        assert message == GroupInterrupted(lease=lease, reason="stopped by SIGTERM", partial=(), tensors=())
        assert buffers == ()
    assert runner.interrupt("again", lambda *answer: answers.append(answer)) == []
    assert len(answers) == 2


def test_group_is_answered_once(engine: DrivenEngine, play: Any) -> None:
    runner, answers = play("two_turns"), list[Any]()
    runner.begin(prepared_group(HELLO, IDS))
    played = engine.inbox.get(timeout=LONG_S)
    assert runner.answer(played, lambda *answer: answers.append(answer))
    assert not runner.answer(played, lambda *answer: answers.append(answer))
    ((lease, message, _),) = answers
    assert (lease, message.lease, len(message.trajectories)) == ("generate:t0", "generate:t0", 2)


def test_reply_with_stop_text_ends_early(engine: DrivenEngine, play: Any) -> None:
    """Every character is a stop text, so the first token with text ends the reply."""
    runner = play("stops", {"stop": [chr(code) for code in range(32, 127)]})
    runner.begin(prepared_group(HELLO, IDS, 2, max_tokens=100))
    for made in wait_for_group(engine, runner).trajectories:
        assert made.status is Status.OK
        assert made.reward == len(made.token_ids) < 60


def test_time_limit_pauses_while_engine_cannot_generate(engine: DrivenEngine, play: Any) -> None:
    runner = play("sleeps", timeout_s=0.2)
    runner.set_paused(True)
    runner.begin(prepared_group(HELLO, IDS))
    assert runner.expire(time.monotonic() + 1000.0) == []
    with pytest.raises(queue.Empty):
        engine.inbox.get(timeout=0.5)
    runner.set_paused(False)
    for made in wait_for_group(engine, runner).trajectories:
        assert made.problem == "the environment took longer than 0.2 s"


def test_blocking_environment_costs_only_its_groups(engine: DrivenEngine, play: Any) -> None:
    limit_s, begun = 60.0, time.monotonic()
    runner, marks = play("blocks", timeout_s=limit_s), seen()
    runner.begin(prepared_group(HELLO, IDS))
    until(lambda: "blocked" in marks, "the block")
    runner.expire(begun + limit_s + GRACE_S)
    assert engine.inbox.empty(), "the deadline has not passed"
    runner.expire(time.monotonic() + limit_s + GRACE_S + 1.0)
    for made in wait_for_group(engine, runner).trajectories:
        assert made.status is Status.ENV_ERROR
        assert made.problem.endswith("could not be stopped: it must not block")
    others = play("two_turns")
    others.begin(prepared_group(HELLO, IDS, lease="generate:t1"))
    assert len(wait_for_group(engine, others, "generate:t1").trajectories) == 2


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("tool", {}, "rollout.environment.kind is 'tool': did you mean 'tools'"),
        ("nothing", {}, r"known are tools, gym, agent, verifiers\. Your own `async def`"),
        (f"{HERE}:two_turn", {}, "no 'two_turn' in there; did you mean 'two_turns'"),
        (f"{HERE}:no_coroutine", {}, "is not an `async def`: write one that takes an episode"),
        (f"{HERE}:two_turns", {"words": 3}, "unexpected keyword argument 'words'.* its options are: word, reward"),
        ("tools", {"tool": []}, "its options are: tools, parser, timeout_s"),
        ("tools", {"tools": []}, "has no tools: name functions"),
        ("tools", {"tools": [{"name": "x"}]}, "names no function"),
        ("tools", {"tools": [{"functoin": "x"}]}, "the key 'functoin': did you mean 'function'"),
        ("tools", {"tools": ["a:b"], "parser": "json"}, "no parser 'json' of tool calls: known are hermes, llama"),
        ("gym", {}, "missing a required argument: 'environment'"),
        ("gym", {"environment": "nothing_like_it:World"}, "Environment 'nothing_like_it:World' cannot be imported"),
    ],
)
def test_invalid_environment_settings_are_rejected(kind: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_environment(EnvironmentSettings(kind=kind, options=options))


def test_results_that_environments_may_return() -> None:
    assert outcome_of(None) == EpisodeOutcome()
    assert outcome_of(2) == outcome_of(np.float64(2.0)) == outcome_of(True + 1) == EpisodeOutcome(reward=2.0)
    assert outcome_of(EpisodeOutcome(metrics={"a": 1})) == EpisodeOutcome(metrics={"a": 1.0})
    assert outcome_of(EpisodeOutcome(metrics={"a": float("inf")})).status is Status.ENV_ERROR


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"metrics": {f"m{n}": 1.0 for n in range(1001)}}, "the environment returned 1001 metrics: return at most"),
        ({"metrics": {"m" * 201: 1.0}}, "the environment returned a metric whose name has 201 characters: use at most"),
        ({"metrics": {"m" * (4 << 20): float("nan")}}, "the environment returned a metric whose name has 4194304 char"),
        ({"metrics": {"m": "x" * (4 << 20)}}, "the environment returned 'xxxxx"),
        ({"status": Status.ENV_ERROR, "problem": "x" * (4 << 20)}, "xxx"),
    ],
)
def test_results_without_bound_are_failures_of_few_characters(given: dict[str, Any], problem: str) -> None:
    outcome = outcome_of(EpisodeOutcome(**given))
    assert outcome.status is Status.ENV_ERROR
    assert not outcome.metrics
    assert outcome.problem.startswith(problem)
    assert len(outcome.problem) <= 2000


def test_metrics_of_a_group_that_no_message_holds_are_failures(engine: DrivenEngine, play: Any) -> None:
    runner = play("measures", {"num_metrics": 1000, "num_characters": 200})
    runner.begin(prepared_group(HELLO, IDS, 20))
    message, _ = played_message(wait_for_group(engine, runner), lambda ids: decode(tokenizer("chatml"), ids))
    assert {meta.status for meta in message.trajectories} == {Status.ENV_ERROR}
    assert message.trajectories[0].problem.startswith("the environment returned metrics of 4320000 characters")
    assert len(msgspec.msgpack.encode(message)) < MAX_MESSAGE_BYTES
    largest = play("measures", {"num_metrics": 1000, "num_characters": 80})
    largest.begin(prepared_group(HELLO, IDS, 20))
    message, _ = played_message(wait_for_group(engine, largest), lambda ids: decode(tokenizer("chatml"), ids))
    assert {len(meta.metrics) for meta in message.trajectories} == {1000}
    assert len(msgspec.msgpack.encode(message)) < MAX_MESSAGE_BYTES
