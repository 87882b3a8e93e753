"""HTTP server of a replica, and the file that publishes its address and key."""

from __future__ import annotations

import secrets
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from starling.algo.text import decode
from starling.common.errors import ConfigError
from starling.common.files import write_whole
from starling.common.http.server import HttpAddress, HttpServer, replica_port
from starling.rollout.api.app import Endpoint
from starling.rollout.api.episode_limits import EpisodeLimits
from starling.rollout.api.keys import ApiKeys
from starling.rollout.api.recording import Recording

if TYPE_CHECKING:
    from starling.rollout.api.model import ServedModel
    from starling.rollout.engine.queue import EngineQueue
    from starling.rollout.env.episodes.episode import TokenEpisode
    from starling.rollout.settings import ApiSettings

log = structlog.get_logger(__name__)


class ApiAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``<run folder>/api/<replica>.json``."""

    base_url: str
    api_key: str
    model: str


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
        port = replica_port(settings.port, replica) if folder is not None else 0
        self.keys: ApiKeys[Recording] = ApiKeys(key)
        """The valid API keys."""
        self.model = served.name
        self._served, self._max_requests = served, settings.max_requests
        self._endpoint = Endpoint(engine_queue, served, settings, self.keys)
        self._server = HttpServer(
            self._endpoint.application(),
            HttpAddress(host, port, "rollout.api"),
            headers_s=settings.read_timeout_s,
            unread_s=settings.write_timeout_s,
        )
        self.base_url = f"{self._server.url}/v1"
        """Base URL for clients."""
        self._server.start()
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
        self._server.listen_also(listener)

    def close(self) -> None:
        """Stop within a few seconds, and end the requests in progress."""
        self._endpoint.stopping = True
        self._server.close()
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
