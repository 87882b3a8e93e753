"""The rollout process: token by token, with everything else between two tokens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from starling.algo.text import decode
from starling.common.errors import StarlingError
from starling.common.net.link import Command, Ended, GivenUp, Link
from starling.common.observe.process import STOP_S, StopSignal, end_process, end_within
from starling.common.service import (
    ServiceArguments,
    check_model_folder,
    host_name,
    link_settings,
    serve,
)
from starling.common.wire import messages as wire
from starling.rollout.core.rollout import Action, Fail, Forget, Generate, Publish, Pull, Rollout, Switch
from starling.rollout.settings import RolloutProcess, RolloutSettings
from starling.rollout.shell.answer import answer_of, progress_of
from starling.rollout.shell.preparation import Preparation, Prepared
from starling.rollout.shell.serving import Serving

if TYPE_CHECKING:
    from starling.rollout.engine.transformers import TransformersEngine

log = structlog.get_logger(__name__)

IDLE_S = 0.5
GAUGE_EVERY_S = 0.5
LOOK_EVERY_S = 0.1
SPLIT = ("prepare_s", "read_s", "unpack_s", "digest_s", "confirm_s")
"""What is told of a pull beside its length."""


@dataclass(frozen=True)
class Pulled:
    """The pulling thread has done."""

    lease: str
    problem: str | None
    seconds: float = 0.0
    size_bytes: int = 0
    sent_bytes: int = 0
    transport: str = ""
    lanes: tuple[str, ...] = ()
    split: dict[str, float] = field(default_factory=dict)


class Shell:
    """One rollout replica of one rank."""

    def __init__(self, settings: RolloutProcess, arguments: ServiceArguments) -> None:
        """Build the model. Its weights come from the policy; only what is below adapters it loads.

        Raises:
            ConfigError: it cannot be built.
        """
        lora = settings.model.lora
        path = check_model_folder(settings.model.path, weights=lora is not None)
        # Only now: importing torch and transformers takes seconds, which a wrong setting must not cost.
        from transformers import AutoTokenizer

        from starling.rollout.engine.model import build_model
        from starling.rollout.engine.vision import PromptEncoder
        from starling.weightsync.execute.pull import Puller
        from starling.weightsync.layout import encode
        from starling.weightsync.layouts.adapters import base_of
        from starling.weightsync.layouts.modules import layout_of

        self._settings = settings
        trusted = settings.model.trust_remote_code
        model = build_model(
            path,
            dtype=settings.model.dtype,
            device=settings.model.device,
            weights=False,
            lora=lora,
            trust_remote_code=trusted,
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        self._engine = _make_engine(model, self._tokenizer, path, settings.rollout)
        layout = layout_of(self._engine.tensors(), arguments.name, base=base_of(model, lora))
        self._puller = Puller(layout, digests=settings.weights.digests)
        self._offers: dict[str, Any] = {}
        self._temperatures: dict[str, float] = {}
        """Of the groups that the engine has, by lease."""
        self._core = Rollout(pull_s=settings.rollout.pull_timeout_s, version_s=settings.rollout.version_timeout_s)
        self._pulls = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._closing = threading.Event()
        self._link = Link(link_settings(arguments, settings), _hello(settings.rollout), (encode(layout),))
        encoder = PromptEncoder(model, self._tokenizer, path, max_media_bytes=settings.rollout.max_media_bytes)
        self._preparation = Preparation(encoder.encode, self._link.put, settings.rollout.media_timeout_s)
        self._serving = Serving(layout, settings, self._link.answer, self._link.put, self._changed)
        self._num_tokens, self._gauged_at, self._told_at = 0, time.monotonic(), float("-inf")
        self._last_pull = Pulled("", None)
        log.info("ready", max_model_len=self._engine.max_model_len)

    def run(self, stop: StopSignal) -> None:
        """Serve until the controller says that nothing more will come."""
        stop.install(self._link.wake)
        self._link.start()
        reason, ended = "its service failed", False
        try:
            while not stop and not ended:
                inbound = self._link.receive(0.0 if self._may_generate else IDLE_S)
                while inbound is not None and not ended:
                    if isinstance(inbound, Ended):
                        reason, ended = inbound.reason, True
                        if inbound.error is not None:
                            raise inbound.error
                    self._act(self._decide(inbound))
                    inbound = self._link.receive(0.0)
                if self._may_generate and not ended:
                    self._generate()
                self._look()
            if stop:
                reason = f"stopped by {stop.name}"
        finally:
            end_within(STOP_S)
            self._closing.set()  # ends a pull, for which the puller would wait
            self._link.close(reason)
            self._pulls.shutdown(wait=False, cancel_futures=True)
            self._preparation.close()
            self._puller.close()
            self._serving.close()

    @property
    def _may_generate(self) -> bool:
        """The engine may sample, and has what to sample: not all that it was given may be prepared yet."""
        return self._core.may_generate and bool(self._engine.num_running or self._engine.num_waiting)

    def _changed(self) -> None:
        """Look at once, when another thread has news for the heartbeats."""
        self._told_at = float("-inf")
        self._link.wake()

    def _look(self) -> None:
        """Now and then, see what has been waited for too long, and let the heartbeats tell what is."""
        now = time.monotonic()
        if now - self._told_at < LOOK_EVERY_S:
            return
        self._told_at = now
        self._act(self._core.tick(now))
        for lease, reason in self._preparation.expire(now):
            self._core.finished(lease)
            self._fail(lease, reason)
        waits = (*self._core.waits(now), *self._preparation.waits(now), *self._serving.waits(now))
        self._link.report(offered=self._serving.offered, waits=waits)

    def _decide(self, inbound: Any) -> list[Action]:
        match inbound:
            case Command(message=wire.GenerateGroup() as message):
                return self._core.generate(message) if self._link.work(message.lease) else []
            case Command(message=wire.AdoptWeights() as message, buffers=buffers):
                return self._core.adopt(message, buffers) if self._link.work(message.lease) else []
            case Command(message=wire.PublishWeights() as message):
                return self._core.publish(message) if self._link.work(message.lease) else []
            case Prepared():
                if self._preparation.take(inbound.message.lease):
                    self._begin(inbound)
                return []
            case Pulled():
                self._last_pull = inbound
                return self._core.pulled(inbound.lease, inbound.problem)
            case GivenUp(leases=leases):
                return self._core.given_up(leases)
            case Future():
                inbound.result()  # raises what no answer could tell
                return []
            case Ended():
                return []
            case _:
                raise AssertionError(f"a rollout is not sent {inbound!r}")

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Generate(message=message):
                    prepared = self._preparation.begin(message)
                    if prepared is not None:
                        self._begin(prepared)
                case Pull(message=message, buffers=buffers):
                    self._pull(message, buffers)
                case Switch(lease=lease):
                    self._switch(lease)
                case Publish(message=message):
                    self._publish(message)
                case Forget(lease=lease):
                    self._preparation.forget(lease)
                    self._engine.cancel(lease)
                    self._temperatures.pop(lease, None)
                case Fail(lease=lease, reason=reason):
                    self._fail(lease, reason)

    def _begin(self, prepared: Prepared) -> None:
        from starling.rollout.engine.base import GroupRequest, RequestError

        message = prepared.message
        try:
            if prepared.problem is not None:
                raise RequestError(prepared.problem)
            self._engine.add(
                GroupRequest(message.lease, prepared.ids, message.num_completions, message.sampling, prepared.tensors)
            )
            self._temperatures[message.lease] = message.sampling.temperature
        except StarlingError as error:
            # The prompt is at fault, not this replica: no other would do better.
            self._core.finished(message.lease)
            self._fail(message.lease, f"prompt {message.prompt.id}: {error}", fatal=True)

    def _generate(self) -> None:
        from starling.rollout.engine.base import GroupFailed

        self._num_tokens += self._engine.num_running
        for result in self._engine.step():
            self._core.finished(result.lease)
            temperature = self._temperatures.pop(result.lease, -1.0)
            if isinstance(result, GroupFailed):
                self._fail(result.lease, result.reason)
            else:
                message, buffers = answer_of(result, lambda ids: decode(self._tokenizer, ids), temperature)
                self._link.answer(result.lease, message, buffers)
        elapsed = time.monotonic() - self._gauged_at
        if elapsed >= GAUGE_EVERY_S:
            self._link.report(gauges={"tokens_per_s": self._num_tokens / elapsed, "rows": self._engine.num_running})
            self._num_tokens, self._gauged_at = 0, time.monotonic()

    def _pull(self, message: wire.AdoptWeights, buffers: tuple[bytes, ...]) -> None:
        from starling.weightsync.offer import decode_offer
        from starling.weightsync.plan import decode_plan

        def work() -> Pulled:
            offer, plan = decode_offer(buffers[0]), decode_plan(buffers[1])
            self._offers = {message.lease: offer}
            report = self._puller.pull(
                offer,
                plan,
                deadline_s=self._settings.rollout.pull_timeout_s,
                cancelled=self._closing.is_set,
                progress=lambda progress: self._link.advance(message.lease, progress_of(progress)),
            )
            split = {name: getattr(report, name) for name in SPLIT}
            return Pulled(
                lease=message.lease,
                problem=None,
                seconds=report.seconds,
                size_bytes=report.size_bytes,
                sent_bytes=sum(report.bytes_by_source.values()),
                transport=report.transport,
                lanes=report.lanes,
                split=split,
            )

        def done(future: Future[Pulled]) -> None:
            error = future.exception()
            if error is None:
                self._link.put(future.result())
            else:
                # Whatever went wrong, the old version stays in use and the controller is told.
                self._link.put(Pulled(message.lease, f"{type(error).__name__}: {error}"))

        self._pulls.submit(work).add_done_callback(done)

    def _publish(self, message: wire.PublishWeights) -> None:
        try:
            self._serving.publish(message, self._engine.tensors())
        except StarlingError as error:
            self._fail(message.lease, str(error))
        self._told_at = float("-inf")

    def _switch(self, lease: str) -> None:
        begin = time.perf_counter()
        offer = self._offers.pop(lease)
        version = self._puller.switch(self._engine.tensors())
        root = self._puller.attest(self._engine.tensors(), offer)
        self._engine.set_version(version)
        pause_s = time.perf_counter() - begin
        actions = self._core.switched(lease, proven=root == offer.root)
        self._link.report(version=self._core.version)
        if self._core.version == version:
            pull = self._last_pull
            adopted = wire.WeightsAdopted(
                lease=lease,
                version=version,
                root=root,
                pull_s=pull.seconds,
                pause_s=pause_s,
                size_bytes=pull.size_bytes,
                sent_bytes=pull.sent_bytes,
                transport=pull.transport,
                lanes=pull.lanes,
                split=pull.split,
            )
            self._link.answer(lease, adopted)
        self._act(actions)

    def _fail(self, lease: str, reason: str, *, fatal: bool = False) -> None:
        log.warning("failed", lease=lease, reason=reason)
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=reason, fatal=fatal)
        self._link.answer(lease, failed)


def _make_engine(model: Any, tokenizer: Any, path: Path, settings: RolloutSettings) -> TransformersEngine:
    from starling.rollout.engine.model import end_token_ids, trained_length
    from starling.rollout.engine.transformers import TransformersEngine

    return TransformersEngine(
        model,
        eos_token_ids=end_token_ids(tokenizer, path),
        max_rows=settings.max_rows,
        max_model_len=trained_length(model.config, settings.max_model_len),
        exclusive=settings.exclusive,
    )


def _hello(settings: RolloutSettings) -> wire.Hello:
    return wire.Hello(
        role="rollout",
        host=host_name(),
        pid=os.getpid(),
        num_slots=settings.num_slots,
        has_layout=True,
        serves=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rollout replica."""
    return serve("rollout", RolloutProcess, Shell, argv)


if __name__ == "__main__":
    end_process(main())
