"""Watch of one run, in a thread of its own: it follows the run's files and its telemetry, and answers the page.

The run may be there already, start later, be resumed, or be over; what cannot be read is one sentence, and is tried
again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from starling.cli.dashboard.files.follow import Follower
from starling.cli.dashboard.files.notices import NoticeLog, volume_problem
from starling.cli.dashboard.files.record import RunRecord
from starling.cli.dashboard.files.samples import SampleIndex
from starling.cli.run.attempt import Attempt, attempts_in
from starling.cli.runs.feed import ControllerFeed
from starling.cli.runs.files.lines import decode
from starling.cli.runs.files.state import state_of
from starling.common.errors import StarlingError
from starling.common.wire.telemetry import RunSnapshot

PERIOD_S: Final = 0.5
SEARCH_S: Final = 2.0
"""Between two looks for a newer attempt, the controller's address and the state."""
FRESH_S: Final = 5.0
"""A snapshot older than this is said to be old."""
BLOCK_BYTES: Final = 4 << 20
"""Bytes of each file that are read before the telemetry is looked at again."""
MAX_STEP_FIELDS: Final = 200


@dataclass
class Sources:
    """Files of one attempt, and what was read of them."""

    attempt: Attempt
    metrics: Follower
    samples: SampleIndex
    record: RunRecord = field(default_factory=RunRecord)
    num_begun: int = 0
    """Of the follower, when the record was begun."""

    @classmethod
    def of(cls, attempt: Attempt) -> Sources:
        """Open the files of an attempt."""
        return cls(attempt, Follower(attempt.metrics), SampleIndex(attempt.folder))

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        self.samples.close()


class RunWatch:
    """One run, under `lock` where its record is read."""

    def __init__(self, number: int, folder: Path, name: str) -> None:
        self.number, self.folder, self.name = number, folder, name
        self.lock = threading.Lock()
        self.sources: Sources | None = None
        self._feed = ControllerFeed()
        self.notices = NoticeLog()
        self._state, self._reason = "unknown", ""
        self._search_problem = self._read_problem = self._volume_problem = ""
        self._searched_at = self._found_at = float("-inf")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, within about a second."""
        self._stopping.set()
        self._thread.join(5.0)

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that is watched, None before there is one."""
        sources = self.sources
        return None if sources is None else sources.attempt

    def view(self) -> dict[str, Any]:
        """Return the present state of the run, as the page shows it live."""
        with self.lock:
            sources, heard = self.sources, self._feed.heard
            record = sources.record if sources is not None else RunRecord()
            is_fresh = self._is_fresh()
            shown: dict[str, Any] = {
                "id": self.number,
                "name": self.name,
                "folder": str(self.folder),
                "attempt": sources.attempt.folder.name if sources is not None else "",
                "state": "running" if is_fresh else self._state,
                "reason": "" if is_fresh else self._reason,
                "problem": next(iter(self._problems()), ""),
                "live": is_fresh,
                "read_share": round(sources.metrics.share, 3) if sources is not None else 0.0,
                "begun": record.begun,
                "newest": record.newest_time,
                "first_step": max(0, record.first_step),
                "newest_step": record.newest_step,
                "revision": {
                    "curves": record.num_steps + record.num_evaluations,
                    "events": record.num_events + self.notices.num,
                    "weights": record.num_lines_changed,
                    "samples": sources.samples.num_read if sources is not None else 0,
                },
                "figures": _figures(record),
                "snapshot": None,
            }
            if heard is not None and (is_fresh or self._state == "running"):
                shown["snapshot"] = _shown_snapshot(heard.snapshot)
                shown["snapshot_age_s"] = round(time.monotonic() - heard.at, 1)
        return shown

    def _is_fresh(self) -> bool:
        heard = self._feed.heard
        return heard is not None and time.monotonic() - heard.at < FRESH_S

    def _problems(self) -> list[str]:
        """Return what is wrong with following the run, in sentences."""
        found = (self._search_problem, self._read_problem, self._feed.problem, self._volume_problem)
        return [one for one in found if one]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - the edge of a thread: the files may be anyone's
                    self._read_problem = f"the run cannot be followed: {error!r:.300}"
                    self._stopping.wait(SEARCH_S)
        finally:
            self._feed.close()
            if self.sources is not None:
                self.sources.close()

    def _turn(self) -> None:
        began, is_behind = time.monotonic(), False
        if began >= self._searched_at + SEARCH_S:
            self._searched_at = began
            try:
                self._search()
                self._search_problem = ""
            except (StarlingError, OSError) as error:
                self._search_problem = _sentence(error)
        try:
            is_behind = self._read()
            self._read_problem = ""
        except (StarlingError, OSError) as error:
            self._read_problem = _sentence(error)
        self._feed.follow(self.attempt)
        self._feed.receive(0.01 if is_behind else PERIOD_S)
        self._note_faults()
        if not is_behind:
            self._stopping.wait(max(0.0, began + PERIOD_S - time.monotonic()))

    def _note_faults(self) -> None:
        """Keep what the controller and this process know of faults as events."""
        heard = self._feed.heard
        told = heard.snapshot.notices if heard is not None and self._is_fresh() else ()
        with self.lock:
            self.notices.update("notice", told)
            self.notices.update("problem", self._problems() if self.attempt is not None else ())

    def _search(self) -> None:
        """Look for the newest attempt, its controller and its state."""
        attempt = Attempt.find(self.folder)
        if self.sources is None or self.sources.attempt.folder != attempt.folder:
            with self.lock:
                if self.sources is not None:
                    self.sources.close()
                self.sources, self.notices = Sources.of(attempt), NoticeLog()
                self._found_at = time.monotonic()
                self._feed.forget()
        if not self._is_fresh():
            state = state_of(attempt)
            with self.lock:
                self._state, self._reason = state.name, state.reason
        else:
            with self.lock:
                self._state, self._reason = "running", ""
        # A controller that can be heard says by itself what it cannot write.
        is_silent = not self._is_fresh() and time.monotonic() > self._found_at + FRESH_S
        may_write = is_silent and self._state in ("running", "crashed")
        self._volume_problem = volume_problem(attempt.folder) if may_write else ""

    def _read(self) -> bool:
        """Read on in the files. Returns whether there is more."""
        sources = self.sources
        if sources is None:
            return False
        for _, text in sources.metrics.lines(BLOCK_BYTES):
            line = decode(text)
            if line is None:
                continue
            with self.lock:
                if sources.num_begun != sources.metrics.num_begun:
                    sources.record, sources.num_begun = RunRecord(), sources.metrics.num_begun
                sources.record.add(line)
        with self.lock:
            sources.samples.read(BLOCK_BYTES)
        return sources.metrics.share < 1.0 and sources.metrics.position < sources.metrics.size


def watch_names(folders: list[Path]) -> list[str]:
    """Return a name for each run: its own, with the attempt where that was given; its folder if that is not unique."""
    names = []
    for folder in folders:
        path = folder.absolute()
        is_attempt = path.name.startswith("attempt-") and not attempts_in(path)
        names.append(f"{path.parent.name}/{path.name}" if is_attempt else path.name)
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file of the run'} cannot be read: {error.strerror}"
    return str(error)


def _figures(record: RunRecord) -> dict[str, float | None]:
    """Return the figures of the run that do not need its controller."""
    found: dict[str, float | None] = {}
    for name, title, num in (("reward", "reward", 5), ("throughput", "tokens/s", 5), ("step_time", "step time", 5)):
        series = record.series.get(title)
        found[name] = series.last(num) if series is not None else None
    series = record.evaluations.get("evaluation reward")
    found["evaluation"] = series.newest if series is not None else None
    found["staleness"] = record.series["staleness, mean"].newest if "staleness, mean" in record.series else None
    return found


def _shown_snapshot(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return a snapshot as JSON values, without what the page reads from the files."""
    shown: dict[str, Any] = msgspec.to_builtins(snapshot)
    for name in ("curve", "rewards", "evaluations"):
        del shown[name]
    shown["step"] = dict(list(shown["step"].items())[:MAX_STEP_FIELDS])
    return shown
