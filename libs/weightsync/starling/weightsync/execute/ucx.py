"""Reading over UCX: ask for regions, receive them by tag into staging or, when they must be unpacked, into a buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.execute.deadline import Deadline
from starling.weightsync.execute.link import Link, Transmission, is_loopback
from starling.weightsync.execute.regions import BucketRead, Memory, as_run, payload_bytes, unpack
from starling.weightsync.execute.requests import (
    ANSWER_BYTES,
    ANSWER_TAG,
    FIRST_PAYLOAD_TAG,
    WELCOME,
    WELCOME_TAG,
    Confirm,
    Open,
    Read,
    Release,
    Request,
    decode_answer,
    frame,
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
        self._request_tag: int | None = None
        self._next_tag = FIRST_PAYLOAD_TAG
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
        arriving = self._link.receive(self._endpoint, payload, tag)
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
            link.close()

    def _ask(self, request: Request, deadline: Deadline) -> None:
        assert self._link is not None
        doing = f"waiting for {self._address} to answer"
        if self._request_tag is None:
            welcome: Memory = np.empty(WELCOME.size, np.uint8)
            self._wait(self._link.receive(self._endpoint, welcome, WELCOME_TAG), doing, deadline)
            (self._request_tag,) = WELCOME.unpack(welcome.data)
        answer: Memory = np.empty(ANSWER_BYTES, np.uint8)
        arriving = self._link.receive(self._endpoint, answer, ANSWER_TAG)
        message = np.frombuffer(frame(request), np.uint8)
        self._wait(self._link.send(self._endpoint, message, self._request_tag), doing, deadline)
        self._wait(arriving, doing, deadline)
        reason = decode_answer(answer.data).reason
        if reason:
            raise WeightsError(reason)

    def _wait(self, item: Transmission, doing: str, deadline: Deadline) -> None:
        assert self._link is not None
        while not item.completed:
            self._link.progress(deadline.check(doing))
        try:
            item.check()
        except self._link.error as error:
            raise WeightsError(f"The connection to {self._address} broke while {doing}: {error}.") from error
