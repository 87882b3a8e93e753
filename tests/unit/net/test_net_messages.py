"""Messages between a healthy link and hub: welcome, commands once, results until released."""

from __future__ import annotations

import re
import select
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_harness import RUN, HubHarness, envelope, generated, received, running_link, score, socket_of

from starling.common.errors import ConfigError, RefusedError
from starling.common.net import link as link_module
from starling.common.net.hub.hub import MAX_RELEASES, Hub, PeerDisconnected, ReceivedMessage
from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.net.settings import LinkSettings
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.common.wire.telemetry import RunSnapshot


def test_hello_welcome_heartbeat(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        hello, message = harness.next(wire.Hello)
        assert (hello.envelope.sender, hello.buffers, message.version) == ("rollout-0", (b"layout",), 3)
        harness.next(wire.Hello)  # the hello is repeated until the welcome
        harness.hub.send("rollout-0", wire.Welcome(heartbeat_s=0.05, lease_s=10.0))
        arrival, heartbeat = harness.next(wire.Heartbeat)
        assert (heartbeat.leases, heartbeat.version) == ((), 3)
        assert arrival.envelope.incarnation == hello.envelope.incarnation
        assert arrival.envelope.seq > hello.envelope.seq
        link.report(version=4, gauges={"rows": 2.0})
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1] == wire.Heartbeat(version=4, gauges={"rows": 2.0}))
    assert harness.next(wire.Leave)[1].reason == "the test is over"


def test_duplicate_command_is_delivered_once(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        for lease in ("score:1:0", "score:1:0", "score:2:0", "score:1:0", "score:3:0"):
            harness.hub.send("rollout-0", score(lease))
        for lease in ("score:1:0", "score:2:0", "score:3:0"):
            assert received(link, ReceivedCommand).message == score(lease)
        held = tuple(wire.HeldLease(lease=f"score:{n}:0", phase="queued") for n in (1, 2, 3))
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1].leases == held)
        assert link.work("score:2:0")
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1].leases[1].phase == "working")


def test_heartbeat_reports_progress_until_the_lease_is_answered(harness: HubHarness, keys: Path) -> None:
    some = wire.LeaseProgress(bytes_done=3, bytes_total=7, seconds_left=1.5)
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        link.work("score:1:0")
        link.report_progress("score:1:0", some)
        working = (wire.HeldLease(lease="score:1:0", phase="working", progress=some),)
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1].leases == working)
        link.answer("score:1:0", generated("score:1:0"))
        answered = (wire.HeldLease(lease="score:1:0", phase="answered"),)
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1].leases == answered)


def test_no_heartbeat_reports_a_version_before_the_result_that_made_it(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller would commit a step by the version in the heartbeat, without the metrics of its result."""
    first, last = 4, 50
    update = link_module.ReportedState.update

    def update_slowly(*arguments: Any) -> None:
        update(*arguments)
        threading.Event().wait(0.003)  # longer than the time between two heartbeats

    monkeypatch.setattr(link_module.ReportedState, "update", update_slowly)
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0", heartbeat_s=0.001)
        for version in range(first, last):
            harness.hub.send("rollout-0", score(f"score:{version}:0"))
            lease = received(link, ReceivedCommand).message.lease
            assert link.work(lease)
            link.answer(lease, generated(lease), version=version)
        link.report(version=last)
        harness.poll_until(
            lambda: any(
                isinstance(event, ReceivedMessage)
                and isinstance(event.message, wire.Heartbeat)
                and event.message.version == last
                for event in harness.events
            )
        )
    answered, num_heartbeats = first - 1, 0
    for event in harness.events:
        assert isinstance(event, ReceivedMessage)
        if isinstance(event.message, wire.GroupGenerated):
            answered = int(event.message.lease.split(":")[1])
        elif isinstance(event.message, wire.Heartbeat) and event.message.version < last:
            assert event.message.version <= answered
            num_heartbeats += 1
    assert answered == last - 1
    assert num_heartbeats > 10


def test_buffers_travel_with_their_message_both_ways(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", wire.AdoptWeights(lease="adopt:1:0", version=1), buffers=(b"offer", b""))
        assert received(link, ReceivedCommand).buffers == (b"offer", b"")
        tensors = tuple(wire.TensorMeta(dtype="uint8", shape=(n,), nbytes=n) for n in (5, 0, 100_000))
        data = tuple(bytes([n % 251]) * meta.nbytes for n, meta in enumerate(tensors))
        link.answer("adopt:1:0", wire.GroupGenerated(lease="adopt:1:0", trajectories=(), tensors=tensors), data)
        assert harness.next(wire.GroupGenerated)[0].buffers == data


def test_result_is_resent_until_released(harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "RESEND_S", 0.1)
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        link.answer("score:1:0", generated("score:1:0"))
        for _ in range(3):
            assert harness.next(wire.GroupGenerated)[1] == generated("score:1:0")
        harness.hub.send("rollout-0", wire.ReleaseLeases(leases=("score:1:0",)))
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1].leases == ())
        harness.events.clear()
        for _ in range(5):  # a quarter of a second, enough for two repetitions
            harness.next(wire.Heartbeat)
        assert not harness.events


def test_result_that_no_message_holds_is_a_failure_of_its_lease(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RESEND_S", 0.1)
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        text = "x" * (codec.MAX_MESSAGE_BYTES // 2)
        meta = wire.TrajectoryMeta(status=wire.Status.OK, num_tokens=1, text=text, oldest_version=0, newest_version=0)
        large = wire.GroupGenerated(lease="score:1:0", trajectories=(meta, meta), tensors=())
        link.answer("score:1:0", large)
        for _ in range(3):  # resent until it is released, as any result
            failed = harness.next(wire.LeaseFailed)[1]
            assert (failed.lease, failed.status, failed.fatal) == ("score:1:0", wire.Status.INFRA_LOST, False)
            assert re.match(r"a GroupGenerated of \d+ bytes is over the limit of 16777216", failed.reason)
        harness.hub.send("rollout-0", score("score:2:0"))
        assert received(link, ReceivedCommand).message.lease == "score:2:0"


def test_duplicate_command_resends_its_result_at_once(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RESEND_S", 1e6)
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        link.answer("score:1:0", generated("score:1:0"))
        harness.next(wire.GroupGenerated)
        harness.hub.send("rollout-0", score("score:1:0"))
        harness.next(wire.GroupGenerated)


def test_lease_released_before_its_result_is_cancelled(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        harness.hub.send("rollout-0", wire.ReleaseLeases(leases=("score:1:0", "score:9:9")))
        assert received(link, CancelledLeases).leases == ("score:1:0",)
        assert not link.work("score:1:0")
        link.answer("score:1:0", generated("score:1:0"))
        harness.hub.send("rollout-0", score("score:2:0"))
        received(link, ReceivedCommand)
        link.answer("score:2:0", generated("score:2:0"))
        assert harness.next(wire.GroupGenerated)[1].lease == "score:2:0", "the first lease was cancelled"


def test_request_hello_is_answered_with_the_present_version(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        first = harness.welcome("rollout-0")
        link.report(version=7)
        harness.hub.send("rollout-0", wire.RequestHello())
        arrival, hello = harness.next(wire.Hello)
        assert (hello.version, arrival.buffers) == (7, (b"layout",))
        assert arrival.envelope.incarnation == first.envelope.incarnation


def test_drain_closes_the_link_without_an_error(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", wire.Drain(reason="the run is complete"))
        assert received(link, LinkClosed) == LinkClosed("the run is complete", None)


def test_refusal_closes_the_link_with_its_reason(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        harness.next(wire.Hello)
        harness.hub.send("rollout-0", wire.Refused(reason="it is no rollout"))
        error = received(link, LinkClosed).error
        assert isinstance(error, RefusedError)
        assert str(error) == "the controller refuses rollout-0: it is no rollout"


def test_replicas_receive_only_their_own_messages(harness: HubHarness, keys: Path) -> None:
    with (
        running_link(harness.hub.address, keys) as first,
        running_link(harness.hub.address, keys, "rollout-1") as second,
    ):
        harness.welcome("rollout-0")
        harness.welcome("rollout-1")
        harness.hub.send("rollout-1", score("score:2:0"))
        harness.hub.send("rollout-0", score("score:1:0"))
        assert received(first, ReceivedCommand).message.lease == "score:1:0"
        assert received(second, ReceivedCommand).message.lease == "score:2:0"


def test_new_incarnation_takes_over_the_name(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as old:
        before = harness.welcome("rollout-0")
        with running_link(harness.hub.address, keys) as new:
            harness.poll_until(lambda: harness.next(wire.Hello)[0].envelope.incarnation > before.envelope.incarnation)
            harness.hub.send("rollout-0", score("score:1:0"))
            assert received(new, ReceivedCommand).message.lease == "score:1:0"
            harness.poll_until(lambda: harness.hub.dropped["epoch"] > 0)
        assert old.receive(0.0) is None


def test_send_to_an_unknown_peer_returns_false(harness: HubHarness) -> None:
    assert not harness.hub.send("rollout-9", wire.Drain(reason="bye"))


def test_link_and_hub_work_without_curve() -> None:
    harness = HubHarness(None)
    try:
        with running_link(harness.hub.address, None) as link:
            harness.welcome("rollout-0")
            harness.hub.send("rollout-0", score("score:1:0"))
            assert received(link, ReceivedCommand).message == score("score:1:0")
    finally:
        harness.hub.close(0.0)


def test_port_in_use_is_one_sentence(harness: HubHarness) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+: .*; choose another port, or 0"):
        Hub(harness.hub.address, "run-2", 1, None)
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://256\.0\.0\.1:0: .*; set network.host"):
        Hub("tcp://256.0.0.1:0", "run-2", 1, None)


def test_telemetry_needs_a_key(harness: HubHarness, keys: Path) -> None:
    watch = TelemetrySubscriber(harness.hub.telemetry_address, keys / "reward-0.json")
    seen: list[RunSnapshot] = []
    snapshot = RunSnapshot(
        phase="rl", version=2, last_step=5, num_supervised_steps=0, elapsed_s=1.0, waiting_for="the policy"
    )

    def heard() -> bool:
        harness.hub.publish(msgspec.msgpack.encode(snapshot))
        latest = watch.latest(0.05)
        seen.extend([] if latest is None else [latest])
        return bool(seen)

    try:
        harness.poll_until(heard)
        assert seen == [snapshot]
    finally:
        watch.close()


def test_leave_is_delivered_before_the_disconnect(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys):
        harness.welcome("rollout-0")
    harness.wait_disconnected("rollout-0")
    kinds = [type(happened.message) for happened in harness.events if not isinstance(happened, PeerDisconnected)]
    assert kinds[-1] is wire.Leave
    assert isinstance(harness.events[-1], PeerDisconnected)


def test_close_leaves_no_thread(keys: Path) -> None:
    before = set(threading.enumerate())
    harness = HubHarness(keys)
    with running_link(harness.hub.address, keys), running_link(harness.hub.address, keys, "rollout-1"):
        harness.welcome("rollout-0")
        assert len(set(threading.enumerate()) - before) == 3, "two links and the authenticator"
    harness.hub.close()
    assert set(threading.enumerate()) == before


def test_link_that_was_never_started_closes() -> None:
    hello = wire.Hello(role="reward", host="h", pid=1, num_slots=1)
    link = ControllerLink(LinkSettings(name="reward-0", run=RUN, controller="tcp://127.0.0.1:1", key=None), hello)
    link.close("never mind")
    assert link.receive(0.0) is None


def test_releases_to_one_peer_are_batched(harness: HubHarness, keys: Path) -> None:
    leases = tuple(f"score:{n}:0" for n in range(3))
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        for lease in leases:
            harness.hub.send("rollout-0", score(lease))
            received(link, ReceivedCommand)
        for lease in leases:
            harness.hub.release("rollout-0", (lease,))
        harness.next(wire.Heartbeat)  # a hub has no thread, so it is polled like by a controller
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1].leases == ())
        assert received(link, CancelledLeases).leases == leases, "in one message"


def test_pending_releases_are_sent_before_drain(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys, "reward-0", buffers=()) as link:
        harness.welcome("reward-0")
        harness.hub.send("reward-0", wire.ScoreGroup(lease="score:1:0", prompt=wire.Prompt(id="p"), completions=()))
        received(link, ReceivedCommand)
        harness.hub.release("reward-0", ("score:1:0",))
        harness.hub.send("reward-0", wire.Drain(reason="the run is over"))
        assert received(link, CancelledLeases).leases == ("score:1:0",)
        assert received(link, LinkClosed).reason == "the run is over"


def test_no_release_is_sent_after_leave(harness: HubHarness, keys: Path) -> None:
    leases = tuple(f"score:{i}:0" for i in range(MAX_RELEASES))
    with socket_of(harness.hub.address, keys) as socket:  # a link would close, in an undefined order
        socket.send_multipart(codec.pack(envelope(seq=1), wire.Hello(role="rollout", host="h", pid=1, num_slots=1)))
        socket.send_multipart(codec.pack(envelope(seq=2), wire.Leave(reason="it was drained")))
        harness.next(wire.Leave, "rollout-1")
        harness.hub.release("rollout-1", leases)
        harness.hub.send("rollout-1", wire.Drain(reason="this is heard first"))
        assert socket.poll(20_000)
        assert isinstance(codec.unpack_down(socket.recv_multipart()), wire.Drain)
    harness.wait_disconnected("rollout-1")
    harness.hub.release("rollout-1", leases)
    assert harness.hub.num_unsent == 0


def test_wake_ends_a_waiting_poll(harness: HubHarness) -> None:
    threading.Timer(0.2, harness.hub.wake).start()
    assert harness.hub.poll(3600.0) == []


def test_release_is_sent_before_the_lease_is_granted_again(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        harness.hub.release("rollout-0", ("score:1:0",))
        harness.hub.send("rollout-0", score("score:1:0"))
        assert received(link, CancelledLeases).leases == ("score:1:0",)
        assert received(link, ReceivedCommand).message == score("score:1:0")
        assert link.work("score:1:0")


def test_receive_ends_on_wake_and_on_put(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        for event in (1, 2):
            threading.Timer(0.05, link.put, (event,)).start()
            assert link.receive(20.0) == event
        begin = time.monotonic()
        threading.Timer(0.05, link.wake).start()
        assert link.receive(20.0) is None
        assert time.monotonic() - begin < 19.0, "the wakeup ended the wait early"
        assert link.receive(0.0) is None


def test_receive_raises_the_error_of_the_heartbeat_thread(harness: HubHarness, keys: Path) -> None:
    """Without heartbeats the controller considers this replica lost, so the working thread must fail too."""
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        link.report(gauges={"tokens_per_s": object()})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="Encoding objects of type object is unsupported"):
            link.receive(20.0)


def test_polling_the_descriptors_misses_no_command(harness: HubHarness, keys: Path) -> None:
    """The heartbeat thread's sends consume the descriptor's edge, so it must wake the waiting thread itself."""
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0", heartbeat_s=0.002)
        poller = select.poll()
        for descriptor in link.descriptors:
            poller.register(descriptor, select.POLLIN)
        for number in range(300):
            while link.receive(0.0) is not None:
                pass
            harness.hub.send("rollout-0", score(f"score:{number}:0"))
            delivered = None
            while delivered is None:
                assert poller.poll(20_000), f"command {number} is in the socket, but no descriptor is readable"
                delivered = link.receive(0.0)
            link.answer(f"score:{number}:0", generated(f"score:{number}:0"))
            harness.events += harness.hub.poll(0.0)


def test_more_than_a_burst_arrives_once_and_in_order(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor does not signal messages after a burst: the working thread must read them itself."""
    monkeypatch.setattr(link_module, "LOOK_EVERY_S", 60.0)  # the keeper, which would find it too, is slow
    num = 3 * link_module.BURST + 1
    leases = [f"score:{number}:0" for number in range(num)]
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", wire.Welcome(heartbeat_s=60.0, lease_s=10.0))
        poller = select.poll()
        for descriptor in link.descriptors:
            poller.register(descriptor, select.POLLIN)
        for lease in [*leases, *leases]:
            harness.hub.send("rollout-0", score(lease))
        delivered: list[str] = []
        while len(delivered) < num:
            assert poller.poll(20_000), f"only {len(delivered)} of {num} commands were announced"
            while (inbound := link.receive(0.0)) is not None:
                delivered.append(inbound.message.lease)
                link.answer(inbound.message.lease, generated(inbound.message.lease))
        assert delivered == leases, "each message once and in order"
        unanswered = set(leases)
        while unanswered:
            unanswered.discard(harness.next(wire.GroupGenerated)[1].lease)


def test_rejoin_sends_hello_first_and_until_it_is_welcomed(harness: HubHarness, keys: Path) -> None:
    """Otherwise a slow controller would consider a sleeping replica awake."""
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        harness.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        beat, _ = harness.next(wire.Heartbeat)
        prefix, welcome = f"rollout-0/{beat.envelope.incarnation}/", wire.Welcome(heartbeat_s=0.05, lease_s=10.0)
        link.rejoin()
        link.answer("score:1:0", generated("score:1:0"))
        anew, _ = harness.next(wire.Hello)
        harness.next(wire.GroupGenerated)
        harness.hub.send("rollout-0", welcome, cause=f"{prefix}{beat.envelope.seq}")
        for _ in range(2):
            again, _ = harness.next(wire.Hello)
        assert again.envelope.seq > anew.envelope.seq
        harness.hub.send("rollout-0", welcome, cause=f"{prefix}{anew.envelope.seq}")
        harness.next(wire.Heartbeat)
