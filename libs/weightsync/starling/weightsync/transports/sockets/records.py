"""Encrypted records of a channel: AES-256-GCM under keys of one pull (NIST SP 800-38D).

A record is the size of its content, which is authenticated too, then the content and its tag. Each direction has a key
of its own, and the number of the record is the nonce: no pair of key and nonce occurs twice, because each key belongs
to a proof, with fresh random characters in it, that a reader has made and a source has accepted once. A record that
was changed, left out, repeated or put elsewhere does not decrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from starling.common.errors import WeightsError
from starling.weightsync.offers.tickets import TicketProof

RECORD_BYTES: Final = 1 << 20
"""Longest content of a record. A channel needs three times as much memory: to send, to receive and to decrypt."""
HEAD: Final = struct.Struct("<I")
TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct("<4xQ")


class ChannelKeys(NamedTuple):
    """The keys of the two directions of a channel."""

    from_reader: bytes
    from_source: bytes


def channel_keys(proof: TicketProof) -> ChannelKeys:
    """Return the keys that follow from a proof that its source has accepted."""
    return ChannelKeys(
        *(
            hmac.digest(proof.key, f"records from the {end} {proof.text}".encode(), hashlib.sha256)
            for end in ("reader", "source")
        )
    )


class RecordWriter:
    """Encrypts one direction. The memory of a record is reused by the next one."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._number = AESGCM(key), 0
        self._record = memoryview(bytearray(HEAD.size + RECORD_BYTES + TAG_BYTES))

    def write(self, content: memoryview) -> memoryview:
        """Return the record of a content of at most `RECORD_BYTES`."""
        head = HEAD.pack(content.nbytes)
        record = self._record[: HEAD.size + content.nbytes + TAG_BYTES]
        record[: HEAD.size] = head
        self._cipher.encrypt_into(_NONCE.pack(self._number), content, head, record[HEAD.size :])
        self._number += 1
        return record


class RecordReader:
    """Decrypts one direction."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._number = AESGCM(key), 0
        self._record = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        self._content = memoryview(bytearray(RECORD_BYTES))
        self._left = self._content[:0]

    def take(self, memory: memoryview) -> int:
        """Fill the start of `memory` with content that was decrypted before; return its size in bytes."""
        num = min(memory.nbytes, self._left.nbytes)
        memory[:num], self._left = self._left[:num], self._left[num:]
        return num

    def body(self, head: bytes | bytearray) -> memoryview:
        """Return the memory in which the rest of a record is to be received.

        Raises:
            WeightsError: it would be longer than a record may be.
        """
        size = _size(head)
        if size > RECORD_BYTES:
            raise WeightsError(f"A peer announced a record of {size} bytes; at most {RECORD_BYTES} are allowed.")
        return self._record[: size + TAG_BYTES]

    def read(self, head: bytes | bytearray, memory: memoryview) -> int:
        """Decrypt the record whose rest was received; return how many bytes of its content are in `memory`.

        If it has more content than fits, `take` returns all of it.

        Raises:
            WeightsError: it is not the next record of the peer.
        """
        size = _size(head)
        fits = size <= memory.nbytes
        content = memory[:size] if fits else self._content[:size]
        try:
            self._cipher.decrypt_into(_NONCE.pack(self._number), self._record[: size + TAG_BYTES], head, content)
        except InvalidTag as error:
            raise WeightsError("An encrypted record was changed on its way, or is not the peer's.") from error
        self._number += 1
        if fits:
            return size
        self._left = content
        return 0


def _size(head: bytes | bytearray) -> int:
    (size,) = HEAD.unpack(head)
    return int(size)
