"""Store in Redis, shared by the instances behind a load balancer: requests, results, and which instance scores what.

An instance holds a lease, which it renews; requests of an instance whose lease has ended are taken by exactly one other
instance. Redis alone measures leases, so clocks of machines do not matter. After a connection was lost, nothing is
taken from others for the duration of a lease: they may have lost theirs, too, and have to renew their leases first.

A Redis that cannot be reached is tried again, each time with a deadline. Requests are refused meanwhile; results wait.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from starling.common.errors import ConfigError
from starling.reward.http.errors import StoreUnavailable
from starling.reward.http.stores import scripts
from starling.reward.http.stores.batches import MAX_OPERATIONS, Availability, Batches
from starling.reward.http.stores.store import (
    PENDING,
    Pending,
    StoredRequest,
    decode_request,
    encode_large,
    unreadable_request,
)

log = structlog.get_logger(__name__)

OPEN_S: Final = 10.0
"""How long Redis may take to answer at the start."""
TIMEOUT_S: Final = 5.0
"""Of one round trip, besides the time that bodies take."""
BYTES_PER_S: Final = 10 << 20
"""What is expected of the network to Redis."""
WAIT_S: Final = 15.0
"""How long a client waits for round trips of others, and its own, before it is told to try again."""
RETRIES: Final = 2
"""Of a round trip whose connection broke: Redis closes idle ones, and closes all when it starts again."""
RENEWALS: Final = 3
"""During a lease."""
KEPT_S: Final = 86_400.0
"""How long requests are kept that no instance scores, because none is alive."""
MAX_RECORD_BYTES: Final = 500 << 20
"""Redis takes values of up to 512 MiB, and ends the connection for a larger one."""
MAX_REFUSED: Final = 100_000
"""Requests to remove when Redis is back; further ones that it has stored nevertheless are scored."""
MAX_TAKEN: Final = 64
"""Requests that are read at a time."""
MAX_TAKEN_BYTES: Final = 64 << 20
"""Of them, unless it is a single one."""

Command = tuple[Any, ...]


class RedisStore:
    """Requests and results in a Redis, for one of several instances.

    Args:
        url: ``redis://`` or ``rediss://`` with TLS, ``USER:PASSWORD@HOST:PORT/DATABASE``; or ``unix://PATH``.
        prefix: of all keys, so that several services can use one database.
        lease_s: how long after the last renewal an instance is dead, in seconds.
        result_ttl_s: how long a result is kept, in seconds.
        timeout_s: how long a request may be scored, in seconds.
        ca_file: certificates that sign that of the server; empty for those of the system.

    Raises:
        ConfigError: the URL is not valid.
    """

    num_results = size_bytes = 0
    """Redis holds the results."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        lease_s: float,
        result_ttl_s: float,
        timeout_s: float,
        ca_file: str = "",
    ) -> None:
        self._redis = _connect(url, ca_file)
        self._prefix, self._lease_s = prefix, lease_s
        self.renew_interval_s = lease_s / RENEWALS
        self._result_ttl_ms, self._kept_ms = _ms(result_ttl_s), _ms(timeout_s + KEPT_S)
        self._instance = secrets.token_hex(8)
        self._availability = Availability("redis")
        self._batches: Batches[Command] = Batches(self._round_trip, _size_of)
        self._owned: set[str] = set()
        """Pending requests of this instance."""
        self._storing: set[str] = set()
        """Requests that are being stored, or have been refused because Redis did not say that it stored them."""
        self._refused: set[str] = set()
        """Those of them that must be removed."""
        self._is_taking = False
        self._num_takes = 0
        self._leftover: set[str] = set()
        """Requests that Redis says are this instance's, who knows nothing of them: the answer to `take` was lost."""
        self._renewed_at = self._sure_at = math.inf
        """When the lease was renewed last, and from when on an instance without a lease is dead; monotonic seconds."""

    @property
    def problem(self) -> str:
        """Why Redis cannot be reached; empty if it can."""
        return self._availability.problem

    async def open(self) -> None:
        """Take the lease. Raises ConfigError when Redis cannot be reached."""
        end = time.monotonic() + OPEN_S
        while True:
            try:
                await self._renew_lease()
                return
            except StoreUnavailable as error:
                if time.monotonic() >= end or isinstance(error.__cause__, AuthenticationError | ResponseError):
                    raise ConfigError(
                        f"the Redis of reward.http.redis_url cannot be used: {error.reason.rstrip('.')}; start it, "
                        "or correct its URL"
                    ) from None
            await asyncio.sleep(0.5)

    async def put(self, request: StoredRequest) -> None:
        """Store a pending request of this instance."""
        id, data = request.id, await encode_large(request, MAX_RECORD_BYTES)
        self._storing.add(id)
        arguments = data, request.num_samples, request.num_bytes, self._kept_ms
        try:
            await self._run(scripts.PUT, id, self._instance, *arguments, timeout_s=WAIT_S + len(data) / BYTES_PER_S)
        except BaseException:
            # It may be stored all the same. Its client was not told its id, so it shall not be scored.
            if len(self._refused) < MAX_REFUSED:
                self._refused.add(id)
            else:
                self._storing.discard(id)
            raise
        self._storing.discard(id)
        self._owned.add(id)

    async def finish(self, request: StoredRequest, result: bytes) -> bytes | None:
        """Store a result, unless another instance was first."""
        arguments = request.id, self._instance, result, self._result_ttl_ms
        found = await self._run(scripts.FINISH, *arguments, timeout_s=None)
        self._owned.discard(request.id)
        if found == 1:
            return result
        return found if isinstance(found, bytes) else None

    async def find(self, id: str) -> bytes | Pending | None:
        """Return the result of a request, whichever instance has scored it."""
        command = "HMGET", self._key("request", id), "result", "owner"
        try:
            result, owner = await self._batches.run(command, WAIT_S)
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):  # as where its user may not read it
                raise self._refusal(error) from error
            return b""  # another kind of value, which is no result
        if isinstance(result, bytes):
            return result
        return None if owner is None else PENDING

    async def remove(self, id: str) -> bool:
        """Forget a request and its result. The instance that scores it will notice when it renews its lease."""
        found = await self._run(scripts.REMOVE, id, self._kept_ms)
        self._owned.discard(id)
        return bool(found)

    async def take(self, max_samples: int, max_bytes: int) -> list[StoredRequest]:
        """Take requests of instances that stopped or, if their leases had the time to be renewed, died."""
        self._is_taking, self._num_takes = True, self._num_takes + 1
        try:
            return await self._recall() if self._leftover else await self._take(max_samples, max_bytes)
        finally:
            self._is_taking = False

    async def renew(self) -> set[str]:
        """Renew the lease, and compare what Redis says is this instance's with what it knows."""
        await self._renew_lease()
        await self._remove_refused()
        known, num_takes, was_taking = self._owned | self._storing, self._num_takes, self._is_taking
        listed = await self._listed()
        if not was_taking and num_takes == self._num_takes:  # else an answer to `take` may be on its way
            # What was stored or finished since then is in only one of the two, rightly.
            self._leftover = listed - known - self._owned - self._storing
        lost = await self._lost(sorted((known & self._owned) - listed))
        self._owned -= lost
        return lost

    async def close(self) -> None:
        """Give the requests that have no result to other instances, and end the connection."""
        try:
            await self._batches.flush()
            await self._call(scripts.RELEASE, self._instance, self._kept_ms)
        finally:
            await self._redis.aclose()

    async def _renew_lease(self) -> None:
        try:
            await self._call(scripts.RENEW, self._instance, _ms(self._lease_s), self._kept_ms)
        except StoreUnavailable:
            self._renewed_at = math.inf
            raise
        now = time.monotonic()
        if not self._is_renewed:  # others may have been late, too
            self._sure_at = now + self._lease_s
        self._renewed_at = now

    @property
    def _is_renewed(self) -> bool:
        """Whether the lease was renewed in time: else Redis may have been gone, and others may have lost theirs."""
        return 0.0 <= time.monotonic() - self._renewed_at <= 1.5 * self.renew_interval_s

    async def _remove_refused(self) -> None:
        for ids in _batched(sorted(self._refused), MAX_OPERATIONS):
            scripted = [self._script(scripts.REMOVE, id, self._kept_ms) for id in ids]
            replies = await self._round_trip(scripted)
            removed = {id for id, reply in zip(ids, replies, strict=True) if not isinstance(reply, ResponseError)}
            self._refused -= removed
            self._storing -= removed

    async def _listed(self) -> set[str]:
        """Return the requests that Redis says are this instance's."""
        found: set[str] = set()
        cursor = 0
        while True:
            command = "SSCAN", self._key("owned", self._instance), cursor, "COUNT", 1000
            cursor, ids = await self._ask(command)
            found.update(id.decode(errors="replace") for id in ids)
            if not cursor:
                return found

    async def _lost(self, ids: Sequence[str]) -> set[str]:
        """Return those of `ids` that another instance has taken, or that were removed or finished.

        Not those of which Redis knows nothing: it has lost its memory, and will get their results.
        """
        if not ids:
            return set()
        commands = [("HMGET", self._key("request", id), "result", "removed", "owner") for id in ids]
        me, lost = self._instance.encode(), set()
        for id, reply in zip(ids, await self._round_trip(commands), strict=True):
            if isinstance(reply, list) and (reply[0] or reply[1] or reply[2] not in (None, me)):
                lost.add(id)
        return lost

    async def _take(self, max_samples: int, max_bytes: int) -> list[StoredRequest]:
        from_dead = int(self._is_renewed and time.monotonic() >= self._sure_at)
        limits = MAX_TAKEN, max_samples, min(max_bytes, MAX_TAKEN_BYTES)
        command = self._script(scripts.TAKE, self._instance, from_dead, *limits, self._kept_ms)
        taken = [_request_of(*row) for row in await self._ask(command, MAX_RECORD_BYTES)]
        self._owned.update(request.id for request in taken)
        return taken

    async def _recall(self) -> list[StoredRequest]:
        """Return one request that this instance owns without knowing it."""
        id = self._leftover.pop()
        fields = "request", "samples", "deaths", "owner"
        (reply,) = await self._round_trip([("HMGET", self._key("request", id), *fields)], MAX_RECORD_BYTES)
        if not isinstance(reply, list) or reply[0] is None or reply[3] != self._instance.encode():
            await self._round_trip([("SREM", self._key("owned", self._instance), id)])
            return []
        self._owned.add(id)
        return [_request_of(id.encode(), reply[0], _number(reply[1]), _number(reply[2]))]

    # --- round trips --------------------------------------------------------------------------------------------------

    async def _run(self, script: str, *arguments: Any, timeout_s: float | None = WAIT_S) -> Any:
        """Run a script, together with what else waits."""
        try:
            return await self._batches.run(self._script(script, *arguments), timeout_s)
        except ResponseError as error:
            raise self._refusal(error) from error

    async def _call(self, script: str, *arguments: Any) -> Any:
        """Run a script at once, in a round trip of its own."""
        return await self._ask(self._script(script, *arguments))

    async def _ask(self, command: Command, reply_bytes: int = 0) -> Any:
        """Return the reply to one command. Raises StoreUnavailable, also where Redis refuses it."""
        (reply,) = await self._round_trip([command], reply_bytes)
        if isinstance(reply, ResponseError):
            raise self._refusal(reply) from reply
        return reply

    def _refusal(self, error: ResponseError) -> StoreUnavailable:
        """Return what the caller of a command gets that Redis refuses, as where its memory is full."""
        self._availability.refused(str(error))
        return StoreUnavailable(str(error))

    def _script(self, script: str, *arguments: Any) -> Command:
        return ("EVAL", script, 1, self._prefix, *arguments)

    async def _round_trip(self, commands: Sequence[Command], reply_bytes: int = 0) -> list[Any]:
        """Return the replies to commands; errors of single ones are among them. Raises StoreUnavailable.

        Args:
            commands: to be sent at once.
            reply_bytes: how long the replies may be, where that is much.
        """
        timeout_s = TIMEOUT_S + (sum(map(_size_of, commands)) + reply_bytes) / BYTES_PER_S
        try:
            async with asyncio.timeout(timeout_s):
                async with self._redis.pipeline(transaction=False) as pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)
                    replies = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError, TimeoutError) as error:
            reason = str(error) or f"it has not answered within {timeout_s:.3g} s"
            self._availability.failed(reason)
            raise StoreUnavailable(reason) from error
        self._availability.succeeded()
        return replies

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"


def _connect(url: str, ca_file: str) -> Redis:
    """Return a client, which connects when it is used. Raises ConfigError, without the URL: it has a password."""
    options: dict[str, Any] = {"ssl_ca_certs": ca_file} if ca_file else {}
    try:
        client = Redis.from_url(
            url,
            protocol=2,
            socket_timeout=None,  # round trips have a deadline
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), RETRIES),
            **options,
        )
        pool: Any = client.connection_pool
        pool.make_connection()  # it checks the options of the URL, and does not connect
    except (ValueError, TypeError, OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"reward.http.redis_url is not valid ({type(error).__name__}); write "
            "redis://USER:PASSWORD@HOST:PORT/DATABASE, or rediss:// with TLS, with special characters as %XX"
        ) from None
    return client


def _request_of(id: bytes, data: object, num_samples: int, num_deaths: int) -> StoredRequest:
    """Return a stored request; one that no reader knows in place of one that cannot be decoded."""
    name = id.decode(errors="replace")
    try:
        return msgspec.structs.replace(decode_request(data), id=name, num_deaths=num_deaths)
    except ValueError as error:
        log.warning("stored_request_refused", id=name, reason=str(error))
        return unreadable_request(name, num_samples)


def _batched(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield parts of at most `size`."""
    return (ids[begin : begin + size] for begin in range(0, len(ids), size))


def _number(field: object) -> int:
    return int(field) if isinstance(field, bytes) and field.isdigit() else 0


def _size_of(command: Command) -> int:
    return sum(len(part) for part in command if isinstance(part, bytes))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
