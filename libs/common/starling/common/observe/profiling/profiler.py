"""The profiles of one process: armed by the controller for an operator, one at a time, and ended by themselves.

A process that is not profiled looks at one attribute, `Profiler.active`, where it would record something. All methods
belong to the working thread, the one that torch's profiler records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from starling.common.counts import counted
from starling.common.observe.profiling.limits import FOLDER, MAX_PROFILES, order_problem
from starling.common.observe.terminal import one_line
from starling.common.wire.messages import Profile, ProfileReport

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from starling.common.observe.profiling.flames import FlameGraph
    from starling.common.observe.profiling.spans import SpanRecorder
    from starling.common.observe.profiling.torch_profile import TorchProfile

log = structlog.get_logger(__name__)


class ActiveProfile:
    """A profile that is being recorded.

    Args:
        order: what to record, and for how long.
        folder: where its files go.
        name: of the process, with its rank if that is not the first.
        num: steps or groups after which it ends; 0 for no such end.
        limit_s: seconds after which it ends.
        rank: of this process; torch records on the ranks of the order only.
        has_tensors: its work is torch's; otherwise torch is not asked, whose first profile takes a second to start.
    """

    def __init__(
        self,
        order: Profile,
        folder: Path,
        name: str,
        num: int,
        limit_s: float,
        *,
        rank: int = 0,
        has_tensors: bool = True,
    ) -> None:
        """Start to record. Raises OSError if the folder cannot be made, RuntimeError if torch cannot record."""
        # Imported here: a process that is never profiled does not need them.
        from starling.common.observe.profiling.spans import SpanRecorder
        from starling.common.observe.profiling.torch_profile import TorchProfile, torch_here

        folder.mkdir(parents=True, exist_ok=True)
        self.order, self._folder, self._name = order, folder, name
        self._num, self.num_ended, self._limit_s = num, 0, limit_s
        self.spans: SpanRecorder = SpanRecorder()
        self.files: list[str] = []
        self._notes: list[str] = []
        self._flames = self._start_flames() if order.flames else None
        torch = torch_here() if has_tensors and (rank in order.ranks or not order.ranks) else None
        self._torch: TorchProfile | None = TorchProfile(torch, memory=order.memory) if torch is not None else None
        self._begun_ns, self._begun = time.perf_counter_ns(), time.monotonic()
        self._phase = ("", self._begun_ns)

    def _start_flames(self) -> FlameGraph | None:
        from starling.common.observe.profiling.flames import FlameGraph

        try:
            return FlameGraph(self._folder / f"{self._name}.flames.svg", self._limit_s)
        except OSError as error:
            self._notes.append(one_line(str(error)))
            return None

    def count(self) -> None:
        """Note that a step has ended, or a group was answered."""
        self.num_ended += 1

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[None]:
        """Record the block as a span."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.spans.add(name, begin_ns, time.perf_counter_ns(), **fields)

    def enter(self, phase: str) -> None:
        """Begin a phase of the work, and end the one before; empty for none. Phases have a track of their own."""
        now_ns = time.perf_counter_ns()
        name, begun_ns = self._phase
        if name:
            self.spans.add(name, begun_ns, now_ns, track="phases")
        self._phase = (phase, now_ns)

    def is_over(self, now: float) -> bool:
        """Say whether the profile has what was asked for, or its time is over."""
        return now - self._begun >= self._limit_s or 0 < self._num <= self.num_ended

    def end(self) -> str:
        """Stop recording and write the files, whose names `files` has then. Returns in words what was recorded.

        Raises OSError, or RuntimeError of torch.
        """
        if self._torch is not None:
            self._torch.end()
        self.enter("")
        self.spans.add("profile", self._begun_ns, time.perf_counter_ns(), track="profile")
        if self._flames is not None:
            problem = self._flames.end()
            self._notes += [problem] if problem else []
            self.files += [] if problem else [f"{self._name}.flames.svg"]
        path = self._folder / f"{self._name}.spans.json"
        self.spans.write(path, self._name)
        self.files.append(path.name)
        if self._torch is not None:
            self._write_torch(self._torch)
        seconds = time.monotonic() - self._begun
        words = [f"{seconds:.1f} s", counted(len(self.spans), "span")]
        words += [f"{self.num_ended} done of {self._num} asked for"] if self._num else []
        words += [f"{self.spans.num_dropped} more left out"] if self.spans.num_dropped else []
        return "; ".join([", ".join(words), *self._notes])

    def _write_torch(self, recorded: TorchProfile) -> None:
        from starling.common.observe.profiling.spans import write_new
        from starling.common.observe.profiling.torch_profile import MAX_FILE_BYTES

        path = self._folder / f"{self._name}.torch.json"
        for name in recorded.write(path, self._folder / f"{self._name}.memory.pickle"):
            size_bytes = (self._folder / name).stat().st_size
            if size_bytes > MAX_FILE_BYTES:
                (self._folder / name).unlink()
                self._notes.append(
                    f"{name} of {size_bytes >> 20} MiB is over the limit of {MAX_FILE_BYTES >> 20} MiB and was "
                    "removed: profile fewer steps or seconds"
                )
            else:
                self.files.append(name)
        write_new(path.with_suffix(".clock"), str(recorded.mark_ns))


class Profiler:
    """The profiles of one process, and the report on the newest one.

    Args:
        name: of the replica, or ``controller``.
        folder: of the run.
        report: takes each report.
        has_tensors: see `ActiveProfile`.
        counts: what ends a profile besides its time limit; empty for `seconds` alone.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        report: Callable[[ProfileReport], None],
        *,
        has_tensors: bool = True,
        counts: Literal["steps", "groups", ""] = "groups",
    ) -> None:
        self.active: ActiveProfile | None = None
        """Set while the process is profiled."""
        self._name, self._folder, self._report, self._counts = name, folder / FOLDER, report, counts
        self._has_tensors = has_tensors
        self._newest: str | None = None

    @property
    def spans(self) -> SpanRecorder | None:
        """Where to record spans; None while the process is not profiled."""
        return self.active.spans if self.active is not None else None

    def arm(self, order: Profile) -> bool:
        """Start a profile, unless it is the newest one, which is reported already. Returns whether it was started."""
        if order.profile == self._newest:
            return False
        problem = self._problem(order)
        if problem:
            if self.active is None:  # else the report on that one stays
                self._newest = order.profile
            self._send(order.profile, "failed", problem)
            return False
        self._newest = order.profile
        folder = self._folder / order.profile
        num = {"steps": order.num_steps, "groups": order.num_groups}.get(self._counts, 0)
        limit_s = order.limit_s if num else min(order.limit_s, order.seconds)
        try:
            self.active = ActiveProfile(order, folder, self._name, num, limit_s, has_tensors=self._has_tensors)
        except (OSError, RuntimeError) as error:
            self._fail(order, error)
            return False
        log.info("profiling", profile=order.profile, limit_s=limit_s, num=num)
        self._send(order.profile, "active", "it records")
        return True

    def _problem(self, order: Profile) -> str:
        if self.active is not None:
            return f"profile {self.active.order.profile} is being recorded; try again when it has ended"
        if problem := order_problem(order):
            return problem
        try:
            num = sum(1 for _ in self._folder.iterdir())
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self._folder} cannot be read: {error.strerror}"
        if num >= MAX_PROFILES and not (self._folder / order.profile).is_dir():
            return f"{self._folder} holds {num} profiles: remove some of its folders"
        return ""

    def count(self) -> None:
        """Note that a step has ended, or a group was answered."""
        if self.active is not None:
            self.active.count()

    def check(self) -> None:
        """End a profile that has what was asked for, or whose time is over."""
        if self.active is not None and self.active.is_over(time.monotonic()):
            self.end()

    def end(self, further: Callable[[], tuple[str, list[str]]] = lambda: ("", [])) -> None:
        """End the profile, if there is one, and report it. `further`: ends those of other ranks, see `RankProfiles`."""
        active, self.active = self.active, None
        if active is None:
            return
        try:
            text = active.end()
        except (OSError, RuntimeError, ValueError) as error:
            self._fail(active.order, error)
            return
        others, files = further()
        folder = str(self._folder / active.order.profile)
        log.info("profiled", profile=active.order.profile, folder=folder, text=text)
        text = "; ".join(filter(None, (text, others)))
        self._send(active.order.profile, "ended", text, folder, (*active.files, *files))

    def span(self, name: str, **fields: Any) -> AbstractContextManager[None]:
        """Record the block as a span, while the process is profiled."""
        return nullcontext() if self.active is None else self.active.span(name, **fields)

    def _fail(self, order: Profile, error: Exception) -> None:
        reason = one_line(str(error)) or type(error).__name__
        log.warning("not_profiled", profile=order.profile, reason=reason)
        self._send(order.profile, "failed", reason)

    def _send(
        self,
        profile: str,
        state: Literal["active", "ended", "failed"],
        text: str,
        folder: str = "",
        files: tuple[str, ...] = (),
    ) -> None:
        report = ProfileReport(profile=profile, state=state, text=text, folder=folder, files=files)
        self._report(report)
