"""Stores with damaged contents, or contents of other programs: they are refused by name, and end no service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import msgspec
import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis_servers import RedisServer, needs_redis, redis_server

from starling.common.errors import ConfigError
from starling.reward.http.errors import StoreUnavailable
from starling.reward.http.stores.redis import RedisStore
from starling.reward.http.stores.sqlite import SqliteStore
from starling.reward.http.stores.store import (
    RequestBody,
    RequestStore,
    StoredRequest,
    decode_request,
    decode_result,
    encode_request,
)

ROOM: Final = (10**6, 10**9)
NAMES: Final = ("a", "b", "c")


def asked(id: str) -> StoredRequest:
    return StoredRequest(id=id, body=RequestBody("v1", b"body"), num_samples=2, num_bytes=10, info={})


async def use(store: RequestStore) -> None:
    """Do all that a service does; only StoreUnavailable may be raised."""
    calls: list[Callable[[], Awaitable[Any]]] = [store.renew, lambda: store.take(*ROOM), lambda: store.take(1, 1)]
    for id in NAMES:
        calls += [partial(store.find, id), partial(store.finish, asked(id), b"result"), partial(store.remove, id)]
    calls += [partial(store.put, asked("d")), store.renew, lambda: store.take(*ROOM)]
    for call in calls:
        try:
            found = await call()
        except StoreUnavailable:
            continue
        for one in found if isinstance(found, list) else ():
            assert isinstance(one, StoredRequest)
            assert 0 < one.num_samples <= 4096


@given(st.binary(max_size=200))
@example(encode_request(asked("a"))[:-1])
@example(b"SQ\x01" + b"\x91" * 5000)
@example(b"SR\x01\xc1")
def test_bytes_that_are_no_record_are_a_value_error(data: bytes) -> None:
    for decode in (decode_request, decode_result):
        with pytest.raises(ValueError):
            decode(data)


def record(**fields: Any) -> bytes:
    """Return a record of these fields, of which others are as they should be."""
    good = {"id": "a", "body": {"form": "v1", "data": b"[]"}, "num_samples": 1, "num_bytes": 0, "info": {}}
    return b"SQ\x01" + msgspec.msgpack.encode({**good, **fields})


def test_record_of_other_programs_passes_no_limit() -> None:
    deep = record(info={"a": "deep"}).replace(b"\xa4deep", b"\x91" * 100_000 + b"\xc0")
    assert decode_request(record()).num_samples == 1
    numbers = (-1, 0, 4097, 10**12), (-1, 1 << 62), (-1, 1 << 62)
    fields = zip(("num_samples", "num_bytes", "num_deaths"), numbers, strict=True)
    wrong = [record(**{name: value}) for name, values in fields for value in values]
    for one in [*wrong, deep]:
        with pytest.raises(ValueError):
            decode_request(one)
    result = b"SR\x01" + msgspec.msgpack.encode({"result": "deep"}).replace(b"\xa4deep", deep[-100_001:])
    with pytest.raises(ValueError):
        decode_result(result)


@pytest.mark.parametrize(
    "fields",
    [
        {"rewards": (1.0, 2.0)},
        {"problems": ()},
        {"scores": {"a": (1.0,), "b": ()}},
        {"failures": {"a": ("", "")}},
        {"evaluation_scores": {"a": ()}},
        {"rewards": (), "statuses": (), "problems": (), "scores": {}},
        {"statuses": ("of a later version",)},
        {"scores": {"a": "text"}},
    ],
)
def test_result_whose_parts_do_not_fit_is_a_value_error(fields: dict[str, Any]) -> None:
    good = {"id": "a", "rewards": (1.0,), "statuses": ("ok",), "problems": ((),), "scores": {"a": (1.0,)}}
    records = [{"result": {**good, **more}, "info": {}, "duration_s": 1.0} for more in ({}, fields)]
    whole, damaged = (b"SR\x01" + msgspec.msgpack.encode(record) for record in records)
    assert decode_result(whole).result.rewards == (1.0,)
    with pytest.raises(ValueError):
        decode_result(damaged)


positions = st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=64)), min_size=1, max_size=4)


@given(positions)
@example([(3676, b"\x80")])
@settings(deadline=None)
def test_damaged_file_is_refused_or_used(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "s.sqlite"

    async def scenario() -> None:
        store = SqliteStore(path, 3600.0)
        for id in NAMES:
            await store.put(asked(id))
        await store.finish(asked("a"), b"result")
        await store.close()
        data = bytearray(path.read_bytes())
        for position, replaced in damage:
            begin = position % len(data)
            data[begin : begin + len(replaced)] = replaced
        path.write_bytes(data)
        try:
            store = SqliteStore(path, 3600.0)
        except ConfigError:
            return
        await use(store)
        try:
            await store.close()
        except StoreUnavailable:
            return

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


text = st.sampled_from([b"", b"a", b"b", b"\xff\xfe", b"1e309", b"-1", b"9" * 400, encode_request(asked("b"))]) | (
    st.binary(max_size=30)
)
keys = st.sampled_from(
    ["request:a", "request:b", "owned:me", "owned:other", "instances", "free", "lease:me", "lease:x"]
)
fields = st.sampled_from(["request", "owner", "samples", "bytes", "deaths", "result", "removed"])
values = st.one_of(
    st.tuples(st.just("string"), text),
    st.tuples(st.just("set"), st.lists(text, min_size=1, max_size=4)),
    st.tuples(st.just("list"), st.lists(text, min_size=1, max_size=4)),
    st.tuples(st.just("hash"), st.dictionaries(fields, text, min_size=1)),
)


@needs_redis
@given(st.lists(st.tuples(keys, values), min_size=1, max_size=6))
@settings(deadline=None)
@example([("owned:me", ("set", [b"a", b"\xff"])), ("request:a", ("hash", {"request": b"x", "owner": b"me"}))])
@example([("request:a", ("hash", {"request": b"x", "samples": b"9" * 400, "owner": b"o"})), ("free", ("set", [b"a"]))])
def test_foreign_contents_of_redis_are_refused_or_left_alone(
    server: RedisServer, contents: list[tuple[str, tuple[str, Any]]]
) -> None:
    client = redis.Redis.from_url(server.url)
    client.flushall()

    async def scenario() -> None:
        store = RedisStore(server.url, prefix="p:", lease_s=1.0, result_ttl_s=60.0, timeout_s=60.0)
        store._instance = "me"
        await store.open()
        for key, (kind, value) in contents:
            name = f"p:{key}"
            client.delete(name)
            match kind:
                case "string":
                    client.set(name, value)
                case "set":
                    client.sadd(name, *value)
                case "list":
                    client.rpush(name, *value)
                case "hash":
                    client.hset(name, mapping=value)
        store._sure_at = 0.0
        await use(store)
        try:
            await store.close()
        except StoreUnavailable:
            return

    asyncio.run(scenario())
    client.close()
