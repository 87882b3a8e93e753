"""Relays: rollouts that serve a version to others while they pull it, so that a policy sends it over its network once.

Rollouts on other hosts than the policy form a chain, in the order in which they become ready. The first one pulls from
the policy; before its first byte has arrived it announces that it serves what arrives, and the next one reads from it,
bucket by bucket, and so on. Each network card then sends the model at most once and receives it at most once, all of
them at the same time. A rollout on the host of a relay reads from it, too: that needs no network.

A relay passes on bytes before it has proven them. They prove nothing about it until it has adopted the version itself
(see `distribution`). Its reader proves them against the layout root that a policy computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, TypeVar

from starling.controller.core.replicas.membership import Member
from starling.weightsync.offers.offer import Offer

ANNOUNCE_S: Final = 5.0
"""How long others wait for a rollout to announce what it pulls. To connect takes some ten milliseconds."""

K = TypeVar("K")
V = TypeVar("V")

Pull = tuple[str, str]
"""A rollout, and the lease of a pull of it."""
ChainKey = tuple[int, str]
"""A version, and the key of the layouts of the policy and of the rollouts: relays of one chain serve equal boxes."""


@dataclass(frozen=True)
class RelayedOffer:
    """What one rollout serves of a version that it pulls, or has pulled."""

    holder: str
    host: str
    chain: ChainKey
    lease: str
    """That of the pull: another one brings other bytes."""
    offer: Offer
    """With the secrets of its snapshots: a reader gets tickets instead."""


@dataclass
class Relays:
    """The relays, who reads from them, and the rollouts that are expected to become relays."""

    offers: dict[str, RelayedOffer] = field(default_factory=dict)
    """By holder."""
    avoided: dict[str, int] = field(default_factory=dict)
    """By rollout: a version that it pulls from a policy, since what a relay sent was not what was published."""
    _read: dict[str, Pull] = field(default_factory=dict)
    """By rollout: the pull of a relay that its last pull read."""
    _proven: dict[str, str] = field(default_factory=dict)
    """By rollout: the lease of the last pull that it has proven."""
    _complaints: dict[Pull, dict[str, None]] = field(default_factory=dict)
    """Rollouts that got something else than was published, by the pull that they read, which is not over."""
    _free: dict[ChainKey, dict[str, None]] = field(default_factory=dict)
    """Relays without a reader on another host."""
    _at_host: dict[tuple[ChainKey, str], dict[str, None]] = field(default_factory=dict)
    _expected: dict[ChainKey, dict[str, float]] = field(default_factory=dict)
    """Rollouts that were told to announce what they pull, and until when others wait for that."""
    _sources: dict[str, str] = field(default_factory=dict)
    """By rollout that pulls over the network: its source, a policy or a relay."""
    _num_readers: Counter[str] = field(default_factory=Counter)
    """By source."""

    def choose(self, reader: Member, chain: ChainKey) -> RelayedOffer | None:
        """Return the relay that `reader` reads from: one on its host, else one without a reader on another host."""
        for names in (self._at_host.get((chain, reader.host)), self._free.get(chain)):
            for name in names or ():
                if name != reader.name:
                    return self.offers[name]
        return None

    def is_expected(self, chain: ChainKey, now: float) -> bool:
        """Say whether a rollout is about to announce a relay of this chain."""
        for name in [name for name, until in self._expected.get(chain, {}).items() if until <= now]:
            _remove(self._expected, chain, name)
        return chain in self._expected

    def begin(
        self, reader: Member, source: str, relay: RelayedOffer | None, chain: ChainKey | None, now: float
    ) -> None:
        """Note that `reader` pulls from `source`, or from a relay; with `chain` it was told to announce that.

        What it served before is gone: the pull takes its place in memory.
        """
        self._begin(reader.name, relay)
        if relay is not None:
            source = relay.holder
        if relay is None or relay.host != reader.host:
            name = reader.name
            self._sources[name] = source
            self._num_readers[source] += 1
            if source in self.offers:
                _remove(self._free, self.offers[source].chain, source)
        if chain is not None:
            self._expected.setdefault(chain, {})[reader.name] = now + ANNOUNCE_S

    def begin_directly(self, reader: str) -> None:
        """Note that `reader` pulls without relays, and serves nothing."""
        if reader in self.offers or reader in self._read or reader in self._sources:
            self._begin(reader, None)

    def _begin(self, reader: str, relay: RelayedOffer | None) -> None:
        self.end_pull(reader)
        self.withdraw(reader)
        self._read.pop(reader, None)
        if relay is not None:
            self._read[reader] = relay.holder, relay.lease

    def pull_read_by(self, reader: str) -> Pull | None:
        """Return the pull of a relay that the last pull of `reader` read."""
        return self._read.get(reader)

    def is_proven(self, pull: Pull) -> bool:
        """Say whether a rollout has proven what a pull brought, as far as it has not proven a later one."""
        return self._proven.get(pull[0]) == pull[1]

    def complain(self, pull: Pull, reader: str) -> None:
        """Note that `reader` got something else than was published from a pull that is not over."""
        self._complaints.setdefault(pull, {})[reader] = None

    def decide(self, name: str, lease: str, *, proven: bool) -> tuple[str, ...]:
        """Note whether a rollout has proven what a pull brought. Returns those that complained of it, if it has."""
        if proven:
            self._proven[name] = lease
        else:
            self.withdraw(name)
        complaints = tuple(self._complaints.pop((name, lease), ()))
        return complaints if proven else ()

    def announce(self, holder: Member, chain: ChainKey, lease: str, offer: Offer) -> None:
        """Add a relay."""
        self.withdraw(holder.name)
        _remove(self._expected, chain, holder.name)
        self.offers[holder.name] = RelayedOffer(holder.name, holder.host, chain, lease, offer)
        self._at_host.setdefault((chain, holder.host), {})[holder.name] = None
        if not self._num_readers[holder.name]:
            self._free.setdefault(chain, {})[holder.name] = None

    def expects(self, chain: ChainKey, name: str) -> bool:
        """Say whether this rollout was told to announce a relay of this chain, and has not yet."""
        return name in self._expected.get(chain, ())

    def renounce(self, chain: ChainKey, name: str) -> None:
        """Note that a rollout serves nothing: others wait for it no longer."""
        _remove(self._expected, chain, name)

    def end_pull(self, reader: str, *, failed: bool = False) -> None:
        """Note that `reader` no longer pulls: its source may serve another. If it failed, it serves nothing either."""
        if failed:
            self.withdraw(reader)
        if not self._sources and not self._expected:
            return  # there are no relays: the usual case, in thousands of adoptions
        for chain in list(self._expected):
            _remove(self._expected, chain, reader)
        source = self._sources.pop(reader, None)
        if source is None:
            return
        self._num_readers[source] -= 1
        if self._num_readers[source] <= 0:
            del self._num_readers[source]
            if source in self.offers:
                self._free.setdefault(self.offers[source].chain, {})[source] = None

    def withdraw(self, name: str) -> None:
        """Remove what a rollout serves."""
        offer = self.offers.pop(name, None)
        if offer is not None:
            _remove(self._free, offer.chain, name)
            _remove(self._at_host, (offer.chain, offer.host), name)

    def forget(self, name: str) -> None:
        """Remove a replica that left."""
        self.end_pull(name)
        self.withdraw(name)
        for index in (self.avoided, self._read, self._proven):
            index.pop(name, None)
        for pull in [pull for pull in self._complaints if pull[0] == name]:
            del self._complaints[pull]


def _remove(index: dict[K, dict[str, V]], key: K, name: str) -> None:
    """Remove a name from an index, and its key with the last name."""
    names = index.get(key)
    if names is not None:
        names.pop(name, None)
        if not names:
            del index[key]
