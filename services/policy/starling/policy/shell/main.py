"""The policy process: takes steps from the controller, one at a time, and publishes versions.

Publishing a version stops it for the copy into a snapshot; the offer follows from another thread (`offers.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import structlog

from starling.algo.text import encode_prompt, encode_response
from starling.common.errors import ConfigError, StarlingError
from starling.common.net.link import Command, Ended, GivenUp, Link
from starling.common.observe.process import StopSignal, end_process
from starling.common.service import (
    ServiceArguments,
    check_model_folder,
    host_name,
    link_settings,
    serve,
)
from starling.common.settings import ModelSettings, ServiceSettings, WeightsSettings
from starling.common.wire import messages as wire
from starling.policy.core.progress import Progress
from starling.policy.settings import PolicySettings
from starling.policy.shell.offers import Offers, failure_of

log = structlog.get_logger(__name__)

IDLE_S = 0.5


class PolicyProcess(ServiceSettings):
    """All settings of a policy process."""

    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    policy: PolicySettings = PolicySettings()


class Shell:
    """One policy replica of one rank."""

    def __init__(self, settings: PolicyProcess, arguments: ServiceArguments) -> None:
        """Load the model and prepare its publication. Raises ConfigError when it cannot be loaded."""
        path = check_model_folder(settings.model.path, weights=settings.policy.init == "pretrained")
        # Only now: importing torch and transformers takes seconds, which a wrong setting must not cost.
        from transformers import AutoTokenizer

        from starling.policy.train.model import load_model, place, tensors
        from starling.weightsync.execute.publish import Publisher
        from starling.weightsync.layout import encode
        from starling.weightsync.layouts.modules import layout_of

        self._settings, self._folder = settings, arguments.folder
        self._model = place(
            load_model(
                path,
                init=settings.policy.init,
                seed=settings.run.seed,
                dtype=settings.model.dtype,
                trust_remote_code=settings.policy.trust_remote_code,
            ),
            settings.model.device,
        )
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._tensors = tensors(self._model)
        layout = layout_of(self._tensors, arguments.name)
        self._publisher = Publisher(
            layout,
            transport=settings.policy.transport,
            host=settings.network.host,
            read_timeout_s=settings.policy.publish_timeout_s,
            digests=settings.weights.digests,
            delta_versions=settings.policy.delta_versions,
        )
        self._trainer: Any = None
        self._progress = Progress()
        self._held_back: Command | None = None
        hello = wire.Hello(role="policy", host=host_name(), pid=os.getpid(), version=0, has_layout=True)
        self._link = Link(link_settings(arguments, settings), hello, (encode(layout),))
        self._offers = Offers(self._link.answer, self._link.put)
        log.info("ready", parameters=self._model.num_parameters(), transport=settings.policy.transport)

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
                else:
                    assert inbound is None or isinstance(inbound, GivenUp)  # a step cannot be given up half-way
            reason = f"stopped by {stop.name}"
        finally:
            self._link.close(reason)
            self._publisher.close()
            self._offers.close()

    def _take(self, command: Command) -> None:
        """Do a command, and then the one that had come before its time."""
        message = command.message
        assert isinstance(message, wire.TrainStep | wire.PublishWeights | wire.SaveCheckpoint), message
        if self._progress.must_wait(message):
            self._held_back = command
            return
        self._do(message, command.buffers)
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            self._take(held_back)

    def _do(
        self, message: wire.TrainStep | wire.PublishWeights | wire.SaveCheckpoint, buffers: tuple[bytes, ...]
    ) -> None:
        if not self._link.work(message.lease):
            return
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
            self._link.answer(message.lease, failure_of(message.lease, error))

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
        from starling.policy.train.sft import SftTrainer

        examples = [
            Example(
                np.array(encode_prompt(self._tokenizer, example), dtype=np.int32),
                np.array(encode_response(self._tokenizer, example), dtype=np.int32),
                example.id,
            )
            for example in message.examples
        ]
        trainer = self._trainer_of(
            SftTrainer,
            lambda: SftTrainer(self._model, self._settings.policy, total_steps=message.num_steps),
        )
        metrics: dict[str, float] = trainer.step(examples)
        return metrics

    def _reinforce(self, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> dict[str, float]:
        from starling.policy.train.groups import groups_from_wire
        from starling.policy.train.step import GrpoTrainer

        groups = groups_from_wire(message.groups, buffers)
        trainer = self._trainer_of(
            GrpoTrainer,
            lambda: GrpoTrainer(self._model, self._settings.policy, total_steps=message.num_steps),
        )
        metrics: dict[str, float] = trainer.step(groups, step=message.step, temperature=message.temperature)
        return metrics

    def _trainer_of(self, kind: type, make: Callable[[], Any]) -> Any:
        """Return the trainer of this kind of step; the first step of another kind begins with a fresh one."""
        if not isinstance(self._trainer, kind):
            self._trainer = make()
        return self._trainer

    def _publish(self, message: wire.PublishWeights) -> None:
        publication = self._publisher.snapshot(message.version, self._tensors)
        self._progress.published = message.version
        self._offers.send(message.lease, publication)

    def _save(self, message: wire.SaveCheckpoint) -> wire.CheckpointSaved:
        from starling.policy.train.checkpoint import save_hf

        folder = self._folder / "checkpoints" / f"step-{message.step}"
        save_hf(self._model, self._tokenizer, folder)
        return wire.CheckpointSaved(lease=message.lease, step=message.step, path=str(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a policy replica."""
    return serve("policy", PolicyProcess, Shell, argv)


if __name__ == "__main__":
    end_process(main())
