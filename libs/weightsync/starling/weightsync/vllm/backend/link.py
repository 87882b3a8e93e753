"""Encrypted connection between a worker and the trainer, authenticated by a secret that both know.

The secret comes to the workers with vLLM's call that initialises the transfer. Each end draws a nonce and proves the
secret over both nonces; the keys of both directions follow from the secret and the nonces, so no key occurs twice. The
tickets of pulls travel over this connection and not over vLLM's own control plane, which may be plain HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.transports.endpoints import split_address
from starling.weightsync.transports.messages import LENGTH
from starling.weightsync.transports.sockets.channel import Channel, ChannelStopped
from starling.weightsync.vllm.backend.messages import (
    LONGEST,
    PROTOCOL,
    Decoder,
    Opened,
    Opening,
    encode,
    opened,
    opening,
)

HANDSHAKE_S: Final = 10.0
"""How long each end waits for the other to prove the secret."""
MAX_OPENING_BYTES: Final = 4096


def new_secret() -> str:
    """Return a secret for the workers of one trainer."""
    return secrets.token_hex(32)


class Link:
    """One end of a connection. `send` may be called by several threads, `receive` by one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    @property
    def host(self) -> str:
        """This end's address."""
        return self._channel.host

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            WeightsError: the connection is gone, or the message too long.
        """
        data = encode(message)
        try:
            with self._sending:
                self._channel.send([memoryview(LENGTH.pack(len(data)) + data)])
        except (ChannelStopped, OSError) as error:
            raise WeightsError(f"The connection has ended: {_reason(error)}.") from error

    def receive(self, decoder: Decoder, deadline_s: float | None = None) -> Any:
        """Return the next message.

        Raises:
            WeightsError: none came within `deadline_s`, the connection is gone, or the peer sent something else.
        """
        end = None if deadline_s is None else time.monotonic() + deadline_s
        try:
            return decoder.decode(self._channel.receive_message(LONGEST, end))
        except (ChannelStopped, OSError) as error:
            raise WeightsError(f"The connection has ended: {_reason(error)}.") from error

    def close(self) -> None:
        """End the connection; the other threads that use it get a `WeightsError`. May be called twice."""
        self._channel.stop.set()
        self._channel.hang_up()

    # --- opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def dial(cls, address: str, secret: str, connect_s: float) -> Link:
        """Connect to a trainer, from a worker.

        Raises:
            WeightsError: it cannot be reached within `connect_s`, or does not know the secret.
        """
        try:
            connection = socket.create_connection(split_address(address), connect_s)
        except OSError as error:
            raise WeightsError(
                f"the trainer at {address} cannot be reached: {error.strerror or error}; start it before vLLM is told "
                "to join it, and set its host to an address that reaches it from here"
            ) from error
        channel = Channel(connection, threading.Event())
        mine = secrets.token_hex(16)
        try:
            _send(channel, Opening(protocol=PROTOCOL, nonce=mine))
            answer = _receive(channel, opened)
            if answer.protocol != PROTOCOL:
                raise WeightsError(
                    f"the trainer speaks protocol {answer.protocol} and this worker {PROTOCOL}; install the same "
                    "version of starling-weightsync on both sides"
                )
            if not _are_equal(answer.proof, _proof(secret, "trainer", mine, answer.nonce)):
                raise WeightsError(f"the trainer at {address} does not know the secret of init_info")
            _send(
                channel,
                Opening(protocol=PROTOCOL, nonce=mine, proof=_proof(secret, "worker", mine, answer.nonce)),
            )
        except (ChannelStopped, OSError) as error:
            channel.close()
            raise WeightsError(f"the trainer at {address} ended the connection: {_reason(error)}") from error
        except WeightsError:
            channel.close()
            raise
        _encrypt(channel, secret, mine, answer.nonce, me="worker", peer="trainer")
        return cls(channel)

    @classmethod
    def accept(cls, connection: socket.socket, secret: str) -> Link:
        """Answer a worker that has connected to the trainer.

        Raises:
            WeightsError: it does not know the secret, or did not prove it in time.
        """
        connection.setblocking(True)
        channel = Channel(connection, threading.Event())
        mine = secrets.token_hex(16)
        try:
            asked = _receive(channel, opening)
            _send(channel, Opened(nonce=mine, proof=_proof(secret, "trainer", asked.nonce, mine)))
            proven = _receive(channel, opening)
            if not _are_equal(proven.proof, _proof(secret, "worker", asked.nonce, mine)):
                raise WeightsError("A peer does not know the secret of this trainer.")
        except (ChannelStopped, OSError) as error:
            channel.close()
            raise WeightsError(f"A peer ended the connection: {_reason(error)}.") from error
        except WeightsError:
            channel.close()
            raise
        _encrypt(channel, secret, asked.nonce, mine, me="trainer", peer="worker")
        return cls(channel)


def _send(channel: Channel, message: msgspec.Struct) -> None:
    data = encode(message)
    channel.send([memoryview(LENGTH.pack(len(data)) + data)])


def _receive(channel: Channel, decoder: Decoder) -> Any:
    return decoder.decode(channel.receive_message(MAX_OPENING_BYTES, time.monotonic() + HANDSHAKE_S))


def _proof(secret: str, end: str, worker_nonce: str, trainer_nonce: str) -> str:
    return _mac(secret, f"proof of the {end}", worker_nonce, trainer_nonce).hex()


def _are_equal(text: str, other: str) -> bool:
    """Compare in constant time. `hmac.compare_digest` itself raises for texts with other characters than ASCII."""
    return hmac.compare_digest(text.encode(), other.encode())


def _encrypt(channel: Channel, secret: str, worker_nonce: str, trainer_nonce: str, *, me: str, peer: str) -> None:
    key: Callable[[str], bytes] = lambda end: _mac(secret, f"records of the {end}", worker_nonce, trainer_nonce)  # noqa: E731
    channel.encrypt(sending=key(me), receiving=key(peer))


def _mac(secret: str, *texts: str) -> bytes:
    return hmac.digest(secret.encode(), msgspec.msgpack.encode(texts), hashlib.sha256)


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
