"""Network cards of a machine: those for RDMA, else Ethernet cards, else the virtual ones of a container."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from starling.weightsync.places.system_files import (
    device_path,
    entries,
    node_of_device,
    pci_address,
    read_number,
    read_text,
)
from starling.weightsync.plan.layout import MAX_RANK_RAILS, Card

ETHERNET: Final = 1
"""ARPHRD_ETHER of the kernel, in the file `type` of an interface."""


class FoundCard(msgspec.Struct, frozen=True, kw_only=True):
    """A network card of this machine that is up."""

    card: Card
    numa: int
    """NUMA node, -1 when unknown."""
    path: tuple[str, ...]
    """Bridges that lead to it, its own PCI address last; empty for a virtual interface."""


def find_cards(root: Path, nodes: dict[int, set[int]]) -> tuple[FoundCard, ...]:
    """Return the cards through which this machine reaches others, by name.

    Cards for RDMA if one is active, since the network of a cluster consists of these; else physical Ethernet cards,
    also wireless ones; else the virtual interfaces that lead out of a container. Several cards are rails, numbered in
    the order of their names: a cluster cables the first card of each host to the same switch.
    """
    found = _rdma(root, nodes) or _ethernet(root, nodes, virtual=False) or _ethernet(root, nodes, virtual=True)
    if len(found) < 2:
        return tuple(found)
    return tuple(
        msgspec.structs.replace(one, card=msgspec.structs.replace(one.card, rail=f"rail-{number}"))
        for number, one in enumerate(found)
    )


def nearest_cards(
    cards: Sequence[FoundCard], path: tuple[str, ...], numa: int, ordinal: int = 0
) -> tuple[FoundCard, ...]:
    """Return the cards that a rank uses: those behind most of the bridges to its GPU, else those of its NUMA node.

    Args:
        cards: all cards of the machine.
        path: bridges that lead to the GPU of the rank; empty without one.
        numa: NUMA node of the rank, -1 when unknown.
        ordinal: number of the GPU. Among equally near cards each GPU begins with another one.
    """
    near = [_common(path, one.path) for one in cards]
    best = max(near, default=0)
    if best > 1:  # behind the same bridge, and not only at the same root complex
        chosen = [one for one, num in zip(cards, near, strict=True) if num == best]
    else:
        chosen = [one for one in cards if numa >= 0 and one.numa == numa] or list(cards)
    first = ordinal % len(chosen) if chosen else 0
    return tuple((chosen[first:] + chosen[:first])[:MAX_RANK_RAILS])


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of leading elements that are equal."""
    num = 0
    for here, there in zip(one, other, strict=False):
        if here != there:
            break
        num += 1
    return num


def _rdma(root: Path, nodes: dict[int, set[int]]) -> list[FoundCard]:
    found = []
    for folder in entries(root / "sys/class/infiniband"):
        rates = [_port_gb_per_s(port) for port in entries(folder / "ports") if _is_active(port)]
        if rates:
            found.append(_found(folder.name, sum(rates), folder / "device", nodes))
    return found


def _is_active(port: Path) -> bool:
    return read_text(port / "state").endswith("ACTIVE")


def _port_gb_per_s(port: Path) -> float:
    """Return the rate of a port from a text such as ``400 Gb/sec (4X NDR)``; 0 if unknown."""
    match = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", read_text(port / "rate"))
    return float(match[1]) / 8 if match else 0.0


def _ethernet(root: Path, nodes: dict[int, set[int]], *, virtual: bool) -> list[FoundCard]:
    return [
        _found(folder.name, max(0, read_number(folder / "speed", 0)) / 8e3, folder / "device", nodes)
        for folder in _interfaces(root / "sys/class/net")
        if (_leads_out(folder) if virtual else (folder / "device").exists())
    ]


def _interfaces(folder: Path) -> Iterable[Path]:
    """Return the interfaces that are up and carry Ethernet. A virtual one may not know whether it is."""
    return [
        one
        for one in entries(folder)
        if read_number(one / "type", 0) == ETHERNET and read_text(one / "operstate") in ("up", "unknown")
    ]


def _leads_out(interface: Path) -> bool:
    """Say whether a virtual interface is one end of a pair whose other end is outside, as that of a container is."""
    index = read_number(interface / "ifindex", 0)
    return read_number(interface / "iflink", index) != index


def _found(name: str, gb_per_s: float, device: Path, nodes: dict[int, set[int]]) -> FoundCard:
    path = device_path(device)
    path = path[: path.index(pci_address(path)) + 1] if pci_address(path) else ()
    return FoundCard(card=Card(name=name, gb_per_s=gb_per_s), numa=node_of_device(device, nodes), path=path)
