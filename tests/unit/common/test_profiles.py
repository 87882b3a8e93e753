"""Profiles of a process: spans, orders, bounds, and the merged trace."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from starling.cli.profile.merge import merge
from starling.common.errors import ConfigError
from starling.common.observe.profiling import flames, spans
from starling.common.observe.profiling.limits import MAX_PROFILES
from starling.common.observe.profiling.profiler import Profiler
from starling.common.wire.messages import Profile, ProfileReport

ID = "a" * 32


def order(profile: str = ID, **fields: Any) -> Profile:
    return Profile(**{"profile": profile, "num_steps": 2, "seconds": 60.0, "num_groups": 0, "limit_s": 60.0, **fields})


class Process:
    """A process with a profiler, and its reports."""

    def __init__(self, folder: Path, name: str = "policy-0") -> None:
        self.reports: list[ProfileReport] = []
        self.profiler = Profiler(
            name, folder, self.reports.append, counts="steps" if name.startswith("policy") else "groups"
        )


def test_profile_ends_after_its_steps_and_is_merged(tmp_path: Path) -> None:
    process = Process(tmp_path)
    assert process.profiler.arm(order())
    assert not process.profiler.arm(order()), "an order that comes again starts nothing"
    assert process.profiler.active is not None
    process.profiler.active.spans.begin("generate:t1:1.1", "generate", prompt="p")
    for step in (1, 2):
        process.profiler.check()
        process.profiler.active.enter("forward")
        with process.profiler.span(f"step {step}"):
            time.sleep(0.001)
        process.profiler.count()
    process.profiler.check()
    assert process.profiler.active is None
    assert [one.state for one in process.reports] == ["active", "ended"]
    assert "2 done of 2 asked for" in process.reports[-1].text
    merged = merge(tmp_path / "profiles" / ID)
    events = json.loads(merged.path.read_text())["traceEvents"]
    assert all({"ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    found = {event["name"]: event for event in events}
    assert found["step 1"]["ph"] == "X"
    assert [one["ph"] for one in events if one["name"] == "generate"] == ["b", "e"]
    assert min(event["ts"] for event in events if event["ph"] != "M") == 0


def test_second_order_is_refused_while_one_is_active(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.profiler.arm(order())
    assert not process.profiler.arm(order("b" * 32))
    assert process.reports[-1].state == "failed"
    assert f"profile {ID} is being recorded" in process.reports[-1].text
    process.profiler.end()
    assert process.reports[-1].profile == ID


def test_profile_of_a_rollout_ends_by_time_or_by_groups(tmp_path: Path) -> None:
    process = Process(tmp_path, "rollout-0")
    process.profiler.arm(order(seconds=0.01))
    time.sleep(0.02)
    process.profiler.check()
    assert process.reports[-1].state == "ended"
    process.profiler.arm(order("b" * 32, seconds=0.001, num_groups=1))
    time.sleep(0.02)
    process.profiler.check()
    assert process.profiler.active is not None, "groups count in place of the time"
    process.profiler.count()
    process.profiler.check()
    assert process.profiler.active is None


@pytest.mark.parametrize("name", ["../" * 10 + "x", "", "A" * 32])
def test_order_with_another_name_than_an_id_is_refused(tmp_path: Path, name: str) -> None:
    process = Process(tmp_path)
    process.profiler.arm(order(name))
    assert process.reports[-1].state == "failed"
    assert not list(tmp_path.iterdir())


def test_folder_full_of_profiles_is_refused(tmp_path: Path) -> None:
    for number in range(MAX_PROFILES):
        (tmp_path / "profiles" / str(number)).mkdir(parents=True)
    process = Process(tmp_path)
    process.profiler.arm(order())
    assert f"holds {MAX_PROFILES} profiles: remove some" in process.reports[-1].text


def test_link_in_the_place_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "profiles" / ID
    folder.mkdir(parents=True)
    (folder / "policy-0.spans.json").symlink_to(victim)
    process = Process(tmp_path)
    process.profiler.arm(order())
    process.profiler.end()
    assert process.reports[-1].state == "failed"
    assert victim.read_text() == "mine"


def test_flame_graph_without_py_spy_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flames, "find_py_spy", lambda: None)
    process = Process(tmp_path)
    process.profiler.arm(order(flames=True))
    process.profiler.end()
    assert process.reports[-1].state == "ended"
    assert "py-spy is not installed here; install starling-common[profile]" in process.reports[-1].text


@pytest.mark.skipif(flames.find_py_spy() is None, reason="py-spy is not installed")
def test_flame_graph_of_this_process(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.profiler.arm(order(flames=True))
    begun = time.monotonic()
    while time.monotonic() < begun + 2:
        sum(range(1000))
    process.profiler.end()
    assert "policy-0.flames.svg" in process.reports[-1].files, process.reports[-1].text


def test_number_of_spans_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_EVENTS", 3)
    recorder = spans.SpanRecorder()
    for number in range(10):
        recorder.add(f"span {number}", 0, 1)
    assert (len(recorder), recorder.num_dropped) == (3, 7)


def write_spans(folder: Path, name: str, begin_us: float, *, boot: str, offset_ns: int, **more: Any) -> None:
    head = {"name": name, "host": f"host-{boot}", "pid": 1, "boot": boot, "clock_offset_ns": offset_ns}
    event = {"ph": "X", "name": f"span of {name}", "ts": begin_us, "dur": 1.0, "pid": 1, "tid": 1}
    text = json.dumps({"starling": head, "traceEvents": [event, *more.get("events", ())]})
    (folder / f"{name}.spans.json").write_text(text)


def test_processes_of_one_boot_share_a_clock_and_hosts_are_aligned_by_theirs(tmp_path: Path) -> None:
    write_spans(tmp_path, "policy-0", 1000.0, boot="a", offset_ns=5_000_000_000)
    write_spans(tmp_path, "reward-0", 1500.0, boot="a", offset_ns=9_000_000_000)  # its wall clock was set meanwhile
    write_spans(tmp_path, "rollout-0", 0.0, boot="b", offset_ns=5_003_000_000)
    merged = merge(tmp_path)
    events = json.loads(merged.path.read_text())["traceEvents"]
    begins = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert begins == {"span of policy-0": 0.0, "span of reward-0": 500.0, "span of rollout-0": 2000.0}
    assert len({event["pid"] for event in events}) == 3
    assert "aligned by their wall clocks" in merged.text()


def test_invalid_events_of_a_replica_are_left_out(tmp_path: Path) -> None:
    bad: list[Any] = [
        {"ph": "X", "name": "late", "ts": 1e300, "tid": 1},
        {"ph": "??", "name": "x", "ts": 1},
        {"ph": "X", "name": 5, "ts": 1},
        {"ph": "M", "name": "process_name", "args": {"name": "the controller"}},
    ]
    write_spans(tmp_path, "rollout-0", 1.0, boot="a", offset_ns=0, events=bad)
    merged = merge(tmp_path)
    assert merged.num_left_out == 3, "names of processes are replaced, and not counted"
    events = json.loads(merged.path.read_text())["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["rollout-0 (host-a, 1)"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"starling": {}}', b"[" * 100_000, b"\xff\xfe"])
def test_file_that_is_no_trace_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "policy-0.spans.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is no trace"):
        merge(tmp_path)


def test_fifo_among_the_files_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "policy-0.spans.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        merge(tmp_path)
