"""Requests of HTTP clients: accepted within limits, kept until they expire, counted exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.requests import RequestResult, RewardRequest
from starling.reward.core.samples import PromptText, Sample
from starling.reward.http.errors import HttpError
from starling.reward.http.settings import HttpSettings
from starling.reward.http.table import RequestTable


class Stage:
    """A table with a clock, and what it passed on."""

    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.table = RequestTable(
            HttpSettings.model_validate(settings),
            lambda request: self.submitted.append(request.id),
            self.cancelled.append,
            lambda: self.now,
        )

    def add(self, id: str, num_samples: int = 1, num_bytes: int = 0) -> None:
        completion = CompletionText(text="a", status=Status.OK, num_tokens=1)
        samples = tuple(Sample(index, 0, completion) for index in range(num_samples))
        self.table.add(RewardRequest(id, (PromptText("", "", {}),), samples), num_bytes)

    def finish(self, id: str, num_samples: int = 1) -> None:
        self.table.finish(RequestResult(id, (1.0,) * num_samples, (Status.OK,) * num_samples, ((),) * num_samples, {}))

    def fetch(self, id: str) -> bytes | None:
        return asyncio.run(self.table.result(id, 0.0))


def refused(call: Any, *arguments: Any) -> int:
    with pytest.raises(HttpError) as caught:
        call(*arguments)
    assert caught.value.retry_after_s == (1 if caught.value.status == 429 else None)
    return caught.value.status


def test_samples_in_progress_are_limited_and_a_large_request_is_taken_alone() -> None:
    stage = Stage(max_samples=4)
    stage.add("a", 3)
    assert refused(stage.add, "b", 2) == 429
    stage.add("c", 1)
    stage.finish("a", 3)
    stage.add("d", 3)
    stage.finish("c")
    stage.finish("d", 3)
    stage.add("e", 9)
    assert (stage.submitted, stage.table.num_samples) == (["a", "c", "d", "e"], 9)


def test_memory_of_requests_and_results_is_limited_and_free_again_when_they_expire() -> None:
    stage = Stage(max_memory_mb=1, max_body_mb=1, result_ttl_s=10.0)
    stage.add("a", num_bytes=700_000)
    assert refused(stage.add, "b", 1, 400_000) == 429
    assert refused(stage.table.check_room, 400_000) == 429
    stage.finish("a")
    stage.add("b", num_bytes=400_000)
    stage.now = 9.9
    assert stage.fetch("a") is not None
    stage.now = 10.0
    assert refused(stage.fetch, "a") == 404
    assert stage.fetch("b") is None
    stage.table.remove("b")
    assert (stage.cancelled, stage.table.num_samples, stage.table.size_bytes, len(stage.table)) == (["b"], 0, 0, 0)
    stage.finish("b")
    assert len(stage.table) == 0, "the result of a removed request is dropped"


def test_waiting_client_gets_the_result_when_it_comes() -> None:
    async def scenario() -> tuple[bytes | None, bytes | None]:
        stage = Stage()
        stage.add("a")
        waiting = asyncio.ensure_future(stage.table.result("a", 30.0))
        early = await stage.table.result("a", 0.01)
        stage.finish("a")
        return early, await waiting

    early, found = asyncio.run(scenario())
    assert early is None
    assert found is not None
    assert found.startswith(b'{"id":"a","status":"done","rewards":[1.0]')


def test_client_that_waits_is_told_when_its_request_is_removed_or_the_service_stops() -> None:
    async def scenario() -> list[int]:
        stage = Stage()
        stage.add("a")
        stage.add("b")
        waiting = [asyncio.ensure_future(stage.table.result(id, 30.0)) for id in ("a", "b")]
        await asyncio.sleep(0)
        stage.table.remove("a")
        await asyncio.sleep(0)
        stage.table.close()
        found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20.0)
        return [error.status for error in found if isinstance(error, HttpError)]

    assert asyncio.run(scenario()) == [404, 503]


steps = st.lists(
    st.tuples(st.sampled_from(["add", "finish", "remove", "pass"]), st.integers(0, 5), st.integers(1, 3)), max_size=40
)


@given(steps)
def test_counts_are_those_of_the_requests_that_are_held(steps: list[tuple[str, int, int]]) -> None:
    stage = Stage(result_ttl_s=3.0)
    held: dict[str, tuple[int, float | None]] = {}
    for step, which, size in steps:
        id = str(which)
        held = {name: one for name, one in held.items() if one[1] is None or one[1] > stage.now}
        match step:
            case "add" if id not in held:
                stage.add(id, size, num_bytes=100)
                held[id] = (size, None)
            case "finish" if id in held and held[id][1] is None:
                stage.finish(id, held[id][0])
                held[id] = (held[id][0], stage.now + 3.0)
            case "remove" if id in held:
                stage.table.remove(id)
                del held[id]
            case "pass":
                stage.now += size
    stage.table.check_room(0)
    held = {name: one for name, one in held.items() if one[1] is None or one[1] > stage.now}
    assert len(stage.table) == len(held)
    assert stage.table.num_samples == sum(num for num, end in held.values() if end is None)
    stage.now += 3.0
    for name in [name for name, one in held.items() if one[1] is None]:
        stage.table.remove(name)
    stage.table.check_room(0)
    assert (len(stage.table), stage.table.size_bytes, stage.table._expiry) == (0, 0, {})
