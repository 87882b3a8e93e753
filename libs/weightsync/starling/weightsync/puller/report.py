"""Progress of a running pull, and the report of a finished one."""

from __future__ import annotations

import msgspec


class PullProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a pull."""

    bytes_done: int
    bytes_total: int
    seconds_left: float
    """At the rate so far; infinite before anything has arrived."""


class SourceRead(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank read from one rank of a source."""

    address: str
    """Of the source, as in its offer."""
    source_rank: int
    rank: int
    """That of the destination."""
    transport: str
    num_bytes: int
    """Bytes that travelled."""
    seconds: float
    """From the beginning of the pull to the last of them, unpacked and digested."""


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times of one pull. `prepare_s`, `read_s` and `confirm_s` sum to `seconds`; the other seconds lie within
    `read_s`, and those of several threads may overlap."""

    version: int
    transport: str
    """Transports of the sources, joined by ``+`` where they differ."""
    lanes: tuple[str, ...]
    """Network paths that the bytes really took, for example ``cma/memory``."""
    num_buckets: int
    num_retries: int
    num_deltas: int
    """Boxes that arrived as deltas."""
    size_bytes: int
    """Bytes of the destination that were brought up to date."""
    buffer_bytes: int
    """Size of the buffer pool for payloads that must be unpacked, in addition to staging or the live tensors."""
    bytes_by_source: dict[str, int]
    """Bytes that travelled, by source address."""
    seconds: float
    prepare_s: float
    """Checking plan and offer, and setting up."""
    read_s: float
    """Connecting, reading, unpacking and digesting."""
    unpack_s: float
    digest_s: float
    wait_s: float
    """Part of `read_s` in which the pulling thread only waited for sources and threads."""
    confirm_s: float
    """Confirming that the snapshots were not revoked meanwhile."""
    reads: tuple[SourceRead, ...] = ()
    """By source and rank."""
