"""Digests of boxes (xxh3-128), in three modes.

`full` covers every byte of a box, row-major. `sampled` covers one stretch in `SAMPLE_EVERY`, another one with each
salt (the version), so that a lasting difference is found within that many versions. `off` covers nothing.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import xxhash

from starling.weightsync.memory.arrays import Array, chunks_of, flat_bytes
from starling.weightsync.memory.single_flight import SingleFlight
from starling.weightsync.plan.layout import Box

DigestMode = Literal["full", "sampled", "off"]
SAMPLE_EVERY: Final = 16
_SAMPLE_BYTES: Final = 4096

DigestKey = tuple[str, Box, DigestMode, int]
"""Tensor name, box, mode, salt."""


class Hasher:
    """Incremental digest of one box, chunk by chunk in row-major order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, chunk: Array) -> None:
        """Add the next chunk; one that is not contiguous is copied first. Releases the interpreter lock."""
        self._state.update(flat_bytes(np.ascontiguousarray(chunk)).data)

    def digest(self) -> bytes:
        """Return the digest of the chunks so far."""
        return self._state.digest()


def sample_of(array: Array, salt: int) -> Array:
    """Return the part of a box that a sampled digest covers: whole rows, or stretches of a single long row."""
    if array.ndim == 0 or array.nbytes <= _SAMPLE_BYTES:
        return array
    if array.ndim == 1 or array.shape[0] < SAMPLE_EVERY:
        run = _SAMPLE_BYTES // array.itemsize
        whole = array.size // run
        if whole < SAMPLE_EVERY:
            return np.ascontiguousarray(array).reshape(-1)
        if array.flags.c_contiguous:
            return array.reshape(-1)[: whole * run].reshape(whole, run)[salt % SAMPLE_EVERY :: SAMPLE_EVERY]
        # Copies the sample only: the whole box may be as large as a bucket.
        return np.stack(
            [array.flat[at * run : (at + 1) * run] for at in range(salt % SAMPLE_EVERY, whole, SAMPLE_EVERY)]
        )
    return array[salt % SAMPLE_EVERY :: SAMPLE_EVERY]


def digest_of_array(array: Array, digests: DigestMode = "full", salt: int = 0) -> bytes:
    """Return the digest of a box with any strides; empty for `off`."""
    if digests == "off":
        return b""
    if digests == "sampled":
        array = sample_of(array, salt)
    if array.flags.c_contiguous:
        return xxhash.xxh3_128_digest(flat_bytes(array).data)
    hasher = Hasher()
    for index in chunks_of(array):
        hasher.update(array[index])
    return hasher.digest()


def digest_of_copy(destination: Array, source: Array) -> bytes:
    """Copy a box into contiguous memory, and return its digest: each chunk is digested while it is in the cache."""
    hasher = Hasher()
    for index in chunks_of(destination):
        np.copyto(destination[index], source[index])
        hasher.update(destination[index])
    return hasher.digest()


DigestCache = SingleFlight[DigestKey, bytes]
"""Digests of one snapshot."""
