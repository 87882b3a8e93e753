"""Unknown peers, wrong keys and garbage are refused or counted, without effect on other peers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
import zmq
from hub_harness import NAMES, RUN, HubHarness, envelope, received, running_link, score, socket_of
from structlog.testing import capture_logs

from starling.common.errors import ConfigError, RefusedError, UnreachableError
from starling.common.net import curve
from starling.common.net.hub import hub
from starling.common.net.keyring import make_keys
from starling.common.net.limits import MAX_FRAMES
from starling.common.net.link import LinkClosed, ReceivedCommand
from starling.common.wire import codec
from starling.common.wire import messages as wire

HELLO = wire.Hello(role="rollout", host="h", pid=1, num_slots=1)


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def bare(message: object) -> bytes:
    """Encode a body that is no message of the protocol."""
    return msgspec.msgpack.encode(message)


GOOD = bare(envelope())
ROUTING = {"protocol": 1, "run": RUN, "sender": "rollout-1", "epoch": 1, "seq": 1}
BODY = bare(HELLO)

BAD_FRAMES: list[tuple[str, list[bytes], str]] = [
    ("one frame", [GOOD], "a message has at least 2 frames, this one has 1"),
    ("an empty frame", [b""], "a message has at least 2 frames, this one has 1"),
    ("empty frames", [b"", b""], "an envelope does not decode"),
    ("no MessagePack", [b"\xc1\xc1", BODY], "an envelope does not decode"),
    ("another map", [bare({"a": 1}), BODY], "an envelope does not decode"),
    ("a long envelope", [bare({**ROUTING, "cause": "x" * codec.MAX_ENVELOPE_BYTES}), BODY], "an envelope of"),
    (
        "another protocol",
        [bare(envelope(protocol=2)), BODY],
        "it speaks version 2 of the protocol, and the controller version 1; install",
    ),
    ("another run", [bare(envelope(run="run-2")), BODY], "this is run run-1, not run-2"),
    ("another name", [bare(envelope("rollout-0")), BODY], "rollout-0 does not own the key of its connection"),
    ("the controller", [bare(envelope("controller")), BODY], "controller does not own the key of its connection"),
    ("no message", [GOOD, b""], "a message does not decode"),
    ("garbage", [GOOD, bytes(range(256))], "a message does not decode"),
    ("an unknown tag", [GOOD, bare({"type": "telepathy"})], "a message does not decode"),
    ("a command", [GOOD, bare(score("score:1:0"))], "a message does not decode"),
    ("a field that is none", [GOOD, bare({"type": "leave", "reason": 7})], "a message does not decode"),
    ("deep nesting", [GOOD, b"\x91" * 100_000], "a message does not decode"),
    ("bad UTF-8", [GOOD, b"\x82\xa4type\xa5leave\xa6reason\xa2\xff\xff"], "a message does not decode"),
    ("a large message", [GOOD, bytes(codec.MAX_MESSAGE_BYTES + 1)], "a message of 16777217 bytes is over the limit"),
    ("a buffer too many", [GOOD, BODY, b"x"], "Hello has 1 buffers instead of 0"),
    ("a buffer too few", [GOOD, bare(wire.WeightsPublished(lease="l", version=1, publish_s=0.0))], "WeightsPublished"),
    (
        "a buffer of another size",
        [
            GOOD,
            bare(
                wire.GroupGenerated(
                    lease="l", trajectories=(), tensors=(wire.TensorMeta(dtype="int32", shape=(1,), nbytes=4),)
                )
            ),
            b"123",
        ],
        "GroupGenerated does not describe the sizes of the 1 buffers",
    ),
]


@pytest.mark.parametrize(("frames", "reason"), [(f, r) for _, f, r in BAD_FRAMES], ids=[n for n, _, _ in BAD_FRAMES])
def test_hub_counts_and_drops_invalid_frames(harness: HubHarness, keys: Path, frames: list[bytes], reason: str) -> None:
    with socket_of(harness.hub.address, keys) as socket, capture_logs() as logs:
        for _ in range(3):
            socket.send_multipart(frames)
        socket.send_multipart(codec.pack(envelope(), HELLO))
        arrival, _ = harness.next(wire.Hello)  # the same connection still serves
    assert arrival.envelope.sender == "rollout-1"
    ((kind, count),) = harness.hub.dropped.items()
    assert count == 3
    (warning,) = [entry for entry in logs if entry["event"] == "dropped a message"]  # logged once, counted each time
    assert warning["kind"] == kind
    assert reason in warning["reason"]


def test_garbage_of_one_peer_does_not_affect_another(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys) as link, socket_of(harness.hub.address, keys) as noisy:
        harness.welcome("rollout-0")
        for _, frames, _ in BAD_FRAMES[:-1]:
            noisy.send_multipart(frames)
        harness.poll_until(lambda: harness.hub.dropped.total() == len(BAD_FRAMES) - 1)
        harness.hub.send("rollout-0", score("score:1:0"))
        assert received(link, ReceivedCommand).message == score("score:1:0")
        harness.next(wire.Heartbeat, "rollout-0")


def test_key_that_sends_a_message_of_many_frames_connects_no_more(harness: HubHarness, keys: Path) -> None:
    with (
        capture_logs() as logs,
        running_link(harness.hub.address, keys) as link,
        socket_of(harness.hub.address, keys) as noisy,
    ):
        harness.welcome("rollout-0")
        noisy.send_multipart(codec.pack(envelope(), HELLO))
        harness.next(wire.Hello, "rollout-1")
        noisy.send_multipart([GOOD, BODY] + [b""] * MAX_FRAMES)
        harness.wait_disconnected("rollout-1")
        assert harness.hub.dropped == {"size": 1}
        with socket_of(harness.hub.address, keys) as again:
            with again.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
                harness.poll_until(lambda: bool(monitor.poll(0)))
            again.disable_monitor()
        harness.hub.send("rollout-0", score("score:1:0"))
        assert received(link, ReceivedCommand).message == score("score:1:0")
    [warning] = [entry for entry in logs if entry["event"] == "dropped a message"]
    assert f"a message of more than {MAX_FRAMES} frames is over the limit" in warning["reason"]


def test_message_with_as_many_frames_as_allowed_is_received(harness: HubHarness, keys: Path) -> None:
    tensors = tuple(wire.TensorMeta(dtype="uint8", shape=(0,), nbytes=0) for _ in range(MAX_FRAMES - 2))
    message = wire.GroupGenerated(lease="l", trajectories=(), tensors=tensors)
    with socket_of(harness.hub.address, keys) as socket:
        socket.send_multipart(codec.pack(envelope(), message, (b"",) * len(tensors)))
        harness.next(wire.GroupGenerated)


def test_hub_closes_the_connection_of_an_oversized_frame(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.codec, "MAX_BUFFER_BYTES", 1 << 20)
    harness = HubHarness(keys)
    try:
        with running_link(harness.hub.address, keys) as link, socket_of(harness.hub.address, keys) as noisy:
            harness.welcome("rollout-0")
            noisy.send_multipart(codec.pack(envelope(), HELLO))
            harness.next(wire.Hello, "rollout-1")
            noisy.send_multipart([*codec.pack(envelope(), HELLO), bytes(2 << 20)])
            harness.wait_disconnected("rollout-1")
            harness.hub.send("rollout-0", score("score:1:0"))
            received(link, ReceivedCommand)
    finally:
        harness.hub.close(0.0)


def test_hub_ignores_a_peer_without_a_key(harness: HubHarness, keys: Path) -> None:
    with socket_of(harness.hub.address, None) as stranger, running_link(harness.hub.address, keys):
        with contextlib.suppress(zmq.Again):  # its handshake may have failed already
            stranger.send_multipart(codec.pack(envelope(), HELLO), zmq.NOBLOCK)
        harness.welcome("rollout-0")
        assert not harness.hub.dropped, "its handshake has already failed"


def test_unknown_key_is_refused_with_one_sentence_and_logged_once(
    harness: HubHarness, keys: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "other", NAMES)
    stolen = curve.load_key(tmp_path / "other" / "rollout-0.json")
    stranger = msgspec.structs.replace(
        stolen, name="rollout-9", controller_public=curve.load_key(keys / "rollout-0.json").controller_public
    )
    with capture_logs() as logs:
        for _ in range(2):
            with running_link(harness.hub.address, keys, "rollout-9", key=stranger) as link:
                error = received(link, LinkClosed).error
                assert isinstance(error, RefusedError)
                assert str(error) == (
                    f"the controller at {harness.hub.address} refuses the key of rollout-9; "
                    "use the key file that was made for this name in this run"
                )
        with running_link(harness.hub.address, keys):
            harness.welcome("rollout-0")  # the hub still serves
    refused = [entry for entry in logs if entry["event"] == "refused an unknown key"]
    assert [entry["public_key"] for entry in refused] == [stranger.public]


def test_keys_of_another_run_get_no_answer(harness: HubHarness, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", NAMES)
    with running_link(harness.hub.address, tmp_path / "other", connect_s=1.0) as link:
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError | RefusedError)
    assert harness.hub.address in str(error)
    with running_link(harness.hub.address, keys):
        harness.welcome("rollout-0")


def test_key_of_another_name_is_refused(harness: HubHarness, keys: Path) -> None:
    with (
        running_link(harness.hub.address, keys, "rollout-1", key_of="rollout-0"),
        running_link(harness.hub.address, keys, "policy-0"),
    ):
        harness.poll_until(lambda: harness.hub.dropped["key"] > 0)
        harness.welcome("policy-0")
        assert not harness.hub.send("rollout-1", wire.RequestHello())


# --- links to a fake controller ------------------------------------------------------------------------------------


def test_link_drops_invalid_frames() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    sender = envelope("controller")
    try:
        with running_link(f"tcp://127.0.0.1:{port}", None) as link, capture_logs() as logs:
            assert router.poll(20_000)
            route = router.recv_multipart()[0]
            router.send_multipart([route, b"garbage"])
            router.send_multipart([route, b"garbage", b"garbage"])
            router.send_multipart([route, *codec.pack(envelope(run="run-2"), score("score:1:0"))])
            router.send_multipart([route, *codec.pack(envelope(protocol=2), score("score:2:0"))])
            router.send_multipart([route, bare(sender), bare({"type": "telepathy"})])
            router.send_multipart([route, bare(sender), bare(HELLO)])
            router.send_multipart([route, *codec.pack(sender, score("score:3:0"))])
            assert received(link, ReceivedCommand).message == score("score:3:0")
        reasons = [entry["reason"] for entry in logs if entry["event"] == "dropped a message"]
        assert len(reasons) == 6
        assert "protocol 1, run run-2: not ours" in reasons
    finally:
        router.close()
        context.term()


# --- key files -----------------------------------------------------------------------------------------------------


def test_key_files_are_private(keys: Path) -> None:
    assert keys.stat().st_mode & 0o777 == 0o700
    files = sorted(keys.iterdir())
    assert [path.name for path in files] == sorted(
        [f"{name}.json" for name in ("controller", *NAMES)] + ["allowed.json"]
    )
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_allow_list_has_every_replica_and_not_the_controller(keys: Path) -> None:
    allowed = curve.load_allowed(keys)
    assert sorted(allowed.values()) == sorted(NAMES)
    assert all(allowed[curve.load_key(keys / f"{name}.json").public] == name for name in NAMES)
    publics = {curve.load_key(keys / f"{name}.json").controller_public for name in NAMES}
    assert publics == {curve.load_key(keys / "controller.json").public}


def test_remade_keys_are_private(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ("policy-0",))
    (tmp_path / "keys" / "policy-0.json").chmod(0o644)
    make_keys(tmp_path / "keys", ("policy-0",), replace=True)
    assert curve.load_key(tmp_path / "keys" / "policy-0.json").name == "policy-0"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o601])
def test_key_file_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path / "keys", ("policy-0",))
    for name, load in (("policy-0.json", curve.load_key), ("allowed.json", lambda p: curve.load_allowed(p.parent))):
        path = tmp_path / "keys" / name
        path.chmod(mode)
        with pytest.raises(ConfigError, match=re.escape(f"run `chmod 600 {path}`")):
            load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_key_file_that_another_user_put_there_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ("policy-0",))
    path = tmp_path / "keys" / "allowed.json"
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match=f"belongs to another user .* run `chown 0 {path}`"):
        curve.load_allowed(path.parent)
    os.chown(path.parent, 65534, -1)  # whoever owns the folder owns the keys: root reads the run of another user
    assert list(curve.load_allowed(path.parent).values()) == ["policy-0"]


@pytest.mark.parametrize("content", [b"", b"no json", b"{}", b"[]", b'{"name": 1}'])
def test_malformed_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "policy-0.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a key file"):
        curve.load_key(path)


def test_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy-0\.json cannot be read \(No such file or directory\)"):
        curve.load_key(tmp_path / "policy-0.json")
