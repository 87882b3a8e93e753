"""Topology of a cluster: hosts, NUMA nodes, GPUs, network cards, rails and switches, with their bandwidths. Pure data.

The planner reads distances from it, the estimate reads bandwidths. The location of a rank is its `Place`, which names
the cards and the switch that the rank detected itself. So a run needs no topology: for a host that is not in it the
place counts, and a rank without known cards has one of its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Final

import msgspec
import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import Bools, Ints
from starling.weightsync.plan.layout import CPU, Place

LINKS: Final = ("device", "numa", "host", "rail", "switch", "far")
"""Classes of distance, nearest first: same device, NUMA node, host, rail, switch, or none of these."""
DEVICE, NUMA, HOST, RAIL, SWITCH, FAR = range(len(LINKS))

Rate = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=65536)]
MAX_RANKS: Final = 1 << 20
"""Maximum number of GPUs, and of cards, of a topology."""


class Nic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One network card, or `count` equal ones: then `{}` in its name and its rail stands for 0, 1, ..."""

    name: str
    gb_per_s: Rate
    """Each way, in 1e9 bytes per second: 50 for 400 Gbit/s."""
    rail: str = ""
    count: Count = 1


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine, or `count` equal ones: then `{}` in its name stands for 0, 1, ..."""

    name: str
    count: Count = 1
    gpus: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    numas: Count = 1
    """NUMA nodes; GPUs and cards are spread over them, and cards over GPUs, in order."""
    nics: tuple[Nic, ...] = ()
    switch: str = ""
    """Switch of its cards, if the cluster has several."""


class SwitchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A switch whose uplink is slower than its ports together."""

    name: str
    uplink_gb_per_s: Rate


class Topology(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """All machines of a cluster, and the bandwidths inside them."""

    hosts: tuple[HostSpec, ...] = ()
    switches: tuple[SwitchSpec, ...] = ()
    nic_gb_per_s: Rate = 50.0
    """Bandwidth of the card of a rank whose host is not listed, or lists no card."""
    device_gb_per_s: Rate = 1000.0
    """Bandwidth of copies on one device, also for packing and unpacking strided pieces."""
    host_gb_per_s: Rate = 100.0
    """Bandwidth between devices of one host (NVLink, or shared memory), each way."""
    latency_us: Annotated[float, msgspec.Meta(ge=0)] = 20.0
    """From the request for a bucket to its first byte."""

    @cached_property
    def machines(self) -> dict[str, HostSpec]:
        """Every host by name, with groups of hosts and cards expanded."""
        machines: dict[str, HostSpec] = {}
        for group in self.hosts:
            for name in _names(group.name, group.count):
                nics = tuple(
                    Nic(name=nic_name, rail=rail, gb_per_s=nic.gb_per_s)
                    for nic in group.nics
                    for nic_name, rail in zip(
                        _names(nic.name, nic.count), _names(nic.rail, nic.count, unique=False), strict=True
                    )
                )
                if name in machines:
                    raise WeightsError(f"The topology lists host {name} twice; write {{}} in the name of a group.")
                machines[name] = msgspec.structs.replace(group, name=name, count=1, nics=nics)
        return machines

    def places(self) -> tuple[Place, ...]:
        """Return the place of each GPU, host by host; a host without GPUs is one place on its processor."""
        return tuple(
            Place(
                host=host.name,
                device=f"cuda:{gpu}" if host.gpus else "cpu",
                numa=gpu * host.numas // max(host.gpus, 1),
                rails=(host.nics[_spread(gpu, max(host.gpus, 1), len(host.nics))].rail,) if host.nics else (),
            )
            for host in self.machines.values()
            for gpu in range(max(host.gpus, 1))
        )

    def nic_of(self, place: Place) -> Nic | None:
        """Return the card through which `place` reaches other hosts; None if it has an own card of `nic_gb_per_s`.

        A card that the rank has detected itself, but whose speed it does not know, has `nic_gb_per_s`, too.
        """
        host = self.machines.get(place.host)
        if host is None or not host.nics:
            if not place.cards:
                return None
            card = place.cards[0]
            return Nic(name=card.name, rail=card.rail, gb_per_s=card.gb_per_s or self.nic_gb_per_s)
        for nic in host.nics:
            if nic.rail and nic.rail in place.rails:
                return nic
        number = place.device.rpartition(":")[2]
        gpu = int(number) if number.isdecimal() and len(number) < 6 else 0
        return host.nics[_spread(gpu, max(host.gpus, 1), len(host.nics))]


def decode_topology(text: str) -> Topology:
    """Read a topology from TOML.

    Raises:
        WeightsError: malformed TOML, or an invalid field.
    """
    try:
        topology = msgspec.convert(tomllib.loads(text), Topology)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise WeightsError(f"This is not a topology: {error}.") from error
    if sum(host.count * max(host.gpus, 1, sum(nic.count for nic in host.nics)) for host in topology.hosts) > MAX_RANKS:
        raise WeightsError(f"The topology has more than {MAX_RANKS} GPUs or cards.")
    named = {switch.name for switch in topology.switches}
    if len(named) < len(topology.switches):
        raise WeightsError("The topology lists a switch twice.")
    if topology.machines and not named <= {host.switch for host in topology.hosts}:
        raise WeightsError(f"No host of the topology is on switch {min(named - {h.switch for h in topology.hosts})}.")
    return topology


def distances(sources: Sequence[Place], destinations: Sequence[Place], topology: Topology | None = None) -> Ints:
    """Return the distance of each source from each destination, as an index into `LINKS`; (sources, destinations)."""
    machines = topology.machines if topology else {}
    both = [*sources, *destinations]

    def equal(labels: Sequence[object]) -> Bools:
        """Return the pairs with equal labels; None equals nothing."""
        numbers: dict[object, int] = {}
        codes = [-1 if label is None else numbers.setdefault(label, len(numbers)) for label in labels]
        one, other = np.array(codes[: len(sources)]), np.array(codes[len(sources) :])
        pairs: Bools = one[:, None] == other
        return pairs & (one[:, None] >= 0) if -1 in codes else pairs

    result = np.full((len(sources), len(destinations)), FAR, np.int64)
    switches = [machines[place.host].switch if place.host in machines else place.switch for place in both]
    if any(switches):
        result[equal([switch or None for switch in switches])] = SWITCH
    if any(place.rails for place in both):
        result[_share_a_rail(sources, destinations)] = RAIL
    hosts = [place.machine_or_host for place in both]
    if set(filter(None, hosts[: len(sources)])).intersection(hosts[len(sources) :]):
        same_host = equal([host or None for host in hosts])
        result[same_host] = HOST
        result[same_host & equal([place.numa if place.numa >= 0 else None for place in both])] = NUMA
        result[same_host & equal([_device(place) for place in both])] = DEVICE
    return result


def card_numbers(places: Sequence[Place], topology: Topology | None = None) -> Ints:
    """Return the number of each rank's network card; a rank whose card is unknown has its own."""
    topology = topology or Topology()
    numbers: dict[object, int] = {}
    cards: list[int] = []
    for rank, place in enumerate(places):
        nic = topology.nic_of(place)
        card: object = rank if nic is None else (place.machine_or_host, nic.name)
        cards.append(numbers.setdefault(card, len(numbers)))
    return np.array(cards, np.int64)


def _device(place: Place) -> object:
    """Return what is equal for ranks that share memory: processors of different NUMA nodes are different devices."""
    return (CPU, place.numa) if place.device == CPU else place.device


def _share_a_rail(sources: Sequence[Place], destinations: Sequence[Place]) -> Bools:
    """Return the pairs that have a rail in common."""
    common = {rail for place in sources for rail in place.rails} & {r for place in destinations for r in place.rails}
    numbers = {rail: number for number, rail in enumerate(sorted(common))}

    def numbers_of(place: Place) -> list[int]:
        return [numbers[rail] for rail in place.rails if rail in numbers]

    reached = np.zeros((len(numbers), len(destinations)), np.bool_)
    for rank, place in enumerate(destinations):
        reached[numbers_of(place), rank] = True
    shared = np.zeros((len(sources), len(destinations)), np.bool_)
    for rank, place in enumerate(sources):
        shared[rank] = reached[numbers_of(place)].any(axis=0)
    return shared


def _names(pattern: str, count: int, *, unique: bool = True) -> Iterator[str]:
    if unique and count > 1 and "{}" not in pattern:
        raise WeightsError(f"The topology has {count} entries {pattern!r}; write {{}} for their number.")
    return (pattern.replace("{}", str(number)) for number in range(count))


def _spread(number: int, count: int, among: int) -> int:
    """Return the index, below `among`, that item `number` of `count` is assigned to, in order."""
    return min(number * among // count, among - 1)
