"""The rollout process: one thread steps the engine, and handles messages and everything else between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from starling.common.errors import StarlingError
from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import STOP_S, ServiceStopped, StopSignal, end_process, end_within
from starling.common.observe.profiling.profiler import Profiler
from starling.common.observe.tracing.traces import open_traces
from starling.common.service import ServiceArguments, link_settings, serve
from starling.common.wire import messages as wire
from starling.rollout.api.start import start_api
from starling.rollout.core import machine as core
from starling.rollout.engine.base import EngineLostError
from starling.rollout.engine.preparation import PreparedPrompt
from starling.rollout.engine.queue import EngineQueue
from starling.rollout.env.episodes.trajectory import PlayedGroup
from starling.rollout.env.registry import make_environment
from starling.rollout.settings import RolloutProcess
from starling.rollout.shell.adoption import Adoptions, PullEnded
from starling.rollout.shell.engines import EngineFactory, ThroughputMeter, hello_of, make_spec
from starling.rollout.shell.groups import EngineGroups, EnvironmentGroups, HasLeases
from starling.rollout.shell.nodes import find_model, make_agent, setup_of
from starling.rollout.shell.prompts import decoder_of, make_encoder, make_preparation, read_language_model
from starling.rollout.shell.publisher import RolloutPublisher, serving_of

if TYPE_CHECKING:
    from pathlib import Path

    from starling.common.net.settings import LinkSettings
    from starling.common.nodes.agent import NodeAgent
    from starling.common.observe.metrics import Family, Samples
    from starling.rollout.api.server import ApiServer
    from starling.rollout.engine.base import Engine
    from starling.rollout.shell.metrics import RolloutMetrics

log = structlog.get_logger(__name__)

IDLE_S = 0.5
REPORT_INTERVAL_S = 0.1


class Shell:
    """One rollout replica."""

    def __init__(self, settings: RolloutProcess, arguments: ServiceArguments) -> None:
        """Create the engine. Its weights come from the policy, unless it is to load those in the model's folder.

        Raises:
            ConfigError: the settings do not allow it.
        """
        own = settings.rollout
        path = find_model(settings)
        self._nodes = setup_of(settings, arguments, path)
        link = link_settings(arguments, settings)  # first: a wrong key must not cost the start of an engine
        self._settings, self._arguments = settings, arguments
        self._environment = make_environment(own.environment)
        config, self._tokenizer = read_language_model(path, settings)
        self._wake: Callable[[], None] = lambda: None  # until the link exists
        self._serving = serving_of(settings)
        wake = lambda: self._wake()  # noqa: E731 - it is set later
        spec = make_spec(path, settings, arguments.name, config, self._tokenizer, wake, self._serving, self._nodes)
        self._engine_factory = EngineFactory(spec)
        self._engine: Engine = self._engine_factory.make()
        try:
            self._build_parts(path, config, link)
        except BaseException:  # no process of the engine may be left behind, whatever the exception
            self._engine.close()
            raise
        log.info("ready", engine=own.engine, version=self._engine.version, max_model_len=self._engine.max_model_len)

    def _build_parts(self, path: Path, config: Any, link: LinkSettings) -> None:
        """Create the parts around the engine; `config` belongs to the model in the folder `path`."""
        from starling.weightsync.plan.layout import encode

        settings, arguments, own = self._settings, self._arguments, self._settings.rollout
        self._engine_error: EngineLostError | None = None
        self._is_resumed = True
        """Whether the engine may step; False while it is paused."""
        self._core = core.RolloutMachine(
            version=self._engine.version,
            mode=own.adoption,
            in_place=not own.double_buffer,
            pull_timeout_s=own.pull_timeout_s,
            version_timeout_s=own.version_timeout_s,
            finish_timeout_s=own.finish_timeout_s,
        )
        layout = self._engine.layout()
        hello = hello_of(own, self._engine, self._engine_factory.checkpoint)
        self._link = ControllerLink(link, hello, (encode(layout),))
        self._wake = self._link.wake
        self._profiler = Profiler(arguments.name, arguments.folder, self._link.report_profile)
        self._traces = open_traces(settings.observe.traces, settings.run.id, "rollout", arguments.name)
        self._groups = EngineGroups(self._link.answer, decoder_of(self._tokenizer))
        self._adoptions = Adoptions(self._link, settings)
        tools = self._environment.tools if self._environment else ()
        self._encoder = make_encoder(path, settings, config, self._tokenizer, tools)
        self._preparation = make_preparation(self._encoder, settings, self._link.put)
        self._publisher = RolloutPublisher(
            layout, self._serving, settings.weights.digests, self._link.answer, self._link.put, self._report_soon
        )
        self._engine_queue = EngineQueue(self._link.wake)
        self._environment_groups: EnvironmentGroups | None = None
        self._api: ApiServer | None = None
        self._throughput, self._reported_at = ThroughputMeter(), float("-inf")
        self._metrics: RolloutMetrics | None = None
        """Of the HTTP endpoint; None without one."""

    def _start_environment(self) -> EnvironmentGroups | None:
        """Start the runner of episodes, if `rollout.environment.kind` names an environment."""
        if self._environment is None:
            return None
        settings, max_model_len = self._settings.rollout.environment, self._engine.max_model_len
        queue, put = self._engine_queue, self._link.put
        return EnvironmentGroups(settings, self._environment, self._tokenizer, queue, put, max_model_len=max_model_len)

    def _start_api(self) -> ApiServer | None:
        """Start the HTTP server, if it is enabled or the environment needs it."""
        return start_api(
            self._engine_factory.spec,
            self._tokenizer,
            self._engine.max_model_len,
            self._engine_queue,
            self._environment,
            folder=self._arguments.folder,
            version=lambda: self._core.version,
        )

    def run(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Serve until the controller ends the run, or `stop` is requested."""
        self._notify = notify
        if notify.page is not None:
            from starling.rollout.shell.metrics import RolloutMetrics

            self._metrics = RolloutMetrics(time.monotonic())
        notify.starting("joins the run", self._settings.network.connect_s)
        stop.install(self._link.wake)
        self._link.start()
        reason, ended = "its service failed", False
        try:
            self._environment_groups, self._api = self._start_environment(), self._start_api()
            while not stop and not ended:
                inbound = self._link.receive(0.0 if self._may_step else IDLE_S)
                while inbound is not None and not ended:
                    if isinstance(inbound, LinkClosed):
                        reason, ended = inbound.reason, True
                        if inbound.error is not None:
                            raise inbound.error
                    self._act(self._decide(inbound))
                    inbound = self._link.receive(0.0)
                with suppress(ServiceStopped):  # `stop` is set, so the loop ends
                    if not ended:
                        self._run_once(stop)
            if stop:
                reason = f"stopped by {stop.name}"
            if self._nodes is not None:
                self._nodes.is_over = True
            notify.stopping(reason, STOP_S)
            self._interrupt(reason)
            if self._environment_groups is not None:
                for lease in self._environment_groups.interrupt(reason, self._link.answer):
                    self._act(self._core.finished(lease))
        finally:
            end_within(STOP_S)
            self._profiler.end()
            self._close(reason)
            if self._traces is not None:
                self._traces.close()

    def _close(self, reason: str) -> None:
        # The queue first: environments and the server wait for its requests.
        for part in (self._engine_queue, self._environment_groups, self._api):
            if part is not None:
                part.close()
        shares_devices = self._link.fence.shares_devices
        if not shares_devices:
            self._link.close(reason)
        self._adoptions.close()  # cancels a pull, for which closing the engine would wait
        self._preparation.close()
        self._engine.close()
        if shares_devices:  # only now: leaving hands the devices over, and others wake up at once
            self._link.close(reason)
        self._publisher.close()

    @property
    def _may_step(self) -> bool:
        # A paused engine may still have results, or be lost. An engine that is lost while asleep is replaced when it is
        # woken, since until then others have its devices.
        return self._engine.ready and not self._core.asleep

    def _run_once(self, stop: StopSignal) -> None:
        """Pass requests to the engine, step it, and check time limits."""
        try:
            self._engine_queue.serve(self._engine, admit=self._core.may_generate)
            if self._may_step:
                if self._profiler.active is None:
                    self._step()
                else:
                    with self._profiler.span("engine step"):
                        self._step()
        except EngineLostError as error:
            self._engine_error = error
        self._check_and_report()
        if self._engine_error is not None:
            self._replace_engine(self._engine_error, stop)

    def _report_soon(self) -> None:
        """Send a heartbeat's state at once; called from any thread."""
        self._reported_at = float("-inf")
        self._link.wake()

    def _check_and_report(self) -> None:
        """At intervals, end what took too long, and report the state for the heartbeats."""
        now = time.monotonic()
        if now - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = now
        self._notify.turn(self._link.describe, serves=self._link.joined, samples=self._samples)
        if self._metrics is not None:
            self._metrics.note(self._engine, now)
        self._profiler.check()
        self._act(self._core.tick(now))
        if not self._link.fence.may_keep_devices:
            self._act(self._core.fenced())
        waits = [*self._core.waits(now), *self._publisher.waits(now)]
        parts: list[HasLeases] = [self._preparation]
        if self._environment_groups is not None:
            parts.append(self._environment_groups)
        for part in parts:
            for lease, reason in part.expire(now):
                self._groups.cancel(self._engine, lease)
                self._act([core.FailLease(lease, reason), *self._core.finished(lease)])
            waits += part.waits(now)
        self._link.report(version=self._core.version, offered=self._publisher.offered, waits=tuple(waits))
        if gauges := self._throughput.measured(self._engine, now):
            self._link.report(gauges=gauges)

    def _samples(self) -> Samples:
        """Return the metrics of the HTTP endpoint."""
        assert self._metrics is not None, "asked for by the page of an endpoint"
        return self._metrics.samples(self._engine, self._core.version)

    def _decide(self, inbound: Any) -> list[core.Action]:
        match inbound:
            case ReceivedCommand(message=message) if not self._link.work(message.lease):
                return []
            case ReceivedCommand(message=wire.GenerateGroup() as message, buffers=buffers):
                return self._core.generate(message, buffers)
            case ReceivedCommand(message=wire.AdoptWeights() as message, buffers=buffers):
                return self._core.adopt(message, buffers)
            case ReceivedCommand(message=wire.PublishWeights() as message):
                return self._core.publish(message)
            case ReceivedCommand(message=wire.Sleep() as message):
                return self._core.sleep(message)
            case ReceivedCommand(message=wire.Wake() as message):
                return self._core.wake(message)
            case wire.Profile():
                self._profiler.arm(inbound)
                return []
            case PreparedPrompt():
                return self._begin(inbound) if self._preparation.take(inbound.message.lease) else []
            case PlayedGroup(lease=lease):
                assert self._environment_groups is not None, "it has played the group"
                answered = self._environment_groups.answer(inbound, self._link.answer)
                self._note_ended(lease)
                if self._metrics is not None:
                    self._metrics.note_group(ok=answered)
                return self._core.finished(lease) if answered else []
            case PullEnded(lease=lease, problem=problem):
                if self._metrics is not None:
                    self._metrics.note_pull(None if problem else self._adoptions.last_report)
                return self._core.pulled(lease, problem)
            case CancelledLeases(leases=leases):
                return self._core.cancelled(leases)
            case Future():
                inbound.result()  # raises what could not be answered
                return []
            case LinkClosed():
                return []
            case _:
                raise AssertionError(f"a rollout is not sent {inbound!r}")

    def _act(self, actions: Sequence[core.Action]) -> None:
        """Carry out actions, and those that follow from them."""
        self._adoptions.note(draining=self._core.adoption == "draining")
        pending = list(actions)
        while pending:
            action = pending.pop(0)
            try:
                pending += self._carry_out(action)
            except EngineLostError as error:  # the engine is replaced after the remaining actions
                self._engine_error = error
                if isinstance(action, core.FallAsleep | core.WakeUp):
                    if not action.lease:
                        raise  # a new engine would use devices that others may have by now
                    self._fail(action.lease, str(error))
        self._pause_or_resume()

    def _carry_out(self, action: core.Action) -> list[core.Action]:
        match action:
            case core.StartGroup():
                return self._accept(action)
            case core.PullWeights(message=message):
                self._pause_or_resume()
                if self._profiler.active is not None:
                    self._profiler.active.spans.begin(message.lease, f"adopt {message.version}", source=message.source)
                self._adoptions.pull(self._engine, action)
            case core.SwitchWeights(lease=lease):
                with self._profiler.span("switch weights"):
                    actions = self._adoptions.switch(self._engine, self._core, action)
                self._note_ended(lease, counts=False)
                return actions
            case core.PublishVersion(message=message):
                self._publish(message)
            case core.CancelGroup(lease=lease):
                self._cancel_group(lease)
            case core.FailLease(lease=lease, reason=reason):
                self._fail(lease, reason)
            case core.FallAsleep():
                return self._fall_asleep(action)
            case core.WakeUp():
                return self._wake_up(action)
        return []

    def _pause_or_resume(self) -> None:
        """Pause or resume the engine, and the time limits of episodes, as the state machine allows."""
        if self._environment_groups is not None:
            self._environment_groups.set_paused(not self._core.may_generate)
        if self._is_resumed == self._core.may_generate or self._engine_error is not None:
            return
        self._is_resumed = not self._is_resumed
        try:
            (self._engine.resume if self._is_resumed else self._engine.pause)()
        except EngineLostError as error:
            self._engine_error = error

    # --- groups ----------------------------------------------------------------------------------------------------

    def _note_ended(self, lease: str, *, counts: bool = True) -> None:
        """End the span of a lease; `counts`: it was that of a group, which was answered."""
        if self._traces is not None:
            self._traces.end(lease, "generate", replica=self._arguments.name, lease=lease, answered=counts)
        if self._profiler.active is not None and self._profiler.active.spans.end(lease) and counts:
            self._profiler.count()

    def _accept(self, order: core.StartGroup) -> list[core.Action]:
        if self._traces is not None and order.message.purpose == "train":
            self._traces.begin(order.message.lease, order.message.prompt.id)
        if self._profiler.active is not None:
            message = order.message
            fields = {"prompt": message.prompt.id, "completions": message.num_completions}
            self._profiler.active.spans.begin(message.lease, "generate", **fields)
        self._groups.accept(order)
        prepared = self._preparation.begin(order.message)
        return [] if prepared is None else self._begin(prepared)

    def _begin(self, prepared: PreparedPrompt) -> list[core.Action]:
        """Start a group whose prompt is prepared, in the environment or in the engine."""
        lease = prepared.message.lease
        try:
            if self._environment_groups is not None and prepared.problem is None:
                self._environment_groups.begin(prepared)
            else:
                self._groups.begin(self._engine, prepared)
        except EngineLostError as error:
            self._engine_error = error
            return self._core.finished(lease)
        except StarlingError as error:
            return self._refuse(prepared.message, error)
        return []

    def _refuse(self, message: wire.GenerateGroup, error: StarlingError) -> list[core.Action]:
        """Fail a group, not to be retried: its prompt is invalid for every replica."""
        self._fail(message.lease, f"prompt {message.prompt.id}: {error}", fatal=True)
        return self._core.finished(message.lease)

    def _step(self) -> None:
        for result in self._engine.step():
            if self._engine_queue.settle(result) or self._groups.begin_anew(self._engine, result):
                continue
            reason = self._groups.answer(result)
            self._note_ended(result.lease)
            if self._metrics is not None:
                self._metrics.note_group(ok=reason is None)
            failed = [] if reason is None else [core.FailLease(result.lease, reason)]
            self._act([*failed, *self._core.finished(result.lease)])

    def _cancel_group(self, lease: str) -> None:
        self._note_ended(lease, counts=False)
        self._preparation.cancel(lease)
        if self._environment_groups is not None:
            self._environment_groups.cancel(lease)
        self._groups.cancel(self._engine, lease)

    def _interrupt(self, reason: str, *, lost: bool = False) -> None:
        """Hand over the engine's groups of the controller, and requeue the other requests for the next engine."""
        for lease in self._groups.interrupt(self._engine, reason, self._preparation.cancel_all(), lost=lost):
            self._act(self._core.finished(lease))
        self._engine_queue.requeue(self._engine)

    # --- weights ---------------------------------------------------------------------------------------------------

    def _publish(self, message: wire.PublishWeights) -> None:
        try:
            self._publisher.publish(message, self._engine.tensors())
        except StarlingError as error:
            self._fail(message.lease, str(error))
        self._reported_at = float("-inf")

    # --- the engine ------------------------------------------------------------------------------------------------

    def _replace_engine(self, error: EngineLostError, stop: StopSignal) -> None:
        """Replace the lost engine. Its groups are handed over to other replicas, with the tokens so far.

        Raises:
            ServiceStopped: the process is to stop, and there is no engine now.
        """
        log.error("engine_lost", reason=str(error))
        if self._metrics is not None:
            self._metrics.note_lost(self._engine)
        self._act(self._core.lost())
        self._interrupt(f"its engine was lost: {error}", lost=True)
        self._adoptions.cancel()
        left_s = self._settings.rollout.vllm.start_timeout_s
        wait = wire.Wait(what="another engine to start", on="engine", since_s=0.0, seconds_left=left_s)
        self._link.report(version=-1, waits=(wait,))
        with self._notify.patient(left_s * (1 + self._settings.rollout.max_engine_restarts), "starts another engine"):
            self._engine = self._engine_factory.replace(self._engine, error, stop)
        self._engine_error, self._is_resumed = None, True
        self._throughput.reset()
        actions = self._core.replaced(self._engine.version)
        self._link.report(version=self._core.version)
        self._act(actions)

    def _fall_asleep(self, order: core.FallAsleep) -> list[core.Action]:
        if not order.repeated:
            self._pause_or_resume()
            self._interrupt("it gives its devices to others")
            self._adoptions.stop()
            self._encoder.release()
            self._engine.sleep()
            self._link.fence.keeps_devices(False)
        if order.lease:
            self._link.answer(order.lease, wire.Slept(lease=order.lease))
        else:
            log.warning("fell_asleep", reason="the controller did not answer, and others may have its devices")
            self._link.rejoin()
        return []

    def _wake_up(self, order: core.WakeUp) -> list[core.Action]:
        actions: list[core.Action] = []
        if not order.repeated:
            self._link.fence.keeps_devices(True)
            self._engine.wake_up()
            actions = self._core.woken(self._engine.version)
            self._link.report(version=self._core.version)
        self._link.answer(order.lease, wire.Woken(lease=order.lease))
        return actions

    def _fail(self, lease: str, reason: str, *, fatal: bool = False) -> None:
        self._note_ended(lease, counts=False)
        log.warning("failed", lease=lease, reason=reason)
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=reason, fatal=fatal)
        self._link.answer(lease, failed)


def make_shell(settings: RolloutProcess, arguments: ServiceArguments) -> Shell | NodeAgent:
    """Return what this process is: the service, on the only node or on node 0, or the agent of another node."""
    if arguments.nodes is None or arguments.nodes.number == 0:
        return Shell(settings, arguments)
    return make_agent(settings, arguments)


def _families() -> Sequence[Family]:
    """Return the metrics of the HTTP endpoint."""
    from starling.rollout.shell.metrics import FAMILIES

    return FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rollout replica, or the agent of one of its nodes."""
    return serve("rollout", RolloutProcess, make_shell, argv, families=_families)


if __name__ == "__main__":
    end_process(main())
