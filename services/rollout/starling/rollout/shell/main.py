"""The rollout process: one thread holds the engine, and does everything else between two of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from starling.algo.text import decode
from starling.common.errors import StarlingError
from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.observe.process import STOP_S, StopRequested, StopSignal, end_process, end_within
from starling.common.service import ServiceArguments, check_model_folder, link_settings, serve
from starling.common.wire import messages as wire
from starling.rollout.api.start import start_api
from starling.rollout.core import machine as core
from starling.rollout.engine.base import EngineLostError
from starling.rollout.env.episodes.trajectory import PlayedGroup
from starling.rollout.env.registry import make_environment
from starling.rollout.settings import RolloutProcess
from starling.rollout.shell.adoption import Adoptions, PullEnded
from starling.rollout.shell.engines import EngineFactory, ThroughputMeter, hello_of, make_spec
from starling.rollout.shell.groups import Closeable, EngineGroups, EnvironmentGroups, LeaseWaits
from starling.rollout.shell.preparation import PreparedPrompt, PromptPreparation
from starling.rollout.shell.publisher import RolloutPublisher
from starling.rollout.shell.request_queue import EngineQueue

if TYPE_CHECKING:
    from pathlib import Path

    from starling.rollout.engine.base import Engine

log = structlog.get_logger(__name__)

IDLE_S = 0.5
LOOK_EVERY_S = 0.1


class Shell:
    """One rollout replica."""

    def __init__(self, settings: RolloutProcess, arguments: ServiceArguments) -> None:
        """Make the engine. Its weights come from the policy, unless it is to load those in the model's folder.

        Raises:
            ConfigError: it cannot be made.
        """
        own = settings.rollout
        path = check_model_folder(settings.model.path, weights=own.load_weights or settings.model.lora is not None)
        # Only now: importing torch and transformers takes seconds, which a wrong setting must not cost.
        from transformers import AutoTokenizer

        from starling.rollout.engine.model_config import read_config

        self._settings, self._arguments = settings, arguments
        trusted = settings.model.trust_remote_code
        config = read_config(path, trust_remote_code=trusted)
        self._environment = make_environment(own.environment)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        self._wake: Callable[[], None] = lambda: None  # until there is a link
        spec = make_spec(path, settings, arguments.name, config, self._tokenizer, lambda: self._wake())
        self._engines = EngineFactory(spec)
        self._engine: Engine = self._engines.make()
        try:
            self._stand_around(path, config)
        except BaseException:  # whatever it is: no process of the engine's must be left
            self._engine.close()
            raise
        log.info("ready", engine=own.engine, version=self._engine.version, max_model_len=self._engine.max_model_len)

    def _stand_around(self, path: Path, config: Any) -> None:
        """Make what stands around the engine; `config` is that of the model in the folder `path`."""
        from starling.rollout.engine.multimodal.prompts import PromptEncoder
        from starling.weightsync.plan.layout import encode

        settings, arguments, own = self._settings, self._arguments, self._settings.rollout
        self._lost: EngineLostError | None = None
        self._samples = True
        """The engine is not paused."""
        self._core = core.RolloutMachine(
            version=self._engine.version,
            mode=own.adoption,
            in_place=not own.double_buffer,
            pull_s=own.pull_timeout_s,
            version_s=own.version_timeout_s,
            finish_s=own.finish_timeout_s,
        )
        layout = self._engine.layout()
        self._link = ControllerLink(link_settings(arguments, settings), hello_of(own, self._engine), (encode(layout),))
        self._wake = self._link.wake
        self._groups = EngineGroups(self._link.answer, lambda ids: decode(self._tokenizer, ids))
        self._adoptions = Adoptions(self._link, timeout_s=own.pull_timeout_s, mode=own.adoption)
        tools = self._environment.tools if self._environment else ()
        encoder = PromptEncoder(config, self._tokenizer, path, max_media_bytes=own.max_media_bytes, tools=tools)
        self._preparation = PromptPreparation(encoder.encode, self._link.put, own.media_timeout_s)
        self._serving = RolloutPublisher(layout, settings, self._link.answer, self._link.put, self._changed)
        self._door = EngineQueue(self._link.wake)
        self._player: EnvironmentGroups | None = None
        self._api: Closeable | None = None
        self._speed, self._told_at = ThroughputMeter(), float("-inf")

    def _start_environment(self) -> EnvironmentGroups | None:
        """Start what plays groups, where `rollout.environment.kind` names an environment."""
        if self._environment is None:
            return None
        settings, longest = self._settings.rollout.environment, self._engine.max_model_len
        return EnvironmentGroups(
            settings, self._environment, self._tokenizer, self._door, self._link.put, max_model_len=longest
        )

    def _start_api(self) -> Closeable | None:
        """Start the HTTP server over the door, where it is enabled or the environment has need of it."""
        parts = (self._engines.spec, self._tokenizer, self._engine.max_model_len, self._door, self._environment)
        return start_api(*parts, folder=self._arguments.folder, version=lambda: self._core.version)

    def run(self, stop: StopSignal) -> None:
        """Serve until the controller says that nothing more will come."""
        stop.install(self._link.wake)
        self._link.start()
        reason, ended = "its service failed", False
        try:
            self._player, self._api = self._start_environment(), self._start_api()
            while not stop and not ended:
                inbound = self._link.receive(0.0 if self._may_step else IDLE_S)
                while inbound is not None and not ended:
                    if isinstance(inbound, LinkClosed):
                        reason, ended = inbound.reason, True
                        if inbound.error is not None:
                            raise inbound.error
                    self._act(self._decide(inbound))
                    inbound = self._link.receive(0.0)
                with suppress(StopRequested):  # then the loop ends
                    if not ended:
                        self._turn(stop)
            if stop:
                reason = f"stopped by {stop.name}"
            self._interrupt(reason)
            for lease in () if self._player is None else self._player.leave(reason, self._link.answer):
                self._act(self._core.finished(lease))
        finally:
            end_within(STOP_S)
            self._close(reason)

    def _close(self, reason: str) -> None:
        for started in (self._door, self._player, self._api):  # the door first: they wait for what it has
            if started is not None:
                started.close()
        shares_devices = self._link.fence.shares_devices
        if not shares_devices:
            self._link.close(reason)
        self._adoptions.close()  # ends a pull, for which the engine would wait
        self._preparation.close()
        self._engine.close()
        if shares_devices:  # who has left has given them away: others wake at once
            self._link.close(reason)
        self._serving.close()

    @property
    def _may_step(self) -> bool:
        # Where it may not generate, it is paused: then it may still have ended something, or be lost. One that is lost
        # asleep is made again when it is woken: until then others have its devices.
        return self._engine.ready and not self._core.asleep

    def _turn(self, stop: StopSignal) -> None:
        """Do what is to be done between two looks at the messages."""
        try:
            self._door.serve(self._engine, admit=self._core.may_generate)
            if self._may_step:
                self._step()
        except EngineLostError as error:
            self._lost = error
        self._look()
        if self._lost is not None:
            self._replace_engine(self._lost, stop)

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
        if not self._link.fence.may_keep_devices:
            self._act(self._core.doze())
        waits = [*self._core.waits(now), *self._serving.waits(now)]
        waiting: list[LeaseWaits] = [self._preparation] if self._player is None else [self._preparation, self._player]
        for each in waiting:
            for lease, reason in each.expire(now):
                self._groups.forget(self._engine, lease)
                self._act([core.FailLease(lease, reason), *self._core.finished(lease)])
            waits += each.waits(now)
        self._link.report(version=self._core.version, offered=self._serving.offered, waits=tuple(waits))
        if gauges := self._speed.measured(self._engine, now):
            self._link.report(gauges=gauges)

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
            case PreparedPrompt():
                return self._begin(inbound) if self._preparation.take(inbound.message.lease) else []
            case PlayedGroup(lease=lease):
                assert self._player is not None, "it has put it"
                return self._core.finished(lease) if self._player.tell(inbound, self._link.answer) else []
            case PullEnded(lease=lease, problem=problem):
                return self._core.pulled(lease, problem)
            case CancelledLeases(leases=leases):
                return self._core.given_up(leases)
            case Future():
                inbound.result()  # raises what no answer could tell
                return []
            case LinkClosed():
                return []
            case _:
                raise AssertionError(f"a rollout is not sent {inbound!r}")

    def _act(self, actions: Sequence[core.Action]) -> None:
        """Carry out what was decided, and what is decided on the way."""
        self._adoptions.note(draining=self._core.adoption == "draining")
        left = list(actions)
        while left:
            action = left.pop(0)
            try:
                left += self._carry_out(action)
            except EngineLostError as error:  # another one is made when the rest is done
                self._lost = error
                if isinstance(action, core.FallAsleep | core.WakeUp):
                    if not action.lease:
                        raise  # another one would be made on devices that others may have by now
                    self._fail(action.lease, str(error))
        self._pace()

    def _carry_out(self, action: core.Action) -> list[core.Action]:
        match action:
            case core.StartGroup():
                return self._take_up(action)
            case core.PullWeights():
                self._pace()
                self._adoptions.pull(self._engine, action)
            case core.SwitchWeights():
                return self._adoptions.switch(self._engine, self._core, action)
            case core.PublishVersion(message=message):
                self._publish(message)
            case core.CancelGroup(lease=lease):
                self._forget(lease)
            case core.FailLease(lease=lease, reason=reason):
                self._fail(lease, reason)
            case core.FallAsleep():
                return self._fall_asleep(action)
            case core.WakeUp():
                return self._wake_up(action)
        return []

    def _pace(self) -> None:
        """Have the engine sample when it may, and only then."""
        if self._player is not None:
            self._player.hold(not self._core.may_generate)
        if self._samples == self._core.may_generate or self._lost is not None:
            return
        self._samples = not self._samples
        try:
            (self._engine.resume if self._samples else self._engine.pause)()
        except EngineLostError as error:
            self._lost = error

    # --- groups ----------------------------------------------------------------------------------------------------

    def _take_up(self, order: core.StartGroup) -> list[core.Action]:
        try:
            self._groups.come(order)
        except StarlingError as error:
            return self._refuse(order.message, error)
        prepared = self._preparation.begin(order.message)
        return [] if prepared is None else self._begin(prepared)

    def _begin(self, prepared: PreparedPrompt) -> list[core.Action]:
        """Give a group whose prompt is prepared to the engine, or to the environment."""
        lease = prepared.message.lease
        try:
            if self._player is not None and prepared.problem is None:
                self._player.begin(prepared)
            else:
                self._groups.begin(self._engine, prepared)
        except EngineLostError as error:
            self._lost = error
            return self._core.finished(lease)
        except StarlingError as error:
            return self._refuse(prepared.message, error)
        return []

    def _refuse(self, message: wire.GenerateGroup, error: StarlingError) -> list[core.Action]:
        """The prompt is at fault, not this replica: no other would do better."""
        self._fail(message.lease, f"prompt {message.prompt.id}: {error}", fatal=True)
        return self._core.finished(message.lease)

    def _step(self) -> None:
        for result in self._engine.step():
            if self._door.settle(result):
                continue
            reason = self._groups.end(result)
            failed = [] if reason is None else [core.FailLease(result.lease, reason)]
            self._act([*failed, *self._core.finished(result.lease)])

    def _forget(self, lease: str) -> None:
        self._preparation.forget(lease)
        if self._player is not None:
            self._player.forget(lease)
        self._groups.forget(self._engine, lease)

    def _interrupt(self, reason: str, *, lost: bool = False) -> None:
        """Hand over the controller's groups, and keep what others asked for until the engine goes on."""
        for lease in self._groups.interrupt(self._engine, reason, self._preparation.forget_all(), lost=lost):
            self._act(self._core.finished(lease))
        self._door.take_back(self._engine)

    # --- weights ---------------------------------------------------------------------------------------------------

    def _publish(self, message: wire.PublishWeights) -> None:
        try:
            self._serving.publish(message, self._engine.tensors())
        except StarlingError as error:
            self._fail(message.lease, str(error))
        self._told_at = float("-inf")

    # --- the engine ------------------------------------------------------------------------------------------------

    def _replace_engine(self, error: EngineLostError, stop: StopSignal) -> None:
        """Go on with another engine. What the lost one ran is for other replicas, as far as it had come.

        Raises:
            Stopped: there is no other one any more.
        """
        log.error("engine_lost", reason=str(error))
        self._act(self._core.lost())
        self._interrupt(f"its engine was lost: {error}", lost=True)
        self._adoptions.void()
        left_s = self._settings.rollout.vllm.start_timeout_s
        wait = wire.Wait(what="another engine to start", on="engine", since_s=0.0, seconds_left=left_s)
        self._link.report(version=-1, waits=(wait,))
        self._engine = self._engines.replace(self._engine, error, stop)
        self._lost, self._samples = None, True
        self._speed.begin()
        actions = self._core.replaced(self._engine.version)
        self._link.report(version=self._core.version)
        self._act(actions)

    def _fall_asleep(self, order: core.FallAsleep) -> list[core.Action]:
        if not order.again:
            self._pace()
            self._interrupt("it gives its devices to others")
            self._adoptions.stop()
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
        if not order.again:
            self._link.fence.keeps_devices(True)
            self._engine.wake_up()
            actions = self._core.woken(self._engine.version)
            self._link.report(version=self._core.version)
        self._link.answer(order.lease, wire.Woken(lease=order.lease))
        return actions

    def _fail(self, lease: str, reason: str, *, fatal: bool = False) -> None:
        log.warning("failed", lease=lease, reason=reason)
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=reason, fatal=fatal)
        self._link.answer(lease, failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rollout replica."""
    return serve("rollout", RolloutProcess, Shell, argv)


if __name__ == "__main__":
    end_process(main())
