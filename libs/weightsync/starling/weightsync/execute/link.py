"""UCX through UCXX's low-level API: one context and worker, driven by the thread that owns them.

Options, all measured: error handling on (else a dead peer aborts the survivor), which with UCX's defaults means slow
TCP even on one host, so shared memory is allowed under error handling by two opt-ins; larger TCP segments.
UCX notices a dead peer but never a stopped one or a cut network: that is what deadlines and the forced close are for.
A request does not keep its buffer alive, and dropping a request does not stop it: `Link` holds both until completion.
"""

from __future__ import annotations

import ipaddress
import time
from typing import Any, Final

from starling.common.errors import WeightsError
from starling.weightsync.execute.deadline import LONGEST_WAIT_S
from starling.weightsync.execute.regions import Memory

_OPTIONS: Final = {
    "TLS": "tcp,posix,cma",
    "POSIX_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
    "KEEPALIVE_INTERVAL": "1s",
}
_FORCE_NS: Final = 10**9
"""Period of a blocking close that amounts to a forced one: pending requests are cancelled at once."""
_DRAIN_S: Final = 1.0


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_ucxx() -> tuple[Any, Any]:
    """Import UCXX's low-level module and its `Array`.

    Raises:
        WeightsError: UCXX is not installed or cannot be loaded.
    """
    try:
        import ucxx._lib.libucxx as lib
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise WeightsError(
            f"UCX is not available ({error}): install starling-weightsync[ucx] or choose transport 'local'."
        ) from error
    return lib, Array


class Transmission:
    """One request under way, with the memory it uses."""

    def __init__(self, request: Any, memory: object) -> None:
        self._request, self._memory = request, memory

    @property
    def completed(self) -> bool:
        """Whether UCX is done with the memory."""
        return bool(self._request.completed)

    def check(self) -> None:
        """Raise what the request failed with, if it did (an error of UCXX)."""
        self._request.check_error()


class Link:
    """A UCX context with one worker. Owned by one thread at a time."""

    def __init__(self, *, loopback: bool) -> None:
        self.lib, self._array = load_ucxx()
        self.error: type[Exception] = self.lib.UCXError
        """What UCXX raises."""
        options = {**_OPTIONS, **({"NET_DEVICES": "lo"} if loopback else {})}
        feature = self.lib.Feature
        try:
            self._context = self.lib.UCXContext(options, feature_flags=(feature.TAG, feature.WAKEUP))
            self.worker = self.lib.UCXWorker(self._context)
            self.worker.init_blocking_progress_mode()
        except self.error as error:
            raise WeightsError(f"UCX cannot start here ({error}); choose transport 'local'.") from error
        self._pending: list[Transmission] = []

    def progress(self, wait_s: float) -> None:
        """Let UCX work, waiting for an event for at most `wait_s`. Releases the interpreter lock."""
        self.worker.progress_worker_event(max(1, int(wait_s * 1000)))
        self._pending = [item for item in self._pending if not item.completed]

    def send(self, endpoint: Any, memory: Memory, tag: int) -> Transmission:
        """Send `memory` with `tag`; it must not change before completion."""
        return self._start(endpoint.tag_send, memory, tag)

    def receive(self, endpoint: Any, memory: Memory, tag: int) -> Transmission:
        """Fill `memory` with what arrives under `tag`. Posted on the endpoint, so that its death ends the wait."""
        return self._start(endpoint.tag_recv, memory, tag)

    def _start(self, method: Any, memory: Memory, tag: int) -> Transmission:
        assert memory.flags.c_contiguous
        array = self._array(memory)
        item = Transmission(method(array, self.lib.UCXXTag(tag)), (array, memory))
        self._pending.append(item)
        return item

    def hang_up(self, endpoint: Any) -> None:
        """Close an endpoint by force: whatever is pending on it fails now."""
        try:
            endpoint.close_blocking(period=_FORCE_NS)
        except self.error:
            pass  # it was broken already, which is as good

    def close(self) -> None:
        """Free worker and context. Endpoints must have been hung up, and listeners be gone."""
        end = time.monotonic() + _DRAIN_S
        while self._pending and time.monotonic() < end:
            self.progress(LONGEST_WAIT_S)
        last, self._pending = self._pending, []  # were UCX still at work, the memory would have to outlive the worker
        self.worker = self._context = None
        del last
