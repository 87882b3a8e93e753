"""Tasks that belong together: where one fails or the caller is cancelled, the others are cancelled and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gathered(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all, in order; raise the first error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end(tasks)


async def first_result(tasks: Sequence[asyncio.Task[T]]) -> T:
    """Return the result of the first task that has one; raise the error of the first task if all fail."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task.result()
    return tasks[0].result()


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that have not ended, and wait for them; their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
