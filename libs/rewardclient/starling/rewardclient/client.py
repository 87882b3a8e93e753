"""Asynchronous client of a reward service.

    samples --split--> requests --enqueue--> tickets --poll--> rewards --merge--> Rewards
                           |                    |
                 retries at other replicas,   removed at the service once their rewards
                 hedging                      are here, or nothing waits for them any more

`score` does all of this. `enqueue` and `fetch` are its halves, for trainers that do something else meanwhile: a ticket
is plain data, and another process can fetch its rewards. A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from starling.common.errors import ConfigError
from starling.rewardclient.environment import settings_from_environment
from starling.rewardclient.errors import RequestLostError, RewardsLateError, RewardsMissingError
from starling.rewardclient.exchange import Deadline, exchange
from starling.rewardclient.hedging import HedgeState, Rotation
from starling.rewardclient.protocols.cosmos import CosmosProtocol
from starling.rewardclient.protocols.protocol import HttpRequest, RewardProtocol, Ticket
from starling.rewardclient.protocols.v1 import V1Protocol
from starling.rewardclient.rewards import (
    REWARD_ERROR,
    REWARD_TIMEOUT,
    Rewards,
    concatenate,
    failed_rewards,
    merge,
    with_times,
)
from starling.rewardclient.samples import RewardSample, group_indices, split
from starling.rewardclient.schedule import check_seconds
from starling.rewardclient.settings import ClientSettings, Endpoint, shown
from starling.rewardclient.tasks import end, first_result, gathered
from starling.rewardclient.transport import REMOVALS, Reply, Transport, TryFailed

MAX_LOST: Final = 3
"""How often samples are sent again when a restarted service does not know their request."""
CLOSE_S: Final = 5.0
"""How long removals may take when the client is closed."""
NOT_FINITE: Final = "its latents have NaN or infinities, and were not sent."


@dataclass(frozen=True, slots=True)
class _Part:
    """The samples of one request."""

    indices: tuple[int, ...]
    samples: tuple[RewardSample, ...]
    groups: tuple[int, ...]


@dataclass(slots=True)
class _Target:
    """The replica that gets a part; None before the first try."""

    index: int | None = None
    avoid: int | None = None
    """Gets it only if there is no other."""


class AsyncRewardClient:
    """Asynchronous client of a reward service; also an async context manager.

    Args:
        settings: by default those of the environment, see `settings_from_environment`.

    Raises:
        ConfigError: no service is named.
    """

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self.settings = settings or settings_from_environment()
        self._protocol = _protocol_of(self.settings)
        self._transport = Transport(self.settings)
        self._rotation = Rotation(len(self.settings.endpoints))
        self._hedges = HedgeState(self.settings.hedging)
        self._uploads = asyncio.Semaphore(self.settings.max_uploads)
        self._polls = asyncio.Semaphore(self.settings.max_polls)
        self._removals = asyncio.Semaphore(REMOVALS)
        self._num_waiting = 0
        """Results that are waited for."""
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish removals, for some seconds, and close all connections."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_S)
            await end(list(self._background))
        await self._transport.close()

    async def score(
        self, samples: Sequence[RewardSample], *, timeout_s: float | None = None, min_valid_rate: float | None = None
    ) -> Rewards:
        """Return the rewards of samples, of any number and form.

        Samples whose rewards do not come in time, or whose requests fail on their way, have a status instead of a
        reward. When this call is cancelled, its requests are removed at the service.

        Args:
            samples: completions of one prompt belong into one call.
            timeout_s: until all rewards are there, in seconds; by default that of the settings.
            min_valid_rate: the least share of samples with a valid reward; by default that of the settings.

        Raises:
            RequestRefusedError: the service refuses a request for good.
            RewardsMissingError: no request was answered at all; its subclasses say why.
            TooFewRewardsError: fewer samples than demanded have a valid reward.
            ConfigError: a sample cannot be sent.
        """
        started, deadline = time.monotonic(), self._deadline(timeout_s)
        groups = group_indices(samples)
        sendable = await asyncio.to_thread(_sendable, samples)
        parts = self._divide(samples, groups, sendable)
        found = await gathered([_or_missing(self._hedged(part, deadline)) for part in parts])
        rewards = _all_or_some(found, [part.groups for part in parts])
        scored = [(part.indices, one) for part, one in zip(parts, rewards, strict=True)]
        if left_out := sorted(set(range(len(samples))).difference(sendable)):
            failed = failed_rewards([groups[index] for index in left_out], REWARD_ERROR, NOT_FINITE)
            scored.append((tuple(left_out), failed))
        whole = merge(scored, groups)
        return self._checked(with_times(whole, time.monotonic() - started, whole.num_hedged), min_valid_rate)

    async def enqueue(self, samples: Sequence[RewardSample], *, timeout_s: float | None = None) -> Ticket:
        """Send samples in one request; return the ticket for their rewards once the service has accepted them.

        Args:
            samples: as many as one request can have, and of one form where the protocol wants it.
            timeout_s: until they are accepted, in seconds.

        Raises:
            RequestRefusedError, RewardsMissingError, ConfigError: as of `score`.
        """
        parts = self._divide(samples, group_indices(samples), range(len(samples)))
        if len(parts) != 1:
            raise ConfigError(
                f"{len(samples)} samples need {len(parts)} requests and a ticket is for one: enqueue at most "
                f"{self.settings.max_request_samples} samples of one form and {self.settings.max_request_mb} MiB, or "
                "use score"
            )
        return await self._enqueue(parts[0], self._deadline(timeout_s), _Target())

    async def fetch(self, ticket: Ticket, *, timeout_s: float | None = None, remove: bool = True) -> Rewards:
        """Return the rewards of a ticket once they are there.

        Args:
            ticket: of this client, or of another one with the same endpoint.
            timeout_s: until they are there, in seconds. If that passes, or this call is cancelled, the ticket stays
                valid.
            remove: remove them at the service, whose room for results is limited; False to fetch them again.

        Raises:
            RequestRefusedError, RewardsMissingError: as of `score`.
            ConfigError: the ticket is of another service.
        """
        started = time.monotonic()
        rewards = await self._fetch(ticket, self._deadline(timeout_s))
        if remove:
            self._in_background(self.remove(ticket))
        return with_times(rewards, time.monotonic() - started, 0)

    async def fetch_many(
        self, tickets: Sequence[Ticket], *, timeout_s: float | None = None, min_valid_rate: float | None = None
    ) -> list[Rewards]:
        """Return the rewards of many tickets in their order; at most `max_polls` are asked for at a time.

        Args:
            tickets: any number. The samples of one whose rewards do not come have a status instead.
            timeout_s: until all are there, in seconds.
            min_valid_rate: the least share of all their samples with a valid reward.

        Raises:
            RequestRefusedError, RewardsMissingError, TooFewRewardsError, ConfigError: as of `score` and `fetch`.
        """
        found = await gathered([_or_missing(self.fetch(ticket, timeout_s=timeout_s)) for ticket in tickets])
        rewards = _all_or_some(found, [ticket.groups for ticket in tickets])
        self._checked(concatenate(rewards), min_valid_rate)
        return rewards

    async def remove(self, ticket: Ticket) -> None:
        """Stop scoring the samples of a ticket, and forget their rewards, where the protocol has a request for it.

        It does not raise where the service cannot be reached: that costs the service some memory until the rewards
        expire.
        """
        request = self._protocol.remove(self._endpoint_of(ticket)[1], ticket)
        if request is None:
            return
        async with self._removals:
            with contextlib.suppress(TryFailed, RewardsMissingError):
                await self._transport.send(request, self.settings.timeouts.poll_s)

    def _divide(self, samples: Sequence[RewardSample], groups: Sequence[int], indices: Sequence[int]) -> list[_Part]:
        """Return the requests of the samples of `indices`."""
        chosen = [samples[index] for index in indices]
        requests = split(
            [groups[index] for index in indices],
            [self._protocol.form_of(sample) for sample in chosen],
            [self._protocol.size_of(sample) for sample in chosen],
            max_samples=self.settings.max_request_samples,
            max_bytes=self.settings.max_request_mb << 20,
        )
        parts = [tuple(indices[position] for position in request) for request in requests]
        return [
            _Part(part, tuple(samples[index] for index in part), tuple(groups[index] for index in part))
            for part in parts
        ]

    async def _hedged(self, part: _Part, deadline: Deadline) -> Rewards:
        """Return the rewards of a part, from the first of one or two requests that is answered."""
        started, delay_s, target = time.monotonic(), self._hedges.start(), _Target()
        tasks = [asyncio.create_task(self._attempt(part, deadline, target))]
        try:
            if delay_s is not None:
                await asyncio.wait(tasks, timeout=delay_s)
                # One that waits for its turn to be sent is not slow at the service.
                if not tasks[0].done() and target.index is not None and self._hedges.take():
                    tasks.append(asyncio.create_task(self._attempt(part, deadline, _Target(avoid=target.index))))
            rewards = await first_result(tasks)
        finally:
            await end(tasks)
        time_s = time.monotonic() - started
        self._hedges.observe(time_s)
        return with_times(rewards, time_s, len(tasks) - 1)

    async def _attempt(self, part: _Part, deadline: Deadline, target: _Target) -> Rewards:
        """Send a part and wait for its rewards. Whatever happens, its request is removed at the service."""
        num_lost = 0
        while True:
            ticket = await self._enqueue(part, deadline, target)
            try:
                return await self._fetch(ticket, deadline)
            except RequestLostError:
                num_lost += 1
                if num_lost > MAX_LOST:
                    raise
            finally:
                self._in_background(self.remove(ticket))

    async def _enqueue(self, part: _Part, deadline: Deadline, target: _Target) -> Ticket:
        async def make() -> tuple[int, HttpRequest]:
            previous = target.avoid if target.index is None else target.index
            target.index = self._rotation.choose(time.monotonic(), previous)
            endpoint = self.settings.endpoints[target.index]
            # Media take long to encode, during which other requests go on.
            return target.index, await asyncio.to_thread(self._protocol.enqueue, endpoint, part.samples)

        async def send(request: HttpRequest) -> Reply:
            assert target.index is not None, "chosen by `make`"
            return await self._send_samples(request, deadline, part.groups, target.index)

        async with self._uploads:  # through all tries, since the samples are encoded in memory
            reply = await exchange(
                make,
                send,
                expected=self._protocol.accepted,
                retries=self.settings.retries,
                rotation=self._rotation,
                deadline=deadline,
            )
        assert target.index is not None, "chosen by `make`"
        return self._ticket_of(reply, part.groups, target.index)

    async def _send_samples(
        self, request: HttpRequest, deadline: Deadline, groups: tuple[int, ...], index: int
    ) -> Reply:
        """Send samples once. If this is cancelled, the reply is waited for, to remove what the service accepted."""
        sending = asyncio.create_task(self._transport.send(request, deadline.left_s))

        async def remove_accepted() -> None:
            with contextlib.suppress(TryFailed, RewardsMissingError):
                reply = await sending
                if reply.status in self._protocol.accepted:
                    await self.remove(self._ticket_of(reply, groups, index))

        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._in_background(remove_accepted())
            raise

    async def _fetch(self, ticket: Ticket, deadline: Deadline) -> Rewards:
        index, endpoint = self._endpoint_of(ticket)
        names = self._protocol.parts_of(ticket)
        parts = await gathered([self._poll(ticket, name, index, endpoint, deadline) for name in names])
        return self._protocol.read_result(ticket, parts)

    async def _poll(self, ticket: Ticket, name: str, index: int, endpoint: Endpoint, deadline: Deadline) -> bytes:
        """Return a part of the result of a ticket once it is there."""
        protocol, num_pauses = self._protocol, 0
        self._num_waiting += 1
        try:
            while True:
                if not deadline.left_s:
                    raise RewardsLateError(
                        f"request {ticket.id} has no rewards after {deadline.timeout_s:g} s; raise timeout_s, or see "
                        "what delays the service"
                    )
                asked_at = time.monotonic()
                reply = await self._ask(ticket, name, index, endpoint, deadline)
                if reply.status in protocol.ready:
                    return reply.body
                if reply.status in protocol.lost:
                    raise RequestLostError(
                        f"{shown(endpoint.fetch_url)} does not know request {ticket.id}: the service was restarted, or "
                        "the rewards have expired; send the samples again"
                    )
                pause_s = self.settings.polling.pause_s(num_pauses, random.random())
                num_pauses += 1
                # A service that has waited itself needs no pause.
                pause_s = max(0.0, pause_s - (time.monotonic() - asked_at))
                await asyncio.sleep(min(pause_s, deadline.left_s))
        finally:
            self._num_waiting -= 1

    async def _ask(self, ticket: Ticket, name: str, index: int, endpoint: Endpoint, deadline: Deadline) -> Reply:
        """Return a reply on a part of the result of a ticket: the result, not ready, or not known."""
        protocol, settings = self._protocol, self.settings

        async def make() -> tuple[int, HttpRequest]:
            wait_s = settings.polling.long_poll_s(self._num_waiting, settings.max_polls, deadline.left_s)
            return index, protocol.poll(endpoint, ticket, name, wait_s)

        async def send(request: HttpRequest) -> Reply:
            async with self._polls:
                return await self._transport.send(request, deadline.left_s)

        try:
            return await exchange(
                make,
                send,
                expected=protocol.ready | protocol.not_ready | protocol.lost,
                retries=settings.retries,
                rotation=self._rotation,
                deadline=deadline,
            )
        except RewardsLateError as error:
            late = f"request {ticket.id} has no rewards after {deadline.timeout_s:g} s: {error}"
            raise RewardsLateError(late) from None

    def _ticket_of(self, reply: Reply, groups: tuple[int, ...], index: int) -> Ticket:
        accepted = self._protocol.read_accepted(reply.body)
        url = self.settings.endpoints[index].fetch_url
        return Ticket(id=accepted.id, fetch_url=url, groups=groups, replica=accepted.replica)

    def _endpoint_of(self, ticket: Ticket) -> tuple[int, Endpoint]:
        """Return the endpoint of a ticket, and its index. A ticket does not decide where the token is sent."""
        for index, endpoint in enumerate(self.settings.endpoints):
            if endpoint.fetch_url == ticket.fetch_url:
                return index, endpoint
        raise ConfigError(f"a ticket is of {shown(ticket.fetch_url)}, which is none of this client's endpoints; add it")

    def _deadline(self, timeout_s: float | None) -> Deadline:
        if timeout_s is None:
            return Deadline(self.settings.timeout_s)
        check_seconds("timeout_s", timeout_s)
        return Deadline(timeout_s)

    def _checked(self, rewards: Rewards, min_valid_rate: float | None) -> Rewards:
        return rewards.require(self.settings.min_valid_rate if min_valid_rate is None else min_valid_rate)

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _protocol_of(settings: ClientSettings) -> RewardProtocol:
    if settings.protocol == "v1":
        return V1Protocol(settings.rule)
    return CosmosProtocol(settings.rule, settings.extras, use_replica=settings.use_replica)


def _sendable(samples: Sequence[RewardSample]) -> list[int]:
    """Return the indices of the samples that a service would not refuse, and all others with them."""
    return [index for index, sample in enumerate(samples) if sample.media is None or sample.media.is_finite]


async def _or_missing(rewards: Coroutine[Any, Any, Rewards]) -> Rewards | RewardsMissingError:
    """Return rewards, or the error that says why they did not come."""
    try:
        return await rewards
    except RewardsMissingError as error:
        return error


def _all_or_some(found: Sequence[Rewards | RewardsMissingError], groups: Sequence[tuple[int, ...]]) -> list[Rewards]:
    """Return the rewards of requests, failed ones for those that were not answered; raise if none was answered."""
    errors = [one for one in found if isinstance(one, RewardsMissingError)]
    if errors and len(errors) == len(found):
        raise errors[0]
    return [
        one if isinstance(one, Rewards) else failed_rewards(own, _status_of(one), str(one))
        for one, own in zip(found, groups, strict=True)
    ]


def _status_of(error: RewardsMissingError) -> str:
    return REWARD_TIMEOUT if isinstance(error, RewardsLateError) else REWARD_ERROR
