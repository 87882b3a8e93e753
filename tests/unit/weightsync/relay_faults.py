"""Faults of relays: each is injected into a chain in mid-transfer, and must end with every survivor on the new version.

The victim is one of the relays. The reader behind it takes the rest from the publisher; whoever is behind that reader
reads from it as before.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Literal

from fault_chain import NUM_RELAYS, STALL_S, FaultChain
from fault_pair import Outcome, require, with_address
from fault_proxy import FlippingProxy, proxy
from relay_peers import RelayEnd
from weights_peers import BUCKET_BYTES

from starling.weightsync.offers.offer import Offer

RelayKind = Literal[
    "relay killed",
    "relay stalled",
    "relay waiting",
    "relay corrupted",
    "relay forging",
    "relay closed",
    "relay failed",
]

ANSWER_BYTES: Final = 1024
"""Most bytes that a bucket adds to what travels: requests' answers with digests, and the headers of encryption."""
LAST: Final = NUM_RELAYS - 1


def kill_relay(chain: FaultChain) -> Outcome:
    """Kill a relay with SIGKILL: its reader loses at most the bucket that was on its way."""
    victim = _victim(chain)
    with ExitStack() as stack:
        between: list[FlippingProxy] = []

        def through(own: Offer) -> Offer:
            if chain.transport != "tcp":
                return own
            between.append(stack.enter_context(proxy(own.ranks[0].address)))
            return with_address(own, between[0].address)

        offer, root = chain.source.publish_with_root()
        offers = chain.begin(offer, victim=victim, through=through)
        trigger = chain.trigger(chain.relays[victim].kill)
        outcome = _adopt(chain, offer, root, offers, victim, trigger)
        trigger.fire()
        reports = [chain.report, *(end.report for end in _check_others(chain, offer, root, offers, victim))]
        for one in between:
            arrived = max(report.bytes_by_source.get(one.address, 0) for report in reports if report is not None)
            lost = one.num_bytes["answers"] - arrived - ANSWER_BYTES * (1 + chain.num_buckets)
            require(lost <= BUCKET_BYTES, f"{lost} bytes arrived and were lost, more than a bucket of {BUCKET_BYTES}")
    chain.restart_relay(victim)
    return outcome


def stall_relay(chain: FaultChain) -> Outcome:
    """Stop the last relay with SIGSTOP; it continues soon, or after the pull."""
    return _stall(chain, LAST)


def stall_source_of_relay(chain: FaultChain) -> Outcome:
    """Stop the first relay, so that the last one has nothing to pass on until it turns to the publisher itself."""
    return _stall(chain, 0)


def _stall(chain: FaultChain, victim: int) -> Outcome:
    relay, soon = chain.relays[victim], chain.draw.random() < 0.5
    offer, root = chain.source.publish_with_root()
    offers = chain.begin(offer, victim=victim)
    trigger = chain.trigger(lambda: relay.signal(signal.SIGSTOP))
    timer = threading.Timer(STALL_S / 2, lambda: relay.signal(signal.SIGCONT))
    if soon:
        timer.start()
    try:
        outcome = _adopt(chain, offer, root, offers, victim, trigger)
        _check_others(chain, offer, root, offers, victim)
    finally:
        trigger.fire()
        timer.cancel()
        if soon:
            timer.join()
        relay.signal(signal.SIGCONT)
    chain.require_adopted(relay.end(), offer, root)
    return outcome


def corrupt_relay(chain: FaultChain) -> Outcome:
    """Flip a bit in the memory of a relay, after it has verified it: its readers find that, and so does the relay."""
    victim = _victim(chain)
    offer, root = chain.source.publish_with_root()
    offers = chain.begin(offer, victim=victim, corrupts="flip")
    outcome = _adopt(chain, offer, root, offers, victim)
    _check_others(chain, offer, root, offers, victim)
    end = chain.relays[victim].end()
    require(end.report is not None, f"a relay failed: {end.reason}")
    require(end.root != offer.root, "a relay did not find that its memory has changed")
    chain.adopt_directly(offer, root, [victim])
    return outcome


def forge_weights(chain: FaultChain) -> Outcome:
    """Have a relay replace weights and their digests: the layout root tells all behind it, who then pull directly."""
    victim = _victim(chain)
    offer, root = chain.source.publish_with_root()
    offers = chain.begin(offer, victim=victim, corrupts="forge")
    outcome = chain.pull(offer, in_place=chain.draw.random() < 0.5, relays=offers[-1:], layout_root=root)
    chain.expect(outcome, "unproven")
    for number, relay in enumerate(chain.relays):
        end = relay.end()
        require(end.report is not None, f"a relay failed: {end.reason}")
        require((end.layout_root == root) is (number < victim), "another relay than those behind the forger is proven")
    chain.adopt_directly(offer, root, range(victim, NUM_RELAYS))
    return chain.expect(chain.pull(offer, in_place=chain.draw.random() < 0.5, layout_root=root), "adopted")


def close_connections(chain: FaultChain) -> Outcome:
    """Have a relay close its connections, while its own pull goes on."""
    victim = _victim(chain)
    offer, root = chain.source.publish_with_root()
    offers = chain.begin(offer, victim=victim)
    trigger = chain.trigger(lambda: chain.relays[victim].send("close"))
    outcome = _adopt(chain, offer, root, offers, victim, trigger)
    trigger.fire()
    _check_others(chain, offer, root, offers, victim)
    chain.require_adopted(chain.relays[victim].end(), offer, root)
    chain.restart_relay(victim)
    return outcome


def fail_pull_of_relay(chain: FaultChain) -> Outcome:
    """Have the pull of a relay fail: it revokes what it serves."""
    victim = _victim(chain)
    offer, root = chain.source.publish_with_root()
    offers = chain.begin(offer, victim=victim)
    trigger = chain.trigger(lambda: chain.relays[victim].send("fail"))
    outcome = _adopt(chain, offer, root, offers, victim, trigger)
    trigger.fire()
    _check_others(chain, offer, root, offers, victim)
    chain.relays[victim].end()  # it may have had all already
    return outcome


def _victim(chain: FaultChain) -> int:
    return chain.draw.randrange(NUM_RELAYS)


def _adopt(
    chain: FaultChain,
    offer: Offer,
    root: str,
    offers: list[Offer],
    victim: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Pull through the chain, which must succeed: only the reader behind the victim may read from the publisher."""
    in_place = chain.draw.random() < 0.5
    outcome = chain.pull(offer, in_place=in_place, relays=offers[-1:], layout_root=root, cancelled=cancelled)
    chain.expect(outcome, "adopted")
    chain.require_sources(chain.sources(), offers[-1], *([offer] if victim == LAST else []))
    return outcome


def _check_others(chain: FaultChain, offer: Offer, root: str, offers: list[Offer], victim: int) -> list[RelayEnd]:
    """Wait for the other relays, which must have adopted the version; return how their pulls ended."""
    ends: list[RelayEnd] = []
    for number, relay in enumerate(chain.relays):
        if number != victim:
            ends.append(relay.end())
            allowed = [offer] if number in (0, victim + 1) else []
            chain.require_adopted(ends[-1], offer, root, *allowed, *offers[max(0, number - 1) : number])
    return ends


RELAY_FAULTS: Final[dict[RelayKind, Callable[[FaultChain], Outcome]]] = {
    "relay killed": kill_relay,
    "relay stalled": stall_relay,
    "relay waiting": stall_source_of_relay,
    "relay corrupted": corrupt_relay,
    "relay forging": forge_weights,
    "relay closed": close_connections,
    "relay failed": fail_pull_of_relay,
}
