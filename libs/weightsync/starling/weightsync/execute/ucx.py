"""Reading over UCX: ask for regions, receive them by tag into staging or, when they must be unpacked, into a buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.execute.deadline import Deadline
from starling.weightsync.execute.link import Link, Transmission, is_loopback
from starling.weightsync.execute.regions import BucketRead, Memory, as_run, payload_bytes, unpack
from starling.weightsync.execute.requests import (
    LENGTH,
    Confirm,
    Open,
    Read,
    Release,
    Request,
    decode_answer,
    frame,
    length_of,
)
from starling.weightsync.offer import RankOffer


class UcxReader:
    """A `Reader` over one UCX endpoint."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise WeightsError(f"{address!r} is not an address of the form host:port.")
        self._address = address
        self._link: Link | None = Link(loopback=is_loopback(host))
        self._next_tag = 1
        self._scratch: Memory = np.empty(0, np.uint8)
        try:
            self._endpoint: Any = self._link.lib.UCXEndpoint.create(self._link.worker, host, int(port), True)
        except self._link.error as error:
            self._link.close()
            raise WeightsError(f"No connection to {address}: {error}.") from error

    def open(self, offer: RankOffer, deadline: Deadline) -> None:
        """See `Reader.open`."""
        self._ask(Open(snapshot=offer.snapshot, token=offer.token), deadline)

    def read(self, bucket: BucketRead, staging: Memory, deadline: Deadline) -> None:
        """See `Reader.read`."""
        assert self._link is not None
        payload = as_run(staging, bucket.destinations)
        in_place = payload is not None
        if payload is None:
            size = payload_bytes(bucket.destinations)
            if self._scratch.nbytes < size:
                self._scratch = np.empty(size, np.uint8)
            payload = self._scratch[:size]
        tag = self._next_tag
        self._next_tag += 1
        arriving = self._link.tag_receive(self._endpoint, payload, tag)
        self._ask(Read(tag=tag, regions=bucket.sources), deadline)
        self._wait(arriving, "receiving weights", deadline)
        if not in_place:
            unpack(payload, bucket.destinations, staging)

    def confirm(self, deadline: Deadline) -> None:
        """See `Reader.confirm`."""
        self._ask(Confirm(), deadline)

    def release(self, deadline: Deadline) -> None:
        """See `Reader.release`."""
        self._ask(Release(), deadline)

    def close(self) -> None:
        """See `Reader.close`."""
        link, self._link = self._link, None
        if link is not None:
            link.hang_up(self._endpoint)
            self._endpoint = None
            try:
                link.drain()
            except WeightsError:
                pass  # the requests hold their memory; freeing the worker ends them
            link.close()

    def _ask(self, request: Request, deadline: Deadline) -> None:
        assert self._link is not None
        doing = f"waiting for {self._address} to answer"
        self._wait(self._link.stream_send(self._endpoint, frame(request)), doing, deadline)
        header = self._receive(LENGTH.size, doing, deadline)
        answer = decode_answer(self._receive(length_of(header), doing, deadline))
        if answer.reason:
            raise WeightsError(answer.reason)

    def _receive(self, size: int, doing: str, deadline: Deadline) -> bytes:
        assert self._link is not None
        memory: Memory = np.empty(size, np.uint8)
        self._wait(self._link.stream_receive(self._endpoint, memory), doing, deadline)
        return memory.tobytes()

    def _wait(self, item: Transmission, doing: str, deadline: Deadline) -> None:
        assert self._link is not None
        while not item.completed:
            self._link.progress(deadline.check(doing))
        try:
            item.check()
        except self._link.error as error:
            raise WeightsError(f"The connection to {self._address} broke while {doing}: {error}.") from error
