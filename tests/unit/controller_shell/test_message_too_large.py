"""A command that is larger than a message: the controller goes on, and its core is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from starling.common.net.link import ControllerLink, ReceivedCommand
from starling.common.net.settings import LinkSettings
from starling.common.service import ServiceArguments
from starling.common.wire import messages as wire
from starling.common.wire.codec import MAX_MESSAGE_BYTES
from starling.controller.core.events import NotSent, Send
from starling.controller.settings import ControllerProcess
from starling.controller.shell.main import Shell

DEADLINE_S = 20.0
RECIPE = {"run": {"id": "run-1"}, "data": {"source": "rows.jsonl"}, "network": {"curve": False}}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    arguments = ServiceArguments(name="controller", configs=(), folder=tmp_path, controller="", key=None, flags=())
    return Shell(ControllerProcess.model_validate(RECIPE), arguments)


def generate(lease: str, text: str) -> wire.GenerateGroup:
    return wire.GenerateGroup(
        lease=lease,
        purpose="train",
        prompt=wire.Prompt(id="p", text=text),
        num_completions=1,
        sampling=wire.Sampling(max_tokens=4),
        min_version=0,
    )


def test_command_that_no_message_holds_is_an_event_of_the_core(shell: Shell) -> None:
    settings = LinkSettings(name="rollout-0", run="run-1", controller=shell.hub.address, key=None)
    link = ControllerLink(settings, wire.Hello(role="rollout", host="h", pid=1, num_slots=2))
    link.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not shell.hub.poll(0.05):
            assert time.monotonic() < deadline
        shell._execute(Send("rollout-0", generate("generate:t0:1.1", "x" * MAX_MESSAGE_BYTES)), "")
        (event,) = shell._later_events
        assert isinstance(event, NotSent)
        assert (event.peer, event.lease) == ("rollout-0", "generate:t0:1.1")
        assert event.reason.startswith("a GenerateGroup of 16777")
        shell._execute(Send("rollout-0", generate("generate:t1:1.2", "x")), "")
        arrived = link.receive(DEADLINE_S)
        assert isinstance(arrived, ReceivedCommand)
        assert arrived.message.lease == "generate:t1:1.2"
    finally:
        link.close("the test is over")
        shell.hub.close()
