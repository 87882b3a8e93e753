"""Recordings hold all events up to a crash, the size limit, or a full disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from recorded_run import HELD_OUT, PLAN, hello

from starling.common.errors import ConfigError
from starling.common.wire import messages as wire
from starling.controller.core.events import (
    CheckpointRead,
    Event,
    Fetched,
    NotSent,
    Received,
    ReplicaDisconnected,
    StopRequested,
    Stored,
    Ticked,
)
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import CompletionsStored, ControllerStarted, JournalEntry, RewardsStored
from starling.controller.shell.recording.format import (
    Frame,
    JournalFrame,
    MessageFrame,
    PromptFrame,
    RecordingEnd,
    encode_frame,
    read_recording,
)
from starling.controller.shell.recording.recorder import (
    FLUSH_BYTES,
    Recorder,
    recording_path,
    remove_old_recordings,
)

TIMES = st.floats(0, 1e9)
NAMES = st.text(max_size=8)
PAYLOADS = st.lists(st.binary(max_size=20), max_size=3).map(tuple)
MESSAGES: st.SearchStrategy[wire.Up] = st.one_of(
    st.builds(wire.Heartbeat, version=st.integers(-1, 9), gauges=st.dictionaries(NAMES, TIMES, max_size=2)),
    st.builds(wire.Leave, reason=NAMES),
    st.builds(wire.GroupScored, lease=NAMES, rewards=st.just((1.0, None)), statuses=st.just((wire.Status.OK,) * 2)),
    st.builds(wire.ChangeSetting, request=NAMES, key=NAMES, value=st.one_of(TIMES, st.integers(-9, 9), NAMES)),
    st.builds(wire.GroupGenerated, lease=NAMES, trajectories=st.just(()), tensors=st.just(())),
)
DECODED_MESSAGES: st.SearchStrategy[wire.Up] = st.one_of(
    st.builds(wire.Hello, role=st.just("policy"), host=NAMES, pid=st.integers(1, 9), has_layout=st.just(True)),
    st.builds(wire.WeightsPublished, lease=NAMES, version=st.integers(0, 9), publish_s=TIMES),
)
RECORDS: st.SearchStrategy[JournalEntry] = st.one_of(
    st.builds(
        JournalEntry, st.builds(CompletionsStored, key=NAMES, trajectories=st.just(()), tensors=st.just(())), PAYLOADS
    ),
    st.builds(JournalEntry, st.builds(RewardsStored, key=NAMES, rewards=st.just((None, 2.0)))),
)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Received, TIMES, NAMES, st.integers(0, 2**62), MESSAGES, PAYLOADS),
    st.builds(Received, TIMES, NAMES, st.integers(0, 2**62), DECODED_MESSAGES, PAYLOADS),
    st.builds(Ticked, TIMES),
    st.builds(ReplicaDisconnected, TIMES, NAMES),
    st.builds(StopRequested, TIMES, NAMES),
    st.builds(CheckpointRead, TIMES, NAMES),
    st.builds(NotSent, TIMES, NAMES, NAMES, NAMES),
    st.builds(Stored, TIMES, st.integers(0, 9)),
    st.builds(Fetched, TIMES, st.integers(0, 9), st.lists(RECORDS, max_size=3).map(tuple), NAMES),
)


def recorder_at(path: Path, past: list[JournalEntry] | None = None, cap_bytes: int = 1 << 30) -> Recorder:
    """Return a recorder with a file at `path`."""
    return Recorder(path, run="r", incarnation=3, plan=PLAN, past=past or [], held_out=HELD_OUT, cap_bytes=cap_bytes)


def zeroed(payload: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return buffers as a replay returns them: zeros of the same sizes."""
    return tuple(bytes(len(buffer)) for buffer in payload)


def replayed(event: Event) -> Event:
    """Return an event as a replay returns it."""
    match event:
        case Received(now=now, sender=sender, incarnation=epoch, message=message, buffers=buffers):
            decoded = isinstance(message, wire.Hello | wire.WeightsPublished)
            return Received(now, sender, epoch, message, buffers if decoded else zeroed(buffers), is_checked=True)
        case Fetched(now=now, step=step, records=records, problem=problem):
            zeros = tuple(JournalEntry(kept.record, zeroed(kept.payload)) for kept in records)
            return Fetched(now, step, zeros, problem)
        case _:
            return event


@given(st.lists(EVENTS, max_size=12), st.lists(RECORDS, max_size=4))
@examples(100)
def test_recording_reads_back_what_was_recorded(events: list[Event], past: list[JournalEntry]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events-3.rec"
        recorder = recorder_at(path, past)
        for event in events:
            recorder.event(event)
        recorder.prompt("examples", 7, HELD_OUT[0])
        recorder.close()
        header, before, entries = read_recording(path)
        found = list(entries)
    assert (header.run, header.incarnation, RunPlan.from_fields(header.plan), header.held_out) == (
        "r",
        3,
        PLAN,
        tuple(HELD_OUT),
    )
    assert before == [JournalEntry(kept.record, zeroed(kept.payload)) for kept in past]
    assert found == [*map(replayed, events), PromptFrame("examples", 7, HELD_OUT[0]), RecordingEnd("")]


def test_recording_cut_off_anywhere_reads_up_to_there(tmp_path: Path) -> None:
    path, cut = tmp_path / "whole.rec", tmp_path / "cut.rec"
    recorder = recorder_at(path, [JournalEntry(ControllerStarted(incarnation=2))])
    events: list[Event] = [hello("reward-0", "reward", 1.0), Ticked(1.5), ReplicaDisconnected(2.0, "reward-0")]
    for event in events:
        recorder.event(event)
    recorder.close()
    whole, lengths = path.read_bytes(), set()
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        try:
            *found, ended = read_recording(cut)[2]
        except ConfigError:
            continue
        assert found == [*map(replayed, events)][: len(found)]
        assert isinstance(ended, RecordingEnd)
        assert ended.cut_off
        lengths.add(len(found))
    assert lengths == {0, 1, 2, 3}


def test_recording_ends_at_a_corrupt_frame(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "events-1.rec")
    for event in (ReplicaDisconnected(1.0, "rollout-0"), ReplicaDisconnected(2.0, "rollout-1")):
        recorder.event(event)
    recorder.close()
    data = recorder.path.read_bytes()
    recorder.path.write_bytes(data.replace(b"rollout-1", b"rollout-7"))
    *found, ended = read_recording(recorder.path)[2]
    assert found == [ReplicaDisconnected(1.0, "rollout-0")]
    assert ended.cut_off


def test_recording_ignores_trailing_zeros(tmp_path: Path) -> None:
    path = tmp_path / "events-1.rec"
    recorder = recorder_at(path)
    recorder.event(Ticked(1.0))
    recorder.flush()
    with path.open("ab") as file:
        file.write(bytes(4096))
    *found, ended = read_recording(path)[2]
    assert found == [Ticked(1.0)]
    assert ended.cut_off
    recorder.close()


def test_recorder_flushes_at_ticks(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "events-1.rec")
    for event in (ReplicaDisconnected(1.0, "a"), Ticked(2.0), ReplicaDisconnected(3.0, "b")):
        recorder.event(event)
    assert list(read_recording(recorder.path)[2])[:-1] == [ReplicaDisconnected(1.0, "a")]
    recorder.event(StopRequested(4.0, "x" * FLUSH_BYTES))
    recorder.event(ReplicaDisconnected(5.0, "c"))
    assert len(list(read_recording(recorder.path)[2])) == 5, "little is kept in memory between two ticks"
    recorder.close()


def test_recorder_stops_at_its_size_limit(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "events-1.rec", cap_bytes=2000)
    for n in range(1000):
        recorder.event(ReplicaDisconnected(float(n), "rollout-0"))
        recorder.event(Ticked(float(n)))
    assert recorder.stopped == "it has reached its limit of 2000 bytes"
    recorder.close()
    assert recorder.path.stat().st_size < 2200
    *found, ended = read_recording(recorder.path)[2]
    assert (
        found
        == [
            entry for n in range(len(found)) for entry in (ReplicaDisconnected(float(n), "rollout-0"), Ticked(float(n)))
        ][: len(found)]
    )
    assert ended == RecordingEnd(recorder.stopped)


def test_recording_without_its_beginning_is_rejected(tmp_path: Path) -> None:
    past = [JournalEntry(ControllerStarted(incarnation=n)) for n in range(100)]
    recorder = recorder_at(tmp_path / "events-1.rec", past, cap_bytes=2000)
    recorder.event(Ticked(1.0))
    recorder.close()
    with pytest.raises(ConfigError, match="of the 100 journal entries at its beginning, and no event"):
        read_recording(recorder.path)


def test_recorder_stops_on_a_full_disk(disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(60 << 10))
    recorder = recorder_at(disk / "events-1.rec", [JournalEntry(ControllerStarted(incarnation=1))] * 2000)
    recorder.event(Ticked(1.0))
    recorder.close()
    assert recorder.stopped == f"cannot write {disk / 'events-1.rec'}: No space left on device"


def test_recorder_stops_without_its_folder(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "nowhere" / "events-1.rec")
    recorder.event(Ticked(1.0))
    recorder.close()
    assert "No such file" in recorder.stopped


def test_recorder_stops_at_an_unencodable_value(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path / "events-1.rec")
    recorder.prompt("prompts", 0, wire.Prompt(id="p", metadata={"n": 1 << 80}))
    recorder.event(Ticked(1.0))
    recorder.close()
    assert recorder.stopped.startswith("a PromptFrame cannot be encoded")
    assert list(read_recording(recorder.path)[2]) == [RecordingEnd(recorder.stopped)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a recording"),
        (b"[run]\nname = 'x'\n", "is not a recording"),
        (b"starling-recording 7\n", "a recording of version 7 and this Starling reads version 1"),
        (b"starling-recording 1\n", "has only the first line"),
    ],
)
def test_recording_rejects_another_kind_of_file(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "events-1.rec"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_recording(path)


def test_recordings_of_the_last_incarnations_are_kept(tmp_path: Path) -> None:
    for number in range(1, 13):
        recording_path(tmp_path, number).touch()
    for name in ("events-x.rec", "events-².rec"):
        (tmp_path / name).touch()
    remove_old_recordings(tmp_path, 13)
    kept = {"events-x.rec", "events-².rec", *(f"events-{number}.rec" for number in range(6, 13))}
    assert {path.name for path in tmp_path.iterdir()} == kept, "with the new one there are eight"


SCORED = wire.GroupScored(lease="x", rewards=(1.0,), statuses=(wire.Status.OK,))
JOURNALED = RewardsStored(key="t0", rewards=(1.0,))


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (MessageFrame(1.0, "reward-0", 1, SCORED, sizes=(1 << 62,)), "it has buffers of 4,611,686,018,427,387,904"),
        (MessageFrame(1.0, "reward-0", 1, SCORED, sizes=(1, -1)), "it has buffers of 1 and -1 bytes"),
        (JournalFrame(JOURNALED), "it is an entry of the journal"),
    ],
    ids=["huge", "negative", "journal entry"],
)
def test_recording_of_others_cannot_make_buffers_of_any_size(tmp_path: Path, frame: Frame, problem: str) -> None:
    path = tmp_path / "events-3.rec"
    recorder_at(path).close()
    whole = path.read_bytes()
    end = len(encode_frame(RecordingEnd("")))
    path.write_bytes(whole[:-end] + encode_frame(frame) + whole[-end:])
    _, _, entries = read_recording(path)
    with pytest.raises(ConfigError, match=f"entry 1 of .* cannot be decoded: {problem}"):
        list(entries)


def test_journal_of_a_recording_cannot_have_buffers_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "events-3.rec"
    recorder_at(path, [JournalEntry(JOURNALED)]).close()
    honest, lying = encode_frame(JournalFrame(JOURNALED)), encode_frame(JournalFrame(JOURNALED, sizes=(1 << 62,)))
    assert honest in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(honest, lying))
    with pytest.raises(ConfigError, match="cannot be decoded: it has buffers of"):
        read_recording(path)
