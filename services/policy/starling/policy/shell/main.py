"""The policy process: executes the controller's commands, one at a time: train, publish, save, sleep.

Publishing a version stops training for the copy into a snapshot; the offer follows from another thread (see
`starling.common.offers`). It saves its state on command, to resume after a crash.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from starling.common.errors import ConfigError, RestartError, StarlingError, WeightsError
from starling.common.kinds import KINDS
from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.nodes.agent import NodeAgent
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import STOP_S, StopSignal, end_process, end_within
from starling.common.observe.profiling.profiler import Profiler
from starling.common.observe.tracing.traces import open_traces
from starling.common.offers import OFFER_TIMEOUT_S, OfferSender, lease_failure
from starling.common.pipeline_folder import check_pipeline_folder
from starling.common.service import (
    ServiceArguments,
    check_model_folder,
    host_name,
    link_settings,
    serve,
)
from starling.common.wire import messages as wire
from starling.policy.core.admission import PolicyCommand, PolicyState
from starling.policy.shell.facts import facts_of, limit_of
from starling.policy.shell.loading import PolicyProcess, choose_transport
from starling.policy.shell.peers import PeerServer, StateRequest, request_state, settings_digest
from starling.policy.shell.profiles import RANKS_WRITE_S
from starling.policy.shell.ranks import RankLink, RanksDisagreeError
from starling.policy.shell.step_traces import StepTraces
from starling.policy.train.errors import PeersLostError, RejectedGroupsError, StepBrokenError

if TYPE_CHECKING:  # they import torch, see `Shell`; or are of an endpoint
    from starling.common.observe.metrics import Family, Samples
    from starling.policy.shell.metrics import PolicyMetrics
    from starling.policy.shell.saving import PolicySaver
    from starling.policy.train.checkpoint.storage import Storage

log = structlog.get_logger(__name__)

IDLE_S = 0.5
EXIT_S = 5.0
"""How long a policy that got a stop signal may take to exit, besides the time to save."""


def find_model(settings: PolicyProcess) -> Path:
    """Return the folder of the model. Raises ConfigError if it cannot be used."""
    pretrained = settings.policy.init == "pretrained" or not KINDS[settings.run.kind].trains
    if settings.diffusion is not None:
        return check_pipeline_folder(settings.model.path, weights=pretrained)
    return check_model_folder(
        settings.model.path,
        weights=pretrained and not settings.policy.weights_from,
        runs_code=settings.model.trust_remote_code,
    )


def find_home(settings: PolicyProcess, folder: Path) -> Storage:
    """Return the storage of the run's states and checkpoints; `folder`: that of the run.

    It is checked at the start, and not at the first save, which may come after hours.

    Raises:
        DiskFaultError: its disk is full or read-only.
        ConfigError: it cannot be written for any other reason.
    """
    # Imported here: the libraries of storage are slower than the settings to check.
    from starling.policy.train.checkpoint.header import CHECKPOINTS, STATES
    from starling.policy.train.checkpoint.storage import Storage

    saving = settings.policy.saving
    home = Storage(str(folder.absolute()))
    if saving.folder:
        home = Storage(saving.folder, saving.storage_options).below(*settings.run.id.split("/"))
    if KINDS[settings.run.kind].trains:
        home.check(STATES, CHECKPOINTS)
    return home


class Shell:
    """One policy replica."""

    def __init__(self, settings: PolicyProcess, arguments: ServiceArguments) -> None:
        """Load the model, resume from the newest state, and prepare publication. Raises ConfigError if that fails."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save: until all is loaded there is nothing to save
        self._settings, self._has_nodes = settings, arguments.nodes is not None
        self._trains = KINDS[settings.run.kind].trains
        path = find_model(settings)
        home = find_home(settings, arguments.folder)
        transport = choose_transport(settings)
        # Imported only now: torch and transformers take seconds, which a wrong setting must not cost.
        from starling.policy.shell.replica import PolicyReplica
        from starling.weightsync.plan.layout import encode

        self._replica = PolicyReplica(settings, arguments, path, transport)
        rank = self._replica.rank
        self._learner, self._clock = rank.learner, rank.clock
        is_elastic = settings.policy.parallel.elastic and self._trains
        with self._replica.ending_nodes():
            self._saver = self._create_saver(path, home, arguments.folder)
            version = self._saver.resume() if self._trains else 0
            self._replica.serve()
            self._peers = PeerServer(settings.network.host) if is_elastic else None
        self._publisher = rank.publisher
        self._state = PolicyState(version=version, elastic=is_elastic)
        self._place = 0
        """Of this replica among those of the last step: the first one exports and saves for all."""
        hello = self._hello(version, rank.checkpoint, path)
        self._link = ControllerLink(link_settings(arguments, settings), hello, (encode(self._publisher.layout),))
        if self._peers is not None:
            self._peers.listen(self._link.put)
        self._offers = OfferSender(self._answer_offer, self._link.put, self._report)
        self._profiler = Profiler(arguments.name, arguments.folder, self._link.report_profile, counts="steps")
        traces = open_traces(settings.observe.traces, settings.run.id, "policy", arguments.name)
        self._traces = StepTraces(traces, arguments.name) if traces is not None else None
        self._saver.connect(self._link.answer, self._link.put, self._report)
        self._copying_since: float | None = None
        self._snapshot_place = ""
        """Where the last version was copied; empty before the first."""
        self._report_lock = threading.Lock()
        self._metrics: PolicyMetrics | None = None
        """Of the HTTP endpoint; None without one."""
        log.info(
            "ready",
            version=version,
            parameters=self._learner.num_parameters,
            transport=self._publisher.transport,
            encrypted=transport[1],
            **({"ranks": settings.policy.parallel.num_ranks} if settings.policy.parallel.num_ranks > 1 else {}),
        )

    def _hello(self, version: int, checkpoint: str, model: Path) -> wire.Hello:
        """Return the hello of a policy that holds `version`.

        `checkpoint`: digest of a model that is not trained; `model`: the folder of the initial model.
        """
        has_rl_steps = self._trains and KINDS[self._settings.run.kind].has_rl_steps
        return wire.Hello(
            role="policy",
            host=host_name(),
            pid=os.getpid(),
            version=version,
            has_layout=True,
            serves=True,
            limits=self._learner.limits if has_rl_steps else None,
            checkpoint=checkpoint,
            peer="" if self._peers is None else self._peers.address,
            settings_digest="" if self._peers is None else settings_digest(self._settings, model),
        )

    def _create_saver(self, model: Path, home: Storage, folder: Path) -> PolicySaver:
        """Prepare saving to `home`. `model`: the folder of the initial model; `folder`: that of the run."""
        from starling.policy.shell.saving import PolicySaver
        from starling.policy.train.checkpoint.huggingface import TokenizerFiles
        from starling.policy.train.checkpoint.pipeline import PipelineFiles

        lora, tokenizer = self._settings.model.lora, self._replica.rank.tokenizer
        return PolicySaver(
            self._replica,
            PipelineFiles(model) if tokenizer is None else TokenizerFiles(tokenizer, model),
            self._settings.policy.saving,
            self._settings.run.id,
            home,
            merged=lora is not None and lora.merged,
            shared=folder if self._has_nodes else None,
        )

    def run(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Serve until the controller ends the run."""
        self._join(stop, notify)
        reason, is_over = "its service failed", False
        try:
            while not stop:
                notify.turn(self._link.describe, serves=self._link.joined, samples=self._samples)
                with self._clock.within("wait_data"):
                    inbound = self._link.receive(IDLE_S)
                if isinstance(inbound, LinkClosed):
                    reason = inbound.reason
                    if inbound.error is not None:
                        raise inbound.error
                    is_over = True
                    return
                self._handle(inbound)
                self._look_after()
            reason, is_over = f"stopped by {stop.name}", True
            notify.stopping(reason, self._settings.policy.saving.leave_s + EXIT_S + STOP_S)
            self._saver.leave(self._state.version if self._has_state else -1)
        except StepBrokenError as error:
            reason = f"its weights are not a version ({error}): it must restart from the newest state"
            raise WeightsError(reason) from error  # not a ConfigError, after which it would not be restarted
        finally:
            self._leave(reason, is_over=is_over, is_stopped=bool(stop))

    def _join(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Begin to join the run, and to listen to signals."""
        self._notify = notify
        if notify.page is not None:
            from starling.policy.shell.metrics import PolicyMetrics

            self._metrics = PolicyMetrics()
        # A step may take long, but each of its phases is a turn.
        self._clock.on_phase = lambda: notify.turn(serves=None)
        notify.starting("joins the run", self._settings.network.connect_s)
        stop.deadline_s = self._settings.policy.saving.leave_s + EXIT_S
        stop.install(self._link.wake)
        self._saver.listen(self._link.wake)
        self._link.start()

    @property
    def _has_state(self) -> bool:
        """Whether this policy saves its state: that would need the devices, and the first of several policies does."""
        return self._trains and not (self._state.asleep or self._place)

    def _handle(self, inbound: object) -> None:
        """Handle what the link has received, if anything."""
        if isinstance(inbound, ReceivedCommand):
            self._take(inbound)
        elif isinstance(inbound, Future):
            inbound.result()  # raises an unexpected error of another thread
        elif isinstance(inbound, StateRequest):
            self._send_state(inbound)
        elif isinstance(inbound, wire.Profile):
            self._start_profile(inbound)
        elif isinstance(inbound, CancelledLeases):
            self._state.give_up(inbound.leases)  # a step in progress cannot be cancelled
        else:
            assert inbound is None, inbound

    def _look_after(self) -> None:
        """Do what is due between two commands."""
        if self._has_state:
            self._saver.save_if_requested(self._state.version)
        if self._profiler.active is not None and self._profiler.active.is_over(time.monotonic()):
            self._end_profile()
        self._expire()
        self._report()
        if not (self._state.asleep or self._link.fence.may_keep_devices):
            self._sleep()
            log.warning("fell_asleep", reason="the controller did not answer, and others may have its devices")
            self._link.rejoin()

    def _leave(self, reason: str, *, is_over: bool, is_stopped: bool) -> None:
        """Wait for a write in progress, unless a signal has stopped this process, and close everything."""
        self._clock.watch = None
        self._profiler.end()
        if not is_stopped and not self._replica.is_broken:
            self._notify.stopping(reason, self._settings.policy.saving.patience_s + STOP_S)
            self._await_write()
        self._notify.stopping(reason, STOP_S + EXIT_S)
        end_within(STOP_S)
        self._link.close(reason)
        self._replica.close(is_over=is_over)
        self._offers.close()
        if self._traces is not None:
            self._traces.close()

    def _samples(self) -> Samples:
        """Return the metrics of the HTTP endpoint."""
        assert self._metrics is not None, "asked for by the page of an endpoint"
        state = self._state
        return self._metrics.samples(version=state.version, published=state.published, asleep=state.asleep)

    def _await_write(self) -> None:
        """Wait for the write in progress; the data is in host memory, so devices that others share are released."""
        if self._saver.is_writing:
            if self._link.fence.shares_devices and not self._state.asleep:
                self._sleep()
            self._saver.finish()

    def _take(self, command: ReceivedCommand) -> None:
        """Execute a command, then the held steps that it releases."""
        message = command.message
        assert isinstance(message, PolicyCommand), message
        if self._state.must_wait(message):
            assert isinstance(message, wire.TrainStep), message
            self._state.hold(message, command.buffers)
            return
        self._execute(message, command.buffers)
        while ready := self._state.take_ready():
            for step, buffers in ready:
                self._execute(step, buffers)

    def _expire(self) -> None:
        for lease, reason in self._state.expire(time.monotonic()):
            log.warning("gave up", lease=lease, reason=reason)
            version, infra_lost = self._state.version, wire.Status.INFRA_LOST
            failed = wire.LeaseFailed(lease=lease, status=infra_lost, reason=reason, version=version)
            self._link.answer(lease, failed)

    def _report(self) -> None:
        """Report offered versions and current waits in the next heartbeats. Any thread may call this."""
        with self._report_lock:
            now = time.monotonic()
            waits = [*self._state.waits(now), *self._offers.waits(now), *self._saver.waits(now)]
            copying_since = self._copying_since  # read once: the copy may end meanwhile
            if copying_since is not None:
                since_s, limit_s = now - copying_since, self._settings.policy.publish_timeout_s
                left_s = max(0.0, limit_s - since_s)
                waits.append(
                    wire.Wait(what="memory for a snapshot", on="readers", since_s=since_s, seconds_left=left_s)
                )
            self._link.report(offered=self._offers.offered, waits=tuple(waits))

    def _execute(self, message: PolicyCommand, buffers: tuple[bytes, ...]) -> None:
        if not self._link.work(message.lease):
            return
        self._report()
        objection = self._state.objection(message)
        try:
            if objection is not None:
                raise ConfigError(objection)
            match message:
                case wire.TrainStep():
                    trained = self._train(message, buffers)
                    self._link.answer(message.lease, trained, version=trained.step)
                case wire.PublishWeights():
                    self._publish(message, buffers)
                case wire.AdoptWeights():
                    self._adopt(message)
                case wire.SaveCheckpoint():
                    patience_s = self._settings.policy.saving.patience_s  # for what is being written
                    with self._clock.within("checkpoint"), self._notify.patient(patience_s, "saves"):
                        self._saver.save(message)
                case wire.Sleep():
                    self._sleep()
                    self._link.answer(message.lease, wire.Slept(lease=message.lease))
                case wire.Wake():
                    self._link.fence.keeps_devices(True)
                    self._replica.wake()
                    self._state.asleep = False
                    self._link.answer(message.lease, wire.Woken(lease=message.lease))
        except (StepBrokenError, RanksDisagreeError, RestartError):
            raise  # no answer: the restarted policy makes the step again from the newest state
        except PeersLostError as error:
            failed = lease_failure(message.lease, error, self._state.version)
            self._link.answer(message.lease, msgspec.structs.replace(failed, fatal=False))
        except StarlingError as error:
            rejected = error.prompts if isinstance(error, RejectedGroupsError) else ()
            self._link.answer(message.lease, lease_failure(message.lease, error, self._state.version, rejected))

    def _start_profile(self, order: wire.Profile) -> None:
        if self._profiler.arm(order):
            assert self._profiler.active is not None
            self._clock.watch = self._profiler.active.enter
            self._replica.start_profile(order)

    def _end_profile(self) -> None:
        self._clock.watch = None
        with self._notify.patient(RANKS_WRITE_S, "writes a profile"):
            self._profiler.end(self._replica.end_profile)

    def _sleep(self) -> None:
        freed_bytes = self._replica.sleep()
        self._link.fence.keeps_devices(False)
        self._state.asleep = True
        log.info("asleep", freed_bytes=freed_bytes)

    def _train(self, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> wire.StepTrained:
        begun_ns = time.time_ns()
        if self._profiler.active is None:
            metrics, alarms = self._replica.train(message, buffers)
        else:
            with self._profiler.span(f"step {message.step}", groups=len(message.groups)):
                metrics, alarms = self._replica.train(message, buffers)
            self._profiler.count()
        if self._traces is not None:
            self._traces.trained(message, begun_ns)
        self._state.version, self._place = message.step, message.replica
        if not self._place:
            with self._clock.within("checkpoint"):
                self._saver.export_if_due(message.step)
        self._link.report(gauges={"tokens_per_s": metrics.get("tokens_per_s", 0.0)})
        if self._metrics is not None:
            self._metrics.note_step(metrics)
        return wire.StepTrained(
            lease=message.lease,
            step=message.step,
            metrics=metrics,
            alarms=alarms,
            batch_digest=self._learner.batch_digest,
        )

    def _publish(self, message: wire.PublishWeights, buffers: tuple[bytes, ...]) -> None:
        if self._state.published == message.version:
            self._replica.add_layout_roots(message.layouts, buffers)
        if self._offers.resend(message.lease, message.version):
            return
        self._copying_since = time.monotonic()
        if self._traces is not None:
            self._traces.publishing(message)
        self._report()
        try:
            with self._clock.within("publish_exposed"), self._profiler.span(f"publish {message.version}"):
                publication = self._replica.snapshot(message.version, message.layouts, buffers)
        finally:
            self._copying_since = None
        if self._publisher.snapshot_place != self._snapshot_place:
            self._snapshot_place = self._publisher.snapshot_place
            log.info("snapshots", place=self._snapshot_place)
        self._state.published = message.version
        self._offers.send(message.lease, publication)

    def _send_state(self, asked: StateRequest) -> None:
        """Send the present state to a policy that has asked for it; the controller dispatches no step meanwhile."""
        assert self._peers is not None, "only an elastic replica is asked"
        begun = time.monotonic()
        try:
            if self._state.asleep:
                raise PeersLostError("this policy is asleep")
            self._replica.send_state((self._peers.address, asked.peer), asked.group, self._state.version)
        except PeersLostError as error:
            log.warning("state_not_sent", group=asked.group, reason=str(error))
        else:
            log.info("state_sent", group=asked.group, seconds=round(time.monotonic() - begun, 3))
        finally:
            self._peers.note_answered()

    def _adopt(self, message: wire.AdoptWeights) -> None:
        """Copy the state of another policy, which has the same mesh.

        Raises:
            RestartError: that has failed amid the transfer, and nothing is left to go on from.
        """
        assert self._peers is not None, "the controller sends it to elastic replicas"
        begun, peers = time.monotonic(), (message.peer, self._peers.address)
        try:
            request_state(*peers, message.lease)
            version = self._replica.receive_state(peers, message.lease)
        except (PeersLostError, OSError, RuntimeError) as error:
            raise RestartError(f"the state of {message.source} could not be copied ({error})") from error
        if version != message.version:
            raise RestartError(f"{message.source} sent version {version} instead of {message.version}")
        copied = time.monotonic()
        self._state.version, self._place = version, 1  # the other one saves this version
        offer = self._replica.snapshot(version, (), ()).offer(OFFER_TIMEOUT_S)
        self._state.published = version
        adopted = wire.WeightsAdopted(
            lease=message.lease,
            version=version,
            root=offer.root,
            pull_s=copied - begun,
            pause_s=time.monotonic() - copied,
            size_bytes=self._replica.rank.size_bytes,
            transport="gloo" if self._learner.model.device.type == "cpu" else "nccl",
            source=message.source,
            layout=message.layout,
        )
        self._link.answer(message.lease, adopted, version=version)

    def _answer_offer(self, lease: str, message: wire.Up, buffers: tuple[bytes, ...]) -> None:
        """Answer with the result of an offer, in the offering thread, while training continues."""
        if isinstance(message, wire.WeightsPublished):
            self._clock.hide(message.offer_s)
            if self._traces is not None:
                self._traces.published(message)
        self._link.answer(lease, message, buffers)


def make_shell(settings: PolicyProcess, arguments: ServiceArguments) -> Shell | NodeAgent:
    """Return what this process is: the service, on the only node or on node 0, or the agent of another node."""
    if arguments.nodes is None or arguments.nodes.number == 0:
        return Shell(settings, arguments)
    path = find_model(settings)
    find_home(settings, arguments.folder)  # a volume may be mounted in another way on each node
    transport = choose_transport(settings)
    # Imported before the ranks are forked, each time; and only now, see `Shell`.
    from starling.policy.shell.rank import RankSetup, shared_files
    from starling.policy.shell.rank_process import serve_rank

    setup = RankSetup(settings, arguments, path, transport, shared_files())

    def serve(rank: int, first_rank: int, pipe: Connection) -> None:
        serve_rank(setup, rank, first_rank, RankLink(pipe))

    return NodeAgent(
        settings,
        arguments,
        facts_of(settings, arguments, path, transport),
        serve,
        limit=limit_of(settings.policy.parallel),
        leave_s=settings.policy.saving.leave_s,
    )


def _families() -> Sequence[Family]:
    """Return the metrics of the HTTP endpoint."""
    from starling.policy.shell.metrics import FAMILIES

    return FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a policy replica, or the agent of one of its nodes."""
    return serve("policy", PolicyProcess, make_shell, argv, families=_families)


if __name__ == "__main__":
    end_process(main())
