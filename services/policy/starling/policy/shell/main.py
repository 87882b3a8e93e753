"""The policy process: takes steps from the controller, one at a time, and publishes versions.

Publishing a version stops it for the copy into a snapshot; the offer follows from another thread (see
`starling.weightsync.execute.offers`). What it needs to go on after a crash it saves when it is told to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from starling.algo.text import encode_prompt, encode_response
from starling.common.errors import ConfigError, StarlingError
from starling.common.net.link import Command, Ended, GivenUp, Link
from starling.common.observe.process import STOP_S, StopSignal, end_process, end_within
from starling.common.service import (
    ServiceArguments,
    check_model_folder,
    host_name,
    link_settings,
    serve,
)
from starling.common.settings import ModelSettings, ServiceSettings, WeightsSettings
from starling.common.wire import messages as wire
from starling.policy.core.progress import Order, Progress
from starling.policy.settings import PolicySettings
from starling.weightsync.execute.offers import Offers, failure_of

log = structlog.get_logger(__name__)

IDLE_S = 0.5
STATES = "states"
"""Where in the run's folder the states are from which a policy goes on."""


class PolicyProcess(ServiceSettings):
    """All settings of a policy process."""

    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    policy: PolicySettings = PolicySettings()


class Shell:
    """One policy replica of one rank."""

    def __init__(self, settings: PolicyProcess, arguments: ServiceArguments) -> None:
        """Load the model and what was saved of it, and prepare its publication. Raises ConfigError when it cannot."""
        path = check_model_folder(settings.model.path, weights=settings.policy.init == "pretrained")
        # Only now: importing torch and transformers takes seconds, which a wrong setting must not cost.
        from transformers import AutoTokenizer

        from starling.policy.train.learner import Learner
        from starling.policy.train.state import seed_random
        from starling.weightsync.execute.publish import Publisher
        from starling.weightsync.layout import encode
        from starling.weightsync.layouts.modules import layout_of

        self._settings, self._folder = settings, arguments.folder
        seed_random(settings.run.seed)
        self._learner = Learner(partial(_load, path, settings), settings.policy)
        version = self._learner.resume(self._folder / STATES)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        layout = layout_of(self._learner.tensors, arguments.name)
        self._publisher = Publisher(
            layout,
            transport=settings.policy.transport,
            host=settings.network.host,
            read_timeout_s=settings.policy.publish_timeout_s,
            digests=settings.weights.digests,
            delta_versions=settings.policy.delta_versions,
        )
        self._progress = Progress(version=version)
        hello = wire.Hello(
            role="policy", host=host_name(), pid=os.getpid(), version=version, has_layout=True, serves=True
        )
        self._link = Link(link_settings(arguments, settings), hello, (encode(layout),))
        self._offers = Offers(self._link.answer, self._link.put, self._tell)
        self._copying_since: float | None = None
        self._telling = threading.Lock()
        log.info(
            "ready",
            version=version,
            parameters=self._learner.model.num_parameters(),
            transport=settings.policy.transport,
        )

    def run(self, stop: StopSignal) -> None:
        """Serve until the controller says that nothing more will come."""
        stop.install(self._link.wake)
        self._link.start()
        reason = "its service failed"
        try:
            while not stop:
                inbound = self._link.receive(IDLE_S)
                if isinstance(inbound, Ended):
                    reason = inbound.reason
                    if inbound.error is not None:
                        raise inbound.error
                    return
                if isinstance(inbound, Command):
                    self._take(inbound)
                elif isinstance(inbound, Future):
                    inbound.result()  # raises what no answer could tell
                elif isinstance(inbound, GivenUp):
                    self._progress.give_up(inbound.leases)  # but a step cannot be given up half-way
                else:
                    assert inbound is None, inbound
                self._expire()
                self._tell()
            reason = f"stopped by {stop.name}"
        finally:
            end_within(STOP_S)
            self._link.close(reason)
            self._publisher.close()
            self._offers.close()

    def _take(self, command: Command) -> None:
        """Do a command, and then what had come before its time."""
        message = command.message
        assert isinstance(message, Order), message
        if self._progress.must_wait(message):
            assert isinstance(message, wire.TrainStep), message
            self._progress.hold(message, command.buffers)
            return
        self._do(message, command.buffers)
        while ready := self._progress.take_ready():
            for step, buffers in ready:
                self._do(step, buffers)

    def _expire(self) -> None:
        for lease, reason in self._progress.expire(time.monotonic()):
            log.warning("gave up", lease=lease, reason=reason)
            version, infra_lost = self._progress.version, wire.Status.INFRA_LOST
            failed = wire.LeaseFailed(lease=lease, status=infra_lost, reason=reason, version=version)
            self._link.answer(lease, failed)

    def _tell(self) -> None:
        """Let the next heartbeats say what is on offer and what is waited for. Any thread may call it."""
        with self._telling:
            now = time.monotonic()
            waits = [*self._progress.waits(now), *self._offers.waits(now)]
            if self._copying_since is not None:
                since_s, limit_s = now - self._copying_since, self._settings.policy.publish_timeout_s
                left_s = max(0.0, limit_s - since_s)
                waits.append(wire.Wait(what="room for a snapshot", on="readers", since_s=since_s, seconds_left=left_s))
            self._link.report(offered=self._offers.offered, waits=tuple(waits))

    def _do(self, message: Order, buffers: tuple[bytes, ...]) -> None:
        if not self._link.work(message.lease):
            return
        self._tell()
        objection = self._progress.objection(message)
        try:
            if objection is not None:
                raise ConfigError(objection)
            match message:
                case wire.TrainStep():
                    self._link.answer(message.lease, self._train(message, buffers))
                case wire.PublishWeights():
                    self._publish(message)
                case wire.SaveCheckpoint():
                    self._link.answer(message.lease, self._save(message))
        except StarlingError as error:
            self._link.answer(message.lease, failure_of(message.lease, error, self._progress.version))

    def _train(self, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> wire.StepTrained:
        begin = time.perf_counter()
        metrics = self._supervise(message) if message.examples else self._reinforce(message, buffers)
        metrics["train_s"] = time.perf_counter() - begin
        self._progress.version = message.step
        self._link.report(
            version=message.step, gauges={"tokens_per_s": metrics["num_tokens"] / max(metrics["train_s"], 1e-9)}
        )
        return wire.StepTrained(lease=message.lease, step=message.step, metrics=metrics)

    def _supervise(self, message: wire.TrainStep) -> dict[str, float]:
        from starling.policy.train.groups import Example

        examples = [
            Example(
                np.array(encode_prompt(self._tokenizer, example), dtype=np.int32),
                np.array(encode_response(self._tokenizer, example), dtype=np.int32),
                example.id,
            )
            for example in message.examples
        ]
        return self._learner.supervise(examples, num_steps=message.num_steps, changes=message.settings)

    def _reinforce(self, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> dict[str, float]:
        from starling.policy.train.groups import groups_from_wire

        return self._learner.reinforce(
            groups_from_wire(message.groups, buffers),
            step=message.step,
            num_steps=message.num_steps,
            temperature=message.temperature,
            changes=message.settings,
        )

    def _publish(self, message: wire.PublishWeights) -> None:
        if self._offers.again(message.lease, message.version):
            return
        self._copying_since = time.monotonic()
        self._tell()
        try:
            publication = self._publisher.snapshot(message.version, self._learner.tensors)
        finally:
            self._copying_since = None
        self._progress.published = message.version
        self._offers.send(message.lease, publication)

    def _save(self, message: wire.SaveCheckpoint) -> wire.CheckpointSaved:
        from starling.policy.train.checkpoint import save_hf

        if message.state:
            folder = self._learner.save(self._folder / STATES, message.step)
        else:
            folder = self._folder / "checkpoints" / f"step-{message.step}"
            save_hf(self._learner.model, self._tokenizer, folder)
        return wire.CheckpointSaved(lease=message.lease, step=message.step, path=str(folder), state=message.state)


def _load(path: Path, settings: PolicyProcess) -> Any:
    """Load version 0 of the model."""
    from starling.policy.train.model import load_model, place

    model = load_model(
        path,
        init=settings.policy.init,
        seed=settings.run.seed,
        dtype=settings.model.dtype,
        trust_remote_code=settings.policy.trust_remote_code,
    )
    return place(model, settings.model.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a policy replica."""
    return serve("policy", PolicyProcess, Shell, argv)


if __name__ == "__main__":
    end_process(main())
