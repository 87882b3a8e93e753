"""Loop of random faults, drawn by a seed, against real publishers and relays in child processes.

After every fault the destination must hold a complete and attested version, the new one or the unchanged old one, or
report that it is torn; after a fault of a relay it must hold the new one. Then a pull without faults must succeed.
Leaked resources are counted at the end.

Each pair of a transport and a kind of fault comes once, in random order, before any is repeated.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fault_chain import FaultChain
from fault_kinds import FAULTS, Kind
from fault_pair import SECOND_SOCKETS, FaultPair, Outcome, resource_counts
from relay_faults import RELAY_FAULTS, RelayKind
from transport_peers import served_transports

from starling.weightsync.offers.offer import Transport

TRANSPORTS: Final[tuple[Transport, ...]] = ("local", *served_transports())
ALL_FAULTS: Final[dict[str, Callable[[Any], Outcome]]] = {**FAULTS, **RELAY_FAULTS}
"""By kind: of a pair, or of a chain."""
FIXTURES: Final[tuple[type[FaultPair], ...]] = (FaultPair, FaultChain)
ENDING_S: Final = 20.0
"""How long threads may take to end, and with them their descriptors, on a busy machine."""
DECK: Final[tuple[tuple[Transport, Kind | RelayKind], ...]] = (
    *((t, kind) for t in TRANSPORTS for kind in FAULTS if t == "tcp" or kind != "wire flipped"),
    *((t, kind) for t in TRANSPORTS for kind in RELAY_FAULTS if FaultChain.serves(t)),
)
"""Each kind over each transport that has it: a proxy flips bytes of tcp only."""


def covering_deck() -> tuple[tuple[Transport, Kind | RelayKind], ...]:
    """Return a part of the deck that has each kind once, over transports in turn, and each transport at least once."""
    found: list[tuple[Transport, Kind | RelayKind]] = []
    for kind in ALL_FAULTS:
        transports = [transport for transport, other in DECK if other == kind]
        uses = Counter(transport for transport, _ in found)
        found.append((min(transports, key=lambda transport: uses[transport]), kind))  # type: ignore[arg-type]
    return tuple(found)


@dataclass
class Report:
    """The result of a loop."""

    injected: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    survived: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind, how often the destination adopted the new version, kept the old one, or was torn."""
    transports: Counter[str] = field(default_factory=Counter)
    """Faults by transport."""
    failures: list[str] = field(default_factory=list)
    """Reasons why faults were not survived."""
    leaks: Counter[str] = field(default_factory=Counter)
    """Leaked resources by kind."""
    seconds: float = 0.0


def _left_since(before: Counter[str]) -> Counter[str]:
    """Return the resources that are left of those opened since `before`, once threads that end have had time to."""
    end = time.monotonic() + ENDING_S
    while True:
        gc.collect()
        left = resource_counts("self")
        left.subtract(before)
        if not +left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def run_faults(
    num: int,
    seed: int,
    report_progress: Callable[[int], None] = lambda done: None,
    faults: Sequence[tuple[Transport, Kind | RelayKind]] = DECK,
) -> Report:
    """Inject `num` of the `faults`, each once before any is repeated; `report_progress` gets the number done."""
    draw = random.Random(seed)
    report = Report()
    warm_up(draw)
    before, files, begin = resource_counts("self"), shared_files(), time.monotonic()
    others = set(mp.active_children())
    fixtures = {(t, made): made(t, draw) for t in TRANSPORTS for made in FIXTURES if made.serves(t)}
    opened = resource_counts("self")
    try:
        deck: list[tuple[Transport, Kind | RelayKind]] = []
        for done in range(num):
            if not deck:
                deck = list(faults)
                draw.shuffle(deck)
            transport, kind = deck.pop()
            key = transport, FaultChain if kind in RELAY_FAULTS else FaultPair
            if not _survives(fixtures[key], kind, report):
                fixtures[key].close()
                fixtures[key] = key[1](transport, draw)
            report_progress(done + 1)
        for key in fixtures:  # no name may keep a fixture, whose descriptors would then count as leaked
            report.leaks += fixtures[key].leaks()
        grown = resource_counts("self")
        grown.subtract(opened)
        grown["descriptors"] -= sum(SECOND_SOCKETS.get(transport, 0) for transport, _ in fixtures)
        report.leaks["descriptors of pullers"] += max(0, grown["descriptors"])
    finally:
        while fixtures:
            fixtures.popitem()[1].close()
    report.leaks += _left_since(before)
    report.leaks["processes"] += len(set(mp.active_children()) - others)
    report.leaks["shared files"] += len(shared_files() - files)
    report.leaks = +report.leaks
    report.seconds = time.monotonic() - begin
    return report


def warm_up(draw: random.Random) -> None:
    """Make the libraries open what they keep open for the life of the process."""
    for transport in TRANSPORTS:
        FaultPair(transport, draw).close()
    FaultChain("tcp", draw).close()
    gc.collect()


def shared_files() -> set[str]:
    """Return the names in /dev/shm that UCX or this code may have created."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("ucx", "starling"))}


def _survives(pair: FaultPair, kind: Kind | RelayKind, report: Report) -> bool:
    """Inject one fault and heal; record the outcome."""
    report.injected[kind] += 1
    report.transports[pair.transport] += 1
    number = report.injected.total()
    try:
        if kind == "source killed":
            report.leaks += pair.leaks()
        outcome = ALL_FAULTS[kind](pair)
        pair.heal()
    except Exception as error:  # noqa: BLE001 - any exception is a finding
        where = "" if isinstance(error, AssertionError) else traceback.format_exc()
        reason = f"fault {number} ({kind}, {pair.transport}): {type(error).__name__}: {error} {where}"
        report.failures.append(reason.strip())
        return False
    report.survived[kind] += 1
    report.outcomes.setdefault(kind, Counter())[outcome] += 1
    return True
