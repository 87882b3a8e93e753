"""One trace of all processes of a profile, in Chrome's format, from the files that they wrote.

Each file of spans says how far the clock of its host is from the wall clock. Processes of one boot of a host share that
clock, so they are aligned exactly, whatever the wall clock does; hosts are aligned by their wall clocks, and the trace
is wrong by as much as those differ. Torch's traces are aligned by a span that is in them at a known time.

The files may come from replicas that nobody trusts: what is no valid event is left out, and counted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from starling.common.errors import ConfigError
from starling.common.files import open_own, write_whole

T = TypeVar("T")
TRACE: Final = "trace.json"
CLOCK_MARK: Final = "starling.clock"
"""As in `starling.common.observe.profiling.torch_profile`."""
MAX_FILE_BYTES: Final = 512 << 20
MAX_FILES: Final = 1024
MAX_EVENTS: Final = 5_000_000
PHASES: Final = frozenset("BEXiIbensftCMPNOD")
"""Kinds of events that are kept."""
MAX_NUMBER: Final = 2**53


class ProcessHead(msgspec.Struct):
    """What a file of spans says of its process."""

    name: str
    host: str
    pid: int
    boot: str
    clock_offset_ns: int
    clock_moved_ns: int = 0
    num_dropped: int = 0


class SpansFile(msgspec.Struct):
    """A file of spans."""

    starling: ProcessHead
    traceEvents: list[dict[str, Any]]


class TorchFile(msgspec.Struct):
    """A trace of torch, as far as it is read."""

    traceEvents: list[dict[str, Any]]


@dataclass(frozen=True)
class MergedTrace:
    """What was merged."""

    path: Path
    num_events: int
    num_left_out: int
    processes: tuple[str, ...]
    hosts: tuple[str, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return it in words."""
        words = f"{self.path}: {self.num_events} events of {', '.join(self.processes)}"
        left = f"; {self.num_left_out} that are no valid events were left out" if self.num_left_out else ""
        return "\n".join([words + left, *self.notes])


def merge(folder: Path) -> MergedTrace:
    """Write the trace of all processes that have files in `folder`.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """
    found = [(path, _read(path, SpansFile)) for path in _files(folder, ".spans.json")]
    if not found:
        raise ConfigError(f"{folder} has no NAME.spans.json; give the folder of a profile, RUN/profiles/ID")
    offsets: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    num_left_out = 0
    for number, (path, spans) in enumerate(found, start=1):
        head = spans.starling
        offset_ns = offsets.setdefault(head.boot or f"{head.host}/{head.pid}", head.clock_offset_ns)
        events += _process_names(number, head)
        for shift_us, all_events in _sources(path, spans, offset_ns):
            given = [event for event in all_events if not _names_a_process(event)]
            kept = [event for event in (_event(one, number, shift_us) for one in given) if event is not None]
            num_left_out += len(given) - len(kept)
            events += kept
            if len(events) > MAX_EVENTS:
                raise ConfigError(f"{folder} has more than {MAX_EVENTS} events; move some of its files away")
    _begin_at_zero(events)
    heads = [spans.starling for _, spans in found]
    path = folder / TRACE
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    hosts = tuple(sorted({head.host for head in heads}))
    names = tuple(head.name for head in heads)
    return MergedTrace(path, len(events), num_left_out, names, hosts, tuple(_notes(heads, hosts)))


def _files(folder: Path, suffix: str) -> list[Path]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(suffix))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; give the folder of a profile") from None
    if len(names) > MAX_FILES:
        raise ConfigError(f"{folder} has {len(names)} files of spans, more than {MAX_FILES}; move some away")
    return [folder / name for name in names]


def _read(path: Path, kind: type[T]) -> T:
    """Return the contents of a file. Raises ConfigError if it has another form, or is too large."""
    try:
        with os.fdopen(open_own(path), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; move it away") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; move it away")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no trace: {error}; move it away") from None


def _sources(path: Path, spans: SpansFile, offset_ns: int) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Yield the lists of events of a process, each with what to add to its times for wall-clock microseconds."""
    yield offset_ns / 1e3, spans.traceEvents
    torch = path.with_name(path.name.removesuffix(".spans.json") + ".torch.json")
    clock = torch.with_suffix(".clock")
    if not torch.is_file() or not clock.is_file():
        return
    mark_us = _read(clock, int) / 1e3
    events = _read(torch, TorchFile).traceEvents
    mark = next((one for one in events if one.get("name") == CLOCK_MARK and _is_number(one.get("ts"))), None)
    if mark is not None:
        length = mark["dur"] if _is_number(mark.get("dur")) else 0.0
        yield offset_ns / 1e3 + mark_us - (mark["ts"] + length), events


def _names_a_process(event: dict[str, Any]) -> bool:
    """Return whether an event is one of torch's names and labels of a process, in whose place ours are written."""
    name = event.get("name")
    return event.get("ph") == "M" and isinstance(name, str) and name.startswith("process_")


def _event(event: dict[str, Any], process: int, shift_us: float) -> dict[str, Any] | None:
    """Return an event of process number `process` at wall-clock time; None if it is no valid one."""
    phase, name, time_us = event.get("ph"), event.get("name", ""), event.get("ts", 0)
    is_valid = isinstance(phase, str) and phase in PHASES and len(phase) == 1 and isinstance(name, str)
    if not is_valid or not _is_number(time_us) or not _is_number(event.get("dur", 0)):
        return None
    if phase == "M":
        return {**event, "pid": process, "tid": _thread(event)} if name.startswith("thread_") else None
    return {**event, "pid": process, "tid": _thread(event), "ts": time_us + shift_us}


def _thread(event: dict[str, Any]) -> int | str:
    thread = event.get("tid", 0)
    return thread if isinstance(thread, int) else str(thread)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < MAX_NUMBER


def _process_names(number: int, head: ProcessHead) -> Iterable[dict[str, Any]]:
    common = {"ph": "M", "pid": number, "tid": 0, "ts": 0}
    yield {**common, "name": "process_name", "args": {"name": f"{head.name} ({head.host}, {head.pid})"}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": number}}


def _begin_at_zero(events: list[dict[str, Any]]) -> None:
    """Count all times from the first event: a double has not the digits for nanoseconds since 1970."""
    timed = [event for event in events if event["ph"] != "M"]
    first = min((event["ts"] for event in timed), default=0.0)
    for event in timed:
        event["ts"] = round(event["ts"] - first, 3)


def _notes(heads: list[ProcessHead], hosts: tuple[str, ...]) -> Iterator[str]:
    boots = {head.boot or f"{head.host}/{head.pid}" for head in heads}
    if len(boots) > 1:
        yield (
            f"{', '.join(hosts)}: aligned by their wall clocks, so spans of different hosts are off by as much as "
            "these differ: milliseconds with NTP, any time without"
        )
    moved_ms = max(abs(head.clock_moved_ns) for head in heads) / 1e6
    if moved_ms > 1 and len(boots) > 1:
        yield f"a wall clock was set by {moved_ms:.0f} ms during the profile"
    dropped = sum(head.num_dropped for head in heads)
    if dropped:
        yield f"{dropped} spans beyond the bound of a process were not recorded"
