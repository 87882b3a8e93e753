"""Keys that are made, listed and revoked, beside a running job and by the command line."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hub_harness import Desk, calling, envelope, received, socket_of
from structlog.testing import capture_logs

from starling.cli.main import main
from starling.common.errors import ConfigError, RefusedError
from starling.common.net import curve, hub
from starling.common.net.keyring import list_keys, make_keys, revoke_keys
from starling.common.net.link import LinkClosed
from starling.common.wire import codec
from starling.common.wire import messages as wire


def names_in(folder: Path) -> list[str]:
    return [entry.name for entry in list_keys(folder)]


def test_a_folder_that_has_keys_gets_more_and_keeps_its_controllers(tmp_path: Path) -> None:
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


def test_a_key_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0", "rollout-0"))
    old = curve.load_key(tmp_path / "policy-0.json")
    with pytest.raises(ConfigError, match=r"has a key for policy-0; choose another name, or replace it"):
        make_keys(tmp_path, ("rollout-1", "policy-0"))
    assert names_in(tmp_path) == ["policy-0", "rollout-0"], "and nothing else was made"
    make_keys(tmp_path, ("policy-0",), replace=True)
    new = curve.load_key(tmp_path / "policy-0.json")
    allowed = curve.load_allowed(tmp_path)
    assert old.public not in allowed
    assert allowed[new.public] == "policy-0"


def test_a_revoked_key_is_allowed_no_more_and_its_file_is_gone(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0", "rollout-0"))
    revoke_keys(tmp_path, ("rollout-0",))
    assert names_in(tmp_path) == ["policy-0"]
    assert not (tmp_path / "rollout-0.json").exists()
    make_keys(tmp_path, ("rollout-0",))
    assert names_in(tmp_path) == ["policy-0", "rollout-0"]


def test_two_makers_do_not_lose_each_others_keys(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0",))
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `starling keys` is at work in"):
            make_keys(tmp_path, ("policy-1",))
    finally:
        os.close(other)
    make_keys(tmp_path, ("policy-1",))


# --- the command line ----------------------------------------------------------------------------------------------


def test_the_command_line_makes_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder), "policy-0", "rollout-0"]) == 0  # as it was always written
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
    (["make", "{}"], "the following arguments are required: names; see starling keys make --help"),
    (
        ["make", "{}", "trainer-0"],
        "'trainer-0' is no name for a key; write ROLE-NUMBER, ROLE being policy, rollout, re",
    ),
    (["{}", "rollout"], "'rollout' is no name for a key"),
    (["make", "{}", "rollout-../../x"], "'rollout-../../x' is no name for a key"),
    (["make", "{}", "controller"], "the controller's key is made with the first others"),
    (["make", "{}", "policy-1", "policy-1"], "policy-1 is given twice"),
    (["make", "{}", "policy-0"], "has a key for policy-0"),
    (["revoke", "{}", "policy-7"], "allows no key of policy-7; it allows policy-0"),
    (["revoke", "{}/none", "policy-0"], "none does not exist; give the folder of a run's keys"),
    (["list", "{}/none"], "none/allowed.json cannot be read (No such file or directory)"),
    (["list"], "the following arguments are required: folder"),
    ([], "the following arguments are required: make | list | revoke"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[sentence[:30] for _, sentence in BAD])
def test_what_cannot_be_done_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    make_keys(tmp_path, ("policy-0",))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["keys", *(text.replace("{}", str(tmp_path)) for text in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_without_its_controller_gets_no_more_keys(tmp_path: Path) -> None:
    make_keys(tmp_path, ("policy-0",))
    (tmp_path / "controller.json").unlink()
    with pytest.raises(ConfigError, match=r"controller\.json is missing, which the keys in"):
        make_keys(tmp_path, ("policy-1",))


# --- in a running job ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ("policy-0", "rollout-0"))
    return tmp_path / "keys"


def test_a_new_key_joins_a_running_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(folder)
    try:
        with calling(desk.hub.address, folder):
            desk.admit("rollout-0")
            with capture_logs() as logs:
                make_keys(folder, ("rollout-7",))
                desk.poll_until(lambda: any(entry["event"] == "read the allow-list again" for entry in logs))
            with calling(desk.hub.address, folder, "rollout-7"):
                desk.admit("rollout-7")
                desk.next(wire.Heartbeat, "rollout-0")
    finally:
        desk.hub.close(0.0)


def test_a_revoked_peer_is_lost_and_not_heard_and_not_let_in_again(folder: Path) -> None:
    desk = Desk(folder)
    try:
        with calling(desk.hub.address, folder, "policy-0"), calling(desk.hub.address, folder) as link:
            desk.admit("policy-0")
            desk.admit("rollout-0")
            revoke_keys(folder, ("rollout-0",))
            desk.lost("rollout-0")
            desk.heard.clear()
            error = None
            while error is None:  # its line is cut, and its key is refused when it calls again
                desk.heard += desk.hub.poll(0.05)
                ended = link.receive(0.0)
                error = ended.error if isinstance(ended, LinkClosed) else None
            assert isinstance(error, RefusedError)
            assert "refuses the key of rollout-0; use the key file that was made for this name" in str(error)
            desk.next(wire.Heartbeat, "policy-0")
            senders = {a.envelope.sender for a in desk.heard if isinstance(a, hub.ReceivedMessage)}
            assert senders <= {"policy-0"}
            assert not desk.hub.send("rollout-0", wire.RequestHello())
    finally:
        desk.hub.close(0.0)


def test_a_replaced_key_takes_the_name_with_it(folder: Path) -> None:
    desk = Desk(folder)
    old = curve.load_key(folder / "rollout-0.json")
    try:
        with calling(desk.hub.address, folder, key=old):
            desk.admit("rollout-0")
            make_keys(folder, ("rollout-0",), replace=True)
            desk.lost("rollout-0")
            with calling(desk.hub.address, folder):
                desk.admit("rollout-0")
    finally:
        desk.hub.close(0.0)


def test_what_a_revoked_peer_has_sent_already_is_not_heard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cut", lambda descriptor, address: False)  # as if its line could not be cut
    desk = Desk(folder)
    try:
        with socket_of(desk.hub.address, folder, "rollout-0") as socket:
            socket.send_multipart(codec.pack(envelope("rollout-0"), wire.Heartbeat()))
            desk.next(wire.Heartbeat)
            revoke_keys(folder, ("rollout-0",))
            desk.lost("rollout-0")
            socket.send_multipart(codec.pack(envelope("rollout-0"), wire.Heartbeat()))
            desk.poll_until(lambda: desk.hub.dropped["key"] == 1)
            assert not desk.hub.send("rollout-0", wire.RequestHello())
    finally:
        desk.hub.close(0.0)


@pytest.mark.parametrize("spoil", [lambda p: p.write_text("{"), lambda p: p.chmod(0o644), lambda p: p.unlink()])
def test_a_spoilt_allow_list_changes_nothing(folder: Path, spoil: object) -> None:
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


def test_a_link_with_a_new_key_is_heard_while_others_are_cut(folder: Path) -> None:
    desk = Desk(folder)
    try:
        with calling(desk.hub.address, folder) as link:
            desk.admit("rollout-0")
            make_keys(folder, ("rollout-1",))
            revoke_keys(folder, ("policy-0",))
            desk.next(wire.Heartbeat)
            desk.hub.send("rollout-0", wire.Drain(reason="over"))
            assert received(link, LinkClosed).error is None
    finally:
        desk.hub.close(0.0)
