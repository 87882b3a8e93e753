"""The door: requests of other threads reach the engine, and none is lost when the engine is taken away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import make_engine, make_model, request

from starling.rollout.api.generation import Choice, Generation
from starling.rollout.engine.base import EngineLostError, GroupRequest, GroupResult, PartialCompletion, RequestError
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.shell.request_queue import LEASE_PREFIX, EngineQueue, QueueClosedError

torch.set_num_threads(1)


class Gone(TransformersEngine):
    """An engine that is lost when it is asked for anything."""

    def add(self, request: GroupRequest) -> None:
        raise EngineLostError("it is gone")


class LostOnTheWay(TransformersEngine):
    """An engine that is lost when something is taken out of it for the first time."""

    lost_by = ""

    def cancel(self, lease: str) -> bool:
        self._look("cancel")
        return super().interrupt(lease) is not None

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        self._look("interrupt")
        return super().interrupt(lease)

    def _look(self, call: str) -> None:
        if self.lost_by == call:
            self.lost_by = ""
            raise EngineLostError("it is gone")


def make_door() -> tuple[EngineQueue, threading.Event]:
    woken = threading.Event()
    return EngineQueue(woken.set), woken


def ask(door: EngineQueue, name: str, max_tokens: int = 6, **more: Any) -> Future[GroupResult]:
    return door.submit(request(LEASE_PREFIX + name, [1, 2, 3], 2, max_tokens=max_tokens, seed=1, **more))


def settle(door: EngineQueue, engine: TransformersEngine) -> None:
    """Go on until the engine is empty."""
    while engine.ready:
        for result in engine.step():
            assert door.settle(result)


def tokens(result: GroupResult) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in result.completions]


def test_a_request_of_another_thread_comes_back_to_it() -> None:
    (door, woken), engine = make_door(), make_engine()
    found: list[GroupResult] = []
    thread = threading.Thread(target=lambda: found.append(ask(door, "a").result(60)))
    thread.start()
    assert woken.wait(60)
    door.serve(engine, admit=True)
    assert not door.waiting
    settle(door, engine)
    thread.join(60)
    assert [len(ids) for ids in tokens(found[0])] == [6, 6]


def test_what_came_otherwise_is_none_of_its_business() -> None:
    (door, _), engine = make_door(), make_engine()
    engine.add(request("generate:0:0", [1], max_tokens=1))
    (result,) = engine.step()
    assert not door.settle(result)


def test_what_the_engine_refuses_is_told_to_who_asked() -> None:
    (door, _), engine = make_door(), make_engine()
    good, bad = ask(door, "good"), ask(door, "bad", max_tokens=0)
    door.serve(engine, admit=True)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        bad.result(0)
    settle(door, engine)
    assert good.done()


def test_a_prompt_is_scored_anew_by_the_next_engine() -> None:
    (door, _), engine = make_door(), make_engine()
    future = door.submit(replace(request(LEASE_PREFIX + "a", [1, 2, 3], 2, max_tokens=6, seed=1), score_prompt=True))
    door.serve(engine, admit=True)
    engine.step()
    door.take_back(engine)
    other = make_engine()
    door.serve(other, admit=True)
    settle(door, other)
    result = future.result(0)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs.logprobs) == 2
    assert [len(ids) for ids in tokens(result)] == [6, 6]


def test_what_is_said_twice_of_a_scored_prompt_is_told_once() -> None:
    (door, _), engine, other = make_door(), make_engine(), make_engine()
    asked = replace(request("", [1, 2, 3], 2, max_tokens=6, seed=1), score_prompt=True)

    def decode(ids: Sequence[int]) -> str:
        return "".join(f"{token};" for token in ids)

    async def made() -> list[Choice]:
        generation = Generation(door, [asked], decode=decode, stops=["never said"], timeout_s=60, listens=False)
        task = asyncio.create_task(generation.all())
        await asyncio.sleep(0)  # it asks
        door.serve(engine, admit=True)
        for _ in range(3):
            engine.step()
        door.take_back(engine)
        door.serve(other, admit=True)
        settle(door, other)
        return await task

    found = asyncio.run(made())
    engine = make_engine()
    engine.add(replace(asked, lease="plain"))
    (plain,) = [result for _ in range(6) for result in engine.step()]
    assert isinstance(plain, GroupResult)
    assert [one.text for one in found] == [decode(ids) for ids in tokens(plain)]
    assert all(one.prompt_logprobs is not None for one in found)


def test_requests_wait_while_none_is_admitted() -> None:
    (door, _), engine = make_door(), make_engine()
    future, dropped = ask(door, "a"), ask(door, "b")
    door.abandon(LEASE_PREFIX + "b")
    door.serve(engine, admit=False)
    assert engine.num_waiting == 0
    assert door.waiting
    door.serve(engine, admit=True)
    assert engine.num_waiting == 1
    settle(door, engine)
    assert future.done()
    assert not dropped.done()


def test_what_is_abandoned_or_cancelled_costs_the_engine_nothing() -> None:
    (door, _), engine = make_door(), make_engine()
    abandoned, cancelled = ask(door, "a", 30), ask(door, "b", 30)
    assert cancelled.cancel()
    door.serve(engine, admit=True)
    assert engine.num_waiting == 1
    engine.step()
    door.abandon(LEASE_PREFIX + "a")
    assert door.waiting
    door.serve(engine, admit=True)
    assert engine.num_running == 0
    assert not abandoned.done()


def test_what_is_under_way_cannot_be_cancelled_behind_the_engines_back() -> None:
    (door, _), engine = make_door(), make_engine()
    future = ask(door, "a")
    door.serve(engine, admit=True)
    assert not future.cancel(), "its result would have nowhere to go"
    settle(door, engine)
    assert future.done()


def test_another_engine_goes_on_where_the_first_was() -> None:
    (door, _), first, second = make_door(), make_engine(), make_engine()
    heard: list[int] = []
    asked = request(LEASE_PREFIX + "a", [1, 2, 3], 1, max_tokens=12, seed=1)
    future = door.submit(
        GroupRequest(asked.lease, asked.prompt_ids, 1, asked.sampling, listener=lambda _, ids, __: heard.extend(ids))
    )
    door.serve(first, admit=True)
    for _ in range(5):
        first.step()
    door.take_back(first)
    assert first.num_running == 0
    assert door.waiting
    late = ask(door, "late")
    door.serve(second, admit=True)
    settle(door, second)
    assert second.num_tokens == 7 + 2 * 6
    assert tokens(future.result(0)) == [heard]
    assert late.done()
    plain = make_engine()
    plain.add(asked)
    (whole,) = [result for _ in range(12) for result in plain.step()]
    assert isinstance(whole, GroupResult)
    assert tokens(whole) == [heard]


def test_what_is_enough_while_there_is_no_engine_ends_with_the_next_one() -> None:
    (door, _), first, second = make_door(), make_engine(), make_engine()
    future = ask(door, "a", 30)
    door.serve(first, admit=True)
    for _ in range(5):
        first.step()
    door.take_back(first)
    door.finish(LEASE_PREFIX + "a")
    door.serve(second, admit=False)
    assert not future.done()
    door.serve(second, admit=True)
    assert [len(ids) for ids in tokens(future.result(0))] == [5] * len(future.result(0).completions)
    assert (second.num_running, second.num_waiting) == (0, 0)


def test_a_lost_engine_loses_no_request() -> None:
    (door, _), engine = make_door(), Gone(make_model(), eos_token_ids=())
    futures = [ask(door, name) for name in "abc"]
    with pytest.raises(EngineLostError):
        door.serve(engine, admit=True)
    another = make_engine()
    door.serve(another, admit=True)
    settle(door, another)
    assert [len(tokens(future.result(0))) for future in futures] == [2, 2, 2]


@pytest.mark.parametrize("call", ["cancel", "interrupt"])
def test_an_engine_that_is_lost_as_something_is_taken_out_loses_no_request(call: str) -> None:
    """Who is not wanted is forgotten all the same, and who has enough gets it from the next engine."""
    (door, _), engine, other = make_door(), LostOnTheWay(make_model(), eos_token_ids=()), make_engine()
    unwanted, enough = ask(door, "unwanted", 30), ask(door, "enough", 30)
    door.serve(engine, admit=True)
    for _ in range(5):
        engine.step()
    engine.lost_by = call
    door.abandon(LEASE_PREFIX + "unwanted")
    door.finish(LEASE_PREFIX + "enough")
    late = ask(door, "late")
    with pytest.raises(EngineLostError):
        door.serve(engine, admit=True)
    door.take_back(engine)
    door.serve(other, admit=True)
    assert [len(ids) for ids in tokens(enough.result(0))] == [5, 5]
    settle(door, other)
    assert [len(ids) for ids in tokens(late.result(0))] == [6, 6]
    assert other.num_tokens == 2 * 6, "what nobody wants any longer was generated"
    assert not unwanted.done()


def test_who_waits_is_told_that_the_replica_leaves() -> None:
    (door, _), engine = make_door(), make_engine()
    held = ask(door, "held")
    door.serve(engine, admit=True)
    waiting, cancelled = ask(door, "waiting"), ask(door, "cancelled")
    assert cancelled.cancel()
    door.close()
    for future in (held, waiting):
        with pytest.raises(QueueClosedError, match="this replica leaves"):
            future.result(0)
    with pytest.raises(QueueClosedError, match="ask another one"):
        ask(door, "late")
