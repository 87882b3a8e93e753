"""A real publisher, its destination, and checks of the destination after a pull, successful or not."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec
from fault_proxy import Direction, proxy
from weights_peers import ANSWER_S, BUCKET_BYTES, Source, blank, same, weights

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.offers.offer import layout_root as root_of_layout
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullReport
from starling.weightsync.tensors.modules import layout_of

Outcome = Literal["adopted", "stale", "torn", "unproven"]
"""`unproven`: the destination holds what its source sent, and found that it is not what was published."""

SETTLE_S: Final = 5.0
"""Time within which a publisher must notice that its readers have disconnected."""
POOL_THREADS: Final = 4
"""Threads that a publisher starts on first use, and keeps."""
SECOND_SOCKETS: Final = {"ucx": 1}
"""Sockets that a connection may have, at each end, besides those of the first one. The endpoints of two UCX workers
share a socket only while both workers have made the same number of them; after a reader was dropped before it made its
own, each endpoint has one."""


class Violation(AssertionError):
    """The destination is in a state that is not allowed."""


def require(holds: bool, otherwise: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(otherwise)


def do_nothing() -> None:
    """Do nothing."""


def resource_counts(pid: int | str | None) -> Counter[str]:
    """Count a process's descriptors, threads, and mappings of snapshots and of UCX's shared memory."""
    with open(f"/proc/{pid}/maps") as maps:
        mapped = sum("starling-snapshots" in line or "/dev/shm/" in line for line in maps)
    return Counter(
        descriptors=len(os.listdir(f"/proc/{pid}/fd")), threads=len(os.listdir(f"/proc/{pid}/task")), mappings=mapped
    )


class Trigger:
    """A `cancelled` callback that calls `act` in its n-th call, and from then on returns `cancels`."""

    def __init__(self, step: int, act: Callable[[], object] = do_nothing, *, cancels: bool = False) -> None:
        self.num_asked = 0
        self._step, self._act, self._cancels = step, act, cancels
        self._fired = False

    def __call__(self) -> bool:
        self.num_asked += 1
        if self.num_asked > self._step:
            self.fire()
        return self._fired and self._cancels

    def fire(self) -> None:
        """Call `act` now if it has not been called."""
        if not self._fired:
            self._fired = True
            self._act()


class FaultPair:
    """A publisher in a child process, and its destination in this one."""

    def __init__(self, transport: Transport, draw: random.Random, *, stall_s: float = 10.0) -> None:
        self.transport, self.draw = transport, draw
        self.source = self._start(-1)
        self.tensors = blank()
        self.version = -1
        self.forged = False
        """Whether it holds something else than was published as this version."""
        self.report: PullReport | None = None
        """Of the last successful pull."""
        self.reason = ""
        """Why the last pull failed; empty if it did not."""
        layout = layout_of(self.tensors, "rollout-0")
        self.plan = make_plan(self.source.layout, layout, bucket_bytes=BUCKET_BYTES)
        self.puller = Puller(layout, stall_s=stall_s)
        self.sent: dict[Direction, int] = {"requests": 0, "answers": 0}
        offer = self.source.publish()
        if transport == "tcp":
            with proxy(offer.ranks[0].address) as between:
                self.adopt(with_address(offer, between.address))
                self.sent = dict(between.num_bytes)
        counted = Trigger(sys.maxsize)
        self.adopt(self.source.publish(), counted)
        self.num_steps = counted.num_asked
        """About how often a pull checks whether it is cancelled."""
        self.publisher_before = resource_counts(self.source.process.pid)

    @classmethod
    def serves(cls, transport: Transport) -> bool:
        """Return whether there is one with this transport."""
        return True

    def heal(self) -> None:
        """Pull the next version without a fault, which must succeed."""
        self.adopt(self.source.publish())

    def pull(
        self,
        offer: Offer,
        *,
        in_place: bool,
        deadline_s: float = ANSWER_S,
        cancelled: Callable[[], bool] = lambda: False,
        relays: Sequence[Offer] = (),
        layout_root: str = "",
    ) -> Outcome:
        """Pull, switch if it was not in place, and check what the destination holds, successful or not.

        `relays` are read first. With `layout_root`, that of the version, they may send other bits with their digests.

        Raises:
            Violation: it holds what it must not hold, or says what is not so.
        """
        self.reason = ""
        try:
            self.report = self.puller.pull(
                offer,
                self.plan,
                deadline_s=deadline_s,
                cancelled=cancelled,
                into=self.tensors if in_place else None,
                relays=relays,
                relays_first=True,
            )
        except WeightsError as error:
            self.reason = str(error)
            return self._check_failed(in_place, self.reason)
        if not in_place:
            require(self.puller.state == "staged", f"{self.puller.state} after a pull into staging")
            require(self.puller.version == self.version, "another version before the switch")
            require(self.version < 0 or self.holds(), "other bits before the switch")
            self.puller.switch(self.tensors)
        require(self.puller.state == "current", f"{self.puller.state} after adoption")
        require(self.puller.version == offer.version, f"version {self.puller.version}, not {offer.version}")
        roots = self.puller.attest_roots(self.tensors, offer)
        require(roots.root == offer.root, "another root than the offer's")
        is_published = same(self.tensors, weights(offer.version))
        self.version = offer.version
        self.forged = bool(layout_root) and root_of_layout([roots.rank_root]) != layout_root
        if self.forged:
            require(not is_published, "the bits that were published, but another layout root")
            return "unproven"
        require(is_published, "other bits than were published, though attested")
        return "adopted"

    def adopt(self, offer: Offer, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Pull without a fault, which must succeed."""
        self.expect(self.pull(offer, in_place=self.draw.random() < 0.5, cancelled=cancelled), "adopted")

    def expect(self, outcome: Outcome, *allowed: Outcome) -> Outcome:
        """Return the outcome of a pull, which must be among `allowed`."""
        require(outcome in allowed, f"{outcome} instead of {' or '.join(allowed)}: {self.reason or 'no failure'}")
        return outcome

    def holds(self) -> bool:
        """Return whether the destination holds the version that it claims, or knows that it does not."""
        return self.puller.version == self.version and same(self.tensors, weights(self.version)) is not self.forged

    def restart(self) -> None:
        """Replace a killed publisher."""
        self.source.process.kill()
        self.source.process.join(ANSWER_S)
        self.source.process.close()
        self.source = self._start(self.source.version)
        self.adopt(self.source.publish())
        self.publisher_before = resource_counts(self.source.process.pid)

    def leaks(self) -> Counter[str]:
        """Return the resources of the publisher beyond those when its first reader was connected."""
        return self.beyond("publisher", self.source.process.pid, self.publisher_before)

    def beyond(self, name: str, pid: int | None, before: Counter[str]) -> Counter[str]:
        """Return the resources that a process has kept beyond those `before`."""
        end = time.monotonic() + SETTLE_S
        while True:
            more = resource_counts(pid)
            more.subtract(before)
            more["threads"] -= POOL_THREADS
            more["descriptors"] -= SECOND_SOCKETS.get(self.transport, 0)
            found = Counter({f"{name} {kind}": num for kind, num in (+more).items()})
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.02)

    def close(self) -> None:
        """Close the puller, and kill the publisher."""
        self.puller.close()
        self.source.process.kill()
        self.source.process.join(ANSWER_S)
        self.source.process.close()

    def _start(self, version: int) -> Source:
        source = Source(self.transport, read_timeout_s=0.0)
        source.version = version
        return source

    def _check_failed(self, in_place: bool, reason: str) -> Outcome:
        state = self.puller.state
        if state == "torn":
            require(in_place, f"torn though the live tensors were left alone: {reason}")
            require(self.puller.version == -1, "torn, but with a version")
            self.version = -1
            try:
                self.puller.switch(self.tensors)
            except WeightsError:
                return "torn"
            raise Violation(f"switched to what had not arrived whole: {reason}")
        require(state == "stale", f"{state} after a pull that failed: {reason}")
        require(self.puller.version == self.version, "another version after a pull that failed")
        require(self.holds(), "other bits after a pull that failed")
        return "stale"


def with_address(offer: Offer, address: str) -> Offer:
    """Return the offer with the address replaced."""
    return msgspec.structs.replace(offer, ranks=(msgspec.structs.replace(offer.ranks[0], address=address),))
