"""Faults one after the other, drawn by a seed, against real publishers in processes of their own.

After every fault the destination must hold a complete and attested version: the new one, or the old one with every
bit as it was; or say that it is torn. Then a clean pull must heal it. What is left behind is counted at the end.

Transports take turns with the kinds of fault as cards are dealt: each pair of them once, shuffled, and again.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fault_kinds import FAULTS, Kind
from fault_pair import Pair, census
from transport_peers import served_transports

from starling.weightsync.plan.offer import Transport

TRANSPORTS: Final[tuple[Transport, ...]] = ("local", *served_transports())
PRELOADED: Final = (
    "starling.weightsync.publisher.publisher",
    "starling.weightsync.puller.puller",
    "starling.weightsync.layouts.checkpoint",
    "starling.weightsync.tensors.modules",
)
"""Imported once, by the process that all others are forked from."""


@dataclass
class Report:
    """What came of a loop."""

    injected: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    survived: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind, how often the destination adopted the version, stayed with the old one, or was torn."""
    transports: Counter[str] = field(default_factory=Counter)
    """Faults by transport."""
    failures: list[str] = field(default_factory=list)
    """Why a fault was not survived."""
    leaks: Counter[str] = field(default_factory=Counter)
    """What was left behind, by what it is; empty when nothing was."""
    seconds: float = 0.0


def run_faults(num: int, seed: int, told: Callable[[int], None] = lambda done: None) -> Report:
    """Do `num` faults; `told` how many are done."""
    mp.set_forkserver_preload(list(PRELOADED))
    draw = random.Random(seed)
    report = Report()
    warm_up(draw)
    before, files, begin = census("self"), shared_files(), time.monotonic()
    pairs = {transport: Pair(transport, draw) for transport in TRANSPORTS}
    opened = census("self")
    try:
        deck: list[tuple[Transport, Kind]] = []
        for done in range(num):
            if not deck:
                deck = [(t, kind) for t in TRANSPORTS for kind in FAULTS if t == "tcp" or kind != "wire flipped"]
                draw.shuffle(deck)
            transport, kind = deck.pop()
            if not _survives(pairs[transport], kind, report):
                pairs[transport].close()
                pairs[transport] = Pair(transport, draw)
            told(done + 1)
        for transport in TRANSPORTS:
            report.leaks += pairs[transport].left_behind()
        grown = census("self")
        grown.subtract(opened)
        report.leaks["descriptors of pullers"] += max(0, grown["descriptors"])
    finally:
        while pairs:
            pairs.popitem()[1].close()
    gc.collect()
    left = census("self")
    left.subtract(before)
    report.leaks += left
    report.leaks["processes"] += len(mp.active_children())
    report.leaks["shared files"] += len(shared_files() - files)
    report.leaks = +report.leaks
    report.seconds = time.monotonic() - begin
    return report


def warm_up(draw: random.Random) -> None:
    """Let the libraries open what they open once and keep."""
    for transport in TRANSPORTS:
        Pair(transport, draw).close()
    gc.collect()


def shared_files() -> set[str]:
    """Names in /dev/shm that could be ours."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("ucx", "starling"))}


def _survives(pair: Pair, kind: Kind, report: Report) -> bool:
    """Inject one fault and heal; note how it went."""
    report.injected[kind] += 1
    report.transports[pair.transport] += 1
    number = report.injected.total()
    try:
        if kind == "source killed":
            report.leaks += pair.left_behind()
        outcome = FAULTS[kind](pair)
        pair.adopt(pair.source.publish())
    except Exception as error:  # noqa: BLE001 - whatever is raised is what is looked for
        where = "" if isinstance(error, AssertionError) else traceback.format_exc()
        reason = f"fault {number} ({kind}, {pair.transport}): {type(error).__name__}: {error} {where}"
        report.failures.append(reason.strip())
        return False
    report.survived[kind] += 1
    report.outcomes.setdefault(kind, Counter())[outcome] += 1
    return True
