"""Controller front end: the groups that a run's controller assigns to this replica, over ZeroMQ."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starling.common.counts import counted
from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.net.settings import LinkSettings
from starling.common.observe.profiling.profiler import ActiveProfile, Profiler
from starling.common.observe.tracing.traces import GroupTraces
from starling.common.service import host_name
from starling.common.wire import messages as wire
from starling.reward.core import groups as core
from starling.reward.core.latents import LatentsError, latents_form
from starling.reward.core.media import MediaForm, MediaTensor
from starling.reward.core.samples import Score
from starling.reward.core.waiting import WaitingGroup, WaitingGroups
from starling.reward.score.decode.geometry import decoded_bytes, read_geometries
from starling.reward.score.decode.start import AnyPool
from starling.reward.score.workers.shared import MediaMemory, TooManyBuffersError
from starling.reward.settings import RewardSettings

if TYPE_CHECKING:
    from starling.common.observe.metrics import Samples
    from starling.reward.score.metrics import Latencies

MEMORY_WAIT_S: Final = 600.0
"""How long a group with latents waits for memory, in seconds: as long as a request of the HTTP front end may take by
default, and less than `controller.deadlines.score_s`, so that the controller gets the reason."""


class ControllerFrontEnd:
    """The groups of one replica of a run.

    Where memory for media is full, a group waits: its latents are in this process already, so that a refusal, which the
    HTTP front end gives its clients for them to come again, would free nothing, and the controller would generate the
    group anew. One for which the memory would never suffice fails at once, as a request of a client.

    Args:
        settings: of the service.
        link: to the controller.
        folder: of the run.
        media: memory for media.
        traces: None where they are off.
    """

    def __init__(
        self,
        settings: RewardSettings,
        link: LinkSettings,
        folder: Path,
        media: MediaMemory,
        traces: GroupTraces | None = None,
    ) -> None:
        self._scorers = settings.weighted_scorers()
        self._groups = core.GroupScores(self._scorers, settings.num_slots, settings.bounds)
        self._waiting = WaitingGroups(MEMORY_WAIT_S)
        self._media, self._max_bytes = media, settings.max_media_mb << 20
        self._geometries = read_geometries(settings.decoder.folders)
        hello = wire.Hello(role="reward", host=host_name(), pid=os.getpid(), num_slots=settings.num_slots)
        self._link = ControllerLink(link, hello)
        self._name, self._traces = link.name, traces
        self._profiler = Profiler(link.name, folder, self._link.report_profile, has_tensors=False)
        self._ended: LinkClosed | None = None
        self._latencies: Latencies | None = None
        """Of groups, where they are measured."""

    def measure(self) -> None:
        """Measure the latencies of groups from now on."""
        # Imported here: a service whose metrics nobody can read does not load it.
        from starling.reward.score.metrics import Latencies

        self._latencies = Latencies("controller")

    def samples(self) -> Samples:
        """Return the measured metrics; none before `measure`."""
        return {} if self._latencies is None else self._latencies.samples()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when `receive` may have something to do."""
        return tuple(self._link.descriptors)

    @property
    def serves(self) -> bool:
        """Whether it has joined the run."""
        return self._link.joined

    def describe(self) -> str:
        """Return the state in one line."""
        return self._link.describe()

    def wake(self) -> None:
        """Make `descriptors` readable; from any thread, and in a signal handler."""
        self._link.wake()

    def start(self) -> None:
        """Join the run."""
        self._link.start()

    def receive(self, pool: AnyPool) -> bool:
        """Carry out all commands that have arrived. Returns False when the controller has ended the run."""
        while (inbound := self._link.receive(0.0)) is not None:
            match inbound:
                case ReceivedCommand(message=wire.ScoreGroup() as message, buffers=buffers):
                    if self._latencies is not None:
                        self._latencies.begin(message.lease, time.monotonic())
                    if self._traces is not None:
                        self._traces.begin(message.lease, message.prompt.id)
                    self._add(pool, message, buffers)
                case CancelledLeases(leases=leases):
                    if self._latencies is not None:
                        self._latencies.forget(*leases)
                    self._waiting.cancel(leases)
                    self._carry_out(pool, self._groups.cancel(leases))
                case wire.Profile():
                    self._profiler.arm(inbound)
                case LinkClosed():
                    self._ended = inbound
                    return False
                case _:
                    raise AssertionError(f"a reward service is not sent {inbound!r}")
        self._admit(pool)
        return True

    def next_deadline(self) -> float | None:
        """When a group has waited too long for memory; the controller limits the time of the others."""
        return self._waiting.next_deadline()

    def record(self, pool: AnyPool, score: Score) -> None:
        """Record a score, unless it is of another front end."""
        self._carry_out(pool, self._groups.record(score))

    def report(self, pool: AnyPool) -> None:
        """Update what the heartbeats say."""
        self._profiler.check()
        self._link.report(gauges=pool.gauges(), waits=pool.waits() + self._waits())

    def close(self, reason: str) -> None:
        """Leave the run. Raises what ended the connection, if that was a failure."""
        self._profiler.end()
        self._link.close(reason)
        if self._traces is not None:
            self._traces.close()
        if self._ended is not None and self._ended.error is not None:
            raise self._ended.error

    def _add(self, pool: AnyPool, message: wire.ScoreGroup, buffers: tuple[bytes, ...]) -> None:
        """Begin to score a group, or let it wait for memory; one that cannot be scored is answered."""
        try:
            form = latents_form(message, buffers)
        except LatentsError as error:
            self._carry_out(pool, self._groups.fail(message, wire.Status.REWARD_ERROR, str(error)))
            return
        if form is None:
            self._carry_out(pool, self._groups.add(message))
            return
        pixel_bytes = self._pixel_bytes(pool, message, form)
        group = WaitingGroup(message, form, buffers[0], pixel_bytes, time.monotonic())
        if group.needed_bytes <= self._max_bytes:
            self._waiting.add(group)
            return
        problem = (
            f"The latents of the group, with the pixels that they decode to, take {group.needed_bytes >> 20} MiB, and "
            f"reward.max_media_mb is {self._max_bytes >> 20}; raise it, or make groups or samples smaller."
        )
        self._carry_out(pool, self._groups.fail(message, wire.Status.REWARD_ERROR, problem))

    def _pixel_bytes(self, pool: AnyPool, message: wire.ScoreGroup, form: MediaForm) -> int:
        """Return what the pixels of a group take, if a scorer reads some, or may do so as it is not loaded yet."""
        forms = [pool.form_of(scorer) for scorer in core.scored_by(message, self._scorers)]
        if not any(one is None or one.media == "pixels" for one in forms):
            return 0
        return decoded_bytes(form, len(message.completions), self._geometries)

    def _admit(self, pool: AnyPool) -> None:
        """Begin to score the groups that have waited for memory which is free now, and fail those whose time is up."""
        if not self._waiting:
            return
        while (group := self._waiting.first_of(self._max_bytes - self._media.size_bytes)) is not None:
            try:
                buffer = self._media.share((group.latents,))
            except TooManyBuffersError:
                break  # the next turn of the loop tries again
            self._waiting.take()
            buffer.reserve(group.pixel_bytes)
            latents = MediaTensor(group.form, len(group.message.completions), buffer)
            self._carry_out(pool, self._groups.add(group.message, latents))
        for group in self._waiting.expire(time.monotonic()):
            problem = (
                f"There was no memory for the latents of the group within {MEMORY_WAIT_S:g} s: others take "
                f"{self._media.size_bytes >> 20} MiB of reward.max_media_mb; raise it, or add a reward replica."
            )
            self._carry_out(pool, self._groups.fail(group.message, wire.Status.REWARD_TIMEOUT, problem))

    def _waits(self) -> tuple[wire.Wait, ...]:
        """Return what groups wait for, with the time after which the first of them fails."""
        deadline = self._waiting.next_deadline()
        if deadline is None:
            return ()
        left_s = min(MEMORY_WAIT_S, max(0.0, deadline - time.monotonic()))
        what = f"memory for the latents of {counted(len(self._waiting), 'group')}"
        return (wire.Wait(what=what, on="reward.max_media_mb", since_s=MEMORY_WAIT_S - left_s, seconds_left=left_s),)

    def _carry_out(self, pool: AnyPool, commands: list[core.Command]) -> None:
        if self._profiler.active is not None:
            self._record(self._profiler.active, commands)
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    self._link.work(task.id)
                    pool.submit(task)
                case core.CancelTask(lease=lease):
                    if self._traces is not None:
                        self._traces.forget(lease)
                    pool.cancel(lease)
                case core.SendScores(message=message):
                    if self._latencies is not None:
                        self._latencies.end(message.lease, time.monotonic())
                    if self._traces is not None:
                        self._traces.end(message.lease, "score", replica=self._name, lease=message.lease)
                    self._link.answer(message.lease, message)

    def _record(self, active: ActiveProfile, commands: list[core.Command]) -> None:
        """Record the begin and the end of groups."""
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    active.spans.begin(task.id, "score")
                case core.CancelTask(lease=lease):
                    active.spans.end(lease, cancelled=True)
                case core.SendScores(message=message):
                    if active.spans.end(message.lease):
                        active.count()
