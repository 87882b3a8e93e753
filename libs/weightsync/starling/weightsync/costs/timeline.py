"""Measured timeline of weight synchronisation: its parts, its bottleneck, and a trace. Pure.

A timeline is one publication and its adoptions. Clocks of different machines are not compared: an adoption is placed by
the time at which the controller received its end, and by the durations that the replica measured itself.

The trace is in the Trace Event Format (Google, "Trace Event Format", duration events `ph: "X"`, times in microseconds),
which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import msgspec

PARTS: Final = ("prepare", "read", "confirm", "switch", "wait")
"""Parts of the wall-clock time of an adoption, in order, except `wait`."""

PART_MEANINGS: Final = {
    "prepare": "checking plan and offer, preparing memory",
    "read": "connecting, reading, unpacking and digesting, while generation continues",
    "confirm": "checking that the snapshots did not change",
    "switch": "the pause of generation: writing live tensors, digests of the weights that the engine holds",
    "wait": "messages in flight, an earlier pull, the next token boundary",
}

PART_REMEDIES: Final = {
    "prepare": "a new plan or a first connection; it should be rare: check whether replicas join and leave often",
    "network": "the links are full or slow: relays, delta, or a faster transport (check the lanes that were used)",
    "unpack": "strided pieces are copied twice: choose a destination layout more like the source's, or more threads",
    "digest": "digests take most of the time: set weights.digests to sampled, or use more puller threads",
    "confirm": "sources answer late: they are busy; give the policy's process a core for its progress thread",
    "switch": "generation pauses for copying: pull in place at a pause, or use fewer, larger tensors",
    "wait": "replicas get a version late, or switch late: shorten decode steps, or reduce messages at the controller",
}


_MEASURED: Final = ("prepare", "read", "unpack", "digest", "confirm")
"""Parts of the `split` of a line, as the replica measured them."""


class PairTime(msgspec.Struct, frozen=True, kw_only=True):
    """One source rank and one rank of the reader in one adoption, expected and measured."""

    source_rank: int
    rank: int
    link: str
    """Class of their distance, as in `plan.topology.LINKS`."""
    num_bytes: int = msgspec.field(name="bytes")
    """Of the plan."""
    expected_s: float | None
    """None if the speed of a network card is unknown."""
    transport: str = ""
    sent_bytes: int | None = None
    """Bytes that were transferred; None if the reader did not report this pair."""
    read_s: float | None = None
    """From the beginning of the pull to the last of them; None likewise."""


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """Adoption of a version by one rank of one replica. Seconds; `unpack_s` and `digest_s` are part of `read_s`."""

    replica: str
    end_s: float
    """From the publication until the controller received the adoption."""
    prepare_s: float = 0.0
    read_s: float = 0.0
    unpack_s: float = 0.0
    digest_s: float = 0.0
    confirm_s: float = 0.0
    switch_s: float = 0.0
    size_bytes: int = 0
    """Size of the weights that it holds."""
    sent_bytes: int = 0
    """Bytes that were transferred."""
    transport: str = ""
    lanes: tuple[str, ...] = ()
    attested: bool = True
    source: str = ""
    expected_s: float | None = None
    """Expected for `read_s`; None if unknown."""
    pairs: tuple[PairTime, ...] = ()
    """The largest first; not all of them if there are many."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by `PARTS`, which sum to the wall-clock time."""
        known = {
            "prepare": self.prepare_s,
            "read": self.read_s,
            "confirm": self.confirm_s,
            "switch": self.switch_s,
        }
        return {**known, "wait": max(0.0, self.end_s - sum(known.values()))}


class PublicationTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One version: how long training waited for it, and its adoptions."""

    version: int
    publish_s: float
    offer_s: float = 0.0
    """From the snapshot to the offer (digests), during which training continues."""
    adoptions: tuple[Adoption, ...] = ()


class PairSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Means of one pair of ranks over some adoptions; None where nothing is known."""

    source: str
    source_rank: int
    replica: str
    rank: int
    link: str
    transport: str
    num_bytes: float
    """Of the plan."""
    sent_bytes: float | None
    expected_s: float | None
    read_s: float | None


class TimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the adoptions of some publications, in seconds; `parts` sum to `total_s`."""

    num_publications: int = msgspec.field(name="num_rounds")
    num_adoptions: int
    num_unproven: int
    publish_s: float
    offer_s: float
    parts: dict[str, float]
    total_s: float
    rate_bytes_per_s: float
    """Transferred bytes over `read` time; 0 if nothing was read."""
    sent_share: float
    """Transferred bytes over the size of the weights: less than 1 with deltas."""
    lanes: tuple[str, ...]
    bottleneck: str
    """A key of `PART_REMEDIES`."""
    expected_read_s: float | None = None
    """Expected for ``read``; None if it is not known of any adoption."""
    pairs: tuple[PairSplit, ...] = ()
    """The largest first."""


class _Published(msgspec.Struct, frozen=True):
    """Fields of a line `published`."""

    time: float
    version: int
    publish_s: float
    offer_s: float = 0.0


def publication_timelines(lines: Iterable[Mapping[str, Any]], last: int = 0) -> list[PublicationTimeline]:
    """Return the publications in a run's metrics, oldest first; only the `last` ones are in memory, 0 for all.

    Args:
        lines: objects with ``kind``, of which ``published`` (``time``, ``version``, ``publish_s``, ``offer_s``) and
            ``adopted`` (``time``, ``version``, ``replica``, ``attested``, ``pull_s``, ``pause_s``, ``size_bytes``,
            ``sent_bytes``, ``transport``, ``lanes``, ``split``, ``source``, ``expected_s``, ``pairs``) are read.
            Adoptions of versions without a ``published`` line are left out.

    Raises:
        KeyError, TypeError, AttributeError, ArithmeticError, msgspec.ValidationError: a line lacks a field, or has one
            of another type.
    """
    published: dict[int, _Published] = {}
    adoptions: dict[int, list[Adoption]] = {}
    for line in lines:
        if line["kind"] == "published":
            published[line["version"]] = msgspec.convert(line, _Published)
            adoptions[line["version"]] = []
            if 0 < last < len(published):
                oldest = next(iter(published))
                del published[oldest], adoptions[oldest]
        elif line["kind"] == "adopted" and line["version"] in published:
            adoptions[line["version"]].append(_adoption(line, published[line["version"]].time))
    return [
        PublicationTimeline(
            version=version,
            publish_s=line.publish_s,
            offer_s=line.offer_s,
            adoptions=tuple(adoptions[version]),
        )
        for version, line in published.items()
    ]


def _adoption(line: Mapping[str, Any], published_at: float) -> Adoption:
    split = line["split"]
    fields = {
        "replica": line["replica"],
        "end_s": max(0.0, line["time"] - published_at),
        "read_s": line["pull_s"],
        **{f"{part}_s": split[f"{part}_s"] for part in _MEASURED if f"{part}_s" in split},
        "switch_s": line["pause_s"],
        "size_bytes": line["size_bytes"],
        "sent_bytes": line.get("sent_bytes", line["size_bytes"]),
        "transport": line["transport"],
        "lanes": line["lanes"],
        "attested": line["attested"],
        **{name: line[name] for name in ("source", "expected_s", "pairs") if name in line},
    }
    return msgspec.convert(fields, Adoption)


def time_split(timelines: Sequence[PublicationTimeline]) -> TimeSplit | None:
    """Return the mean times of `timelines`, or None if there are no adoptions."""
    adoptions = [adoption for each in timelines for adoption in each.adoptions]
    if not adoptions:
        return None
    parts = {name: fmean(adoption.parts[name] for adoption in adoptions) for name in PARTS}
    reading = sum(adoption.read_s for adoption in adoptions)
    sent, size = (sum(getattr(adoption, name) for adoption in adoptions) for name in ("sent_bytes", "size_bytes"))
    return TimeSplit(
        num_publications=len(timelines),
        num_adoptions=len(adoptions),
        num_unproven=sum(not adoption.attested for adoption in adoptions),
        publish_s=fmean(each.publish_s for each in timelines),
        offer_s=fmean(each.offer_s for each in timelines),
        parts=parts,
        total_s=fmean(sum(adoption.parts.values()) for adoption in adoptions),
        rate_bytes_per_s=sent / reading if reading else 0.0,
        sent_share=sent / size if size else 1.0,
        lanes=tuple(sorted({lane for adoption in adoptions for lane in adoption.lanes})),
        bottleneck=_bottleneck(adoptions, parts),
        expected_read_s=_mean([adoption.expected_s for adoption in adoptions]),
        pairs=_pair_splits(adoptions),
    )


def _pair_splits(adoptions: Sequence[Adoption]) -> tuple[PairSplit, ...]:
    """Return the means of each pair of ranks, by the replicas, the ranks, and how they were connected."""
    groups: dict[tuple[str, int, str, int, str, str], list[PairTime]] = {}
    for adoption in adoptions:
        for pair in adoption.pairs:
            key = adoption.source, pair.source_rank, adoption.replica, pair.rank, pair.link, pair.transport
            groups.setdefault(key, []).append(pair)
    splits = [
        PairSplit(
            source=source,
            source_rank=source_rank,
            replica=replica,
            rank=rank,
            link=link,
            transport=transport,
            num_bytes=fmean(pair.num_bytes for pair in pairs),
            sent_bytes=_mean([pair.sent_bytes for pair in pairs]),
            expected_s=_mean([pair.expected_s for pair in pairs]),
            read_s=_mean([pair.read_s for pair in pairs]),
        )
        for (source, source_rank, replica, rank, link, transport), pairs in groups.items()
    ]
    return tuple(sorted(splits, key=lambda split: (-split.num_bytes, split.source, split.replica, split.rank)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _bottleneck(adoptions: Sequence[Adoption], parts: dict[str, float]) -> str:
    largest = max(PARTS, key=lambda name: parts[name])
    if largest != "read":
        return largest
    # Threads overlap, so the parts of reading are compared with it and not summed.
    for name, inner in (("digest", "digest_s"), ("unpack", "unpack_s")):
        if fmean(getattr(adoption, inner) for adoption in adoptions) > 0.5 * parts["read"]:
            return name
    return "network"


def chrome_trace(measured: PublicationTimeline) -> dict[str, Any]:
    """Return the trace of a publication, ready for `json.dumps`; of each replica its last adoption."""
    adoptions = {adoption.replica: adoption for adoption in measured.adoptions}
    stall_s, offer_s = measured.publish_s, measured.offer_s
    events = [
        *_named(0, "publisher"),
        _slice("publish (training waits)", 0, -stall_s - offer_s, stall_s),
        _slice("digest (training continues)", 0, -offer_s, offer_s),
    ]
    for number, (_, adoption) in enumerate(sorted(adoptions.items()), start=1):
        events += _named(number, adoption.replica)
        begin = adoption.parts["wait"]
        for name in PARTS[:-1]:
            seconds = adoption.parts[name]
            detail: dict[str, Any] = {"seconds": seconds}
            if name == "read":
                detail |= {
                    "bytes": adoption.sent_bytes,
                    "transport": adoption.transport,
                    "lanes": list(adoption.lanes),
                    "unpack_s": adoption.unpack_s,
                    "digest_s": adoption.digest_s,
                }
            events.append(_slice(name, number, begin, seconds, detail))
            begin += seconds
    return {
        "displayTimeUnit": "ms",
        "otherData": {"version": measured.version, "meaning": PART_MEANINGS},
        "traceEvents": events,
    }


def _named(process: int, name: str) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _slice(
    name: str, process: int, begin_s: float, seconds: float, detail: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": "weightsync",
        "pid": process,
        "tid": 0,
        "ts": round(begin_s * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "args": detail or {},
    }
