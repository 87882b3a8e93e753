"""Loggers that hang, raise or are slow: the run continues, losses are counted, every committed step is logged."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from starling.controller.settings import LoggingSettings
from starling.controller.shell.loggers.fanout import MARKS, LoggerFanout, PastSteps
from starling.controller.shell.loggers.logger_thread import MAX_FAILURES, LogEntry, LoggerThread

LONG_S = 30.0


class Recording:
    """Logger that keeps its entries, waits at `gate` before each, and raises at the steps `fails_at`."""

    def __init__(self, *, fails_at: frozenset[int] = frozenset()) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.first_step = -1
        self.is_closed = False
        self._fails_at = fails_at

    def make(self, first_step: int) -> Recording:
        """Return this logger, as its factory."""
        self.first_step = first_step
        return self

    def log(self, step: int, metrics: Any) -> None:
        """Record the step."""
        self.entered.set()
        assert self.gate.wait(LONG_S)
        if step in self._fails_at:
            raise ConnectionError(f"no luck with {step}\nmore of it")
        self.seen.append((step, metrics))

    def table(self, step: int, rows: Any) -> None:
        """Record the number of rows."""
        self.seen.append((step, len(rows)))

    def close(self) -> None:
        """Record the close."""
        self.is_closed = True

    def steps(self) -> list[int]:
        """Return the logged steps."""
        return [step for step, _ in self.seen]


@pytest.fixture
def recording() -> Iterator[Recording]:
    """Return a logger whose gate is opened at the end of the test."""
    made = Recording()
    yield made
    made.gate.set()


def outlet(path: Path, *, max_waiting: int = 100, deadline_s: float = LONG_S) -> LoggerThread:
    """Return a logger thread that is not started."""
    return LoggerThread("mine", path / "mark", max_waiting=max_waiting, deadline_s=deadline_s)


def close(one: LoggerThread) -> None:
    """Close the thread, and wait for its queued entries."""
    one.close(time.monotonic() + LONG_S)


def poll_until_given_up(one: LoggerThread) -> None:
    """Poll the thread like the controller, until it is given up."""
    deadline, never = time.monotonic() + LONG_S, threading.Event()
    while not one.is_given_up and time.monotonic() < deadline:
        one.check()
        never.wait(0.005)


def test_logger_thread_keeps_order(tmp_path: Path, recording: Recording) -> None:
    """The mark is the last step passed to the logger."""
    one = outlet(tmp_path)
    one.begin(recording.make)
    for step in range(1, 6):
        one.put(LogEntry(step, {"loss": float(step)}))
        one.put(LogEntry(step, rows=[{}], is_step=False))
    one.put(LogEntry(99, {"eval/x": 1.0}, is_step=False))
    close(one)
    assert recording.steps() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 99]
    assert recording.is_closed
    assert (recording.first_step, one.last_step, one.num_dropped) == (1, 5, 0)


def test_logger_thread_drops_entries_beyond_its_queue(tmp_path: Path, recording: Recording) -> None:
    """Adding an entry never blocks; the count of dropped entries is exact."""
    one = outlet(tmp_path, max_waiting=3)
    recording.gate.clear()
    one.begin(recording.make)
    one.put(LogEntry(1, {}))
    assert recording.entered.wait(LONG_S)
    for step in range(2, 12):
        one.put(LogEntry(step, {}))
    assert one.num_dropped == 7
    recording.gate.set()
    close(one)
    assert recording.steps() == [1, 2, 3, 4]
    assert not one.is_given_up
    assert one.problem == "3 entries wait already"


def test_logger_thread_gives_up_a_hanging_logger(tmp_path: Path, recording: Recording) -> None:
    """Its present and its queued entries are counted as dropped, and the end of the run does not wait for it."""
    one = outlet(tmp_path, deadline_s=0.01)
    recording.gate.clear()
    one.begin(recording.make)
    for step in range(1, 5):
        one.put(LogEntry(step, {}))
    assert recording.entered.wait(LONG_S)
    poll_until_given_up(one)
    assert one.is_given_up
    assert one.num_dropped == 4
    one.put(LogEntry(5, {}))
    assert one.num_dropped == 5
    one.close(time.monotonic() + LONG_S)
    assert one.problem == "it hangs: it took more than 0.01 s"
    assert not recording.is_closed


def test_logger_thread_gives_up_a_logger_that_hangs_at_start(tmp_path: Path) -> None:
    """For example a logger that waits for the network."""
    gate = threading.Event()

    def make(first_step: int) -> Recording:
        assert gate.wait(LONG_S)
        return Recording()

    one = outlet(tmp_path, deadline_s=0.01)
    one.begin(make, [LogEntry(1, {})])
    poll_until_given_up(one)
    assert (one.is_given_up, one.num_dropped) == (True, 0), "the next incarnation passes it again"
    gate.set()


def test_logger_thread_close_is_bounded(tmp_path: Path, recording: Recording) -> None:
    """A logger that is busy at the deadline is abandoned, and its queued entries are reported."""
    one = outlet(tmp_path)
    recording.gate.clear()
    one.begin(recording.make)
    one.put(LogEntry(1, {}))
    assert recording.entered.wait(LONG_S)
    one.put(LogEntry(2, {}))
    one.close(time.monotonic() + 0.01)
    assert (one.is_given_up, one.num_dropped) == (True, 2)
    assert one.problem == "it had not finished when the run ended"


def test_logger_thread_counts_exceptions(tmp_path: Path) -> None:
    """Later steps are still passed; the mark does not go back."""
    recording = Recording(fails_at=frozenset({2, 4}))
    one = outlet(tmp_path)
    one.begin(recording.make)
    for step in range(1, 6):
        one.put(LogEntry(step, {}))
    close(one)
    assert recording.steps() == [1, 3, 5]
    assert (one.num_dropped, one.last_step) == (2, 5)
    assert re.fullmatch(rf"ConnectionError: no luck with 4 more of it \({__file__}:\d+\)", one.problem)


def test_logger_thread_gives_up_after_repeated_exceptions(tmp_path: Path) -> None:
    """It is not called again."""
    num = MAX_FAILURES + 5
    recording = Recording(fails_at=frozenset(range(1, num + 1)))
    one = outlet(tmp_path)
    one.begin(recording.make, [LogEntry(step, {}) for step in range(1, num + 1)])
    close(one)
    assert (one.is_given_up, one.num_dropped, recording.seen) == (True, MAX_FAILURES, [])
    assert one.problem.startswith(f"it failed {MAX_FAILURES} times in a row, the last time with ConnectionError")


def test_logger_thread_reports_a_failed_start(tmp_path: Path) -> None:
    """The report has the message of the exception."""

    def make(first_step: int) -> Recording:
        raise PermissionError("log in first")

    one = outlet(tmp_path)
    one.begin(make, [LogEntry(1, {})])
    close(one)
    assert one.is_given_up
    assert re.fullmatch(rf"it cannot start: PermissionError: log in first \({__file__}:\d+\)", one.problem)


# --- all loggers of a run ------------------------------------------------------------------------------------------


def committed(folder: Path, *steps: int) -> PastSteps:
    """Write a metrics.jsonl with these steps, among other lines."""
    path = folder / "metrics.jsonl"
    lines = [{"time": 0.1, "kind": "step", "step": step, "phase": "rl", "loss": float(step)} for step in steps]
    others = [{"time": 0.2, "kind": "trained", "step": step, "prompts": ['"kind": "step"']} for step in steps]
    path.write_text("".join(json.dumps(line) + "\n" for both in zip(lines, others, strict=True) for line in both))
    return PastSteps(path, path.stat().st_size, newest=max(steps))


def test_past_steps_begin_where_their_version_is_summed_up(tmp_path: Path) -> None:
    whole = committed(tmp_path, 1, 2, 3)
    two = len("".join(whole.path.read_text().splitlines(keepends=True)[:4]))
    past = PastSteps(whole.path, whole.size_bytes, newest=3, summed_up=two, version=2)
    whole.path.write_text("{nonsense}\n" + whole.path.read_text()[11:])
    assert [entry.step for entry in past.after(2)] == [3], "what is summed up is not read"
    assert [entry.step for entry in past.after(1)] == [2, 3]
    with whole.path.open("a") as file:
        file.write('{"time": 1, "kind": "step", "step": 4}\n')
    assert [entry.step for entry in past.after(2)] == [3], "lines of this incarnation reach the logger as they come"


def test_logger_fanout_passes_missed_steps_after_a_restart(tmp_path: Path) -> None:
    """The logger got 2 of 4 steps before the crash; a logger that is new in the recipe gets all of them."""
    first, second, new = Recording(), Recording(), Recording()
    fanout = LoggerFanout({"mine.py:log": first.make}, LoggingSettings(), tmp_path)
    for step in (1, 2):
        fanout.note("step", {"step": step, "phase": "rl", "loss": float(step)})
    assert fanout.close() == []
    past = committed(tmp_path, 1, 2, 3, 4)
    again = LoggerFanout({"mine.py:log": second.make, "new": new.make}, LoggingSettings(), tmp_path, past)
    again.note("step", {"step": 5, "loss": 5.0})
    assert again.close() == []
    assert first.seen == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert (second.first_step, second.steps()) == (3, [3, 4, 5])
    assert (new.first_step, new.steps()) == (1, [1, 2, 3, 4, 5])


def test_logger_fanout_passes_all_steps_without_a_readable_mark(tmp_path: Path) -> None:
    """The guarantee is at-least-once."""
    (tmp_path / MARKS).mkdir()
    (tmp_path / MARKS / "mine").write_text("nonsense")
    recording = Recording()
    assert LoggerFanout({"mine": recording.make}, LoggingSettings(), tmp_path, committed(tmp_path, 1, 2)).close() == []
    assert recording.steps() == [1, 2]


def test_logger_fanout_passes_steps_samples_and_evaluations(tmp_path: Path) -> None:
    """Steps have their numbers and alarms, evaluations their version, and samples are unchanged."""
    recording = Recording()
    fanout = LoggerFanout({"mine": recording.make}, LoggingSettings(), tmp_path)
    fanout.note("step", {"step": 3, "phase": "rl", "loss": 0.5, "num": 2, "alarms": [{"name": "clip", "value": 0.7}]})
    fanout.note("evaluation", {"version": 2, "reward_mean": 0.25, "cause": "step", "score/x": None, "tasks": {}})
    fanout.note("samples", {"step": 3, "rows": [{}, {}]})
    fanout.note("published", {"version": 3, "publish_s": 0.1})
    fanout.close()
    assert recording.seen == [
        (3, {"loss": 0.5, "num": 2.0, "alarm/clip": 1.0}),
        (2, {"eval/reward_mean": 0.25}),
        (3, 2),
    ]


def test_logger_fanout_isolates_loggers(tmp_path: Path, recording: Recording) -> None:
    """The good logger gets everything, and only the bad one is reported."""
    good = Recording()
    recording.gate.clear()
    settings = LoggingSettings(close_s=1.0)
    fanout = LoggerFanout({"bad": recording.make, "good": good.make}, settings, tmp_path)
    for step in range(1, 4):
        fanout.note("step", {"step": step, "loss": 1.0})
    assert recording.entered.wait(LONG_S)
    deadline, never = time.monotonic() + LONG_S, threading.Event()
    while good.steps() != [1, 2, 3] and time.monotonic() < deadline:
        never.wait(0.005)  # all loggers share one deadline, which the bad one uses up
    [lost] = fanout.close()
    assert (lost["logger"], lost["dropped"]) == ("bad", 3)
    assert good.steps() == [1, 2, 3]
