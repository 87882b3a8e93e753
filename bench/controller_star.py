"""Starling's side of controller_side_by_side.py: `Hub` and `ControllerLink`, each in a process of its own, with CURVE.

    python controller_star.py controller KEYS | policy ADDRESS KEYS | rollouts ADDRESS KEYS NUM

A rollout converts its result to arrays and a message like the service, and answers its lease; the controller decodes
the message, forwards the group to the policy as a step without touching its buffers, releases the lease and sends the
rollout its next group; the policy reads the group like the service. `Forwarding` replaces the controller's core, which
also scores groups, freezes steps and writes a journal, between `Hub.poll` and `Hub.send`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from controller_traffic import GROUP_SIZE, POLICY, Result, hear, lead_rollouts, make_result, say

from starling.common.ids import lease_id
from starling.common.net import curve
from starling.common.net.hub.hub import Hub, HubKeys, ReceivedMessage
from starling.common.net.link import ControllerLink, LinkClosed, ReceivedCommand
from starling.common.net.settings import LinkSettings
from starling.common.wire import codec, messages
from starling.common.wire.messages import Down, Status

RUN = "bench/attempt-1/0badcafe"
SEND_WITHIN_S = 10.0
POLL_S = 0.05
"""Interval at which the controller reads standard input between measurements."""
ANSWER_TIMEOUT_S = 60.0
SILENCE_S = 3600.0
"""Longer than this side is suspended while the other one is measured."""
HEARTBEAT_S, LEASE_S = 1.0, 60.0
VERSION = 7


# --- the controller ------------------------------------------------------------------------------------------------


class Forwarding:
    """Decides the commands and releases that follow from a message."""

    def __init__(self) -> None:
        """Start without replicas."""
        self._num_leases = 0
        self._met: set[str] = set()
        self._open: set[str] = set()
        """Leases of groups being generated. A resumed rollout may send a result twice; it counts once."""

    def step(self, arrival: ReceivedMessage) -> list[tuple[str, Down, tuple[bytes, ...]]]:
        """Return the messages that follow from `arrival`."""
        sender = arrival.envelope.sender
        match arrival.message:
            case messages.Hello(role=role):
                welcome = messages.Welcome(heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S)
                is_new = role == "rollout" and sender not in self._met
                self._met.add(sender)
                first: list[tuple[str, Down, tuple[bytes, ...]]] = [(sender, self.generate(), ())] if is_new else []
                return [(sender, welcome, ()), *first]
            case messages.Heartbeat():
                return [(sender, messages.Welcome(heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S), ())]
            case messages.GroupGenerated() as group if group.lease in self._open:
                self._open.remove(group.lease)
                return [
                    (POLICY, self.train(sender, group), arrival.buffers),
                    (sender, messages.ReleaseLeases(leases=(group.lease,)), ()),
                    (sender, self.generate(), ()),
                ]
            case messages.StepTrained(lease=lease) | messages.GroupGenerated(lease=lease):
                return [(sender, messages.ReleaseLeases(leases=(lease,)), ())]
            case _:
                return []

    def generate(self) -> messages.GenerateGroup:
        """Return the command for one more group."""
        self._num_leases += 1
        lease = lease_id("generate", f"t{self._num_leases}", 1, self._num_leases)
        self._open.add(lease)
        return messages.GenerateGroup(
            lease=lease,
            purpose="train",
            prompt=messages.Prompt(id=f"train/0/{self._num_leases}", text="Spell this word backward: benchmark"),
            num_completions=GROUP_SIZE,
            sampling=messages.Sampling(max_tokens=256, seed=self._num_leases),
            min_version=VERSION,
        )

    def train(self, sender: str, group: messages.GroupGenerated) -> messages.TrainStep:
        """Return the step that trains one group; its prompt is named after the rollout."""
        self._num_leases += 1
        trajectories = tuple(
            messages.ScoredTrajectory(
                num_tokens=made.num_tokens, oldest_version=made.oldest_version, reward=float(i % 2), status=made.status
            )
            for i, made in enumerate(group.trajectories)
        )
        return messages.TrainStep(
            lease=lease_id("train", self._num_leases, 1, self._num_leases),
            step=self._num_leases,
            groups=(messages.TrainGroup(prompt_id=sender, trajectories=trajectories, tensors=group.tensors),),
        )


def data_fetch(number: int) -> messages.TrainStep:
    """Return a command to train a step, with about as many bytes as the other side's."""
    return messages.TrainStep(lease=lease_id("train", number, 2, number), step=number, num_steps=1000, ordinal=number)


def run_controller(folder: Path) -> None:
    """Forward results, and send commands on request."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is for the answers
    keys = HubKeys(curve.load_key(folder / "controller.json"), curve.load_allowed(folder))
    hub, forwarding = Hub("tcp://127.0.0.1:0", RUN, 1_700_000_000_000, keys), Forwarding()
    requests: deque[dict[str, int]] = deque()
    threading.Thread(target=lambda: collect(requests), daemon=True).start()
    say(address=hub.address, **sizes())
    sent: list[str] = []
    while True:
        match requests.popleft() if requests else {}:
            case {"commands": num}:
                sent = send_commands(hub, num)
            case {"release": _}:
                hub.release(POLICY, tuple(sent))
            case {"end": _}:
                return
        for happened in hub.poll(POLL_S):
            if not isinstance(happened, ReceivedMessage):
                raise SystemExit(f"{happened.name} is gone")
            cause = f"{happened.envelope.sender}/{happened.envelope.incarnation}/{happened.envelope.seq}"
            for name, message, buffers in forwarding.step(happened):
                if isinstance(message, messages.ReleaseLeases):
                    hub.release(name, message.leases)
                else:
                    hub.send(name, message, cause=cause, buffers=buffers)


def send_commands(hub: Hub, num: int) -> list[str]:
    """Send commands to the policy one by one; report the start time, and return their leases."""
    begin = time.monotonic_ns()
    leases = []
    for number in range(begin, begin + num):  # so that leases are unique
        command = data_fetch(number)
        deadline = time.monotonic() + SEND_WITHIN_S
        while not hub.send(POLICY, command):  # the queue is full; the policy has to read some first
            if time.monotonic() > deadline:
                raise SystemExit(f"{command.lease} was not sent within {SEND_WITHIN_S:g} s")
            time.sleep(0.0002)
        leases.append(command.lease)
    say(began=begin)
    return leases


def collect(requests: deque[dict[str, int]]) -> None:
    """Read requests of the benchmark."""
    try:
        while True:
            requests.append(hear())
    finally:
        requests.append({"end": 0})


def sizes() -> dict[str, int]:
    """Return the bytes of a group and of a command."""
    message, buffers = group_of("generate:t1:1.1", make_result(0))
    envelope = messages.Envelope(protocol=1, run=RUN, sender="rollout-0", incarnation=1_700_000_000_000, seq=1000)
    return {
        "group_bytes": sum(map(len, codec.pack(envelope, message, buffers))),
        "command_bytes": sum(map(len, codec.pack(envelope, data_fetch(1000)))),
    }


# --- the replicas --------------------------------------------------------------------------------------------------


def group_of(lease: str, result: Result) -> tuple[messages.GroupGenerated, tuple[bytes, ...]]:
    """Return the message of a result and its buffers, encoded like in the rollout service."""
    from starling.rollout.engine.base import (  # imports torch, which the controller does not need
        Completion,
        GroupResult,
    )
    from starling.rollout.shell.results import generated_message

    completions = tuple(
        Completion(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.full(len(token_ids), VERSION, dtype=np.int32),
            status=Status.OK,
        )
        for token_ids, logprobs in zip(result.token_ids, result.logprobs, strict=True)
    )
    texts = iter(result.texts)  # decoded by the engine, as on the other side
    return generated_message(
        GroupResult(lease, np.array(result.prompt_ids, dtype=np.int32), completions), lambda token_ids: next(texts)
    )


def open_link(address: str, folder: Path, name: str, role: messages.Role) -> ControllerLink:
    """Return a started link of one replica."""
    settings = LinkSettings(
        name=name, run=RUN, controller=address, key=curve.load_key(folder / f"{name}.json"), silence_s=SILENCE_S
    )
    link = ControllerLink(settings, messages.Hello(role=role, host="here", pid=1, num_slots=1))
    link.start()
    return link


def next_command(link: ControllerLink) -> ReceivedCommand:
    """Return the next command, and skip other messages."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline:
        match link.receive(deadline - time.monotonic()):
            case ReceivedCommand() as command:
                return command
            case LinkClosed(reason=reason):
                raise SystemExit(reason)
    raise SystemExit(f"no command within {ANSWER_TIMEOUT_S:g} s")


class StarLine:
    """A rollout's link to the controller."""

    def __init__(self, address: str, folder: Path, index: int) -> None:
        """Connect."""
        self._link, self._lease = open_link(address, folder, f"rollout-{index}", "rollout"), ""

    def acquire(self) -> None:
        """Wait for the next group to generate."""
        self._lease = next_command(self._link).message.lease
        self._link.work(self._lease)

    def deliver(self, result: Result, *, tokens: bool) -> None:
        """Answer the lease; the tokens are always sent."""
        self._link.answer(self._lease, *group_of(self._lease, result))


def run_policy(address: str, folder: Path) -> None:
    """Run the policy: receive the expected messages, and report when each was decoded."""
    from starling.policy.train.data.groups import groups_from_wire

    link = open_link(address, folder, POLICY, "policy")
    say(joined=POLICY)
    while True:
        told = hear()
        if "commands" in told:  # the controller releases the leases; the other side sends no answers either
            for _ in range(told["commands"]):
                next_command(link)
            say(decoded=time.monotonic_ns())
            continue
        decoded, leases = [0] * told["results"], []
        for _ in range(told["results"]):
            command = next_command(link)
            message: Any = command.message
            groups = groups_from_wire(message.groups, command.buffers)
            decoded[int(groups[0].prompt_id.rpartition("-")[2])] = time.monotonic_ns()
            leases.append(message.lease)
        for lease in leases:
            link.work(lease)
            link.answer(lease, messages.StepTrained(lease=lease, step=1, metrics={}))
        say(decoded=decoded)


def main() -> None:
    """Run one of the processes of this side."""
    role, *rest = sys.argv[1:]
    folder = Path(rest[-1] if role != "rollouts" else rest[1])
    if role == "controller":
        run_controller(folder)
    elif role == "policy":
        run_policy(rest[0], folder)
    else:
        group_of("generate:t1:1.1", make_result(0))  # imports torch once, for all that are forked
        lead_rollouts(int(rest[2]), lambda index: StarLine(rest[0], folder, index))


if __name__ == "__main__":
    main()
