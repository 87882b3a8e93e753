"""Handshakes that are broken off: a wrong key, or a controller that is down behind a port that accepts connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_harness import DEADLINE_S, HubHarness

from starling.common.net import curve, handshakes
from starling.common.net.dealer import Dealer
from starling.common.net.handshakes import BrokenHandshakes
from starling.common.net.telemetry import TelemetrySubscriber


@pytest.mark.parametrize(
    ("times", "now", "is_lasting"),
    [
        ([], 100.0, False),
        ([0.0, 1.0, 2.0, 4.0], 4.0, False),  # a controller that restarts
        ([0.0, 1.0, 2.0, 4.0], 60.0, False),  # they are over
        ([2.0 * n for n in range(15)], 28.0, False),
        ([2.0 * n for n in range(16)], 30.0, True),
        ([2.0 * n for n in range(16)], 40.0, True),
        ([2.0 * n for n in range(16)], 40.1, False),
        ([30.0 * n for n in range(9)], 240.0, False),  # a controller that hangs
        ([*(2.0 * n for n in range(10)), *(100.0 + 2.0 * n for n in range(10))], 118.0, False),  # two restarts
    ],
)
def test_broken_handshakes_last(times: list[float], now: float, is_lasting: bool) -> None:
    broken = BrokenHandshakes()
    for at in times:
        broken.add(at)
    assert broken.is_lasting(now) == is_lasting
    broken.clear()
    assert not broken.is_lasting(now)


@contextmanager
def closing_port() -> Iterator[tuple[str, list[float]]]:
    """Accept connections and close them, as a forwarded port does; yield the address, and when each was closed."""
    closed: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_over = threading.Event()

        def close_all() -> None:
            while not is_over.is_set():
                server.accept()[0].close()
                closed.append(time.monotonic())

        thread = threading.Thread(target=close_all)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}", closed
        finally:
            is_over.set()
            socket.create_connection(server.getsockname()).close()
            thread.join(DEADLINE_S)


def test_controller_behind_a_forwarded_port_may_be_down(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    with closing_port() as (address, closed):
        dealer = Dealer(address, "rollout-0", curve.load_key(keys / "rollout-0.json"))
        subscriber = TelemetrySubscriber(address, keys / "rollout-0.json")
        try:
            while len(closed) < 12:  # several of each
                assert time.monotonic() < begin + DEADLINE_S
                dealer.reconnected()
                subscriber.latest(0.05)
            is_told = dealer.is_unproven, subscriber.is_refused
            assert not any(is_told) or time.monotonic() > begin + handshakes.LASTING_S
            monkeypatch.setattr(handshakes, "LASTING_S", 1.0)
            while not (dealer.is_unproven and subscriber.is_refused):
                assert time.monotonic() < begin + 2 * DEADLINE_S
                dealer.reconnected()
                subscriber.latest(0.05)
            assert "or something between them closes the connections" in dealer.new_problem()
            assert dealer.new_problem() == "", "once"
            assert not subscriber.is_key_refused
        finally:
            dealer.close()
            subscriber.close()


def test_connection_forgets_broken_handshakes(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "LASTING_S", 0.5)
    with closing_port() as (address, _):
        dealer = Dealer(address, "rollout-0", curve.load_key(keys / "rollout-0.json"))
        deadline = time.monotonic() + DEADLINE_S
        while not dealer.is_unproven:
            assert time.monotonic() < deadline
            dealer.reconnected()
            time.sleep(0.01)
    harness = HubHarness(keys, bind=address)
    try:
        harness.poll_until(dealer.reconnected)
        assert not dealer.is_unproven
    finally:
        dealer.close()
        harness.hub.close(0.0)
