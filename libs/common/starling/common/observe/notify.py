"""Messages to the service manager (systemd's protocol of ``sd_notify``): readiness, watchdog, status and stop.

What the working loop says here is also what the service's HTTP endpoint shows, if it has one: see `page`.

A service manager that is to be told names a datagram socket in ``NOTIFY_SOCKET``; see `from_variables`. The watchdog is
fed by the loop that does the work of the service, so that a service whose loop hangs is restarted although its other
threads, and its heartbeats, go on. Where the loop may rightly stand still for longer, it says so; see `patient`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from starling.common.observe.terminal import one_line

if TYPE_CHECKING:
    from starling.common.observe.metrics import Samples
    from starling.common.observe.page import StatusPage

NOTIFY_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
FEEDS_PER_PERIOD: Final = 4
"""A loop that turns as often feeds the watchdog at most this often within its period."""
MARGIN_S: Final = 30.0
"""Added to a time limit of the service, which ends itself at that limit, with a reason, before its manager does."""
STATUS_INTERVAL_S: Final = 1.0
MAX_STATUS: Final = 200
"""Characters of a status."""


class NotifySocket:
    """Where the service manager listens. Its methods belong to the working thread, and never wait.

    Args:
        address: path of a datagram socket, or a name in the abstract namespace that begins with ``@``; empty where
            there is no service manager, and then nothing is sent.
        watchdog_s: period of the watchdog; 0 for none.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s if address else 0.0
        self._is_ready = False
        self._fed_at = self._status_at = float("-inf")
        self._status = ""
        self.page: StatusPage | None = None
        """What the HTTP endpoint of this process shows; None without one."""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> NotifySocket:
        """Return the socket that `variables` of the environment name; what this version cannot use is ignored."""
        address = variables.get("NOTIFY_SOCKET", "")
        period = variables.get("WATCHDOG_USEC", "")
        is_mine = variables.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(
            address if address.startswith(("/", "@")) else "",
            int(period) / 1e6 if period.isascii() and period.isdecimal() and is_mine else 0.0,
        )

    @property
    def has_watchdog(self) -> bool:
        """Whether the service manager ends this process when it is not fed."""
        return self._watchdog_s > 0.0

    def starting(self, status: str, limit_s: float) -> None:
        """Say what the start waits for, and that this may take `limit_s` from now."""
        if self.page is not None:
            self.page.wait(limit_s + MARGIN_S)
        self._send(f"EXTEND_TIMEOUT_USEC={_usec(limit_s + MARGIN_S)}", f"STATUS={_line(status)}")

    def turn(
        self,
        status: str | Callable[[], str] | None = None,
        *,
        serves: bool | None = True,
        samples: Callable[[], Samples] | None = None,
    ) -> None:
        """Note a turn of the working loop: it is alive, and `serves` once the service has started.

        Args:
            status: the state in one line, or returns it; it is sent with the readiness, and about once a second what
                has changed.
            serves: whether work can arrive; None where that is as before.
            samples: returns the metrics, about once a second, and only where there is an HTTP endpoint.
        """
        if self.page is not None:
            self.page.turn(serves, samples)
        if not self._address:
            return
        now = time.monotonic()
        becomes_ready = bool(serves) and not self._is_ready
        lines = ["READY=1"] if becomes_ready else []
        if lines or (self._watchdog_s and now - self._fed_at >= self._watchdog_s / FEEDS_PER_PERIOD):
            lines.append("WATCHDOG=1")
        shown = self._status
        if status is not None and (becomes_ready or now - self._status_at >= STATUS_INTERVAL_S):
            shown, self._status_at = _line(status if isinstance(status, str) else status()), now
        if shown and (becomes_ready or shown != self._status):
            lines.append(f"STATUS={shown}")
        if lines and self._send(*lines):
            self._status = shown
            self._is_ready |= becomes_ready
            self._fed_at = now if "WATCHDOG=1" in lines else self._fed_at

    @contextmanager
    def patient(self, limit_s: float, status: str) -> Iterator[None]:
        """Let the working loop stand still in this block, which has a time limit of its own, `limit_s`."""
        self._status = _line(status)
        if self.page is not None:
            self.page.wait(limit_s)
        if not self._is_ready:
            self.starting(status, limit_s)
        elif self._watchdog_s:
            self._send(f"WATCHDOG_USEC={_usec(limit_s + self._watchdog_s)}", "WATCHDOG=1", f"STATUS={self._status}")
        try:
            yield
        finally:
            if self.page is not None:
                self.page.turn(None, None)
            if self._is_ready and self._watchdog_s:
                self._send(f"WATCHDOG_USEC={_usec(self._watchdog_s)}", "WATCHDOG=1")

    def stopping(self, reason: str, limit_s: float) -> None:
        """Say that the service ends, which may take `limit_s`; the watchdog is off from here on."""
        if self.page is not None:
            self.page.stop(limit_s + MARGIN_S)
        self._is_ready = True  # or will not be: a later turn of the loop must not say so
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={_usec(limit_s + MARGIN_S)}", f"STATUS={_line(reason)}")
        self._watchdog_s = 0.0

    def _send(self, *lines: str) -> bool:
        """Send one datagram. Returns False if there is no manager, or if it could not be reached now."""
        if not self._address:
            return False
        # A socket for each: nothing that a child process could inherit, and a manager may replace its own.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            try:
                sender.sendto("\n".join(lines).encode(errors="replace"), socket.MSG_DONTWAIT, self._address)
            except OSError:  # its queue is full, or it restarts: the next turn of the loop repeats what matters
                return False
        return True


def _usec(seconds: float) -> int:
    return max(1, round(seconds * 1e6))


def _line(text: str) -> str:
    """Return a status as one line: a line feed in it would begin a message of its own."""
    return one_line(text)[:MAX_STATUS]
