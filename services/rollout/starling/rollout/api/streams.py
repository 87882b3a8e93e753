"""Answers that take time: as one response or as server-sent events, and dropped when the client hangs up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from starling.common.errors import StarlingError
from starling.rollout.api.ask import Ask
from starling.rollout.api.generate import Generation, Made, Piece
from starling.rollout.api.refusal import refusal_of
from starling.rollout.api.shapes import Shapes, event

T = TypeVar("T")

DONE = event("[DONE]")


class Events(StreamingResponse):
    """Server-sent events, and what is to be given back when they end, however they do."""

    def __init__(self, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events, self._held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        with self._held:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)


async def attended(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` does; end it when the client hangs up.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # so that nothing of it is left


async def told(
    shapes: Shapes,
    ask: Ask,
    generation: Generation,
    first: Piece | None,
    pieces: AsyncGenerator[Piece, None],
    prompts: Sequence[Sequence[int]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a generation, of which `first` has come already."""
    async with contextlib.aclosing(pieces):
        try:
            for chunk in shapes.begin(ask.num_completions * len(prompts)):
                yield event(chunk)
            piece = first
            while piece is not None:
                said = shapes.piece(piece)
                if said is not None:
                    yield event(said)
                piece = await anext(pieces, None)
            for data in _ending(shapes, ask, generation.made, prompts):
                yield data
        except StarlingError as error:
            # The status went out with the first event; clients find errors among the events, too.
            yield event(refusal_of(error).body)


async def told_at_once(shapes: Shapes, ask: Ask, made: Made, prompt: Sequence[int]) -> AsyncGenerator[bytes, None]:
    """Yield the events of one choice that is whole already."""
    for chunk in shapes.begin(1):
        yield event(chunk)
    for data in _ending(shapes, ask, [made], [prompt]):
        yield data


def _ending(shapes: Shapes, ask: Ask, made: Sequence[Made], prompts: Sequence[Sequence[int]]) -> Iterator[bytes]:
    for index, one in enumerate(made):
        yield from map(event, shapes.end(index, one))
    if ask.include_usage:
        yield event(shapes.usage(made, prompts))
    yield DONE


async def _hung_up(request: Request) -> None:
    """Return when the client hangs up; its request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
