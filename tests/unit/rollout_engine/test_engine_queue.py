"""The engine queue: requests of other threads reach the engine, and survive its loss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from tiny_models import VOCAB, make_engine, make_model, request
from transformers import AutoModelForCausalLM

from starling.common.wire.messages import (
    GenerateGroup,
    GroupGenerated,
    GroupInterrupted,
    Prompt,
    Sampling,
)
from starling.rollout.api.generation import Choice, Generation
from starling.rollout.core.machine import StartGroup
from starling.rollout.engine.base import EngineLostError, GroupRequest, GroupResult, PartialCompletion, RequestError
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.preparation import PreparedPrompt
from starling.rollout.engine.queue import LEASE_PREFIX, EngineQueue, QueueClosedError
from starling.rollout.shell.groups import EngineGroups
from starling.rollout.shell.results import interrupted_message

torch.set_num_threads(1)


class LostEngine(TransformersEngine):
    """An engine that is lost at the first call."""

    def add(self, request: GroupRequest) -> None:
        raise EngineLostError("the engine died")


class EngineLostOnCall(TransformersEngine):
    """An engine that is lost at the first cancellation or interruption."""

    lost_by = ""

    def cancel(self, lease: str) -> bool:
        self._check("cancel")
        return super().interrupt(lease) is not None

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        self._check("interrupt")
        return super().interrupt(lease)

    def _check(self, call: str) -> None:
        if self.lost_by == call:
            self.lost_by = ""
            raise EngineLostError("the engine died")


def make_queue() -> tuple[EngineQueue, threading.Event]:
    woken = threading.Event()
    return EngineQueue(woken.set), woken


def ask(engine_queue: EngineQueue, name: str, max_tokens: int = 6, **more: Any) -> Future[GroupResult]:
    return engine_queue.submit(request(LEASE_PREFIX + name, [1, 2, 3], 2, max_tokens=max_tokens, seed=1, **more))


def settle(engine_queue: EngineQueue, engine: TransformersEngine) -> None:
    """Step until the engine is empty."""
    while engine.ready:
        for result in engine.step():
            assert engine_queue.settle(result)


def tokens(result: GroupResult) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in result.completions]


def test_queue_returns_the_result_to_the_requesting_thread() -> None:
    (engine_queue, woken), engine = make_queue(), make_engine()
    found: list[GroupResult] = []
    thread = threading.Thread(target=lambda: found.append(ask(engine_queue, "a").result(60)))
    thread.start()
    assert woken.wait(60)
    engine_queue.serve(engine, admit=True)
    assert not engine_queue.waiting
    settle(engine_queue, engine)
    thread.join(60)
    assert [len(ids) for ids in tokens(found[0])] == [6, 6]


def test_queue_ignores_results_of_other_leases() -> None:
    (engine_queue, _), engine = make_queue(), make_engine()
    engine.add(request("generate:0:0", [1], max_tokens=1))
    (result,) = engine.step()
    assert not engine_queue.settle(result)


def test_queue_raises_a_rejection_in_the_requesting_thread() -> None:
    (engine_queue, _), engine = make_queue(), make_engine()
    good, bad = ask(engine_queue, "good"), ask(engine_queue, "bad", max_tokens=0)
    engine_queue.serve(engine, admit=True)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        bad.result(0)
    settle(engine_queue, engine)
    assert good.done()


def test_queue_requests_prompt_logprobs_again_from_the_next_engine() -> None:
    (engine_queue, _), engine = make_queue(), make_engine()
    future = engine_queue.submit(
        replace(request(LEASE_PREFIX + "a", [1, 2, 3], 2, max_tokens=6, seed=1), score_prompt=True)
    )
    engine_queue.serve(engine, admit=True)
    engine.step()
    engine_queue.requeue(engine)
    other = make_engine()
    engine_queue.serve(other, admit=True)
    settle(engine_queue, other)
    result = future.result(0)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs.logprobs) == 2
    assert [len(ids) for ids in tokens(result)] == [6, 6]


def test_generation_streams_repeated_tokens_once() -> None:
    (engine_queue, _), engine, other = make_queue(), make_engine(), make_engine()
    asked = replace(request("", [1, 2, 3], 2, max_tokens=6, seed=1), score_prompt=True)

    def decode(ids: Sequence[int]) -> str:
        return "".join(f"{token};" for token in ids)

    async def made() -> list[Choice]:
        generation = Generation(
            engine_queue, [asked], decode=decode, stops=["never said"], timeout_s=60, streaming=False
        )
        task = asyncio.create_task(generation.all())
        await asyncio.sleep(0)  # it sends its request
        engine_queue.serve(engine, admit=True)
        for _ in range(3):
            engine.step()
        engine_queue.requeue(engine)
        engine_queue.serve(other, admit=True)
        settle(engine_queue, other)
        return await task

    found = asyncio.run(made())
    engine = make_engine()
    engine.add(replace(asked, lease="plain"))
    (plain,) = [result for _ in range(6) for result in engine.step()]
    assert isinstance(plain, GroupResult)
    assert [one.text for one in found] == [decode(ids) for ids in tokens(plain)]
    assert all(one.prompt_logprobs is not None for one in found)


def test_queue_holds_requests_while_not_admitting() -> None:
    (engine_queue, _), engine = make_queue(), make_engine()
    future, dropped = ask(engine_queue, "a"), ask(engine_queue, "b")
    engine_queue.abandon(LEASE_PREFIX + "b")
    engine_queue.serve(engine, admit=False)
    assert engine.num_waiting == 0
    assert engine_queue.waiting
    engine_queue.serve(engine, admit=True)
    assert engine.num_waiting == 1
    settle(engine_queue, engine)
    assert future.done()
    assert not dropped.done()


def test_queue_cancels_abandoned_requests_in_the_engine() -> None:
    (engine_queue, _), engine = make_queue(), make_engine()
    abandoned, cancelled = ask(engine_queue, "a", 30), ask(engine_queue, "b", 30)
    assert cancelled.cancel()
    engine_queue.serve(engine, admit=True)
    assert engine.num_waiting == 1
    engine.step()
    engine_queue.abandon(LEASE_PREFIX + "a")
    assert engine_queue.waiting
    engine_queue.serve(engine, admit=True)
    assert engine.num_running == 0
    assert not abandoned.done()


def test_queue_running_request_cannot_be_cancelled_by_its_future() -> None:
    (engine_queue, _), engine = make_queue(), make_engine()
    future = ask(engine_queue, "a")
    engine_queue.serve(engine, admit=True)
    assert not future.cancel(), "its result could not be delivered"
    settle(engine_queue, engine)
    assert future.done()


def test_queue_resumes_requests_on_the_next_engine() -> None:
    (engine_queue, _), first, second = make_queue(), make_engine(), make_engine()
    streamed: list[int] = []
    asked = request(LEASE_PREFIX + "a", [1, 2, 3], 1, max_tokens=12, seed=1)
    future = engine_queue.submit(
        GroupRequest(asked.lease, asked.prompt_ids, 1, asked.sampling, listener=lambda _, ids, __: streamed.extend(ids))
    )
    engine_queue.serve(first, admit=True)
    for _ in range(5):
        first.step()
    engine_queue.requeue(first)
    assert first.num_running == 0
    assert engine_queue.waiting
    late = ask(engine_queue, "late")
    engine_queue.serve(second, admit=True)
    settle(engine_queue, second)
    assert second.num_tokens == 7 + 2 * 6
    assert tokens(future.result(0)) == [streamed]
    assert late.done()
    plain = make_engine()
    plain.add(asked)
    (whole,) = [result for _ in range(12) for result in plain.step()]
    assert isinstance(whole, GroupResult)
    assert tokens(whole) == [streamed]


def test_queue_stopped_request_ends_with_the_next_engine() -> None:
    (engine_queue, _), first, second = make_queue(), make_engine(), make_engine()
    future = ask(engine_queue, "a", 30)
    engine_queue.serve(first, admit=True)
    for _ in range(5):
        first.step()
    engine_queue.requeue(first)
    engine_queue.finish(LEASE_PREFIX + "a")
    engine_queue.serve(second, admit=False)
    assert not future.done()
    engine_queue.serve(second, admit=True)
    assert [len(ids) for ids in tokens(future.result(0))] == [5] * len(future.result(0).completions)
    assert (second.num_running, second.num_waiting) == (0, 0)


def test_queue_lost_engine_loses_no_request() -> None:
    (engine_queue, _), engine = make_queue(), LostEngine(make_model(), eos_token_ids=())
    futures = [ask(engine_queue, name) for name in "abc"]
    with pytest.raises(EngineLostError):
        engine_queue.serve(engine, admit=True)
    another = make_engine()
    engine_queue.serve(another, admit=True)
    settle(engine_queue, another)
    assert [len(tokens(future.result(0))) for future in futures] == [2, 2, 2]


@pytest.mark.parametrize("call", ["cancel", "interrupt"])
def test_queue_engine_lost_during_a_cancellation_loses_no_request(call: str) -> None:
    """A cancelled request is dropped all the same; a stopped one gets its result from the next engine."""
    (engine_queue, _), engine, other = make_queue(), EngineLostOnCall(make_model(), eos_token_ids=()), make_engine()
    unwanted, enough = ask(engine_queue, "unwanted", 30), ask(engine_queue, "enough", 30)
    engine_queue.serve(engine, admit=True)
    for _ in range(5):
        engine.step()
    engine.lost_by = call
    engine_queue.abandon(LEASE_PREFIX + "unwanted")
    engine_queue.finish(LEASE_PREFIX + "enough")
    late = ask(engine_queue, "late")
    with pytest.raises(EngineLostError):
        engine_queue.serve(engine, admit=True)
    engine_queue.requeue(engine)
    engine_queue.serve(other, admit=True)
    assert [len(ids) for ids in tokens(enough.result(0))] == [5, 5]
    settle(engine_queue, other)
    assert [len(ids) for ids in tokens(late.result(0))] == [6, 6]
    assert other.num_tokens == 2 * 6, "a cancelled request was generated"
    assert not unwanted.done()


def test_queue_close_fails_waiting_requests() -> None:
    (engine_queue, _), engine = make_queue(), make_engine()
    held = ask(engine_queue, "held")
    engine_queue.serve(engine, admit=True)
    waiting, cancelled = ask(engine_queue, "waiting"), ask(engine_queue, "cancelled")
    assert cancelled.cancel()
    engine_queue.close()
    for future in (held, waiting):
        with pytest.raises(QueueClosedError, match="this replica is shutting down"):
            future.result(0)
    with pytest.raises(QueueClosedError, match="use another one"):
        ask(engine_queue, "late")


def test_queue_requeues_every_request_of_an_engine_that_is_lost_meanwhile() -> None:
    """The tokens of the request that could not be taken out are lost; no request is."""
    (engine_queue, _), engine, other = make_queue(), EngineLostOnCall(make_model(), eos_token_ids=()), make_engine()
    futures = [ask(engine_queue, name, 8) for name in ("first", "second")]
    engine_queue.serve(engine, admit=True)
    for _ in range(3):
        engine.step()
    engine.lost_by = "interrupt"
    engine_queue.requeue(engine)
    engine_queue.serve(other, admit=True)
    settle(engine_queue, other)
    assert [[len(ids) for ids in tokens(future.result(0))] for future in futures] == [[8, 8], [8, 8]]
    assert other.num_tokens == 2 * 8 + 2 * 5, "the second continues from its tokens"


def test_every_lease_is_answered_when_the_engine_is_lost_meanwhile() -> None:
    """A lease without an answer would keep its group until its limit, of an hour, has passed."""
    answers: dict[str, GroupInterrupted] = {}

    def answer(lease: str, message: Any, buffers: tuple[bytes, ...]) -> None:
        answers[lease] = message

    engine, groups = EngineLostOnCall(make_model(), eos_token_ids=()), EngineGroups(answer, lambda ids: "")
    leases = ["generate:t0:1", "generate:t1:1"]
    for lease in leases:
        sampling = Sampling(max_tokens=8)
        message = GenerateGroup(
            lease=lease, purpose="train", prompt=Prompt(id=lease), num_completions=2, sampling=sampling, min_version=0
        )
        groups.begin(engine, PreparedPrompt(message, [1, 2, 3]))
    for _ in range(3):
        engine.step()
    engine.lost_by = "interrupt"
    assert groups.interrupt(engine, "it gives its devices to others", ["generate:t2:1"]) == ["generate:t2:1", *leases]
    assert list(answers) == ["generate:t2:1", *leases]
    assert [bool(answers[lease].partial) for lease in leases] == [False, True]


@pytest.mark.parametrize(
    ("num_tokens", "token", "missing"), [(30, 7, 0), (3, 1 << 20, 0), (3, 7, 4)], ids=["context", "vocabulary", "sizes"]
)
def test_group_begins_anew_where_its_partial_completions_cannot_be_resumed(
    num_tokens: int, token: int, missing: int
) -> None:
    """Another replica has made them: they are no fault of the prompt, which would be discarded, nor of this one."""
    answers: list[tuple[GroupGenerated, tuple[bytes, ...]]] = []
    engine = make_engine(max_model_len=16)
    groups = EngineGroups(lambda lease, message, buffers: answers.append((message, buffers)), lambda ids: "")
    partial = PartialCompletion(
        np.full(num_tokens, token, np.int32), np.zeros(num_tokens, np.float32), np.zeros(num_tokens, np.int32)
    )
    left, buffers = interrupted_message("generate:t0:1", [partial, partial], "it leaves")
    message = GenerateGroup(
        lease="generate:t0:2",
        purpose="train",
        prompt=Prompt(id="p"),
        num_completions=2,
        sampling=Sampling(max_tokens=40),
        min_version=0,
    )
    message = changed(message, partial=left.partial, tensors=left.tensors)
    groups.accept(StartGroup(message, (buffers[0][missing:], *buffers[1:])))
    groups.begin(engine, PreparedPrompt(message, [1, 2, 3]))
    for _ in range(20):
        for result in engine.step():
            assert groups.answer(result) is None
    [(answer, (_, ids, *_))] = answers
    assert [one.num_tokens for one in answer.trajectories] == [13, 13], "as much as the context holds"
    assert max(np.frombuffer(ids, np.int32).tolist()) < 1 << 20


def test_group_begins_anew_where_what_it_resumes_fills_the_cache() -> None:
    """Another replica has made its partial completions so long: the failure would be this replica's."""
    answers: list[GroupGenerated] = []
    config = make_model().config
    config.max_position_embeddings = 8192
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    engine = make_engine(model, kv_cache_mb=1)  # 4096 tokens
    num_tokens = 4095
    with torch.inference_mode():
        after = int(model(input_ids=torch.full((1, num_tokens + 1), 7)).logits[0, -1].argmax())
    groups = EngineGroups(lambda lease, message, buffers: answers.append(message), lambda ids: "")
    partial = PartialCompletion(
        np.full(num_tokens, 7, np.int32), np.zeros(num_tokens, np.float32), np.zeros(num_tokens, np.int32)
    )
    left, buffers = interrupted_message("generate:t0:1", [partial], "it leaves")
    sampling = Sampling(max_tokens=5000, temperature=0.0, stop_token_ids=tuple(set(range(VOCAB)) - {7, after}))
    message = GenerateGroup(
        lease="generate:t0:2",
        purpose="train",
        prompt=Prompt(id="p"),
        num_completions=1,
        sampling=sampling,
        min_version=0,
        partial=left.partial,
        tensors=left.tensors,
    )
    groups.accept(StartGroup(message, buffers))
    groups.begin(engine, PreparedPrompt(message, [1]))
    for _ in range(20):
        for result in engine.step():
            assert groups.begin_anew(engine, result) or groups.answer(result) is None
    [answer] = answers
    assert answer.trajectories[0].num_tokens < 20
