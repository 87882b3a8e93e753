"""Limits of a peer: allowed messages, sizes and rates, and peers that exceed them or do not read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import structlog
import zmq
from hub_harness import NAMES, RUN, HubHarness, envelope, received, running_link, score, socket_of
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from starling.common.errors import RefusedError, WireError
from starling.common.net.hub import hub
from starling.common.net.hub.hub import SEND_HIGH_WATER, PeerDisconnected
from starling.common.net.keyring import make_keys
from starling.common.net.limits import MAX_BYTES, PEER_ROLES, PeerAllowance, RateLimits, role_of, rules_of
from starling.common.net.link import LinkClosed, ReceivedCommand
from starling.common.net.operator import OperatorClient
from starling.common.wire import codec
from starling.common.wire import messages as wire

SAMPLES: tuple[wire.Up, ...] = (
    wire.Hello(role="rollout", host="h", pid=1),
    wire.Heartbeat(),
    wire.Leave(reason="r"),
    wire.GroupGenerated(lease="l", trajectories=(), tensors=()),
    wire.GroupInterrupted(lease="l", reason="r", partial=(), tensors=()),
    wire.GroupScored(lease="l", rewards=(), statuses=()),
    wire.TokensScored(lease="l", tensors=()),
    wire.StepTrained(lease="l", step=1, metrics={}),
    wire.WeightsPublished(lease="l", version=1, publish_s=0.0),
    wire.RelayOffered(lease="l", version=1, problem="p"),
    wire.WeightsAdopted(lease="l", version=1, root="r", pull_s=0.0, pause_s=0.0, size_bytes=0, transport="memory"),
    wire.Slept(lease="l"),
    wire.Woken(lease="l"),
    wire.CheckpointSaved(lease="l", step=1, path="p"),
    wire.LeaseFailed(lease="l", status=wire.Status.INFRA_LOST, reason="r"),
    wire.QueryRun(request="r", about="why"),
    wire.ChangeSetting(request="r", key="k", value=1),
    wire.RequestEvaluation(request="r"),
    wire.RequestCheckpoint(request="r"),
    wire.RequestStop(request="r", reason="r"),
    wire.RequestProfile(request="0" * 32, targets=("policy-0",)),
    wire.ScaleReplicas(request="r", role="rollout", num=2),
    wire.DrainReplica(request="r", name="rollout-0"),
)
TIGHT = RateLimits(messages_per_s=20.0, burst_messages=60.0, bytes_per_s=1e6, burst_bytes=1e6, patience=200)


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture
def strict(keys: Path) -> Iterator[HubHarness]:
    harness = HubHarness(keys, limits=TIGHT)
    yield harness
    harness.hub.close(0.0)


# --- roles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["policy-0", "rollout-1", "reward-0", "teacher-0", "operator-0"])
def test_role_may_send_its_own_messages_only(tmp_path: Path, name: str) -> None:
    make_keys(tmp_path / "keys", (name, "rollout-9"))
    harness = HubHarness(tmp_path / "keys")
    role = role_of(name)
    may_say = wire.ALLOWED_MESSAGES.get(role, frozenset())  # type: ignore[call-overload]
    samples = [sample for sample in SAMPLES if type(sample) is not wire.Hello or role == "rollout"]
    allowed = [type(sample) for sample in samples if type(sample) in may_say]
    try:
        with socket_of(harness.hub.address, tmp_path / "keys", name) as socket, capture_logs() as logs:
            for sample in samples:
                buffers = (b"offer",) if isinstance(sample, wire.WeightsPublished) else ()
                socket.send_multipart(codec.pack(envelope(name), sample, buffers))
            # The last message is a valid one of another peer, which was not affected.
            harness.poll_until(
                lambda: harness.hub.dropped["role"] + harness.hub.dropped["size"] + len(harness.events) == len(samples)
            )
        assert [type(arrival.message) for arrival in harness.events] == allowed
        assert harness.hub.dropped.total() == len(samples) - len(allowed)
        assert len([entry for entry in logs if entry["event"] == "dropped a message"]) == 1, (
            "one log line for all messages"
        )
    finally:
        harness.hub.close(0.0)


def test_every_message_has_a_sender_and_every_role_a_size_limit() -> None:
    # The hub itself answers a request for settings, and shows a fault: they are no events.
    assert {type(sample) for sample in SAMPLES} == set(get_args(wire.Up)) - {wire.RequestSettings, wire.ReportFault}
    assert frozenset().union(*wire.ALLOWED_MESSAGES.values()) == set(get_args(wire.Up))
    assert set(MAX_BYTES) == set(PEER_ROLES)


def test_hello_with_another_role_than_the_name_is_refused(harness: HubHarness, keys: Path) -> None:
    with socket_of(harness.hub.address, keys, "rollout-1") as socket:
        socket.send_multipart(codec.pack(envelope(), wire.Hello(role="policy", host="h", pid=1)))
        harness.poll_until(lambda: harness.hub.dropped["role"] == 1)
        refused = codec.unpack_down(socket.recv_multipart())
    assert refused == wire.Refused(reason="rollout-1 has the name of a rollout, but joins as a policy")
    assert not harness.events


@pytest.mark.parametrize("name", ["", "rollout", "rollout-", "rollout-01", "rollout--1", "rollout-1 ", "Rollout-1"])
def test_malformed_name_is_refused(name: str) -> None:
    assert role_of(name) is None
    with pytest.raises(WireError, match="is not a valid name: it must be ROLE-NUMBER, ROLE being policy, rollout"):
        rules_of(name)


def test_message_larger_than_the_run_allows_is_dropped(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MIN_BYTES", 1 << 10)
    harness = HubHarness(keys)
    try:
        with socket_of(harness.hub.address, keys, "rollout-1") as socket:
            socket.send_multipart(codec.pack(envelope("rollout-1"), SAMPLES[0]))
            harness.next(wire.Hello)
            harness.hub.limit_messages("rollout", 1 << 20)
            tensor = wire.TensorMeta(dtype="uint8", shape=(1 << 20,), nbytes=1 << 20)
            message = wire.GroupGenerated(lease="l", trajectories=(), tensors=(tensor,))
            socket.send_multipart(codec.pack(envelope("rollout-1"), message, (bytes(1 << 20),)))
            harness.poll_until(lambda: harness.hub.dropped == {"size": 1})
            harness.hub.limit_messages("rollout", 2 << 20)
            socket.send_multipart(codec.pack(envelope("rollout-1"), message, (bytes(1 << 20),)))
            harness.next(wire.GroupGenerated)
    finally:
        harness.hub.close(0.0)


def test_large_message_of_an_operator_is_dropped(harness: HubHarness, keys: Path) -> None:
    large = wire.RequestStop(request="r", reason="x" * MAX_BYTES["operator"])
    with socket_of(harness.hub.address, keys, "operator-0") as socket:
        socket.send_multipart(codec.pack(envelope("operator-0"), large))
        socket.send_multipart(codec.pack(envelope("operator-0"), wire.QueryRun(request="r", about="why")))
        harness.next(wire.QueryRun, "operator-0")
    assert harness.hub.dropped == {"size": 1}


def test_operator_of_another_run_is_refused_with_the_reason(harness: HubHarness, keys: Path) -> None:
    found: list[Exception] = []

    def ask() -> None:
        with OperatorClient(harness.hub.address, keys / "operator-0.json", "run-2") as line:
            try:
                line.ask(wire.QueryRun(request="r", about="why"), 20.0)
            except RefusedError as error:
                found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    harness.poll_until(lambda: bool(found))
    thread.join()
    assert str(found[0]) == f"the controller refuses operator-0: this is run {RUN}, not run-2"


# --- rates ---------------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 2_000)


@given(st.lists(st.tuples(st.floats(0, 5), SIZES), max_size=200))
def test_allowance_bounds_messages_to_the_rate_plus_two_bursts(messages: list[tuple[float, int]]) -> None:
    limits = RateLimits(messages_per_s=3.0, bytes_per_s=500.0, burst_messages=5.0, burst_bytes=4_000.0)
    allowance, now, taken = PeerAllowance(limits, 0.0), 0.0, []
    for pause_s, size in messages:
        now += pause_s
        allowance.num_messages -= 1
        allowance.num_bytes -= size
        if (allowance.num_messages < 0 or allowance.num_bytes < 0) and not allowance.refill(now):
            allowance.refund(size)
        else:
            taken.append((now, size))
        assert allowance.num_messages >= 0
        assert allowance.num_bytes >= 0
    for first in range(len(taken)):
        elapsed = now - taken[first][0]
        assert len(taken) - first <= 2 * limits.burst_messages + 3.0 * elapsed + 1e-6
        assert sum(size for _, size in taken[first:]) <= 2 * limits.burst_bytes + 500.0 * elapsed + 1e-6


def test_allowance_accepts_everything_within_the_rate() -> None:
    allowance = PeerAllowance(RateLimits(messages_per_s=10.0, burst_messages=10.0), 0.0)
    for number in range(1000):
        allowance.num_messages -= 1
        assert allowance.num_messages >= 0 or allowance.refill(number / 10)


def test_allowance_bounds_the_time_of_messages() -> None:
    allowance, now, taken = PeerAllowance(RateLimits(seconds_per_s=0.5, burst_seconds=10.0), 0.0), 0.0, 0
    for _ in range(1000):
        now += 0.1
        if allowance.is_within() or allowance.refill(now):
            allowance.take_time(1.0)
            taken += 1
    assert 10 + 0.5 * 100 - 2 <= taken <= 10 + 0.5 * 100 + 2, "messages that take a second each, ten a second"


def test_one_long_message_leaves_a_short_debt() -> None:
    allowance = PeerAllowance(RateLimits(seconds_per_s=0.5, burst_seconds=10.0), 0.0)
    allowance.take_time(1000.0)
    assert not allowance.refill(1.9)
    assert allowance.refill(2.1), "it would seem to be silent"


def test_policy_is_not_charged_for_work_that_others_may_have_caused(keys: Path) -> None:
    harness = HubHarness(keys, limits=RateLimits(seconds_per_s=0.0))
    with socket_of(harness.hub.address, keys, "policy-0") as policy:
        policy.send_multipart(codec.pack(envelope("policy-0"), wire.Heartbeat()))
        harness.next(wire.Heartbeat, "policy-0")
        harness.hub.charge("policy-0", 1e6)
        policy.send_multipart(codec.pack(envelope("policy-0", seq=2), wire.Heartbeat()))
        harness.next(wire.Heartbeat, "policy-0")
    harness.hub.close(0.0)


def test_messages_of_a_peer_that_takes_too_much_time_are_dropped(keys: Path) -> None:
    harness = HubHarness(keys, limits=RateLimits(seconds_per_s=0.0))
    with running_link(harness.hub.address, keys) as link, socket_of(harness.hub.address, keys) as slow:
        harness.welcome("rollout-0", heartbeat_s=0.1)
        slow.send_multipart(codec.pack(envelope(), wire.Heartbeat()))
        harness.next(wire.Heartbeat, "rollout-1")
        harness.hub.charge("rollout-1", 1e6)
        slow.send_multipart(codec.pack(envelope(), wire.Heartbeat()))
        harness.poll_until(lambda: harness.hub.dropped["rate"] == 1)
        harness.hub.send("rollout-0", score("score:1:1.1"))
        assert received(link, ReceivedCommand).message.lease == "score:1:1.1"
        harness.next(wire.Heartbeat, "rollout-0")
    harness.hub.close(0.0)


def test_time_to_decode_a_large_message_counts(harness: HubHarness, keys: Path) -> None:
    with socket_of(harness.hub.address, keys) as socket:
        socket.send_multipart(codec.pack(envelope(), wire.Heartbeat(gauges={str(n): 0.0 for n in range(10_000)})))
        harness.next(wire.Heartbeat)
    allowance = harness.hub._peers.by_name["rollout-1"].allowance
    assert allowance.num_seconds < allowance.limits.burst_seconds


def test_flood_is_dropped_then_disconnected_without_loss_for_others(strict: HubHarness, keys: Path) -> None:
    with (
        capture_logs() as logs,
        running_link(strict.hub.address, keys) as link,
        socket_of(strict.hub.address, keys) as noisy,
    ):
        strict.welcome("rollout-0", heartbeat_s=0.1)
        noisy.linger = 0
        beat = codec.pack(envelope(), wire.Heartbeat())
        for _ in range(TIGHT.patience + 200):
            noisy.send_multipart(beat)
        strict.wait_disconnected("rollout-1")
        assert strict.hub.dropped["rate"] >= TIGHT.patience
        strict.hub.send("rollout-0", score("score:1:1.1"))
        assert received(link, ReceivedCommand).message.lease == "score:1:1.1"
        strict.next(wire.Heartbeat, "rollout-0")
    events = [(entry["event"], entry["peer"]) for entry in logs if entry["log_level"] == "warning"]
    assert events == [
        ("a peer exceeds its rate limit", "rollout-1"),
        ("closed the connection of a peer that exceeds its rate limit", "rollout-1"),
    ]


def test_bytes_beyond_the_rate_are_dropped(strict: HubHarness, keys: Path) -> None:
    tensors = (wire.TensorMeta(dtype="uint8", shape=(300_000,), nbytes=300_000),)
    message = wire.GroupGenerated(lease="l", trajectories=(), tensors=tensors)
    with socket_of(strict.hub.address, keys) as socket:
        for _ in range(10):
            socket.send_multipart(codec.pack(envelope(), message, (bytes(300_000),)))
        strict.poll_until(lambda: len(strict.events) + strict.hub.dropped["rate"] == 10)
    assert len(strict.events) < 10


def test_garbage_counts_against_the_rate(strict: HubHarness, keys: Path) -> None:
    with socket_of(strict.hub.address, keys) as socket:
        for _ in range(100):
            socket.send_multipart([b"gar", b"bage"])
        strict.poll_until(lambda: strict.hub.dropped.total() == 100)
    assert strict.hub.dropped["form"] >= TIGHT.burst_messages
    assert strict.hub.dropped["rate"] > 0


def test_peer_that_does_not_read_costs_one_log_line_and_bounded_memory(harness: HubHarness, keys: Path) -> None:
    big = wire.ScoreGroup(lease="score:1:1.1", prompt=wire.Prompt(id="p", text="x" * 20_000), completions=())
    with (
        running_link(harness.hub.address, keys) as link,
        socket_of(harness.hub.address, keys) as stalled,
        capture_logs() as logs,
    ):
        harness.welcome("rollout-0")
        stalled.send_multipart(codec.pack(envelope(), wire.Hello(role="rollout", host="h", pid=1)))
        harness.next(wire.Hello, "rollout-1")
        sent = [harness.hub.send("rollout-1", big) for _ in range(4 * SEND_HIGH_WATER + 2000)]
        assert not all(sent), "the limit was never exceeded"
        harness.hub.send("rollout-0", score("score:1:1.1"))
        assert received(link, ReceivedCommand)
        stalled.rcvtimeo = 200
        with contextlib.suppress(zmq.Again):  # it reads everything
            while True:
                stalled.recv_multipart()
        assert harness.hub.send("rollout-1", wire.RequestHello())
    assert harness.hub.num_unsent == sent.count(False)
    assert [entry["peer"] for entry in logs if entry["event"] == "cannot send"] == ["rollout-1"]


def test_refused_operator_gets_the_reason(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", NAMES)
    harness = HubHarness(tmp_path / "keys")
    try:
        with socket_of(harness.hub.address, tmp_path / "keys", "reward-0") as socket:
            socket.send_multipart(codec.pack(envelope("reward-0"), wire.StepTrained(lease="l", step=1, metrics={})))
            harness.poll_until(lambda: harness.hub.dropped["role"] == 1)
            answer = codec.unpack_down(socket.recv_multipart())
        assert answer == wire.Refused(reason="reward-0 may not send StepTrained: its role is reward")
        assert not [happened for happened in harness.events if not isinstance(happened, PeerDisconnected)]
    finally:
        harness.hub.close(0.0)


def test_refused_link_delivers_link_closed(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", NAMES)
    harness = HubHarness(tmp_path / "keys")
    try:
        with running_link(harness.hub.address, tmp_path / "keys", "operator-0") as link:  # operators send no hello
            harness.poll_until(lambda: harness.hub.dropped["role"] > 0)
            error = received(link, LinkClosed).error
        assert isinstance(error, RefusedError)
        assert str(error) == "the controller refuses operator-0: operator-0 may not send Hello: its role is operator"
    finally:
        harness.hub.close(0.0)
