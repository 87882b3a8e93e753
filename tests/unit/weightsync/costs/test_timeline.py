"""The parts of a timeline sum to its wall-clock time, its bottleneck is named, and its trace is valid."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.weightsync.costs.timeline import (
    PART_REMEDIES,
    PARTS,
    Adoption,
    PairTime,
    PublicationTimeline,
    chrome_trace,
    publication_timelines,
    time_split,
)

seconds = st.floats(0.0, 100.0, allow_nan=False)


def adoption(**changes: float | str | bool) -> Adoption:
    """An adoption of 1 s, most of it reading."""
    fields = {"replica": "rollout-0", "end_s": 1.0, "prepare_s": 0.1, "read_s": 0.5, "confirm_s": 0.1, "switch_s": 0.1}
    return Adoption(**{**fields, "size_bytes": 1000, "sent_bytes": 1000, **changes})  # type: ignore[arg-type]


@given(seconds, seconds, seconds, seconds, seconds)
def test_parts_sum_to_the_wall_clock(end: float, prepare: float, read: float, confirm: float, switch: float) -> None:
    parts = Adoption(replica="r", end_s=end, prepare_s=prepare, read_s=read, confirm_s=confirm, switch_s=switch).parts
    assert sum(parts.values()) == pytest.approx(max(end, prepare + read + confirm + switch))
    assert min(parts.values()) >= 0.0


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        ({}, "network"),
        ({"digest_s": 0.4}, "digest"),
        ({"unpack_s": 0.4}, "unpack"),
        ({"end_s": 5.0}, "wait"),
        ({"switch_s": 0.9}, "switch"),
        ({"confirm_s": 0.9}, "confirm"),
        ({"prepare_s": 0.9}, "prepare"),
    ],
)
def test_bottleneck_is_named(changes: dict[str, float], bottleneck: str) -> None:
    split = time_split(
        [PublicationTimeline(version=1, publish_s=0.01, adoptions=(adoption(**changes), adoption(**changes)))]
    )
    assert split is not None
    assert split.bottleneck == bottleneck
    assert bottleneck in PART_REMEDIES


def test_time_split_of_several_publications() -> None:
    publications = [
        PublicationTimeline(
            version=1, publish_s=0.01, offer_s=0.5, adoptions=(adoption(), adoption(read_s=0.3, attested=False))
        ),
        PublicationTimeline(version=2, publish_s=0.03, adoptions=(adoption(read_s=0.7),)),
    ]
    split = time_split(publications)
    assert split is not None
    assert (split.num_publications, split.num_adoptions, split.num_unproven) == (2, 3, 1)
    assert split.parts["read"] == 0.5
    assert split.publish_s == pytest.approx(0.02)
    assert split.offer_s == pytest.approx(0.25)
    assert split.rate_bytes_per_s == pytest.approx(3000 / 1.5)
    assert time_split([PublicationTimeline(version=3, publish_s=0.1)]) is None


def test_chrome_trace_is_ordered() -> None:
    measured = PublicationTimeline(
        version=7, publish_s=0.02, offer_s=0.3, adoptions=(adoption(replica="rollout-1"), adoption())
    )
    trace = json.loads(json.dumps(chrome_trace(measured)))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["publisher", "rollout-0", "rollout-1"]
    publish, digest = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    assert (publish["ts"], publish["dur"]) == pytest.approx((-0.32e6, 0.02e6))
    assert (digest["ts"], digest["dur"]) == pytest.approx((-0.3e6, 0.3e6))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert [event["name"] for event in slices] == list(PARTS[:-1])
    for event, following in itertools.pairwise(slices):
        assert following["ts"] == pytest.approx(event["ts"] + event["dur"])
    assert slices[-1]["ts"] + slices[-1]["dur"] == pytest.approx(1e6), (
        "the adoption ends when the controller has recorded it"
    )


def test_timelines_are_read_from_the_metrics_of_a_run() -> None:
    adopted = {
        "kind": "adopted",
        "replica": "rollout-0",
        "attested": True,
        "pull_s": 0.4,
        "pause_s": 0.1,
        "size_bytes": 10,
        "sent_bytes": 4,
        "transport": "ucx",
        "lanes": ["cma/memory"],
        "split": {"prepare_s": 0.1, "read_s": 0.25, "digest_s": 0.05, "confirm_s": 0.05},
    }
    lines = [
        {"kind": "step", "step": 1},
        {"kind": "published", "time": 100.0, "version": 4, "publish_s": 0.02, "offer_s": 0.5},
        {**adopted, "time": 101.0, "version": 4},
        {**adopted, "time": 101.5, "version": 3},
        {"kind": "published", "time": 102.0, "version": 5, "publish_s": 0.03},
        {**adopted, "time": 102.5, "version": 4, "replica": "rollout-1", "split": {}},
    ]
    first, second = publication_timelines(lines)
    assert (first.version, second.version, second.adoptions) == (4, 5, ())
    assert (first.offer_s, second.offer_s) == (0.5, 0.0)
    assert [adoption.replica for adoption in first.adoptions] == ["rollout-0", "rollout-1"], "3 was published before"
    split = time_split([first])
    assert split is not None
    assert split.sent_share == pytest.approx(0.4)
    assert first.adoptions[0].parts == pytest.approx(
        {"prepare": 0.1, "read": 0.25, "confirm": 0.05, "switch": 0.1, "wait": 0.5}
    )
    assert first.adoptions[1].parts == pytest.approx(
        {"prepare": 0.0, "read": 0.4, "confirm": 0.0, "switch": 0.1, "wait": 2.0}
    )


def test_pairs_of_ranks_have_means_of_what_is_known() -> None:
    def pair(rank: int, **fields: object) -> PairTime:
        line = {"source_rank": 0, "rank": rank, "link": "rail", "bytes": 8 - rank, "expected_s": None, **fields}
        return msgspec.convert(line, PairTime)

    adoptions = tuple(
        Adoption(replica="rollout-0", end_s=1.0, read_s=0.5, source="policy-0", expected_s=expected, pairs=pairs)
        for expected, pairs in (
            (0.5, (pair(0, expected_s=0.5, transport="ucx", sent_bytes=8, read_s=1.0), pair(1))),
            (0.25, (pair(0, expected_s=0.25, transport="ucx", sent_bytes=4, read_s=0.5), pair(1))),
            (None, ()),
        )
    )
    split = time_split([PublicationTimeline(version=1, publish_s=0.1, adoptions=adoptions)])
    assert split is not None
    assert split.expected_read_s == 0.375
    names = {"source": "policy-0", "source_rank": 0, "replica": "rollout-0", "link": "rail"}
    first = {"rank": 0, "transport": "ucx", "num_bytes": 8.0, "sent_bytes": 6.0, "expected_s": 0.375, "read_s": 0.75}
    other = {"rank": 1, "transport": "", "num_bytes": 7.0, "sent_bytes": None, "expected_s": None, "read_s": None}
    assert [msgspec.structs.asdict(found) for found in split.pairs] == [names | first, names | other]


def test_only_the_last_publications_are_returned() -> None:
    """An adoption of an earlier version, which comes late, is left out with it."""
    adopted = {"kind": "adopted", "replica": "r", "pull_s": 0.1, "pause_s": 0.1, "size_bytes": 8, "split": {}}
    adopted |= {"transport": "ucx", "lanes": [], "attested": True}
    lines = []
    for version in range(1, 8):
        lines.append({"kind": "published", "time": float(version), "version": version, "publish_s": 0.1})
        lines += [{**adopted, "time": version + 0.5, "version": late} for late in (version, max(1, version - 2))]
    whole = publication_timelines(lines)
    for last in (1, 2, 5, 7, 9):
        assert publication_timelines(lines, last) == whole[-last:]
    assert publication_timelines(lines, 0) == whole
