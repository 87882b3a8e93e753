"""A chain of real relays: a publisher, two relays in child processes, and a destination here that reads the last one.

Each relay reads from the one before it, and all of them from the publisher where that is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from fault_pair import FaultPair, Trigger, do_nothing, require, resource_counts
from relay_peers import Corruption, RelayEnd, RelayOrder, RelayPeer

from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.plan.layout import encode
from starling.weightsync.transports.endpoints import ServingOptions

NUM_RELAYS: Final = 2
STALL_S: Final = 1.5
"""How long each reader of the chain waits for a source that says nothing."""
SLOWEST_S: Final = 0.002
"""Longest pace of a relay: a pull of it then takes about a tenth of a second."""


class BucketTrigger(Trigger):
    """A `cancelled` callback that calls `act` when a pull has so many buckets."""

    def __init__(self, num_arrived: Callable[[], int], num: int, act: Callable[[], object]) -> None:
        super().__init__(num, act)
        self._num_arrived, self._num = num_arrived, num

    def __call__(self) -> bool:
        """See `Trigger`; cancels nothing."""
        if self._num_arrived() >= self._num:
            self.fire()
        return False


class FaultChain(FaultPair):
    """A publisher, relays, and a destination that reads from the last relay."""

    def __init__(self, transport: Transport, draw: random.Random) -> None:
        super().__init__(transport, draw, stall_s=STALL_S)
        serving = ServingOptions(transport, "127.0.0.1", encrypt=transport == "tcp" and draw.random() < 0.5)
        source = encode(self.source.layout)
        self.relays = [RelayPeer(source, f"rollout-{n + 1}", serving, STALL_S) for n in range(NUM_RELAYS)]
        self._relays_before = [Counter[str]() for _ in self.relays]
        self.settle(*range(NUM_RELAYS))

    @classmethod
    def serves(cls, transport: Transport) -> bool:
        """Return whether there is one with this transport: the readers of shared memory wait for nothing."""
        return ServingOptions(transport, "").can_relay

    @property
    def num_buckets(self) -> int:
        """Number of buckets of a version."""
        return len(self.plan.of_destination(0))

    def begin(
        self,
        offer: Offer,
        *,
        victim: int = -1,
        corrupts: Corruption = "",
        through: Callable[[Offer], Offer] = lambda own: own,
    ) -> list[Offer]:
        """Have every relay pull, each from the previous one; return what they offer, before it has arrived.

        The `victim` corrupts what it serves, and its readers get its offer `through` a function.
        """
        pace_s = 0.0 if victim < 0 else self.draw.uniform(0.0, SLOWEST_S)
        offers: list[Offer] = []
        for number, relay in enumerate(self.relays):
            order = RelayOrder(
                offer=encode(offer),
                relay=encode(offers[-1]) if offers else b"",
                pace_s=pace_s,
                corrupts=corrupts if number == victim else "",
                bucket=self.draw.randrange(self.num_buckets),
            )
            own = relay.begin(order)
            offers.append(through(own) if number == victim else own)
        return offers

    def heal(self) -> None:
        """Pull the next version through the chain without a fault, each from its relay only; all must succeed."""
        offer, root = self.source.publish_with_root()
        offers = self.begin(offer)
        outcome = self.pull(offer, in_place=self.draw.random() < 0.5, relays=offers[-1:], layout_root=root)
        self.expect(outcome, "adopted")
        self.require_sources(self.sources(), offers[-1])
        for number, relay in enumerate(self.relays):
            self.require_adopted(relay.end(), offer, root, *offers[number - 1 : number])

    def adopt_directly(self, offer: Offer, root: str, numbers: Sequence[int]) -> None:
        """Have these relays pull a version from the publisher."""
        for number in numbers:
            order = RelayOrder(offer=encode(offer), relay=b"", pace_s=0.0, corrupts="", bucket=0)
            self.relays[number].begin(order)
            self.require_adopted(self.relays[number].end(), offer, root)

    def trigger(self, act: Callable[[], object] = do_nothing) -> BucketTrigger:
        """Return a callback that acts when some bucket has arrived at the destination."""
        return BucketTrigger(lambda: len(self.puller._sent), self.draw.randrange(self.num_buckets), act)

    def sources(self) -> set[str]:
        """Return the addresses that the last pull read from."""
        assert self.report is not None
        return set(self.report.bytes_by_source)

    @staticmethod
    def require_sources(sources: set[str], *allowed: Offer) -> None:
        """Raise unless a pull read only from these."""
        addresses = {offer.ranks[0].address for offer in allowed}
        require(sources <= addresses, f"read from {sources - addresses}, not only from {addresses}")

    def require_adopted(self, end: RelayEnd, offer: Offer, root: str, *sources: Offer) -> None:
        """Raise unless a relay holds what was published; with `sources`, unless it read from these only."""
        require(end.report is not None, f"a relay failed: {end.reason}")
        require(end.root == offer.root, "a relay holds something else than it was sent")
        require(end.layout_root == root, "a relay holds something else than was published")
        if sources and end.report is not None:
            self.require_sources(set(end.report.bytes_by_source), *sources)

    def settle(self, *restarted: int) -> None:
        """Connect everything to everything, and count the resources of relays that have started."""
        offer, root = self.source.publish_with_root()
        self.expect(self.pull(offer, in_place=False, layout_root=root), "adopted")
        self.adopt_directly(offer, root, range(NUM_RELAYS))
        self.heal()
        self.publisher_before = resource_counts(self.source.process.pid)
        for number in restarted:
            self._relays_before[number] = resource_counts(self.relays[number].process.pid)

    def restart_relay(self, number: int) -> None:
        """Replace a relay by a new process."""
        self.relays[number].close()
        self.relays[number].start()
        self.settle(number)

    def leaks(self) -> Counter[str]:
        """Return the resources of publisher and relays beyond those when all were connected."""
        found = super().leaks()
        for relay, before in zip(self.relays, self._relays_before, strict=True):
            found += self.beyond("relay", relay.process.pid, before)
        return found

    def close(self) -> None:
        """Close the puller, and kill the publisher and the relays."""
        for relay in self.relays:
            relay.close()
        super().close()
