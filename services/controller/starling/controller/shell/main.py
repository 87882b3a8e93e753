"""The controller process: a ROUTER, a clock, and files around the core."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from starling.common.errors import StarlingError
from starling.common.net.curve import load_allowed
from starling.common.net.epoch import make_epoch
from starling.common.net.hub import Arrival, Hub, HubKeys
from starling.common.observe.process import StopSignal, end_process
from starling.common.service import ServiceArguments, serve
from starling.common.wire.messages import Prompt, Release
from starling.controller.core.events import (
    Command,
    Event,
    Finish,
    Note,
    PeerLost,
    Received,
    Send,
    StopRequested,
    Ticked,
)
from starling.controller.core.machine import Controller
from starling.controller.data.prompts import PromptSource, load_prompts
from starling.controller.settings import ControllerProcess
from starling.controller.shell.status import History, snapshot
from starling.controller.shell.timelines import Timelines

log = structlog.get_logger(__name__)

TICK_S = 0.25
QUIET_NOTES = frozenset({"step", "trained", "published", "adopted"})
"""Notes that come with every step: recorded, and shown on the screen, but not logged."""


class RunFailedError(StarlingError):
    """The run ended without having done what it was to do."""


class Shell:
    """Turns frames and time into events, and commands into frames and lines of files."""

    def __init__(self, settings: ControllerProcess, arguments: ServiceArguments) -> None:
        """Bind first, so that replicas can connect while the data loads."""
        network = settings.network
        key = arguments.key_file(network.curve)
        keys = HubKeys(key, load_allowed(arguments.folder / "keys")) if key is not None else None
        self.hub = Hub(f"tcp://{network.host}:{network.port}", settings.run.id, make_epoch(), keys)
        self._folder = arguments.folder
        self._settings = settings
        self._history = History(time.monotonic())
        self._timelines = Timelines(self._folder)
        self._finish: Finish | None = None
        self._controller: Controller | None = None

    def run(self, stop: StopSignal) -> None:
        """Serve until the run is over. Raises RunFailedError if it failed."""
        write_atomically(
            self._folder / "controller.json",
            json.dumps({"address": self.hub.address, "telemetry": self.hub.telemetry_address}),
        )
        try:
            with (self._folder / "metrics.jsonl").open("a", buffering=1) as self._metrics:
                prompts, examples, held_out = load_data(self._settings)
                self._controller = Controller(self._settings.plan(), prompts, examples, held_out)
                self._serve(self._controller, stop)
        finally:
            self.hub.close()
            self._timelines.write()
        assert self._finish is not None
        if not self._finish.ok:
            raise RunFailedError(self._finish.reason)

    def _serve(self, controller: Controller, stop: StopSignal) -> None:
        next_tick, told = time.monotonic(), False
        while self._finish is None:
            for happened in self.hub.poll(max(0.0, next_tick - time.monotonic())):
                now = time.monotonic()
                if isinstance(happened, Arrival):
                    envelope = happened.envelope
                    cause = f"{envelope.sender}/{envelope.epoch}/{envelope.seq}"
                    event = Received(now, envelope.sender, envelope.epoch, happened.message, happened.buffers)
                    self._take(controller, event, cause)
                else:
                    self._take(controller, PeerLost(now, happened.name), "lost")
            if stop and not told:
                told = True
                self._take(controller, StopRequested(time.monotonic(), f"stopped by {stop.name}"), "signal")
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._take(controller, Ticked(time.monotonic()), "tick")
                self._show(controller)
        self._show(controller)

    def _take(self, controller: Controller, event: Event, cause: str) -> None:
        for command in controller.step(event):
            self._do(command, cause)

    def _do(self, command: Command, cause: str) -> None:
        match command:
            case Send(peer=peer, message=Release(leases=leases)):
                self.hub.release(peer, leases)
            case Send(peer=peer, message=message, buffers=buffers):
                self.hub.send(peer, message, cause=cause, buffers=buffers)
            case Note(kind=kind, fields=fields):
                self._history.note(kind, fields)
                line = {"time": round(time.time(), 4), "kind": kind, **fields}
                self._metrics.write(json.dumps(line) + "\n")
                self._timelines.note(line)
                if kind not in QUIET_NOTES:
                    log.info(kind, **fields)
            case Finish():
                self._finish = command
                log.info("finished", ok=command.ok, reason=command.reason)

    def _show(self, controller: Controller) -> None:
        view = snapshot(controller.state, self._history, time.monotonic(), self.hub.dropped.total())
        self.hub.publish(msgspec.msgpack.encode(view))


def load_data(settings: ControllerProcess) -> tuple[PromptSource, PromptSource, list[Prompt]]:
    """Return the prompts to train on, the supervised examples, and the held-out prompts."""
    prompts = load_prompts(settings.data)
    examples = load_prompts(settings.sft.data) if settings.sft.data is not None else prompts
    return prompts, examples, prompts.held_out_prompts()


def write_atomically(path: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller."""
    return serve("controller", ControllerProcess, Shell, argv)


if __name__ == "__main__":
    end_process(main())
