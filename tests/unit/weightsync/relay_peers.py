"""Child process of a relay: it pulls on request, serves what it pulls, and misbehaves as it is told."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from weights_peers import ANSWER_S, BUCKET_BYTES, blank

from starling.common.errors import WeightsError
from starling.weightsync.memory.digests import digest_of_array
from starling.weightsync.offers.offer import Offer, decode_offer, layout_root
from starling.weightsync.plan.layout import decode_layout
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller.fetch import ReceivedDelta
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.relay import CLOSE_TIMEOUT_S, Relay
from starling.weightsync.puller.report import PullReport
from starling.weightsync.puller.schedule import BucketRead
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.endpoints import ServingOptions

Corruption = Literal["", "flip", "forge"]
"""`flip`: a bit of a bucket changes in the relay's memory, after it was verified. `forge`: the relay also replaces the
digest, so that its readers find that they received what it sent."""


@dataclass(frozen=True)
class RelayOrder:
    """One pull of a relay."""

    offer: bytes
    relay: bytes
    """Offer of the relay to read from; empty for none."""
    pace_s: float
    """How long the relay waits before each look for what has arrived: its readers come to wait for it."""
    corrupts: Corruption
    bucket: int
    """Which of the buckets that arrive is corrupted."""


@dataclass(frozen=True)
class RelayEnd:
    """How a pull of a relay ended."""

    report: PullReport | None
    """None if it failed."""
    reason: str = ""
    root: str = ""
    layout_root: str = ""
    """Of what the relay holds after the switch."""


class _RelayProcess:
    """The relay in its process."""

    def __init__(self, source: bytes, name: str, serving: ServingOptions, stall_s: float, pipe: Connection) -> None:
        layout = layout_of(blank(), name)
        self._tensors, self._pipe = blank(), pipe
        self._plan = make_plan(decode_layout(source), layout, bucket_bytes=BUCKET_BYTES)
        self._puller = Puller(layout, serving=serving, stall_s=stall_s)
        self._cancelled = threading.Event()

    def run(self) -> None:
        """Carry out commands until there are none."""
        while (command := self._pipe.recv()) is not None:
            if isinstance(command, RelayOrder):
                self._cancelled = threading.Event()
                threading.Thread(target=self._pull, args=(command, self._cancelled)).start()
            elif command == "fail":
                self._cancelled.set()
            elif command == "close":
                relay = self._puller._relay
                assert relay is not None
                relay._serving.server.close(CLOSE_TIMEOUT_S)

    def _pull(self, order: RelayOrder, cancelled: threading.Event) -> None:
        offer = decode_offer(order.offer)

        def announce(own: Offer) -> None:
            relay = self._puller._relay
            assert relay is not None
            _corrupt(relay, order)
            self._pipe.send(own)

        try:
            report = self._puller.pull(
                offer,
                self._plan,
                deadline_s=ANSWER_S,
                cancelled=lambda: cancelled.wait(order.pace_s),
                relays=[decode_offer(order.relay)] if order.relay else [],
                relays_first=True,
                announce=announce,
            )
            self._puller.switch(self._tensors)
            roots = self._puller.attest_roots(self._tensors, offer)
        except WeightsError as error:
            self._pipe.send(RelayEnd(None, str(error)))
        else:
            self._pipe.send(RelayEnd(report, "", roots.root, layout_root([roots.rank_root])))


def _corrupt(relay: Relay, order: RelayOrder) -> None:
    """Make the relay corrupt one bucket of its present pull, before its readers can have it."""
    vars(relay).pop("arrived", None)
    if not order.corrupts:
        return
    arrived, num_arrived = relay.arrived, 0

    def corrupted(read: BucketRead, digests: Sequence[bytes], deltas: Sequence[ReceivedDelta]) -> None:
        nonlocal num_arrived
        num_arrived += 1
        if num_arrived - 1 == order.bucket:
            index = max(range(len(read.boxes)), key=lambda index: read.boxes[index].size_bytes)
            array = read.arrays[index]
            assert array is not None
            array[(0,) * array.ndim] ^= 1
            if order.corrupts == "forge":
                digests, deltas = list(digests), ()
                digests[index] = digest_of_array(array)
        arrived(read, digests, deltas)

    relay.arrived = corrupted  # type: ignore[method-assign]


def _relay(source: bytes, name: str, serving: ServingOptions, stall_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    _RelayProcess(source, name, serving, stall_s, pipe).run()


class RelayPeer:
    """A relay in a child process."""

    def __init__(self, source: bytes, name: str, serving: ServingOptions, stall_s: float) -> None:
        self._arguments = (source, name, serving, stall_s)
        self.process: BaseProcess
        self._pipe: Connection
        self.start()

    def start(self) -> None:
        """Start the process."""
        context: Any = mp.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_relay, args=(*self._arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, order: RelayOrder) -> Offer:
        """Begin a pull, and return what the relay offers of it."""
        self._pipe.send(order)
        offer = self._answer()
        assert isinstance(offer, Offer), offer
        return offer

    def end(self) -> RelayEnd:
        """Wait for the end of the pull."""
        end = self._answer()
        assert isinstance(end, RelayEnd), end
        return end

    def send(self, command: Literal["fail", "close"]) -> None:
        """Have the pull fail, or the server close while the pull goes on."""
        self._pipe.send(command)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.process.kill()
        self.process.join(ANSWER_S)

    def close(self) -> None:
        """Kill the process, and free what belongs to it here."""
        self.kill()
        self.process.close()
        self._pipe.close()

    def _answer(self) -> Offer | RelayEnd:
        assert self._pipe.poll(ANSWER_S), "a relay does not answer"
        answer: Offer | RelayEnd = self._pipe.recv()
        return answer
