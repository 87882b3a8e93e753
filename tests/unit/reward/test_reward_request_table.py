"""Requests of HTTP clients: accepted within limits, kept until they expire, counted exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import MediaForm, MediaTensor
from starling.reward.core.requests import RequestResult, RewardRequest
from starling.reward.core.samples import PromptText, Sample
from starling.reward.http.errors import HttpError
from starling.reward.http.settings import HttpSettings
from starling.reward.http.stores.memory import MemoryStore
from starling.reward.http.stores.sqlite import SqliteStore
from starling.reward.http.stores.store import ENTRY_BYTES, FinishedRequest, RequestBody, RequestStore
from starling.reward.http.table import RequestTable
from starling.reward.score.workers.shared import MediaMemory, SharedBuffer


class Stage:
    """A table with a clock, and what it passed on."""

    def __init__(self, store: RequestStore | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.pixel_bytes = 0
        self.memory = MediaMemory()
        limits = HttpSettings.model_validate(settings)
        self.table = RequestTable(
            limits,
            store or MemoryStore(limits.result_ttl_s, lambda: self.now),
            lambda request: self.submitted.append(request.id),
            self.cancelled.append,
            {},
            self.memory,
            pixel_bytes=lambda request: self.pixel_bytes,
        )

    @classmethod
    async def started(cls, store: RequestStore | None = None, **settings: Any) -> Stage:
        stage = cls(store, **settings)
        await stage.table.start()
        return stage

    async def add(
        self,
        id: str,
        num_samples: int = 1,
        num_bytes: int = 0,
        info: dict[str, Any] | None = None,
        body: RequestBody | None = None,
        media: tuple[MediaTensor, ...] = (),
    ) -> None:
        completion = CompletionText(text="a", status=Status.OK, num_tokens=1)
        samples = tuple(Sample(index, 0, completion) for index in range(num_samples))
        request = RewardRequest(id, (PromptText("", "", {}),), samples, media=media)
        await self.table.add(request, num_bytes, body, info)

    async def finish(self, id: str, num_samples: int = 1, reward: float = 1.0) -> None:
        num = num_samples
        self.table.finish(RequestResult(id, (reward,) * num, (Status.OK,) * num, ((),) * num, {}))
        await asyncio.sleep(0)  # it is stored by a task

    async def fetch(self, id: str) -> FinishedRequest | None:
        return await self.table.result(id, 0.0)


async def refused(call: Awaitable[Any]) -> int:
    with pytest.raises(HttpError) as caught:
        await call
    assert caught.value.retry_after_s == (1 if caught.value.status == 429 else None)
    return caught.value.status


def test_samples_in_progress_are_limited_and_a_large_request_is_taken_alone() -> None:
    async def scenario() -> None:
        stage = await Stage.started(max_samples=4)
        await stage.add("a", 3)
        assert await refused(stage.add("b", 2)) == 429
        await stage.add("c", 1)
        await stage.finish("a", 3)
        await stage.add("d", 3)
        await stage.finish("c")
        await stage.finish("d", 3)
        await stage.add("e", 9)
        assert (stage.submitted, stage.table.num_samples) == (["a", "c", "d", "e"], 9)

    asyncio.run(scenario())


def test_memory_of_requests_and_results_is_limited_and_free_again_when_they_expire() -> None:
    async def scenario() -> None:
        stage = await Stage.started(max_memory_mb=1, max_body_mb=1, result_ttl_s=10.0)
        await stage.add("a", num_bytes=700_000)
        assert await refused(stage.add("b", 1, 400_000)) == 429
        with pytest.raises(HttpError, match="max_memory_mb"):
            stage.table.check_room(400_000)
        await stage.finish("a")
        await stage.add("b", num_bytes=400_000)
        stage.now = 9.9
        assert await stage.fetch("a") is not None
        stage.now = 10.0
        assert await refused(stage.fetch("a")) == 404
        assert await stage.fetch("b") is None
        await stage.table.remove("b")
        counts = stage.cancelled, stage.table.num_samples, stage.table.held_bytes, len(stage.table)
        assert counts == (["b"], 0, 0, 0)
        await stage.finish("b")
        assert len(stage.table) == 0, "the result of a removed request is dropped"

    asyncio.run(scenario())


def test_body_that_would_never_have_room_is_refused_for_good() -> None:
    async def scenario() -> None:
        stage = await Stage.started(max_memory_mb=1, max_body_mb=1)
        with pytest.raises(HttpError, match="would take 2 MiB in memory") as caught:
            stage.table.check_room(2 << 20)
        assert (caught.value.status, caught.value.retry_after_s) == (413, None)
        for num_bytes in (700_000, 1 << 21):
            with pytest.raises(HttpError, match="max_memory_mb is 1") as caught:
                async with stage.table.reading(400_000) as count:
                    count(num_bytes)
            assert (caught.value.status, stage.table.held_bytes) == (413, 0)
        async with stage.table.reading(400_000) as count:
            count(300_000)
            assert stage.table.held_bytes == 700_000
            assert await refused(stage.add("a", num_bytes=800_000)) == 429
        assert stage.table.held_bytes == 0

    asyncio.run(scenario())


def test_body_counts_until_it_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = SqliteStore(tmp_path / "s.sqlite", 60.0)
        stage = await Stage.started(store, max_memory_mb=1, max_body_mb=1)
        adding = asyncio.ensure_future(stage.add("a", num_bytes=10, body=RequestBody("v1", bytes(400_000))))
        while not len(stage.table):
            await asyncio.sleep(0)
        assert stage.table.held_bytes == 800_010 + ENTRY_BYTES
        with pytest.raises(HttpError, match="max_memory_mb"):
            stage.table.check_room(400_000)
        await adding
        assert stage.table.held_bytes == 10 + ENTRY_BYTES
        await stage.table.close()

    asyncio.run(scenario())


def test_waiting_client_gets_the_result_when_it_comes_with_what_was_given_with_the_request() -> None:
    async def scenario() -> None:
        stage = await Stage.started()
        await stage.add("a", info={"shape": [1, 2]})
        waiting = asyncio.ensure_future(stage.table.result("a", 30.0))
        assert await stage.table.result("a", 0.01) is None
        await stage.finish("a")
        found = await waiting
        assert found is not None
        assert (found.result.id, found.result.rewards, found.result.statuses) == ("a", (1.0,), (Status.OK,))
        assert found.info == {"shape": [1, 2]}
        assert found.duration_s >= 0.01
        await stage.finish("a", reward=2.0)
        assert await stage.fetch("a") == found, "a result is never overwritten"

    asyncio.run(scenario())


def test_client_that_waits_is_told_when_its_request_is_removed_or_the_service_stops() -> None:
    async def scenario() -> list[int]:
        stage = await Stage.started()
        await stage.add("a")
        await stage.add("b")
        waiting = [asyncio.ensure_future(stage.table.result(id, 30.0)) for id in ("a", "b")]
        await asyncio.sleep(0)
        await stage.table.remove("a")
        await asyncio.sleep(0)
        await stage.table.close()
        found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20.0)
        assert await refused(stage.add("c")) == 503
        return [error.status for error in found if isinstance(error, HttpError)]

    assert asyncio.run(scenario()) == [404, 503]


steps = st.lists(
    st.tuples(st.sampled_from(["add", "finish", "remove", "pass"]), st.integers(0, 5), st.integers(1, 3)), max_size=40
)


@given(steps)
def test_counts_are_those_of_the_requests_that_are_held(steps: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        stage = await Stage.started(result_ttl_s=3.0)
        held: dict[str, tuple[int, float | None]] = {}
        for step, which, size in steps:
            id = str(which)
            held = {name: one for name, one in held.items() if one[1] is None or one[1] > stage.now}
            match step:
                case "add" if id not in held:
                    await stage.add(id, size, num_bytes=100)
                    held[id] = (size, None)
                case "finish" if id in held and held[id][1] is None:
                    await stage.finish(id, held[id][0])
                    held[id] = (held[id][0], stage.now + 3.0)
                case "remove" if id in held:
                    await stage.table.remove(id)
                    del held[id]
                case "pass":
                    stage.now += size
        held = {name: one for name, one in held.items() if one[1] is None or one[1] > stage.now}
        assert len(stage.table) == len(held)
        assert stage.table.num_samples == sum(num for num, end in held.values() if end is None)
        stage.now += 3.0
        for name in [name for name, one in held.items() if one[1] is None]:
            await stage.table.remove(name)
        assert (len(stage.table), stage.table.held_bytes, stage.table.size_bytes) == (0, 0, 0)

    asyncio.run(scenario())


def test_pixels_of_latents_count_before_they_are_made() -> None:
    async def scenario() -> None:
        stage = await Stage.started(max_memory_mb=64)
        stage.pixel_bytes = 65 << 20
        assert await refused(stage.add("a")) == 413, "trying again would not help"
        stage.pixel_bytes = 40 << 20
        await stage.add("b", num_bytes=1 << 20)
        assert await refused(stage.add("c", num_bytes=30 << 20)) == 413
        await stage.add("d", num_bytes=20 << 20)
        assert await refused(stage.add("e", num_bytes=10 << 20)) == 429
        assert stage.submitted == ["b", "d"]

    asyncio.run(scenario())


def test_pixels_that_are_not_made_yet_are_reserved_until_they_are_or_never_will_be() -> None:
    async def scenario() -> None:
        stage = await Stage.started(max_memory_mb=64)
        stage.pixel_bytes = 40 << 20
        form = MediaForm("latents", "float32", (1, 1, 1, 64))
        tensor = MediaTensor(form, 1, stage.memory.share([bytes(256)]))
        await stage.add("a", num_bytes=256, media=(tensor,))
        assert stage.table.held_bytes == (40 << 20) + 256 + ENTRY_BYTES
        assert await refused(stage.add("b")) == 429
        assert isinstance(tensor.buffer, SharedBuffer)
        tensor.buffer.release(30 << 20)  # a decoder has that now
        assert stage.table.held_bytes == (10 << 20) + 256 + ENTRY_BYTES
        await stage.table.remove("a")
        del tensor
        assert stage.table.held_bytes == 0

    asyncio.run(scenario())
