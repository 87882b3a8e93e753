"""HTTP server of a replica: its thread, its address, and the file that publishes both address and key."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import uvicorn

from starling.algo.text import decode
from starling.common.errors import ConfigError
from starling.common.files import write_whole
from starling.common.service import host_name
from starling.rollout.api.app import Endpoint
from starling.rollout.api.episode_limits import EpisodeLimits
from starling.rollout.api.keys import ApiKeys
from starling.rollout.api.protocol import limited_protocol, most_connections
from starling.rollout.api.recording import Recording

if TYPE_CHECKING:
    from starling.rollout.api.model import ServedModel
    from starling.rollout.engine.queue import EngineQueue
    from starling.rollout.env.episodes.episode import TokenEpisode
    from starling.rollout.settings import ApiSettings

log = structlog.get_logger(__name__)

START_S: Final = 30
CLOSE_S: Final = 5
BACKLOG: Final = 128
"""Connections that wait to be accepted; asyncio accepts as many before any can be closed again."""
KEEP_ALIVE_S: Final = 75
"""How long an idle connection stays open: much longer than clients keep theirs (OpenAI's 5 s), since a request fails
when it crosses with the server's closing of the connection."""


class ApiAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``<run folder>/api/<replica>.json``."""

    base_url: str
    api_key: str
    model: str


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


class ApiServer:
    """The OpenAI-compatible server of one replica, in a thread with an event loop of its own.

    Args:
        engine_queue: the request queue of the engine.
        served: the model.
        settings: address, key and limits.
        replica: the replica's name; its number is added to the port.
        folder: the run's folder, for the file with address and key. None for a server that only episodes use: it
            listens on localhost, and accepts only their keys.

    Raises:
        ConfigError: the address cannot be bound, or the file cannot be written.
    """

    def __init__(
        self,
        engine_queue: EngineQueue,
        served: ServedModel,
        settings: ApiSettings,
        *,
        replica: str,
        folder: Path | None,
    ) -> None:
        key = "" if folder is None else settings.key or secrets.token_urlsafe(32)
        host = "127.0.0.1" if folder is None else settings.host
        self._socket = _listen(host, _port(settings, replica) if folder is not None else 0)
        port = self._socket.getsockname()[1]
        self.base_url = f"http://{_client_host(host)}:{port}/v1"
        """Base URL for clients."""
        self.keys: ApiKeys[Recording] = ApiKeys(key)
        """The valid API keys."""
        self.model = served.name
        self._served, self._max_requests = served, settings.max_requests
        self._endpoint = Endpoint(engine_queue, served, settings, self.keys)
        config = uvicorn.Config(
            self._endpoint.application(),
            http=limited_protocol(settings.read_timeout_s, settings.write_timeout_s, most_connections()),
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # it warns of each invalid request, which anybody can send, without end
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="api", daemon=True)
        self._thread.start()
        self._file = None
        if folder is not None:
            self._file = folder / "api" / f"{replica}.json"
            self._write_file(self._file, ApiAddress(base_url=self.base_url, api_key=key, model=served.name))

    def recording(self, episode: TokenEpisode) -> Recording:
        """Return a new recording of `episode`; called in its event loop."""
        # With the episode's own tokenizer, as it decodes in the episode's event loop: tokenizers are not thread-safe.
        limits = EpisodeLimits(self._max_requests, episode.max_branches, self._served.max_model_len)
        return Recording(episode, partial(decode, episode.tokenizer), self._served.read_calls, limits)

    def listen_also(self, listener: socket.socket) -> None:
        """Accept connections at another listening socket too: that of a sandbox with a network of its own.

        Raises:
            TimeoutError: the server has not started within some seconds.
        """
        if not self._server.has_started.wait(START_S):
            raise TimeoutError(f"the server has not started within {START_S} s")
        assert self._server.loop is not None, "it has started"
        asyncio.run_coroutine_threadsafe(self._server.listen_also(listener), self._server.loop).result(START_S)

    def close(self) -> None:
        """Stop within a few seconds, and end the requests in progress."""
        self._endpoint.stopping = True
        self._server.should_exit = True
        self._thread.join(CLOSE_S + 1.0)
        self._socket.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _write_file(self, file: Path, address: ApiAddress) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, msgspec.json.encode(address), private=True)
        except OSError as error:
            self.close()
            raise ConfigError(f"the server's file {file} cannot be written ({error.strerror})") from None
        log.info("listening", base_url=self.base_url, file=str(file))


def _port(settings: ApiSettings, replica: str) -> int:
    """Return the port of a replica: the setting's for the first one, and the following ones for the others."""
    number = replica.rpartition("-")[2]
    return settings.port + int(number) if settings.port and number.isdigit() else settings.port


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"the server cannot listen on {host}:{port} ({reason}); change rollout.api.host or rollout.api.port"
        ) from None


def _client_host(host: str) -> str:
    """Return the host name by which clients reach a server that is bound to `host`."""
    if host in ("", "0.0.0.0", "::"):
        return host_name()
    return f"[{host}]" if ":" in host else host
