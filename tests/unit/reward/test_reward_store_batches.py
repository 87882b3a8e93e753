"""Batches of operations for a store: order, limits, and unexpected errors of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import structlog

from starling.reward.http.errors import StoreUnavailable
from starling.reward.http.stores.batches import MAX_BYTES, MAX_OPERATIONS, Batches

WAIT_S = 30.0


class Commits:
    """A store that returns each operation in capitals, and raises at `broken`, or for what it names."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    async def __call__(self, operations: Sequence[str]) -> Sequence[Any]:
        self.batches.append(list(operations))
        await asyncio.sleep(0)
        if "broken" in operations:
            raise KeyError("a column")
        if "short" in operations:
            return []
        if "cancelled" in operations:
            raise asyncio.CancelledError
        return [one.upper() for one in operations]


def test_operations_that_wait_are_one_batch_within_its_limits() -> None:
    async def scenario() -> None:
        commits = Commits()
        batches = Batches(commits, lambda operation: MAX_BYTES if operation == "large" else 1)
        names = [*map(str, range(MAX_OPERATIONS + 1)), "large", "a"]
        found = await asyncio.gather(*(batches.run(name, WAIT_S) for name in names))
        assert found == [name.upper() for name in names]
        assert [len(one) for one in commits.batches] == [MAX_OPERATIONS, 1, 1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", ["broken", "short"])
def test_unexpected_error_is_reported_to_its_callers_and_what_waits_goes_on(bad: str) -> None:
    async def scenario() -> None:
        commits = Commits()
        batches = Batches(commits, lambda operation: MAX_BYTES)
        with structlog.testing.capture_logs() as logs:
            running = [asyncio.ensure_future(batches.run(name)) for name in (bad, "a", bad, "b")]
            done = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), WAIT_S)
        assert [str(one) for one in done[1::2]] == ["A", "B"]
        for failed in done[::2]:
            assert isinstance(failed, StoreUnavailable)
            assert "was not completed" in failed.reason
        assert [line["event"] for line in logs] == ["store_error"], "one line for all"
        await asyncio.wait_for(batches.flush(), WAIT_S)
        assert await batches.run("c", WAIT_S) == "C"

    asyncio.run(scenario())


def test_end_of_the_worker_is_reported_to_all_that_wait() -> None:
    async def scenario() -> None:
        batches = Batches(Commits(), lambda operation: MAX_BYTES)
        running = [asyncio.ensure_future(batches.run(name)) for name in ("cancelled", "a")]
        for one in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), WAIT_S):
            assert isinstance(one, StoreUnavailable)
        assert await batches.run("b", WAIT_S) == "B"

    asyncio.run(scenario())
