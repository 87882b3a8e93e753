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
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog
from pydantic import model_validator

from starling.common.errors import ConfigError, StarlingError, WeightsError
from starling.common.folder_digests import model_digest
from starling.common.kinds import KINDS
from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.observe.process import STOP_S, StopSignal, end_process, end_within
from starling.common.offers import OfferSender, lease_failure
from starling.common.service import (
    ServiceArguments,
    check_model_folder,
    host_name,
    link_settings,
    serve,
)
from starling.common.settings import ModelSettings, ServiceSettings, WeightsSettings
from starling.common.wire import messages as wire
from starling.policy.core.admission import PolicyCommand, PolicyState
from starling.policy.settings.policy import PolicySettings, check_adapters, check_transport
from starling.policy.train.errors import RejectedGroupsError, StepBrokenError

if TYPE_CHECKING:  # they import torch, see `Shell`
    from starling.policy.shell.saving import PolicySaver
    from starling.policy.train.learner import Learner
    from starling.weightsync.offers.offer import Transport
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.plan.planner import Plan
    from starling.weightsync.publisher.publisher import Publisher

log = structlog.get_logger(__name__)

IDLE_S = 0.5
EXIT_S = 5.0
"""How long a policy that got a stop signal may take to exit, besides the time to save."""


class PolicyProcess(ServiceSettings):
    """All settings of a policy process."""

    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    policy: PolicySettings = PolicySettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_adapters(self.model, self.policy, self.weights)
        check_transport(self.policy, self.network)
        return self


class Shell:
    """One policy replica of one rank."""

    def __init__(self, settings: PolicyProcess, arguments: ServiceArguments) -> None:
        """Load the model, resume from the newest state, and prepare publication. Raises ConfigError if that fails."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save: until all is loaded there is nothing to save
        self._settings = settings
        self._trains = KINDS[settings.run.kind].trains
        pretrained = settings.policy.init == "pretrained" or not self._trains
        path = check_model_folder(
            settings.model.path,
            weights=pretrained and not settings.policy.weights_from,
            runs_code=settings.model.trust_remote_code,
        )
        self._transport, self._encrypted = _choose_transport(settings)
        # Imported only now: torch and transformers take seconds, which a wrong setting must not cost.
        from starling.algo.tokenizer import check_end_token, load_tokenizer
        from starling.policy.train.metrics.step import StepMetrics
        from starling.weightsync.plan.layout import encode
        from starling.weightsync.tensors.adapters import base_digest
        from starling.weightsync.tensors.modules import layout_of

        fetch_to, checkpoint = arguments.folder / f".weights-{arguments.name}", ""
        if self._trains:
            self._learner = create_learner(path, settings, fetch_to)
        else:
            self._learner, checkpoint = load_fixed(path, settings, fetch_to)
        self._clock = self._learner.clock
        self._step_metrics = StepMetrics(
            self._learner.tensors, self._clock, self._learner.model.device, settings.policy
        )
        self._tokenizer = load_tokenizer(
            path, self._learner.model.config, trust_remote_code=settings.model.trust_remote_code
        )
        if KINDS[settings.run.kind].learns_from_examples_only:
            check_end_token(self._tokenizer, path)
        self._saver = self._create_saver(path, arguments.folder)
        version = self._saver.resume() if self._trains else 0
        base = base_digest(self._learner.model, settings.model.lora)
        layout = layout_of(self._learner.tensors, arguments.name, base=base)
        self._publisher = self._create_publisher(layout)  # quantisation changes the published layout
        self._state = PolicyState(version=version)
        hello = self._hello(version, checkpoint)
        self._link = ControllerLink(link_settings(arguments, settings), hello, (encode(self._publisher.layout),))
        self._offers = OfferSender(self._answer_offer, self._link.put, self._report)
        self._saver.connect(self._link.answer, self._link.put, self._report)
        self._plans: dict[str, tuple[bytes, Plan]] = {}
        """The plans of the last publication to the layouts of rollouts, by key, encoded and decoded."""
        self._copying_since: float | None = None
        self._snapshot_place = ""
        """Where the last version was copied; empty before the first."""
        self._report_lock = threading.Lock()
        log.info(
            "ready",
            version=version,
            parameters=self._learner.model.num_parameters(),
            transport=self._publisher.transport,
            encrypted=self._encrypted,
        )

    def _hello(self, version: int, checkpoint: str) -> wire.Hello:
        """Return the hello of a policy that holds `version`; `checkpoint`: digest of a model that is not trained."""
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
        )

    def _create_saver(self, model: Path, folder: Path) -> PolicySaver:
        """Prepare saving. `model`: the folder of the initial model; `folder`: that of the run."""
        from starling.policy.shell.saving import PolicySaver
        from starling.policy.train.checkpoint.huggingface import TokenizerFiles

        lora = self._settings.model.lora
        return PolicySaver(
            self._learner,
            TokenizerFiles(self._tokenizer, model),
            self._settings.policy.saving,
            self._settings.run.id,
            folder,
            merged=lora is not None and lora.merged,
        )

    def _create_publisher(self, layout: Layout) -> Publisher:
        from starling.weightsync.publisher.publisher import Publisher
        from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, linear_weights

        settings = self._settings
        form = settings.weights.quantise
        publisher = Publisher(
            layout,
            transport=self._transport,
            encrypt=self._encrypted,
            host=settings.network.host,
            read_timeout_s=settings.policy.publish_timeout_s,
            digests=settings.weights.digests,
            delta_versions=settings.policy.delta_versions,
            quantise=linear_weights(form, FUSED_BY_VLLM) if form else None,
            snapshots=settings.policy.snapshots,
        )
        try:
            publisher.prepare(self._learner.tensors)
        except WeightsError as error:
            publisher.close()
            raise ConfigError(f"policy.snapshots = {settings.policy.snapshots!r}: {error}") from error
        return publisher

    def run(self, stop: StopSignal) -> None:
        """Serve until the controller ends the run."""
        stop.deadline_s = self._settings.policy.saving.leave_s + EXIT_S
        stop.install(self._link.wake)
        self._saver.listen(self._link.wake)
        self._link.start()
        reason = "its service failed"
        try:
            while not stop:
                with self._clock.within("wait_data"):
                    inbound = self._link.receive(IDLE_S)
                if isinstance(inbound, LinkClosed):
                    reason = inbound.reason
                    if inbound.error is not None:
                        raise inbound.error
                    return
                if isinstance(inbound, ReceivedCommand):
                    self._take(inbound)
                elif isinstance(inbound, Future):
                    inbound.result()  # raises an unexpected error of another thread
                elif isinstance(inbound, CancelledLeases):
                    self._state.give_up(inbound.leases)  # a step in progress cannot be cancelled
                else:
                    assert inbound is None, inbound
                if self._trains and not self._state.asleep:
                    self._saver.save_if_requested(self._state.version)
                self._expire()
                self._report()
                if not (self._state.asleep or self._link.fence.may_keep_devices):
                    self._sleep()
                    log.warning("fell_asleep", reason="the controller did not answer, and others may have its devices")
                    self._link.rejoin()
            reason = f"stopped by {stop.name}"
            has_state = self._trains and not self._state.asleep  # saving it would need the devices
            self._saver.leave(self._state.version if has_state else -1)
        except StepBrokenError as error:
            reason = f"its weights are not a version ({error}): it must restart from the newest state"
            raise WeightsError(reason) from error  # not a ConfigError, after which it would not be restarted
        finally:
            if not stop:
                self._await_write()
            end_within(STOP_S)
            self._link.close(reason)
            self._publisher.close()
            self._offers.close()

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
                    self._link.answer(message.lease, self._train(message, buffers))
                case wire.PublishWeights():
                    self._publish(message, buffers)
                case wire.SaveCheckpoint():
                    with self._clock.within("checkpoint"):
                        self._saver.save(message)
                case wire.Sleep():
                    self._sleep()
                    self._link.answer(message.lease, wire.Slept(lease=message.lease))
                case wire.Wake():
                    self._link.fence.keeps_devices(True)
                    self._learner.wake()
                    self._state.asleep = False
                    self._link.answer(message.lease, wire.Woken(lease=message.lease))
        except StepBrokenError:
            raise  # no answer: the restarted policy makes the step again from the newest state
        except StarlingError as error:
            rejected = error.prompts if isinstance(error, RejectedGroupsError) else ()
            self._link.answer(message.lease, lease_failure(message.lease, error, self._state.version, rejected))

    def _sleep(self) -> None:
        self._publisher.settle()
        freed_bytes = self._learner.sleep()
        self._link.fence.keeps_devices(False)
        self._state.asleep = True
        log.info("asleep", freed_bytes=freed_bytes)

    def _train(self, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> wire.StepTrained:
        self._step_metrics.begin()
        trained = self._supervise(message) if message.examples else self._reinforce(message, buffers)
        metrics, alarms = self._step_metrics.end(message.step, trained)
        self._state.version = message.step
        self._learner.next_prompt = max(self._learner.next_prompt, message.next_prompt)
        with self._clock.within("checkpoint"):
            self._saver.export_if_due(message.step)
        self._link.report(version=message.step, gauges={"tokens_per_s": metrics.get("tokens_per_s", 0.0)})
        return wire.StepTrained(
            lease=message.lease,
            step=message.step,
            metrics=metrics,
            alarms=alarms,
            batch_digest=self._learner.batch_digest,
        )

    def _supervise(self, message: wire.TrainStep) -> dict[str, float]:
        from starling.policy.train.data.examples import examples_of, pairs_of

        if message.objective in ("dpo", "reward_model"):
            pairs = pairs_of(self._tokenizer, message.examples)
            return self._learner.prefer(
                pairs,
                objective=message.objective,
                step=message.step,
                num_steps=message.num_steps,
                changes=message.settings,
            )
        examples = examples_of(self._tokenizer, message.examples)
        return self._learner.supervise(examples, num_steps=message.num_steps, changes=message.settings)

    def _reinforce(self, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> dict[str, float]:
        from starling.policy.train.data.groups import groups_from_wire

        return self._learner.reinforce(
            groups_from_wire(message.groups, buffers, self._learner.limits),
            step=message.step,
            num_steps=message.num_steps,
            temperature=message.temperature,
            max_tokens=message.max_tokens,
            changes=message.settings,
        )

    def _publish(self, message: wire.PublishWeights, buffers: tuple[bytes, ...]) -> None:
        plans = self._decode_plans(message.layouts, buffers)
        if self._state.published == message.version:
            self._publisher.add_layout_roots(plans)
        if self._offers.resend(message.lease, message.version):
            return
        self._learner.check_whole()
        self._copying_since = time.monotonic()
        self._report()
        try:
            with self._clock.within("publish_exposed"):
                publication = self._publisher.snapshot(message.version, self._learner.tensors, plans)
        finally:
            self._copying_since = None
        if self._publisher.snapshot_place != self._snapshot_place:
            self._snapshot_place = self._publisher.snapshot_place
            log.info("snapshots", place=self._snapshot_place)
        self._state.published = message.version
        self._offers.send(message.lease, publication)

    def _decode_plans(self, keys: tuple[str, ...], buffers: tuple[bytes, ...]) -> dict[str, Plan]:
        """Return the plans to the layouts of rollouts, which seldom change.

        Raises:
            WeightsError: not a plan for each key.
        """
        from starling.weightsync.plan.planner import decode_plan

        if len(keys) != len(buffers):
            raise WeightsError(f"{len(buffers)} plans came for {len(keys)} layouts.")
        known, self._plans = self._plans, {}
        for key, data in zip(keys, buffers, strict=True):
            before = known.get(key)
            self._plans[key] = before if before is not None and before[0] == data else (data, decode_plan(data))
        return {key: plan for key, (_, plan) in self._plans.items()}

    def _answer_offer(self, lease: str, message: wire.Up, buffers: tuple[bytes, ...]) -> None:
        """Answer with the result of an offer, in the offering thread, while training continues."""
        if isinstance(message, wire.WeightsPublished):
            self._clock.hide(message.offer_s)
        self._link.answer(lease, message, buffers)


def _choose_transport(settings: PolicyProcess) -> tuple[Transport, bool]:
    """Return the transport of weights, and whether it encrypts; warn if it leaves RDMA unused."""
    from starling.weightsync.transports.registry import choose_for_host

    transport, encrypted, unused_rdma = choose_for_host(
        settings.policy.transport, settings.network.host, encrypt=settings.network.encrypt_weights
    )
    if unused_rdma:
        log.warning("rdma_is_not_used", reason=unused_rdma)
    return transport, encrypted


def create_learner(path: Path, settings: PolicyProcess, fetch_to: Path) -> Learner:
    """Return a learner with version 0 of the model in the folder `path`.

    `fetch_to`: a name for the copy of weights that are elsewhere. Raises ConfigError if that fails.
    """
    from starling.policy.train.checkpoint.state import seed_random
    from starling.policy.train.fit import check_fit
    from starling.policy.train.learner import Learner
    from starling.policy.train.loss.objective import check_objective

    trainer = KINDS[settings.run.kind].trainer
    assert trainer is not None, "a run that trains nothing has no learner of its own"
    if trainer == "rl":
        check_objective(settings.policy.algorithm)
    seed_random(settings.run.seed)
    learner = Learner(partial(load_version_0, path, settings, fetch_to), settings.policy)
    check_fit(learner.model, settings.policy, trainer)
    return learner


def load_fixed(path: Path, settings: PolicyProcess, fetch_to: Path) -> tuple[Learner, str]:
    """Load the model of a run that trains nothing into host memory; return it in a learner, and its folder's digest.

    Arguments and errors are those of `create_learner`.
    """
    from starling.policy.train.checkpoint.source import whole_model
    from starling.policy.train.learner import Learner
    from starling.policy.train.model.load import load_model

    model, policy = settings.model, settings.policy
    with whole_model(path, policy.weights_from, policy.saving.storage_options, fetch_to) as folder:
        thread = ThreadPoolExecutor(1, "digest")  # reads the files while they are loaded
        digest = thread.submit(model_digest, folder)
        thread.shutdown(wait=False)
        load = partial(load_model, folder, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
        return Learner(load, policy), digest.result()


def load_version_0(path: Path, settings: PolicyProcess, fetch_to: Path) -> Any:
    """Load version 0 of the model in the folder `path`; `fetch_to`: see `create_learner`. Raises ConfigError."""
    from starling.policy.train.checkpoint.source import whole_model
    from starling.policy.train.memory.setup import apply_memory_settings
    from starling.policy.train.model.load import freeze, load_model, place, use_liger
    from starling.policy.train.model.lora import load_adapters
    from starling.weightsync.tensors.adapters import add_adapters

    policy = settings.policy
    with whole_model(path, policy.weights_from, policy.saving.storage_options, fetch_to) as folder:
        model = load_model(
            folder,
            init=policy.init,
            seed=settings.run.seed,
            dtype=settings.model.dtype,
            trust_remote_code=settings.model.trust_remote_code,
            scores=KINDS[settings.run.kind].trainer == "reward_model",
        )
    lora = settings.model.lora
    if lora is not None:
        add_adapters(model, lora, seed=settings.run.seed)
        if lora.adapter:
            load_adapters(model, Path(lora.adapter))
    freeze(model, settings.policy.frozen)
    model = place(model, settings.model.device)
    if settings.policy.liger:
        use_liger(model)
    apply_memory_settings(model, settings.policy.memory, settings.policy.attention)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run a policy replica."""
    return serve("policy", PolicyProcess, Shell, argv)


if __name__ == "__main__":
    end_process(main())
