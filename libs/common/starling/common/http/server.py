"""HTTP server in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import uvicorn

from starling.common.errors import ConfigError
from starling.common.http.protocol import limited_protocol, most_connections

START_S: Final = 30
CLOSE_S: Final = 5
BACKLOG: Final = 128
"""Connections that wait to be accepted; asyncio accepts as many before any can be closed again."""
KEEP_ALIVE_S: Final = 75
"""How long an idle connection stays open: much longer than clients keep theirs (OpenAI's 5 s), since a request fails
when it crosses with the server's closing of the connection."""

Application = Callable[..., Awaitable[None]]
"""An ASGI application."""


@dataclass(frozen=True)
class HttpAddress:
    """Where a server listens, and the settings that say so."""

    host: str
    port: int
    """0 for a free one."""
    settings: str
    """Section of these settings, for errors: ``rollout.api``."""


class _Server(uvicorn.Server):
    """uvicorn's server, which can be given further listening sockets while it runs."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.has_started = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.has_started.set()

    async def listen_also(self, listener: socket.socket) -> None:
        """Accept connections at `listener`."""

        def protocol() -> asyncio.Protocol:
            make: Any = self.config.http_protocol_class
            made: asyncio.Protocol = make(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        assert self.loop is not None, "called in the running loop"
        self.servers.append(await self.loop.create_server(protocol, sock=listener, backlog=BACKLOG))


class HttpServer:
    """The server of an ASGI application.

    Args:
        application: it runs in the server's event loop.
        address: where to listen.
        headers_s: time limit for the headers of a request, in seconds.
        unread_s: how long a client may read nothing of a response that waits for it, in seconds.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, application: Application, address: HttpAddress, *, headers_s: float, unread_s: float) -> None:
        self._socket = _listen(address)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{client_host(address.host)}:{self.port}"
        """For clients, without a path."""
        config = uvicorn.Config(
            application,
            http=limited_protocol(headers_s, unread_s, most_connections()),
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # it warns of each invalid request, and clients without a key can send any number
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the application, once `wait_started` has returned."""
        assert self._server.loop is not None, "it has started"
        return self._server.loop

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait_started(self) -> None:
        """Wait until connections are accepted.

        Raises:
            TimeoutError: the server has not started within some seconds.
        """
        if not self._server.has_started.wait(START_S):
            raise TimeoutError(f"the server has not started within {START_S} s")

    def listen_also(self, listener: socket.socket) -> None:
        """Accept connections at another listening socket too: that of a sandbox with a network of its own.

        Raises:
            TimeoutError: the server has not started within some seconds.
        """
        self.wait_started()
        asyncio.run_coroutine_threadsafe(self._server.listen_also(listener), self.loop).result(START_S)

    def close(self) -> None:
        """Stop within a few seconds, and end the requests in progress."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S + 1.0)
        self._socket.close()


def check_address(address: HttpAddress) -> None:
    """Raise ConfigError when no server can listen there now."""
    _listen(address).close()


def _listen(address: HttpAddress) -> socket.socket:
    host, port = address.host, address.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"the server cannot listen on {host}:{port} ({reason}); change {address.settings}.host or "
            f"{address.settings}.port"
        ) from None


def replica_port(port: int, replica: str) -> int:
    """Return the port of a replica: `port` for the first one, and the following ones for the others; 0 for 0."""
    number = replica.rpartition("-")[2]
    return port + int(number) if port and number.isdigit() else port


def client_host(host: str) -> str:
    """Return the host name by which clients reach a server that is bound to `host`."""
    if host in ("", "0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
