"""Requests that a table takes from a store: read again and scored once, or answered as failed; results that wait."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from redis_servers import needs_redis, redis_server

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import MediaForm, MediaTensor
from starling.reward.core.requests import RequestResult, RewardRequest
from starling.reward.core.samples import PromptText, Sample
from starling.reward.http.errors import HttpError
from starling.reward.http.settings import HttpSettings
from starling.reward.http.stores.redis import RedisStore
from starling.reward.http.stores.sqlite import SqliteStore
from starling.reward.http.stores.store import (
    ENTRY_BYTES,
    FinishedRequest,
    RequestBody,
    RequestStore,
    decode_request,
    encode_request,
)
from starling.reward.http.table import MAX_DEATHS, RequestTable
from starling.reward.score.workers.shared import MediaMemory

WAIT_S = 30.0
LEASE_S = 1.0


def read(data: bytes, id: str) -> RewardRequest:
    """Read completions as JSON."""
    texts = json.loads(data)
    if not all(isinstance(one, str) for one in texts):
        raise HttpError(422, "a completion is no text")
    samples = [Sample(n, 0, CompletionText(text=one, status=Status.OK, num_tokens=1)) for n, one in enumerate(texts)]
    return RewardRequest(id, (PromptText("", "", {}),), tuple(samples))


class Instance:
    """A table on a file, or another store, with scorers that answer when they are told to."""

    def __init__(
        self, store: Path | RequestStore, reader: Callable[[bytes, str], RewardRequest] = read, **settings: Any
    ) -> None:
        self.submitted: dict[str, RewardRequest] = {}
        self.cancelled: list[str] = []
        self.store = SqliteStore(store, 3600.0) if isinstance(store, Path) else store
        self.table = RequestTable(
            HttpSettings.model_validate(settings), self.store, self._submit, self.cancelled.append, {"v1": reader}
        )

    def _submit(self, request: RewardRequest) -> None:
        assert request.id not in self.submitted, "nothing is scored twice"
        self.submitted[request.id] = request

    async def add(self, id: str, *texts: Any, num_bytes: int = 100) -> None:
        data = json.dumps(texts).encode()
        request = read(json.dumps([str(one) for one in texts]).encode(), id)
        await self.table.add(request, num_bytes, RequestBody("v1", data), {"id": id})

    def score(self, id: str) -> None:
        """Finish a request: each reward is the length of a completion."""
        samples = self.submitted[id].samples
        num = len(samples)
        rewards = tuple(float(len(one.completion.text)) for one in samples)
        self.table.finish(RequestResult(id, rewards, (Status.OK,) * num, ((),) * num, {"length": rewards}))

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_true():
                await asyncio.sleep(0.01)

    async def result(self, id: str) -> FinishedRequest:
        found = await self.table.result(id, WAIT_S)
        assert found is not None
        return found


def test_requests_of_the_last_process_are_scored_and_a_client_can_wait_for_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = Instance(tmp_path / "s.sqlite")
        await first.table.start()
        for number in range(20):
            await first.add(f"id-{number}", "a" * number, "b")
        for number in range(5):
            first.score(f"id-{number}")
        await first.table.close()

        second = Instance(tmp_path / "s.sqlite")
        with pytest.raises(HttpError) as caught:
            await second.table.result("id-7", 0.0)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        await second.table.start()
        waiting = [asyncio.ensure_future(second.result(f"id-{number}")) for number in range(20)]
        await second.until(lambda: len(second.submitted) == 15)
        assert second.table.num_samples == 30
        for id in list(second.submitted):
            second.score(id)
        for number, found in enumerate(await asyncio.gather(*waiting)):
            assert found.result.rewards == (float(number), 1.0)
            assert found.info == {"id": f"id-{number}"}
        assert (second.table.num_samples, second.table.size_bytes) == (0, 0)
        await second.table.close()

    asyncio.run(scenario())


def test_requests_are_taken_only_while_there_is_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = Instance(tmp_path / "s.sqlite")
        await first.table.start()
        for number in range(10):
            await first.add(f"id-{number}", "a", "b", "c")
        await first.table.close()
        second = Instance(tmp_path / "s.sqlite", max_samples=5)
        await second.table.start()
        await second.until(lambda: len(second.submitted) == 2)
        await asyncio.sleep(0.1)
        assert len(second.submitted) == 2
        assert await second.table.result("id-9", 0.0) is None, "pending, though no instance scores it yet"
        with pytest.raises(HttpError, match="max_samples is 5"):
            await second.add("new", "a")
        for number in range(10):
            await second.until(lambda number=number: f"id-{number}" in second.submitted)  # type: ignore[misc]
            second.score(f"id-{number}")
        await second.table.close()

    asyncio.run(scenario())


def test_request_that_cannot_be_scored_any_more_is_answered_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"

    async def scenario() -> None:
        first = Instance(path)
        await first.table.start()
        await first.add("invalid", 1, 2)
        await first.add("deadly", "a")
        await first.add("damaged", "a")
        await first.add("good", "a")
        await first.table.close()
        with sqlite3.connect(path) as db:
            db.execute("UPDATE pending SET num_deaths = ?, owner = 'x' WHERE id = 'deadly'", (MAX_DEATHS,))
            db.execute("UPDATE pending SET request = substr(request, 1, 30) WHERE id = 'damaged'")
        db.close()
        second = Instance(path)
        with structlog.testing.capture_logs() as logs:
            await second.table.start()
            problems = {id: (await second.result(id)).result for id in ("invalid", "deadly", "damaged")}
        assert [one["id"] for one in logs if one["event"] == "stored_request_failed"] == [
            "invalid",
            "deadly",
            "damaged",
        ]
        assert problems["invalid"].statuses == (Status.REWARD_ERROR,) * 2
        assert problems["invalid"].rewards == (None, None)
        reasons = {id: one.problems[0][0] for id, one in problems.items()}
        assert reasons["invalid"] == "the request cannot be read again after a restart: a completion is no text"
        assert reasons["deadly"] == f"{MAX_DEATHS + 1} processes of the service ended while this request was scored."
        assert reasons["damaged"] == "the stored request is damaged, or of another version of the service."
        await second.until(lambda: list(second.submitted) == ["good"])
        await second.table.close()

    asyncio.run(scenario())


def test_stored_request_counts_for_what_it_is_whatever_its_record_says(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"

    def read_media(data: bytes, id: str) -> RewardRequest:
        form = MediaForm("latents", "float32", (1, 1, 1, 64))
        return replace(read(data, id), media=(MediaTensor(form, 1, MediaMemory().share([bytes(256)])),))

    async def scenario() -> None:
        first = Instance(path)
        await first.table.start()
        await first.add("a", "x", "y", "z", num_bytes=300)
        await first.table.close()
        with sqlite3.connect(path) as db:
            (data,) = db.execute("SELECT request FROM pending").fetchone()
            lie = msgspec.structs.replace(decode_request(data), num_samples=1, num_bytes=0)
            db.execute("UPDATE pending SET request = ?", (encode_request(lie),))
        db.close()
        second = Instance(path, read_media)
        await second.table.start()
        await second.until(lambda: "a" in second.submitted)
        assert second.table.num_samples == 3
        assert second.table.size_bytes == ENTRY_BYTES
        second.score("a")
        assert len((await second.result("a")).result.rewards) == 3
        assert (second.table.num_samples, second.table.size_bytes) == (0, 0)
        await second.table.close()

    asyncio.run(scenario())


def test_reader_that_has_no_room_is_asked_again(tmp_path: Path) -> None:
    refusals = 2

    def crowded(data: bytes, id: str) -> RewardRequest:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise HttpError(429, "no memory for media", retry_after_s=1)
        return read(data, id)

    async def scenario() -> None:
        first = Instance(tmp_path / "s.sqlite")
        await first.table.start()
        await first.add("a", "text")
        await first.table.close()
        second = Instance(tmp_path / "s.sqlite", crowded)
        await second.table.start()
        await second.until(lambda: "a" in second.submitted)
        second.score("a")
        assert (await second.result("a")).result.rewards == (4.0,)
        await second.table.close()

    asyncio.run(scenario())


def test_result_is_told_once_it_is_stored_and_waits_for_the_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        instance = Instance(tmp_path / "s.sqlite")
        await instance.table.start()
        await instance.add("a", "text")
        await instance.add("b", "text")
        assert isinstance(instance.store, SqliteStore)
        instance.store._db.execute("PRAGMA query_only = ON")  # as a disk that cannot be written
        instance.score("a")
        assert await instance.table.result("a", 0.3) is None
        with pytest.raises(HttpError) as caught:
            await instance.add("c", "text")
        assert caught.value.status == 503
        assert instance.table.problem
        assert (instance.table.num_samples, len(instance.table)) == (1, 2)
        instance.store._db.execute("PRAGMA query_only = OFF")
        assert (await instance.result("a")).result.rewards == (4.0,)
        assert instance.table.problem == ""
        await instance.table.remove("b")
        assert instance.cancelled == ["b"]
        await instance.table.close()

    asyncio.run(scenario())


def test_request_that_is_removed_while_it_is_stored_again_is_not_scored(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = Instance(tmp_path / "s.sqlite")
        await first.table.start()
        await first.add("a", "text")
        await first.table.close()
        second = Instance(tmp_path / "s.sqlite", max_samples=1)
        await second.table.start()
        await second.table.remove("a")
        await asyncio.sleep(0.3)
        assert (second.table.num_samples, second.table.size_bytes, len(second.table)) == (0, 0, 0)
        assert set(second.submitted) == set(second.cancelled)
        with pytest.raises(HttpError, match="there is no request 'a'"):
            await second.table.result("a", 0.0)
        await second.table.close()

    asyncio.run(scenario())


@needs_redis
def test_instance_that_has_no_room_to_read_what_it_took_keeps_its_lease(tmp_path: Path) -> None:
    is_full = True

    def crowded(data: bytes, id: str) -> RewardRequest:
        if is_full:
            raise HttpError(429, "no memory for media", retry_after_s=1)
        return read(data, id)

    async def scenario(url: str) -> None:
        nonlocal is_full

        def store() -> RedisStore:
            return RedisStore(url, prefix="test:", lease_s=LEASE_S, result_ttl_s=60.0, timeout_s=600.0)

        gone, busy, other = Instance(store()), Instance(store(), crowded), store()
        await gone.table.start()
        await gone.add("old", "text")
        await gone.add("removed", "text")
        await gone.table.close()
        await busy.table.start()
        await busy.until(lambda: len(busy.table) > 0)
        await busy.add("own", "text")
        await other.open()
        await other.remove("removed")
        async with asyncio.timeout(WAIT_S):
            for _ in range(12):
                await other.renew()
                assert await other.take(100, 1 << 20) == [], "its instance lives"
                await asyncio.sleep(LEASE_S / 3)
        is_full = False
        await busy.until(lambda: busy.submitted.keys() == {"own", "old"})
        await busy.until(lambda: len(busy.table) == 2)
        await other.close()
        await busy.table.close()

    with redis_server(tmp_path / "redis") as server:
        asyncio.run(scenario(server.url))
