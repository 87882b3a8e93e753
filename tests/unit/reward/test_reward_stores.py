"""Stores of requests and results: one behaviour in memory, SQLite and Redis; what survives, and who scores what."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import redis
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_servers import PASSWORD, QUOTED, RedisServer, needs_redis, redis_server

from starling.common.errors import ConfigError
from starling.common.wire.messages import Status
from starling.reward.core.requests import RequestResult
from starling.reward.http.errors import HttpError, StoreUnavailable
from starling.reward.http.stores import scripts
from starling.reward.http.stores.memory import MemoryStore
from starling.reward.http.stores.redis import RedisStore
from starling.reward.http.stores.sqlite import SqliteStore
from starling.reward.http.stores.store import (
    ENTRY_BYTES,
    PENDING,
    FinishedRequest,
    RequestBody,
    RequestStore,
    StoredRequest,
    decode_result,
    encode_request,
    encode_result,
)

ROOM: Final = (10**6, 10**9)
"""Room for everything, for `take`."""
LEASE_S: Final = 1.5
_prefixes = (f"test-{number}:" for number in itertools.count())


def asked(id: str, num_samples: int = 1, num_bytes: int = 100) -> StoredRequest:
    body = RequestBody("v1", b"\x00body of " + id.encode())
    info = {"shape": [1, 2], "id": id}
    return StoredRequest(id=id, body=body, num_samples=num_samples, num_bytes=num_bytes, info=info)


def result(id: str, reward: float = 1.0) -> bytes:
    found = RequestResult(id, (reward, None), (Status.OK, Status.REWARD_ERROR), ((), ("why",)), {"a": (reward, None)})
    return encode_result(FinishedRequest(result=found, info={"id": id}, duration_s=0.5))


class Made(NamedTuple):
    """Makes stores of one kind, on one file or prefix."""

    kind: str
    new: Callable[..., RequestStore]
    """Another instance, or another process."""
    crash: Callable[[RequestStore], Awaitable[None]]
    """Leaves a store as the end of its process does; until it returns, others have no right to what it owns."""


@pytest.fixture(scope="session")
def redis_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def redis_store(server: RedisServer, prefix: str, **options: Any) -> RedisStore:
    values = {"lease_s": LEASE_S, "result_ttl_s": 3600.0, "timeout_s": 600.0, **options}
    return RedisStore(options.pop("url", server.url), prefix=prefix, **{k: v for k, v in values.items() if k != "url"})


def made_in(kind: str, folder: Path, server: RedisServer | None) -> Made:
    if kind == "memory":
        return Made(kind, lambda **options: MemoryStore(options.get("result_ttl_s", 3600.0)), None)  # type: ignore[arg-type]
    if kind == "sqlite":
        images = (folder / f"{number}.sqlite" for number in itertools.count())
        current = [next(images)]

        async def leave(store: RequestStore) -> None:
            """Go on with the files as the end of the process would leave them; the store keeps its own."""
            old, current[0] = current[0], next(images)
            for suffix in ("", "-wal"):
                if Path(f"{old}{suffix}").exists():
                    shutil.copy(f"{old}{suffix}", f"{current[0]}{suffix}")

        return Made(kind, lambda **options: SqliteStore(current[0], options.get("result_ttl_s", 3600.0)), leave)
    prefix = next(_prefixes)
    assert server is not None

    async def lapse(store: RequestStore) -> None:
        await asyncio.sleep(LEASE_S)

    return Made(kind, lambda **options: redis_store(server, prefix, **options), lapse)


DURABLE = ["sqlite", pytest.param("redis", marks=needs_redis)]


@pytest.fixture(params=["memory", *DURABLE])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    server = request.getfixturevalue("redis_of_session") if request.param == "redis" else None
    return made_in(request.param, tmp_path, server)


@pytest.fixture(params=DURABLE)
def durable(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    server = request.getfixturevalue("redis_of_session") if request.param == "redis" else None
    return made_in(request.param, tmp_path, server)


async def opened(made: Made, **options: Any) -> RequestStore:
    store = made.new(**options)
    await store.open()
    return store


async def take_all(store: RequestStore) -> list[StoredRequest]:
    """Take the requests without an owner, once the leases that a crash left have had the time to be renewed."""
    found: list[StoredRequest] = []
    end = time.monotonic() + 30.0
    while not found and time.monotonic() < end:
        await store.renew()
        while taken := await store.take(*ROOM):
            found += taken
        await asyncio.sleep(0.0 if found else 0.05)
    return found


def test_request_is_pending_until_its_first_result_which_nothing_overwrites(made: Made) -> None:
    async def scenario() -> None:
        store = await opened(made)
        assert await store.find("a") is None
        await store.put(asked("a"))
        assert await store.find("a") is PENDING
        assert await store.finish(asked("a"), result("a")) == result("a")
        assert await store.finish(asked("a"), result("a", 2.0)) == result("a")
        found = await store.find("a")
        assert found == result("a")
        assert decode_result(found).result.scores == {"a": (1.0, None)}
        assert await store.find("b") is None
        assert store.num_results == (0 if made.kind == "redis" else 1)
        assert store.size_bytes == (0 if made.kind == "redis" else len(result("a")) + ENTRY_BYTES)
        assert await store.take(*ROOM) == []
        await store.close()

    asyncio.run(scenario())


def test_removed_request_is_unknown_and_its_late_result_dropped(made: Made) -> None:
    async def scenario() -> None:
        store = await opened(made)
        for id in ("a", "b"):
            await store.put(asked(id))
        await store.finish(asked("b"), result("b"))
        assert [await store.remove(id) for id in ("a", "b", "a", "c")] == [True, True, False, False]
        assert await store.finish(asked("a"), result("a")) is None
        assert [await store.find(id) for id in ("a", "b", "c")] == [None] * 3
        assert (store.num_results, store.size_bytes) == (0, 0)
        await store.close()

    asyncio.run(scenario())


def test_results_expire_and_pending_requests_do_not(made: Made) -> None:
    async def scenario() -> None:
        store = await opened(made, result_ttl_s=0.3)
        for id in ("a", "b"):
            await store.put(asked(id))
        await store.finish(asked("a"), result("a"))
        assert await store.find("a") == result("a")
        await asyncio.sleep(0.4)
        assert await store.find("a") is None
        assert not await store.remove("a")
        await store.renew()
        assert (store.num_results, store.size_bytes) == (0, 0)
        assert await store.find("b") is PENDING
        assert await store.finish(asked("b"), result("b")) == result("b")
        await store.close()

    asyncio.run(scenario())


steps = st.lists(
    st.tuples(st.sampled_from(["put", "finish", "find", "remove", "renew"]), st.sampled_from("abc")), max_size=25
)


@pytest.mark.parametrize("kind", DURABLE)
@given(steps=steps)
@settings(deadline=None)
def test_durable_stores_do_as_the_one_in_memory(
    kind: str, steps: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("redis_of_session") if kind == "redis" else None
    made = made_in(kind, tmp_path_factory.mktemp("steps"), server)

    async def scenario() -> None:
        stores = [MemoryStore(3600.0), await opened(made)]
        used: set[str] = set()
        for number, (step, id) in enumerate(steps):
            if step == "put" and id in used:  # ids are new ones
                continue
            used.add(id)
            outcomes = [await _carried_out(store, step, id, float(number)) for store in stores]
            assert outcomes[0] == outcomes[1], (step, id)
        await stores[1].close()

    asyncio.run(scenario())


async def _carried_out(store: RequestStore, step: str, id: str, reward: float) -> Any:
    match step:
        case "put":
            return await store.put(asked(id))
        case "finish":
            # A request that is unknown gets no result but in Redis, which may have lost it.
            return await store.finish(asked(id), result(id, reward)) if await store.find(id) is not None else None
        case "find":
            return await store.find(id)
        case "remove":
            return await store.remove(id)
    return await store.renew()


def test_next_process_takes_what_the_one_that_crashed_had_accepted(durable: Made) -> None:
    async def scenario() -> None:
        first = await opened(durable)
        ids = [f"id-{number}" for number in range(100)]
        await asyncio.gather(*(first.put(asked(id)) for id in ids))
        for id in ids[:10]:
            await first.finish(asked(id), result(id))
        await first.remove(ids[10])
        await durable.crash(first)
        second = await opened(durable)
        taken = await take_all(second)
        assert sorted(one.id for one in taken) == sorted(ids[11:])
        for one in taken:
            expected = asked(one.id)
            assert (one.body, one.info, one.num_bytes) == (expected.body, expected.info, expected.num_bytes)
            assert one.num_deaths == 1
        assert [await second.find(id) for id in ids[:10]] == [result(id) for id in ids[:10]]
        assert await second.find(ids[10]) is None
        assert await second.find(ids[11]) is PENDING
        assert await second.take(*ROOM) == []
        assert await second.finish(taken[0], result(taken[0].id)) == result(taken[0].id)
        await second.close()

    asyncio.run(scenario())


def test_process_that_stops_gives_its_requests_back_and_has_not_died(durable: Made) -> None:
    async def scenario() -> None:
        first = await opened(durable)
        await first.put(asked("a"))
        await first.close()
        for _ in range(5):
            store = await opened(durable)
            (taken,) = await store.take(*ROOM)
            assert (taken.id, taken.num_deaths, taken.body) == ("a", 0, asked("a").body)
            await store.close()

    asyncio.run(scenario())


def test_requests_are_taken_within_limits_and_at_least_one(durable: Made) -> None:
    async def scenario() -> None:
        first = await opened(durable)
        for id in "abcdef":
            await first.put(asked(id, num_samples=4, num_bytes=1000))
        await first.close()
        store = await opened(durable)
        sizes = [len(await store.take(*room)) for room in ((8, 10**9), (100, 999), (0, 0), (100, 10**9), (1, 1))]
        assert sizes == [2, 1, 1, 2, 0]
        await store.close()

    asyncio.run(scenario())


def test_records_that_are_damaged_or_of_another_version_are_refused_by_one_line(
    durable: Made, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    record = encode_request(asked("x"))
    damaged = {"a": record[:20], "b": b"SQ\x02" + record[3:], "c": b"", "d": b"garbage"}
    refused: dict[str, str] = {}

    async def scenario() -> None:
        first = await opened(durable)
        for id in (*damaged, "good"):
            await first.put(asked(id, num_samples=3))
        if isinstance(first, SqliteStore):
            for id, data in damaged.items():
                first._db.execute("UPDATE pending SET request = ? WHERE id = ?", (data, id))
        else:
            assert isinstance(first, RedisStore)
            for id, data in damaged.items():
                await first._redis.hset(first._key("request", id), "request", data)
        await durable.crash(first)
        store = await opened(durable)
        with structlog.testing.capture_logs() as logs:
            taken = {one.id: one for one in await take_all(store)}
        for line in logs:
            if line["event"] == "stored_request_refused":
                assert line["id"] not in refused
                refused[line["id"]] = line["reason"]
        assert taken.keys() == {*damaged, "good"}
        assert taken.pop("good").body.form == "v1"
        assert {one.body.form for one in taken.values()} == {"unreadable"}
        assert {one.num_samples for one in taken.values()} == {3}
        await store.close()

    asyncio.run(scenario())
    assert refused.keys() == damaged.keys()
    assert refused["b"] == "it is of version 2, and this service knows 1"
    assert refused["d"] == "it is no record of this service"


def test_body_that_the_store_cannot_keep_is_refused_alone(durable: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"starling.reward.http.stores.{durable.kind}.MAX_RECORD_BYTES", 3 << 20)
    bodies = {"small": b"a", "large": bytes(2 << 20), "too large": bytes(3 << 20)}

    async def scenario() -> None:
        store = await opened(durable)
        puts = [
            store.put(StoredRequest(id=id, body=RequestBody("v1", data), num_samples=1, num_bytes=1, info={}))
            for id, data in bodies.items()
        ]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert outcomes[:2] == [None, None]
        assert isinstance(outcomes[2], HttpError)
        assert outcomes[2].status == 413
        assert [await store.find(id) for id in bodies] == [PENDING, PENDING, None]
        await store.close()
        (again,) = [one for one in await take_all(await opened(durable)) if one.id == "large"]
        assert again.body.data == bodies["large"]

    asyncio.run(scenario())


def test_operations_of_concurrent_clients_share_commits(tmp_path: Path) -> None:
    async def scenario() -> int:
        store = SqliteStore(tmp_path / "s.sqlite", 60.0)
        commits = 0

        def count(statement: str) -> None:
            nonlocal commits
            commits += statement == "COMMIT"

        store._db.set_trace_callback(count)
        await asyncio.gather(*(store.put(asked(str(number))) for number in range(1000)))
        await store.close()
        return commits

    assert asyncio.run(scenario()) <= 10


# --- SQLite -----------------------------------------------------------------------------------------------------------


def test_results_in_a_file_expire_by_the_wall_clock_over_restarts(tmp_path: Path) -> None:
    now = [1_000_000.0]

    async def scenario() -> None:
        for age, expected in ((0.0, result("a")), (59.0, result("a")), (61.0, None)):
            store = SqliteStore(tmp_path / "s.sqlite", 60.0, lambda: now[0])
            if not age:
                await store.put(asked("a"))
                await store.finish(asked("a"), result("a"))
            now[0] = 1_000_000.0 + age
            assert await store.find("a") == expected
            assert store.num_results == 1, "it is deleted later"
            await store.renew()
            assert store.num_results == (expected is not None)
            await store.close()

    asyncio.run(scenario())


def test_request_that_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = SqliteStore(tmp_path / "s.sqlite", 60.0)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        outcomes = await asyncio.gather(*(store.put(asked(str(n))) for n in range(3)), return_exceptions=True)
        await closing
        outcomes += await asyncio.gather(store.put(asked("late")), return_exceptions=True)
        assert isinstance(outcomes[-1], StoreUnavailable)
        again = SqliteStore(tmp_path / "s.sqlite", 60.0)
        taken = [one.id for one in await again.take(*ROOM)]
        assert taken == [str(n) for n in range(3) if outcomes[n] is None]
        await again.close()

    asyncio.run(scenario())


def test_file_that_is_no_store_or_in_use_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE mine (a)")
    text = tmp_path / "text"
    text.write_bytes(b"not a database, and long enough to have a header" * 50)
    newer = tmp_path / "newer.sqlite"
    changed = tmp_path / "changed.sqlite"
    for path, statement in (
        (newer, "PRAGMA user_version = 2"),
        (changed, "CREATE TRIGGER t AFTER INSERT ON pending BEGIN DELETE FROM pending; END"),
    ):
        asyncio.run(SqliteStore(path, 60.0).close())
        db = sqlite3.connect(path)
        db.execute(statement)
        db.close()
    link = tmp_path / "link.sqlite"
    link.symlink_to(text)
    expected = {
        foreign: "is a database of another application",
        text: "is not a database|cannot be used",
        newer: "is a store of version 2, or was changed, and this Starling has version 1",
        changed: "is a store of version 1, or was changed",
        link: "is a symbolic link",
        tmp_path / "none" / "s.sqlite": "cannot open .*none",
        tmp_path: "is not a regular file",
    }
    contents = {path: path.read_bytes() for path in (foreign, text)}
    for path, reason in expected.items():
        with pytest.raises(ConfigError, match=reason):
            SqliteStore(path, 60.0)
    assert {path: path.read_bytes() for path in contents} == contents

    store = SqliteStore(tmp_path / "mine.sqlite", 60.0)
    code = f"""
import sys; from pathlib import Path; from starling.common.errors import ConfigError
from starling.reward.http.stores.sqlite import SqliteStore
try: SqliteStore(Path({str(tmp_path / "mine.sqlite")!r}), 60.0)
except ConfigError as error: sys.exit(str(error))"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "is in use by another process" in other.stderr, other.stderr
    assert (tmp_path / "mine.sqlite").stat().st_mode & 0o777 == 0o600
    asyncio.run(store.close())


def test_full_disk_refuses_requests_and_keeps_what_was_accepted(tmp_path: Path) -> None:
    large = StoredRequest(id="large", body=RequestBody("v1", os.urandom(1 << 20)), num_samples=1, num_bytes=1, info={})

    async def scenario() -> None:
        store = SqliteStore(tmp_path / "s.sqlite", 60.0)
        await store.put(asked("a"))
        store._db.execute("PRAGMA max_page_count = 20")
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                with pytest.raises(StoreUnavailable) as caught:
                    await store.put(large)
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
            assert "full" not in str(caught.value), "clients are not told why"
            assert await store.find("large") is None
            assert await store.find("a") is PENDING
            store._db.execute("PRAGMA max_page_count = 1000000")
            await store.put(large)
        assert store.problem == ""
        events = [line["event"] for line in logs]
        assert events[0] == "store_unavailable"
        assert events[-1] == "store_available"
        assert await store.finish(asked("a"), result("a")) == result("a")
        await store.close()

    asyncio.run(scenario())


def test_slow_disk_does_not_delay_the_event_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = SqliteStore(tmp_path / "s.sqlite", 60.0, patience_s=0.5)
        store._thread.submit(time.sleep, 2.0)  # the disk
        putting = asyncio.ensure_future(store.put(asked("late")))
        num = 0
        while not putting.done():
            await asyncio.sleep(0.01)
            num += 1
        assert num >= 5
        with pytest.raises(StoreUnavailable):
            await putting
        while store._forgetting:
            await asyncio.sleep(0.05)
        assert await store.find("late") is None, "its client was told to try again"
        await store.close()

    asyncio.run(scenario())


# --- Redis ------------------------------------------------------------------------------------------------------------


async def renewing(store: RedisStore, until: asyncio.Event) -> None:
    """Renew the lease as the table does."""
    while not until.is_set():
        await store.renew()
        await asyncio.sleep(store.renew_interval_s)


@needs_redis
def test_each_request_of_a_dead_instance_is_taken_by_exactly_one_other(redis_of_session: RedisServer) -> None:
    async def scenario() -> None:
        prefix = next(_prefixes)
        dead, *others = [redis_store(redis_of_session, prefix) for _ in range(5)]
        for store in (dead, *others):
            await store.open()
        await others[0].put(asked("of a living one"))
        await asyncio.gather(*(dead.put(asked(f"id-{number}")) for number in range(500)))
        until = asyncio.Event()
        living = [asyncio.create_task(renewing(store, until)) for store in others]
        assert [one for store in others for one in await store.take(*ROOM)] == [], "its lease has not ended"
        taken: list[str] = []
        end = time.monotonic() + 30.0
        while len(taken) < 500 and time.monotonic() < end:
            found = await asyncio.gather(*(store.take(20, 10**9) for store in others))
            taken += [one.id for part in found for one in part]
            await asyncio.sleep(0.01)
        assert sorted(taken) == sorted(f"id-{number}" for number in range(500))
        assert len(await dead.renew()) == 500, "it was late, and is told so"
        for id in ("id-0", "id-1"):
            assert await others[0].finish(asked(id), result(id, 7.0)) == result(id, 7.0)
            assert await dead.finish(asked(id), result(id, 1.0)) == result(id, 7.0), "the first result counts"
        until.set()
        await asyncio.gather(*living)
        for store in (dead, *others):
            await store.close()

    asyncio.run(scenario())


@needs_redis
def test_instances_see_results_and_removals_of_each_other(redis_of_session: RedisServer) -> None:
    async def scenario() -> None:
        prefix = next(_prefixes)
        a, b = (redis_store(redis_of_session, prefix) for _ in range(2))
        for id in ("1", "2", "3"):
            await a.put(asked(id))
        assert await b.find("1") is PENDING
        await a.finish(asked("1"), result("1"))
        assert await b.find("1") == result("1")
        assert await b.remove("1")
        assert await b.remove("2")
        assert await a.renew() == {"2"}, "its owner stops scoring it"
        assert await a.finish(asked("2"), result("2")) is None
        other = redis_store(redis_of_session, next(_prefixes))
        assert await other.find("3") is None, "another service with another prefix"
        for store in (a, b, other):
            await store.close()

    asyncio.run(scenario())


@needs_redis
def test_every_key_has_a_time_to_live(redis_of_session: RedisServer) -> None:
    prefix = next(_prefixes)

    async def scenario() -> None:
        a, b = (redis_store(redis_of_session, prefix) for _ in range(2))
        await a.open()
        for id in ("1", "2", "3"):
            await a.put(asked(id))
        await a.finish(asked("1"), result("1"))
        await a.remove("2")
        await a.close()
        await b.open()
        assert [one.id for one in await b.take(*ROOM)] == ["3"]
        await b.put(asked("4"))

    asyncio.run(scenario())
    client = redis.Redis.from_url(redis_of_session.url)
    keys = list(client.scan_iter(f"{prefix}*"))
    assert len(keys) >= 6
    assert [key for key in keys if client.pttl(key) <= 0] == []


@needs_redis
def test_answer_to_take_or_put_that_was_lost_loses_no_request(redis_of_session: RedisServer) -> None:
    async def scenario() -> None:
        prefix = next(_prefixes)
        dead, store = (redis_store(redis_of_session, prefix) for _ in range(2))
        await dead.put(asked("a"))
        await dead.close()
        await store.open()
        await store._call(scripts.TAKE, store._instance, 0, 64, *ROOM, 60_000)  # and its answer is lost
        assert await store.take(*ROOM) == []
        assert await store.renew() == set()
        assert [one.id for one in await store.take(*ROOM)] == ["a"]

        await store.put(asked("b"))
        store._owned.discard("b")
        store._storing.add("b")
        store._refused.add("b")  # its client was told to try again
        assert await store.renew() == set()
        assert await store.find("b") is None
        assert await store.take(*ROOM) == []
        await store.close()

    asyncio.run(scenario())


@needs_redis
def test_nothing_is_taken_from_others_before_the_lease_is_renewed_in_time(redis_of_session: RedisServer) -> None:
    async def scenario() -> None:
        prefix = next(_prefixes)
        other, store = (redis_store(redis_of_session, prefix) for _ in range(2))
        await other.put(asked("a"))  # without a lease, as after an outage of Redis
        await store.open()
        store._sure_at = 0.0
        store._renewed_at = time.monotonic() - 2 * LEASE_S
        assert await store.take(*ROOM) == [], "the outage was longer than its own lease"
        store._renewed_at = time.monotonic()
        redis.Redis.from_url(redis_of_session.url).delete(f"{prefix}lease:{store._instance}")
        assert await store.take(*ROOM) == [], "Redis has hung, and carries the command out too late"
        assert [one.id for one in await take_all(store)] == ["a"]
        await store.close()

    asyncio.run(scenario())


@needs_redis
def test_request_that_is_taken_after_its_instance_has_stopped_is_taken_by_another(
    redis_of_session: RedisServer,
) -> None:
    async def scenario() -> None:
        prefix = next(_prefixes)
        dead, stopped, other = (redis_store(redis_of_session, prefix) for _ in range(3))
        await dead.put(asked("a"))
        await dead.close()
        await stopped.open()
        await stopped.close()
        # As where the connection of `take`, which was given up, is read after that of `close`.
        await stopped._call(scripts.TAKE, stopped._instance, 0, 64, *ROOM, 60_000)
        await other.open()
        assert [one.id for one in await take_all(other)] == ["a"]
        await other.close()

    asyncio.run(scenario())


class SlowProxy:
    """Passes a server's replies on, some bytes at a time."""

    def __init__(self, port: int, bytes_per_s: int) -> None:
        self._port, self._bytes_per_s = port, bytes_per_s

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, to = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, to, 0.0), self._copy(back, writer, 1 / self._bytes_per_s))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, byte_s: float) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(len(data) * byte_s)
            writer.write(data)
            await writer.drain()
        writer.close()


@needs_redis
def test_large_request_is_taken_over_a_slow_network(
    redis_of_session: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = msgspec.structs.replace(asked("large"), body=RequestBody("v1", bytes(4 << 20)))

    async def scenario() -> None:
        prefix = next(_prefixes)
        gone = redis_store(redis_of_session, prefix)
        await gone.put(large)
        await gone.close()
        async with SlowProxy(redis_of_session.port, 2 << 20) as port:
            url = redis_of_session.url.replace(str(redis_of_session.port), str(port))
            store = redis_store(redis_of_session, prefix, url=url, lease_s=60.0)
            await store.open()
            monkeypatch.setattr("starling.reward.http.stores.redis.TIMEOUT_S", 1.0)
            assert await store.take(*ROOM) == [large]
            assert not store.problem
            await store.close()

    asyncio.run(scenario())


@needs_redis
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "forgetful"])
def test_redis_that_is_gone_for_a_while(tmp_path: Path, durable: bool) -> None:
    async def scenario(server: RedisServer) -> None:
        prefix = next(_prefixes)
        a, b = (redis_store(server, prefix) for _ in range(2))
        for store in (a, b):
            await store.open()
        await a.put(asked("a"))
        await a.put(asked("b"))
        server.stop()
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await a.put(asked("c"))
                for call in (a.find("a"), a.remove("a"), a.take(*ROOM), a.renew()):
                    with pytest.raises(StoreUnavailable):
                        await call
            assert a.problem
            finishing = asyncio.ensure_future(_until_stored(a, "a"))
            await asyncio.sleep(LEASE_S)
            server.start()
            assert await finishing == result("a")
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["store_unavailable"]
        assert PASSWORD not in str(logs)
        assert a.problem == ""
        assert await b.renew() == set()
        assert await b.take(*ROOM) == [], "all leases ended with the Redis, and no instance has died"
        assert await a.renew() == set()
        assert await b.find("a") == result("a")
        assert await b.find("c") is None
        assert await b.find("b") is (PENDING if durable else None)
        assert await a.finish(asked("b"), result("b")) == result("b"), "also where Redis has lost its memory"
        assert await b.find("b") == result("b")
        for store in (a, b):
            await store.close()

    with redis_server(tmp_path / "redis", durable=durable) as server:
        asyncio.run(scenario(server))


async def _until_stored(store: RequestStore, id: str) -> bytes | None:
    while True:
        try:
            return await store.finish(asked(id), result(id))
        except StoreUnavailable:
            await asyncio.sleep(0.05)


@needs_redis
def test_redis_that_hangs_delays_nothing_but_its_own_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.reward.http.stores.redis.TIMEOUT_S", 1.0)

    async def scenario(server: RedisServer) -> None:
        store = redis_store(server, next(_prefixes))
        await store.open()
        server.send(signal.SIGSTOP)
        putting = asyncio.ensure_future(store.put(asked("a")))
        num = 0
        while not putting.done():
            await asyncio.sleep(0.01)
            num += 1
        assert num >= 10
        with pytest.raises(StoreUnavailable):
            await putting
        server.send(signal.SIGCONT)
        await store.renew()
        assert await store.find("a") is None, "it may have been stored, and its client was told to try again"
        await store.put(asked("b"))
        await store.close()

    with redis_server(tmp_path / "redis") as server:
        asyncio.run(scenario(server))


@needs_redis
def test_connection_with_tls_checks_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.reward.http.stores.redis.OPEN_S", 0.5)

    async def scenario(server: RedisServer) -> None:
        store = redis_store(server, "p:", ca_file=str(server.ca_file))
        await store.open()
        await store.put(asked("a"))
        assert await store.find("a") is PENDING
        await store.close()
        for url, ca_file, reason in (
            (server.url, "", "certificate verify failed"),
            (server.url.replace("rediss", "redis"), "", "cannot be used"),
            (server.url.replace("127.0.0.1", "localhost"), str(server.ca_file), "certificate"),
            (server.url.replace(QUOTED, "wrong"), str(server.ca_file), "invalid username-password pair"),
        ):
            with pytest.raises(ConfigError, match=reason) as caught:
                await redis_store(server, "p:", url=url, ca_file=ca_file).open()
            assert QUOTED not in str(caught.value)
            assert PASSWORD not in str(caught.value)

    with redis_server(tmp_path / "redis", tls=True) as server:
        asyncio.run(scenario(server))


@pytest.mark.parametrize("url", ["localhost", "http://h", "redis://:pass@h:port", "redis://:pass@h?color=red"])
def test_url_that_is_not_valid_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis_url is not valid .*; write redis://USER:PASSWORD@HOST") as caught:
        RedisStore(url, prefix="p:", lease_s=1.0, result_ttl_s=1.0, timeout_s=1.0)
    assert ":pass" not in str(caught.value)


@needs_redis
def test_full_redis_refuses_requests_and_takes_results(tmp_path: Path) -> None:
    async def scenario(server: RedisServer) -> None:
        store = redis_store(server, next(_prefixes))
        await store.open()
        await store.put(asked("a"))
        await store._redis.config_set("maxmemory", "1")
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                await store.put(asked("b"))
            assert "maxmemory" in caught.value.reason
        assert await store.renew() == set()
        assert await store.finish(asked("a"), result("a")) == result("a")
        await store._redis.config_set("maxmemory", "0")
        await store.put(asked("c"))
        await store.close()

    with redis_server(tmp_path / "redis") as server:
        asyncio.run(scenario(server))


@needs_redis
def test_foreign_values_at_its_keys_are_refused(redis_of_session: RedisServer) -> None:
    async def scenario() -> None:
        prefix = next(_prefixes)
        dead, store = (redis_store(redis_of_session, prefix) for _ in range(2))
        await dead.put(asked("a"))
        await dead.put(asked("b"))
        await dead.close()
        await store.open()
        await store._redis.set(store._key("request", "a"), "text")
        found = await store.find("a")
        assert isinstance(found, bytes)
        with pytest.raises(ValueError, match="no record of this service"):
            decode_result(found)
        assert [one.id for one in await store.take(*ROOM)] == ["b"]
        assert not await store.remove("a")
        assert await store.finish(asked("a"), result("a")) == result("a")
        await store.close()

    asyncio.run(scenario())
