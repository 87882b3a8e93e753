"""Settings for a process that joins: the hub answers the holder of a key, which believes only what fits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import xxhash
from hub_harness import DEADLINE_S, HubHarness, envelope, running_link, socket_of

from starling.common.errors import RefusedError, UnreachableError
from starling.common.net import curve, role_settings
from starling.common.net.hub import hub
from starling.common.net.role_settings import request_settings, withhold_secrets
from starling.common.wire import codec
from starling.common.wire import messages as wire

CONFIG = b"{}"
FILE = wire.ModelFile(name="config.json", nbytes=2, digest=xxhash.xxh3_128(CONFIG).hexdigest())
SETTINGS = wire.RoleSettings(sections={"run": {"id": "run-1"}, "rollout": {"num_slots": 3}})


def source(role: str, with_model: bool) -> tuple[wire.RoleSettings, codec.Buffers]:
    assert role == "rollout"
    return (msgspec.structs.replace(SETTINGS, files=(FILE,)), (CONFIG,)) if with_model else (SETTINGS, ())


@contextmanager
def polled(harness: HubHarness) -> Iterator[None]:
    """Poll the hub in a thread, which alone uses it meanwhile."""
    over = threading.Event()

    def poll() -> None:
        while not over.is_set():
            harness.events += harness.hub.poll(0.05)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def ask(
    harness: HubHarness,
    keys: Path,
    *,
    key_of: str = "rollout-1",
    with_model: bool = False,
    timeout_s: float = DEADLINE_S,
) -> tuple[wire.RoleSettings, dict[str, bytes]]:
    key = curve.load_key(keys / f"{key_of}.json")
    return request_settings(harness.hub.address, key, "rollout-1", with_model=with_model, timeout_s=timeout_s)


def test_holder_of_a_key_gets_settings_without_becoming_a_peer(harness: HubHarness, keys: Path) -> None:
    harness.hub.settings_source = source
    with polled(harness):
        assert ask(harness, keys) == (SETTINGS, {})
        settings, files = ask(harness, keys, with_model=True)
    assert settings.files == (FILE,)
    assert files == {"config.json": CONFIG}
    assert harness.events == []
    assert not harness.hub.dropped


def test_name_that_is_connected_is_reported_and_keeps_its_connection(harness: HubHarness, keys: Path) -> None:
    harness.hub.settings_source = source
    with running_link(harness.hub.address, keys, "rollout-1"):
        harness.welcome("rollout-1")
        with polled(harness):
            assert ask(harness, keys)[0].connected
        assert harness.hub.send("rollout-1", wire.Welcome(heartbeat_s=0.05, lease_s=10.0))
        harness.next(wire.Heartbeat, "rollout-1")
    assert not harness.hub.dropped


def test_message_without_a_run_that_asks_for_no_settings_is_refused(harness: HubHarness, keys: Path) -> None:
    with socket_of(harness.hub.address, keys) as socket:
        hello = wire.Hello(role="rollout", host="h", pid=1)
        socket.send_multipart(codec.pack(envelope(run=""), hello))
        harness.poll_until(lambda: harness.hub.dropped["run"] == 1)
        assert socket.poll(int(DEADLINE_S * 1000))
        answer = codec.unpack_down(socket.recv_multipart())
    assert answer == wire.Refused(reason="this is run run-1, and the message names none")
    assert harness.events == []


def test_files_are_sent_seldom_to_the_holder_of_a_key(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "MODEL_EVERY_S", 3600.0)
    answered: list[str] = []
    harness.hub.settings_source = lambda role, with_model: answered.append(role) or source(role, with_model)
    with polled(harness):
        ask(harness, keys, with_model=True)
        with pytest.raises(UnreachableError, match=r"no answer for 0.5 s"):
            ask(harness, keys, with_model=True, timeout_s=0.5)
    assert answered == ["rollout"]


def test_key_of_another_name_is_refused(harness: HubHarness, keys: Path) -> None:
    harness.hub.settings_source = source
    with polled(harness), pytest.raises(RefusedError, match="rollout-1 does not own the key of its connection"):
        ask(harness, keys, key_of="rollout-0")


def test_other_version_of_the_protocol_is_named(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.hub.settings_source = source
    monkeypatch.setattr(role_settings, "PROTOCOL_VERSION", wire.PROTOCOL_VERSION + 1)
    text = f"refuses rollout-1: it speaks version {wire.PROTOCOL_VERSION + 1} of the protocol, and the controller"
    with polled(harness), pytest.raises(RefusedError, match=text):
        ask(harness, keys)


LIES = {
    "sections of others": (wire.RoleSettings(sections={**SETTINGS.sections, "reward": {}}), b"", "other sections"),
    "no section": (wire.RoleSettings(sections={"run": {"id": "a"}, "rollout": 3}), b"", "other sections"),
    "no run": (wire.RoleSettings(sections={"run": {}}), b"", "no run.id"),
    "text that no file can have": (
        wire.RoleSettings(sections={"run": {"id": "a"}, "model": {"path": "a\0b"}}),
        b"",
        "null character",
    ),
    "a problem": (wire.RoleSettings(problem="nothing is known"), b"", "nothing is known"),
    "a path": (
        msgspec.structs.replace(
            SETTINGS,
            files=(FILE, wire.ModelFile(name="../a.json", nbytes=2, digest="")),
        ),
        CONFIG,
        "no file of a tokenizer",
    ),
    "code": (
        msgspec.structs.replace(SETTINGS, files=(wire.ModelFile(name="a.py", nbytes=2, digest=FILE.digest),)),
        CONFIG,
        "no file of a tokenizer",
    ),
    "a damaged file": (msgspec.structs.replace(SETTINGS, files=(FILE,)), b"[]", "damaged on the way"),
    "another size": (
        msgspec.structs.replace(SETTINGS, files=(msgspec.structs.replace(FILE, nbytes=9),)),
        CONFIG,
        "damaged",
    ),
    "a file twice": (msgspec.structs.replace(SETTINGS, files=(FILE, FILE)), CONFIG, "too many files"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_of_a_controller_are_refused_in_one_sentence(harness: HubHarness, keys: Path, lie: str) -> None:
    settings, data, text = LIES[lie]
    harness.hub.settings_source = lambda role, with_model: (settings, (data,) * len(settings.files))
    with polled(harness), pytest.raises(UnreachableError, match=text) as raised:
        ask(harness, keys)
    assert "\n" not in str(raised.value)


def test_texts_that_look_like_secrets_are_left_out() -> None:
    tree = {
        "rollout": {
            "api": {"key": "sk-1", "port": 1},
            "vllm": {"engine_args": {"hf_token": "hf_1", "max_tokens": "8"}},
        },
        "reward": {
            "http": {"token": ""},
            "scorers": [
                {"key": "quality", "options": {"url": "http://me:pw@host/", "api_key_env": "KEY", "API_KEY": "sk-2"}},
                {"options": {"headers": {"Authorization": "Bearer 1", "Accept": "text"}, "keys": ["a"]}},
            ],
        },
    }
    kept, withheld = withhold_secrets(tree)
    assert kept == {
        "rollout": {"api": {"port": 1}, "vllm": {"engine_args": {"max_tokens": "8"}}},
        "reward": {
            "http": {"token": ""},
            "scorers": [
                {"key": "quality", "options": {"api_key_env": "KEY"}},
                {"options": {"headers": {"Accept": "text"}, "keys": ["a"]}},
            ],
        },
    }
    assert withheld == [
        "rollout.api.key",
        "rollout.vllm.engine_args.hf_token",
        "reward.scorers.0.options.url",
        "reward.scorers.0.options.API_KEY",
        "reward.scorers.1.options.headers.Authorization",
    ]


@pytest.mark.parametrize("name", ["cookie", "api_keys", "bearer", "access_key_id", "signing_key"])
def test_texts_that_errors_do_not_show_are_not_sent(name: str) -> None:
    assert withhold_secrets({"options": {name: "hunter2", "url": "http://host"}}) == (
        {"options": {"url": "http://host"}},
        [f"options.{name}"],
    )
