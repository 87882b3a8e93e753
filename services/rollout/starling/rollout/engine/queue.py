"""Thread-safe request queue of the engine, used by environments and the HTTP server in threads of their own.

any thread:       submit ──> Future          abandon, finish
engine's thread:  serve (pass requests to the engine)   settle (set the future)   requeue (take requests back)
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

LEASE_PREFIX = "local:"
"""Prefix of the leases of these requests, which no lease of the controller has."""


class QueueClosedError(StarlingError):
    """The replica leaves and accepts no more requests."""


class GenerationError(StarlingError):
    """A request failed in the engine; the text is the reason."""


class EngineQueue:
    """Requests that wait for the engine, and those in it.

    Args:
        wake: makes the engine's thread call `serve`; called from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._submitted: deque[tuple[GroupRequest, Future[GroupResult]]] = deque()
        self._abandoned: set[str] = set()
        self._finished: set[str] = set()
        self._running: dict[str, tuple[GroupRequest, Future[GroupResult]]] = {}
        """Requests in the engine, by lease; for the engine's thread only."""
        self._closed = False

    def submit(self, request: GroupRequest) -> Future[GroupResult]:
        """Request a group; its `lease` begins with `LEASE_PREFIX` and is unique. From any thread.

        The future raises RequestError when the engine rejects the request, GenerationError when it fails.

        Raises:
            QueueClosedError: the replica leaves.
        """
        assert request.lease.startswith(LEASE_PREFIX), f"{request.lease!r} does not begin with {LEASE_PREFIX!r}"
        future: Future[GroupResult] = Future()
        with self._lock:
            if self._closed:
                raise QueueClosedError("this replica is shutting down and accepts no more requests; use another one")
            self._submitted.append((request, future))
        self._wake()
        return future

    def abandon(self, lease: str) -> None:
        """Cancel a request; its future is never done. From any thread."""
        with self._lock:
            self._abandoned.add(lease)
        self._wake()

    def finish(self, lease: str) -> None:
        """End a request early: its future gets the tokens so far. From any thread.

        Unfinished completions count as stopped; some may have no token.
        """
        with self._lock:
            self._finished.add(lease)
        self._wake()

    @property
    def waiting(self) -> bool:
        """Whether there is work for `serve`."""
        with self._lock:
            return bool(self._submitted or self._abandoned or self._finished)

    def serve(self, engine: Engine, *, admit: bool) -> None:
        """Pass requests to the engine; without `admit` new ones wait, and only abandoned ones are cancelled.

        Raises:
            EngineLostError: the engine is lost; no request is.
        """
        with self._lock:
            abandoned, self._abandoned = self._abandoned, set()
            finished, self._finished = self._finished, set()
            submitted = deque(pair for pair in self._submitted if pair[0].lease not in abandoned)
            self._submitted = deque() if admit else submitted.copy()
            if not admit:  # a requeued request that was finished meanwhile ends when an engine has it again
                self._finished |= finished & {request.lease for request, _ in submitted}
                submitted.clear()
        try:
            for lease in abandoned & self._running.keys():
                del self._running[lease]
                engine.cancel(lease)
            while submitted:
                self._admit(engine, *submitted[0])
                submitted.popleft()
            for lease in finished & self._running.keys():
                self._finish(engine, lease)
        except EngineLostError:
            with self._lock:
                self._submitted.extendleft(reversed(submitted))
                self._abandoned |= abandoned
                self._finished |= finished
            raise

    def settle(self, result: GroupResult | GroupFailed) -> bool:
        """Set the future of an ended request; returns False for a group of the controller."""
        if not result.lease.startswith(LEASE_PREFIX):
            return False
        running = self._running.pop(result.lease, None)
        if running is None:
            return True
        _, future = running
        if isinstance(result, GroupResult):
            future.set_result(result)
        else:
            future.set_exception(GenerationError(result.reason))
        return True

    def requeue(self, engine: Engine) -> None:
        """Take all requests out of the engine with their tokens, so that `serve` resumes them in the next one.

        One whose tokens a lost engine does not give starts over.
        """
        running, self._running = self._running, {}
        requeued = []
        for lease, (request, future) in running.items():
            try:
                partial = engine.interrupt(lease)
            except EngineLostError:  # its next step reports that
                partial = None
            # The engine's scores of the prompt are lost, so such a request starts over.
            if partial and not request.score_prompt:
                request = replace(request, partial=partial)
            requeued.append((request, future))
        with self._lock:
            self._submitted.extendleft(reversed(requeued))

    def close(self) -> None:
        """Reject new requests, and fail those in progress."""
        with self._lock:
            self._closed = True
            submitted, self._submitted = list(self._submitted), deque()
        for _, future in (*submitted, *self._running.values()):
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(QueueClosedError("this replica is shutting down; use another one"))
        self._running.clear()

    def _admit(self, engine: Engine, request: GroupRequest, future: Future[GroupResult]) -> None:
        """Pass one request to the engine, unless it was cancelled. From here on its future cannot be cancelled."""
        # The future of a requeued request is running already.
        if not (future.running() or future.set_running_or_notify_cancel()):
            return
        try:
            engine.add(request)
        except EngineLostError:
            raise
        except StarlingError as error:
            future.set_exception(error)
        else:
            self._running[request.lease] = (request, future)

    def _finish(self, engine: Engine, lease: str) -> None:
        """End a request with its tokens so far. One that has ended in the meantime is settled with its result."""
        partials = engine.interrupt(lease)
        if partials is None:
            return
        request, future = self._running.pop(lease)
        completions = tuple(
            Completion(p.token_ids, p.logprobs, p.versions, p.status or Status.OK, p.kept, p.truncation_nats, p.routing)
            for p in partials
        )
        prompt_ids = np.asarray(request.prompt_ids, np.int32)
        routing = partials[0].prompt_routing
        future.set_result(GroupResult(lease, prompt_ids, completions, request.tensors, prompt_routing=routing))
