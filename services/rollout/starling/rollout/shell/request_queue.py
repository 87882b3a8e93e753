"""A door to the engine for whoever does not hold it: environments and the HTTP endpoint, in threads of their own.

any thread:       submit ──> Future          abandon, finish
holder's thread:  serve (what came, to the engine)   settle (what ended, to its future)   take_back (from the engine)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from starling.common.errors import StarlingError
from starling.common.wire.messages import Status
from starling.rollout.engine.base import Completion, EngineLostError, GroupResult

if TYPE_CHECKING:
    from starling.rollout.engine.base import Engine, GroupFailed, GroupRequest

LEASE_PREFIX = "door:"
"""What the names of requests begin with that came this way; no lease of the controller's does."""


class QueueClosedError(StarlingError):
    """The replica leaves: it takes nothing more."""


class GenerationError(StarlingError):
    """What was asked for could not be generated, for the reason given."""


class EngineQueue:
    """Requests on their way to the engine, and what is known of those that it has.

    Args:
        wake: makes the holder of the engine call `serve`; called from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._arrived: deque[tuple[GroupRequest, Future[GroupResult]]] = deque()
        self._abandoned: set[str] = set()
        self._finished: set[str] = set()
        self._held: dict[str, tuple[GroupRequest, Future[GroupResult]]] = {}
        """What the engine has, by name; only the holder's thread looks at it."""
        self._closed = False

    def submit(self, request: GroupRequest) -> Future[GroupResult]:
        """Ask for a group; its `lease` begins with `LEASE_PREFIX` and is nobody else's. From any thread.

        The future raises RequestError for what the engine refuses, GenerationError for what it could not finish.

        Raises:
            DoorClosedError: the replica leaves.
        """
        assert request.lease.startswith(LEASE_PREFIX), f"{request.lease!r} does not begin with {LEASE_PREFIX!r}"
        future: Future[GroupResult] = Future()
        with self._lock:
            if self._closed:
                raise QueueClosedError("this replica leaves and takes no more requests; ask another one")
            self._arrived.append((request, future))
        self._wake()
        return future

    def abandon(self, lease: str) -> None:
        """Want a group no longer: its future is never done. From any thread."""
        with self._lock:
            self._abandoned.add(lease)
        self._wake()

    def finish(self, lease: str) -> None:
        """Want no more tokens of a group: its future is done with what is there of it. From any thread.

        Completions that have not ended count as ended, of their own accord; some may have no token.
        """
        with self._lock:
            self._finished.add(lease)
        self._wake()

    @property
    def waiting(self) -> bool:
        """Whether something came that `serve` has not taken yet."""
        with self._lock:
            return bool(self._arrived or self._abandoned or self._finished)

    def serve(self, engine: Engine, *, admit: bool) -> None:
        """Hand what came to the engine; without `admit` new requests wait, and only what is abandoned goes.

        Raises:
            EngineLostError: the engine is gone; nothing that came is lost.
        """
        with self._lock:
            abandoned, self._abandoned = self._abandoned, set()
            finished, self._finished = self._finished, set()
            arrived = deque(pair for pair in self._arrived if pair[0].lease not in abandoned)
            self._arrived = deque() if admit else arrived.copy()
            if not admit:  # what was taken back, and is enough as it is, ends when an engine has it again
                self._finished |= finished & {request.lease for request, _ in arrived}
                arrived.clear()
        try:
            for lease in abandoned & self._held.keys():
                del self._held[lease]
                engine.cancel(lease)
            while arrived:
                self._admit(engine, *arrived[0])
                arrived.popleft()
            for lease in finished & self._held.keys():
                self._finish(engine, lease)
        except EngineLostError:
            with self._lock:
                self._arrived.extendleft(reversed(arrived))
                self._abandoned |= abandoned
                self._finished |= finished
            raise

    def settle(self, result: GroupResult | GroupFailed) -> bool:
        """Give what ended to who asked for it; False when it did not come this way."""
        if not result.lease.startswith(LEASE_PREFIX):
            return False
        held = self._held.pop(result.lease, None)
        if held is None:
            return True
        _, future = held
        if isinstance(result, GroupResult):
            future.set_result(result)
        else:
            future.set_exception(GenerationError(result.reason))
        return True

    def take_back(self, engine: Engine) -> None:
        """Take out of the engine what it holds, to go on from there when `serve` admits it again."""
        held, self._held = self._held, {}
        again = []
        for lease, (request, future) in held.items():
            partial = engine.interrupt(lease)
            # What an engine has made of a prompt goes with it: such a group begins anew.
            if partial and not request.score_prompt:
                request = replace(request, partial=partial)
            again.append((request, future))
        with self._lock:
            self._arrived.extendleft(reversed(again))

    def close(self) -> None:
        """Refuse what is still to come, and fail what is under way."""
        with self._lock:
            self._closed = True
            arrived, self._arrived = list(self._arrived), deque()
        for _, future in (*arrived, *self._held.values()):
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(QueueClosedError("this replica leaves; ask another one"))
        self._held.clear()

    def _admit(self, engine: Engine, request: GroupRequest, future: Future[GroupResult]) -> None:
        """Hand one request to the engine, unless it was cancelled. From here on nobody cancels it."""
        # What was taken back has come by here before.
        if not (future.running() or future.set_running_or_notify_cancel()):
            return
        try:
            engine.add(request)
        except EngineLostError:
            raise
        except StarlingError as error:
            future.set_exception(error)
        else:
            self._held[request.lease] = (request, future)

    def _finish(self, engine: Engine, lease: str) -> None:
        """End a group now, with what is there of it. One that has ended by itself is settled with its result."""
        partials = engine.interrupt(lease)
        if partials is None:
            return
        request, future = self._held.pop(lease)
        completions = tuple(Completion(p.token_ids, p.logprobs, p.versions, p.status or Status.OK) for p in partials)
        prompt_ids = np.asarray(request.prompt_ids, np.int32)
        future.set_result(GroupResult(lease, prompt_ids, completions, request.tensors))
