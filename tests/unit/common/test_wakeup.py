"""Wakeups by other threads, also during close."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from starling.common.wakeup import Wakeup

ROUNDS = 300


def test_wakeup_ends_a_wait_and_is_reset() -> None:
    wakeup = Wakeup()
    poller = select.poll()
    poller.register(wakeup, select.POLLIN)
    assert not wakeup.clear()
    threading.Timer(0.05, wakeup.set).start()
    assert poller.poll(20_000), "within the deadline"
    wakeup.set()
    assert wakeup.clear()
    assert not wakeup.clear(), "several wakeups count once"
    assert not poller.poll(0)
    wakeup.close()
    wakeup.close()
    assert wakeup.fileno() == -1
    wakeup.set()
    assert not wakeup.clear()


def test_wakeup_never_sets_a_closed_descriptor() -> None:
    failures: list[OSError] = []
    holder = [Wakeup()]
    over = threading.Event()

    def keep_waking() -> None:
        while not over.is_set():
            try:
                holder[0].set()
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=keep_waking) for _ in range(3)]
    for thread in threads:
        thread.start()
    # The next pipe gets the closed descriptors: a late wakeup would write a byte into it.
    for _ in range(ROUNDS):
        time.sleep(0.0001)
        holder[0].close()
        ends = os.pipe()
        os.set_blocking(ends[0], False)
        time.sleep(0.0001)
        try:
            failures += [OSError("written to a closed descriptor")] if os.read(ends[0], 8) else []
        except BlockingIOError:
            pass
        for end in ends:
            os.close(end)
        holder[0] = Wakeup()
    over.set()
    for thread in threads:
        thread.join(20)
    holder[0].close()
    assert failures == []


def test_signal_handler_may_set_a_wakeup() -> None:
    wakeup = Wakeup()
    before = signal.signal(signal.SIGALRM, lambda *_: wakeup.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0002)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            wakeup.set()
            wakeup.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wakeup.close()
