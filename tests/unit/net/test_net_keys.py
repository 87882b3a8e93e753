"""Keys: made, listed and revoked, also while a job is running, and by the command line."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hub_harness import HubHarness, envelope, received, running_link, socket_of
from structlog.testing import capture_logs

from starling.cli.main import main
from starling.common.errors import ConfigError, RefusedError
from starling.common.net import curve
from starling.common.net.hub import hub
from starling.common.net.keyring import list_keys, make_keys, revoke_keys
from starling.common.net.link import LinkClosed
from starling.common.wire import codec
from starling.common.wire import messages as wire


def names_in(folder: Path) -> list[str]:
    return [entry.name for entry in list_keys(folder)]


def test_adding_keys_keeps_the_controllers_key(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0", "rollout-0"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_keys(tmp_path, ("rollout-10", "rollout-2"))
    assert names_in(tmp_path) == ["policy-0", "rollout-0", "rollout-2", "rollout-10"]
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before if name != curve.ALLOWED} == {
        name: data for name, data in before.items() if name != curve.ALLOWED
    }
    public = curve.load_key(tmp_path / "controller.json").public
    assert curve.load_key(tmp_path / "rollout-2.json").controller_public == public


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write files of others")
def test_keys_that_root_makes_belong_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65533)
    make_keys(folder, ("policy-0", "rollout-0"))
    make_keys(folder, ("rollout-1",))
    revoke_keys(folder, ("rollout-0",))
    names = {"allowed.json", "controller.json", "policy-0.json", "rollout-1.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert {(path.stat().st_uid, path.stat().st_gid) for path in folder.iterdir()} == {(65534, 65533)}


def test_allow_list_that_becomes_readable_is_read(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0",))
    allowed = curve.AllowList(curve.load_allowed(tmp_path), tmp_path)
    make_keys(tmp_path, ("rollout-0",))
    (tmp_path / curve.ALLOWED).chmod(0o644)
    with capture_logs() as logs:
        assert not allowed.reload()
    assert [line["event"] for line in logs] == ["the allow-list stays as it was"]
    (tmp_path / curve.ALLOWED).chmod(0o600)
    assert allowed.reload()
    assert set(allowed.names.values()) == {"policy-0", "rollout-0"}


def test_key_is_overwritten_only_with_replace(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0", "rollout-0"))
    old = curve.load_key(tmp_path / "policy-0.json")
    with pytest.raises(ConfigError, match=r"has a key for policy-0; choose another name, or replace it"):
        make_keys(tmp_path, ("rollout-1", "policy-0"))
    assert names_in(tmp_path) == ["policy-0", "rollout-0"], "no other key was written"
    make_keys(tmp_path, ("policy-0",), replace=True)
    new = curve.load_key(tmp_path / "policy-0.json")
    allowed = curve.load_allowed(tmp_path)
    assert old.public not in allowed
    assert allowed[new.public] == "policy-0"


def test_revoking_removes_the_key_and_its_file(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0", "rollout-0"))
    revoke_keys(tmp_path, ("rollout-0",))
    assert names_in(tmp_path) == ["policy-0"]
    assert not (tmp_path / "rollout-0.json").exists()
    make_keys(tmp_path, ("rollout-0",))
    assert names_in(tmp_path) == ["policy-0", "rollout-0"]


def test_concurrent_makers_keep_each_others_keys(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0",))
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `starling keys` is using"):
            make_keys(tmp_path, ("policy-1",))
    finally:
        os.close(other)
    make_keys(tmp_path, ("policy-1",))


# --- the command line ----------------------------------------------------------------------------------------------


def test_command_line_makes_lists_and_revokes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder), "policy-0", "rollout-0"]) == 0  # the former syntax
    assert main(["keys", "make", str(folder), "operator-0"]) == 0
    assert main(["keys", "revoke", str(folder), "rollout-0"]) == 0
    (folder / "operator-0.json").rename(tmp_path / "operator-0.json")
    capsys.readouterr()
    assert main(["keys", "list", str(folder)]) == 0
    operator, policy = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert operator[:2] == ["operator-0", "operator"]
    assert operator[3] == "its key file is elsewhere"
    assert policy[0] == "policy-0"
    assert policy[2:] == [curve.load_key(folder / "policy-0.json").public, str(folder / "policy-0.json")]


BAD = [
    (["make", "{}"], "NAME is missing; see starling keys make --help"),
    (
        ["make", "{}", "trainer-0"],
        "'trainer-0' is not a valid name for a key; write ROLE-NUMBER, ROLE being policy, rollout, re",
    ),
    (["{}", "rollout"], "'rollout' is not a valid name for a key"),
    (["make", "{}", "rollout-../../x"], "'rollout-../../x' is not a valid name for a key"),
    (["make", "{}", "controller"], "the controller's key comes with the first keys of a folder"),
    (["make", "{}", "policy-1", "policy-1"], "policy-1 is given twice"),
    (["make", "{}", "policy-0"], "has a key for policy-0"),
    (["revoke", "{}", "policy-7"], "allows no key of policy-7; it allows policy-0"),
    (["revoke", "{}/none", "policy-0"], "none does not exist; give the folder of a run's keys"),
    (["list", "{}/none"], "none/allowed.json cannot be read (No such file or directory)"),
    (["list"], "FOLDER is missing; see starling keys list --help"),
    ([], "FOLDER is missing; see starling keys --help"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[sentence[:30] for _, sentence in BAD])
def test_keys_command_errors_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    make_keys(tmp_path, ("policy-0",))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["keys", *(text.replace("{}", str(tmp_path)) for text in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_without_controller_key_gets_no_more_keys(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0",))
    (tmp_path / "controller.json").unlink()
    with pytest.raises(ConfigError, match=r"controller\.json is missing, and the keys in"):
        make_keys(tmp_path, ("policy-1",))


# --- in a running job ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ("policy-0", "rollout-0"))
    return tmp_path / "keys"


def test_new_key_joins_a_running_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = HubHarness(folder)
    try:
        with running_link(harness.hub.address, folder):
            harness.welcome("rollout-0")
            with capture_logs() as logs:
                make_keys(folder, ("rollout-7",))
                harness.poll_until(lambda: any(entry["event"] == "read the allow-list again" for entry in logs))
            with running_link(harness.hub.address, folder, "rollout-7"):
                harness.welcome("rollout-7")
                harness.next(wire.Heartbeat, "rollout-0")
    finally:
        harness.hub.close(0.0)


def test_revoked_peer_is_disconnected_and_kept_out(folder: Path) -> None:
    harness = HubHarness(folder)
    try:
        with running_link(harness.hub.address, folder, "policy-0"), running_link(harness.hub.address, folder) as link:
            harness.welcome("policy-0")
            harness.welcome("rollout-0")
            revoke_keys(folder, ("rollout-0",))
            harness.wait_disconnected("rollout-0")
            harness.events.clear()
            error = None
            while error is None:  # it is disconnected, and its key is refused when it reconnects
                harness.events += harness.hub.poll(0.05)
                ended = link.receive(0.0)
                error = ended.error if isinstance(ended, LinkClosed) else None
            assert isinstance(error, RefusedError)
            assert "refuses the key of rollout-0; use the key file that was made for this name" in str(error)
            harness.next(wire.Heartbeat, "policy-0")
            senders = {a.envelope.sender for a in harness.events if isinstance(a, hub.ReceivedMessage)}
            assert senders <= {"policy-0"}
            assert not harness.hub.send("rollout-0", wire.RequestHello())
    finally:
        harness.hub.close(0.0)


def test_replaced_key_takes_over_its_name(folder: Path) -> None:
    harness = HubHarness(folder)
    old = curve.load_key(folder / "rollout-0.json")
    try:
        with running_link(harness.hub.address, folder, key=old):
            harness.welcome("rollout-0")
            make_keys(folder, ("rollout-0",), replace=True)
            harness.wait_disconnected("rollout-0")
            with running_link(harness.hub.address, folder):
                harness.welcome("rollout-0")
    finally:
        harness.hub.close(0.0)


def test_queued_messages_of_a_revoked_peer_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "close_connection", lambda descriptor, address: False)  # as if the close failed
    harness = HubHarness(folder)
    try:
        with socket_of(harness.hub.address, folder, "rollout-0") as socket:
            socket.send_multipart(codec.pack(envelope("rollout-0"), wire.Heartbeat()))
            harness.next(wire.Heartbeat)
            revoke_keys(folder, ("rollout-0",))
            harness.wait_disconnected("rollout-0")
            socket.send_multipart(codec.pack(envelope("rollout-0"), wire.Heartbeat()))
            harness.poll_until(lambda: harness.hub.dropped["key"] == 1)
            assert not harness.hub.send("rollout-0", wire.RequestHello())
    finally:
        harness.hub.close(0.0)


@pytest.mark.parametrize("spoil", [lambda p: p.write_text("{"), lambda p: p.chmod(0o644), lambda p: p.unlink()])
def test_invalid_allow_list_changes_nothing(folder: Path, spoil: object) -> None:
    assert callable(spoil)
    allowed = curve.AllowList(curve.load_allowed(folder), folder)
    before = dict(allowed.names)
    make_keys(folder, ("rollout-1",))
    good = (folder / curve.ALLOWED).read_bytes()
    spoil(folder / curve.ALLOWED)
    assert not allowed.reload()
    assert allowed.names == before
    path = folder / curve.ALLOWED
    path.write_bytes(good)
    path.chmod(0o600)
    os.utime(path, ns=(1, 1))
    assert allowed.reload()
    assert sorted(allowed.names.values()) == ["policy-0", "rollout-0", "rollout-1"]
    assert not allowed.reload()


def test_unknown_keys_fill_neither_memory_nor_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "MAX_REFUSALS", 3)
    allowed = curve.AllowList({})
    with capture_logs() as logs:
        for number in range(10):
            assert not allowed.callback("starling", b"key %d" % number)
    assert len(logs) == 3


def test_link_with_a_new_key_works_while_others_are_disconnected(folder: Path) -> None:
    harness = HubHarness(folder)
    try:
        with running_link(harness.hub.address, folder) as link:
            harness.welcome("rollout-0")
            make_keys(folder, ("rollout-1",))
            revoke_keys(folder, ("policy-0",))
            harness.next(wire.Heartbeat)
            harness.hub.send("rollout-0", wire.Drain(reason="over"))
            assert received(link, LinkClosed).error is None
    finally:
        harness.hub.close(0.0)
