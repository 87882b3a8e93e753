"""The teacher process: scores given tokens under a teacher model, whose weights never change."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import STOP_S, StopSignal, end_process, end_within
from starling.common.observe.profiling.profiler import Profiler
from starling.common.observe.tracing.traces import open_traces
from starling.common.service import (
    ServiceArguments,
    check_model_folder,
    host_name,
    link_settings,
    serve,
)
from starling.common.wire import messages as wire
from starling.rollout.settings import TeacherProcess

if TYPE_CHECKING:
    from starling.common.observe.metrics import Family, Samples
    from starling.rollout.engine.teacher import TokenLogprobs
    from starling.rollout.shell.metrics import TeacherMetrics

log = structlog.get_logger(__name__)

IDLE_S = 0.5
REPORT_INTERVAL_S = 0.5


class Shell:
    """One teacher replica, on one device."""

    def __init__(self, settings: TeacherProcess, arguments: ServiceArguments) -> None:
        """Load the model. Raises ConfigError when that is impossible, or its vocabulary is not the policy's."""
        teacher = settings.teacher
        path = check_model_folder(teacher.path, weights=True, key="teacher.path")
        student = check_model_folder(settings.model.path, weights=False, runs_code=settings.model.trust_remote_code)
        link = link_settings(arguments, settings)
        # Imported here: torch and transformers take seconds, which a wrong setting must not cost.
        from starling.rollout.engine.embedded.model import build_model
        from starling.rollout.engine.teacher import TokenScorer, num_shared_token_ids

        num_ids = num_shared_token_ids(path, student, trust_remote_code=settings.model.trust_remote_code)
        model: Any = build_model(path, dtype=teacher.dtype, device=teacher.device, weights=True)
        self._scorer = TokenScorer(
            model, tokens_per_forward=teacher.tokens_per_forward, top_k=teacher.top_k, num_ids=num_ids
        )
        hello = wire.Hello(role="teacher", host=host_name(), pid=os.getpid(), num_slots=teacher.num_slots)
        self._link = ControllerLink(link, hello)
        self._profiler = Profiler(arguments.name, arguments.folder, self._link.report_profile)
        self._name = arguments.name
        self._traces = open_traces(settings.observe.traces, settings.run.id, "teacher", arguments.name)
        self._connect_s = settings.network.connect_s
        self._queue: dict[str, ReceivedCommand] = {}
        """Groups that wait to be scored, by lease, in order of arrival."""
        self._num_tokens, self._reported_at = 0, time.monotonic()
        self._metrics: TeacherMetrics | None = None
        """Of the HTTP endpoint; None without one."""
        log.info("ready", model=str(path), top_k=teacher.top_k)

    def run(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Serve until the controller ends the run, or `stop` is requested."""
        self._notify = notify
        if notify.page is not None:
            from starling.rollout.shell.metrics import TeacherMetrics

            self._metrics = TeacherMetrics()
        notify.starting("joins the run", self._connect_s)
        stop.install(self._link.wake)
        self._link.start()
        reason = "its service failed"
        try:
            ended = self._serve(stop)
            reason = f"stopped by {stop.name}" if ended is None else ended.reason
        finally:
            notify.stopping(reason, STOP_S)
            end_within(STOP_S)
            self._profiler.end()
            self._link.close(reason)
            if self._traces is not None:
                self._traces.close()
        if ended is not None and ended.error is not None:
            raise ended.error

    def _serve(self, stop: StopSignal) -> LinkClosed | None:
        """Handle messages and score one group, in a loop. Returns how the link closed, or None after `stop`."""
        while not stop:
            inbound = self._link.receive(0.0 if self._queue else IDLE_S)
            while inbound is not None:
                match inbound:
                    case ReceivedCommand(message=wire.ScoreTokens() as message):
                        self._queue[message.lease] = inbound
                        if self._traces is not None:
                            self._traces.begin(message.lease, message.prompt_id)
                    case CancelledLeases(leases=leases):
                        for lease in leases:
                            self._queue.pop(lease, None)
                    case wire.Profile():
                        self._profiler.arm(inbound)
                    case LinkClosed():
                        return inbound
                    case _:
                        raise AssertionError(f"a teacher is not sent {inbound!r}")
                inbound = self._link.receive(0.0)
            if self._queue:
                command = self._queue.pop(next(iter(self._queue)))
                with self._profiler.span("score", lease=command.message.lease):
                    self._score(command)
                self._profiler.count()
                if self._traces is not None:
                    lease = command.message.lease
                    self._traces.end(lease, "score tokens", replica=self._name, lease=lease)
            self._profiler.check()
            self._report()
            self._notify.turn(self._link.describe, serves=self._link.joined, samples=self._samples)
        return None

    def _samples(self) -> Samples:
        """Return the metrics of the HTTP endpoint."""
        assert self._metrics is not None, "asked for by the page of an endpoint"
        return self._metrics.samples(len(self._queue))

    def _score(self, command: ReceivedCommand) -> None:
        from starling.rollout.engine.teacher import TeacherRequestError

        message = command.message
        assert isinstance(message, wire.ScoreTokens)
        if not self._link.work(message.lease):
            return
        prompt_ids, token_ids = (np.frombuffer(buffer, np.int32) for buffer in command.buffers)
        try:
            scores = self._scorer.score(prompt_ids, token_ids, message.lengths, message.temperature)
        except TeacherRequestError as error:
            # The tokens are invalid for every teacher.
            reason = f"prompt {message.prompt_id}: {error}"
            log.warning("failed", lease=message.lease, reason=reason)
            failed = wire.LeaseFailed(lease=message.lease, status=wire.Status.INFRA_LOST, reason=reason, fatal=True)
            self._link.answer(message.lease, failed)
            if self._metrics is not None:
                self._metrics.note_group(0, ok=False)
            return
        self._num_tokens += len(token_ids)
        if self._metrics is not None:
            self._metrics.note_group(len(token_ids), ok=True)
        self._link.answer(message.lease, *scored_message(message.lease, scores))

    def _report(self) -> None:
        elapsed = time.monotonic() - self._reported_at
        if elapsed >= REPORT_INTERVAL_S:
            self._link.report(gauges={"tokens_per_s": self._num_tokens / elapsed, "queue_depth": len(self._queue)})
            self._num_tokens, self._reported_at = 0, time.monotonic()


def scored_message(lease: str, scores: TokenLogprobs) -> tuple[wire.TokensScored, tuple[bytes, ...]]:
    """Return the message for `scores`, and its buffers; without the most likely tokens where there are none."""
    arrays: dict[str, Any] = {"teacher_logprobs": scores.logprobs}
    if scores.top_ids.shape[1]:
        arrays |= {"teacher_top_ids": scores.top_ids, "teacher_top_logprobs": scores.top_logprobs}
    tensors = tuple(
        wire.TensorMeta(dtype=array.dtype.name, shape=array.shape, nbytes=array.nbytes, name=name)
        for name, array in arrays.items()
    )
    return wire.TokensScored(lease=lease, tensors=tensors), tuple(array.tobytes() for array in arrays.values())


def _families() -> Sequence[Family]:
    """Return the metrics of the HTTP endpoint."""
    from starling.rollout.shell.metrics import TEACHER_FAMILIES

    return TEACHER_FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a teacher."""
    return serve("teacher", TeacherProcess, Shell, argv, families=_families)


if __name__ == "__main__":
    end_process(main())
