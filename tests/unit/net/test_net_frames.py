"""Frames of messages: of a message with too many, the rest is dropped at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from starling.common.net import frames
from starling.common.net.frames import receive, receive_routed


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[Any], zmq.Socket[Any]]]:
    """Yield a ROUTER, and a DEALER that is connected to it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for socket in (router, dealer):
            socket.linger = 0
        router.rcvtimeo = 10_000
        router.bind("inproc://frames")
        dealer.connect("inproc://frames")
        yield router, dealer


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("num", [3, 4, 5, frames.SKIPPED_AT_ONCE + 3, frames.SKIPPED_AT_ONCE + 4, 5000])
def test_frames_beyond_the_limit_are_dropped(
    sockets: tuple[zmq.Socket[Any], zmq.Socket[Any]], num: int, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fast:  # as with another build of libzmq
        monkeypatch.setattr(frames, "_SKIP", None)
    router, dealer = sockets
    sent = [b"x" * ((0, 10, 100_000)[number % 3]) for number in range(num)]
    dealer.send_multipart(sent)
    dealer.send_multipart([b"next", b"whole"])
    found = receive_routed(router, 0, 3)
    assert found is not None
    assert found[1] == sent[:3]
    later = receive_routed(router, 0, 3)
    assert later is not None
    assert later[1] == [b"next", b"whole"]
    assert receive(router) is None


def test_dropped_frames_are_no_objects_of_python(sockets: tuple[zmq.Socket[Any], zmq.Socket[Any]]) -> None:
    """A million of them would take seconds, in which the controller serves no other peer."""
    router, dealer = sockets
    dealer.send_multipart([b""] * 20_000)
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "c_call"

    sys.setprofile(count)
    try:
        receive_routed(router, 0, 3)
    finally:
        sys.setprofile(None)
    assert num_calls < 1000
