"""Mistakes of an installation: each gives one clear line in a log, and one in the snapshot that live views show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lone_controller import PATIENCE_S, LoneController, end, lone_controller, wait_until
from small_disk import breakable_disk, disk

from starling.common.errors import RefusedError, UnreachableError
from starling.common.net.keyring import make_keys
from starling.common.net.operator import OperatorClient
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.observe.process import EXIT_FAILED, EXIT_RESTART
from starling.common.wire.messages import QueryRun

pytestmark = pytest.mark.system

OTHER_VERSION = "import starling.common.wire.structs as structs\nstructs.PROTOCOL_VERSION = 7"
"""What makes a process one of another version of Starling."""
CLOCK = """
import time
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + 3600
time.time_ns = lambda: now_ns() + 3600 * 10**9
"""
"""What sets the clock of a process an hour ahead."""


def last_line(log: Path) -> str:
    """Return the last line of a log, which has no traceback."""
    text = log.read_text()
    assert "Traceback" not in text
    return text.splitlines()[-1]


def test_wrong_key_version_and_clock_are_named(tmp_path: Path) -> None:
    with lone_controller(tmp_path / "run", "reward-0", "reward-1", "reward-2") as controller:
        stranger = tmp_path / "others"
        make_keys(stranger, ["reward-2"])
        own = (controller.folder / "keys/reward-2.json").read_text()
        theirs = (stranger / "reward-2.json").read_text()
        ours = own[own.index("controller_public") :]
        (stranger / "reward-2.json").write_text(theirs[: theirs.index("controller_public")] + ours)

        refused, refused_log = controller.reward("reward-2", "--key", str(stranger / "reward-2.json"))
        older, older_log = controller.reward("reward-1", before=OTHER_VERSION)
        _, ahead_log = controller.reward("reward-0", before=CLOCK)
        assert [process.wait(PATIENCE_S) for process in (refused, older)] == [EXIT_FAILED, EXIT_FAILED]
        assert "refuses the key of reward-2; use the key file that was made for this name" in last_line(refused_log)
        assert last_line(older_log) == (
            "starling reward-1: the controller refuses reward-1: it speaks version 7 of the protocol, and the "
            "controller version 1; install the same version of Starling for both"
        )
        snapshot = controller.wait_for_snapshot(lambda one: len(one.notices) == 3)
        key, version, clock = sorted(snapshot.notices, key=lambda text: ["key", "protocol", "clock"].index(kind(text)))
        assert "a service with an unknown key is refused (public key " in key
        assert version.startswith(
            "reward-1 is refused: it speaks version 7 of the protocol, and the controller version 1"
        )
        assert clock in ("the clock of reward-0 is 3600 s ahead of the controller's; set both by NTP", clock)
        assert 3590 <= float(clock.split(" is ")[1].split()[0]) <= 3610
        assert [one.name for one in snapshot.replicas] == ["reward-0"], ahead_log.read_text()
        log = controller.log.read_text()
        for event in ("refused an unknown key", "speaks version 7", "clock_skew"):
            assert sum(event in line for line in log.splitlines()) == 1, log


def with_controller_key(key: Path, public: str, folder: Path) -> Path:
    """Write a key file that names another public key of the controller."""
    folder.mkdir(exist_ok=True)
    path = folder / key.name
    path.write_text(json.dumps({**json.loads(key.read_text()), "controller_public": public}))
    path.chmod(0o600)
    return path


def kind(text: str) -> str:
    if "another key of this controller" in text:
        return "controller key"
    return "clock" if "clock" in text else "protocol" if "protocol" in text else "key"


def test_operator_of_another_version_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lone_controller(tmp_path / "run", "reward-0") as controller:
        monkeypatch.setattr("starling.common.net.operator.PROTOCOL_VERSION", 7)
        key = controller.folder / "keys/operator-0.json"
        with (
            OperatorClient(controller.address(), key, "run-1") as client,
            pytest.raises(RefusedError, match="refuses operator-0: it speaks version 7 of the protocol, and the"),
        ):
            client.ask(QueryRun(request="r", about="why"), PATIENCE_S)


def test_operator_with_another_key_of_the_controller_is_told(tmp_path: Path) -> None:
    with lone_controller(tmp_path / "run") as controller:
        make_keys(tmp_path / "others", ["operator-0"])
        public = json.loads((tmp_path / "others/operator-0.json").read_text())["controller_public"]
        key = with_controller_key(controller.folder / "keys/operator-0.json", public, tmp_path / "wrong")
        with (
            OperatorClient(controller.address(), key, "run-1") as client,
            pytest.raises(UnreachableError, match="does not prove to operator-0 that it has the key"),
        ):
            client.ask(QueryRun(request="r", about="why"), 45.0)
        observer = with_controller_key(controller.folder / "keys/observer-0.json", public, tmp_path / "wrong")
        subscriber = TelemetrySubscriber(controller.address("telemetry"), observer)
        try:
            wait_until(lambda: subscriber.latest(0.1) or subscriber.is_refused, lambda: "not refused")
            assert subscriber.is_refused
            assert not subscriber.is_key_refused, "as far as is known"
        finally:
            subscriber.close()


def test_log_on_a_full_disk_ends_no_service(tmp_path: Path) -> None:
    with disk(tmp_path / "small", size_mb=1) as small, lone_controller(tmp_path / "run", "reward-0") as controller:
        small.fill()
        reward, _ = controller.join("reward", "reward-0", log=small.folder / "reward.log")
        controller.wait_for_snapshot(lambda one: len(one.replicas) == 1)
        small.free()
        reward.send_signal(signal.SIGTERM)
        assert reward.wait(PATIENCE_S) == 0
        first, *others = (small.folder / "reward.log").read_text().splitlines()
        assert first == "this log could not be written for a while (No space left on device), and may lack lines"
        assert any("] ready" in line for line in others), others


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount a volume")
def test_read_only_volume_is_named_by_each_service(tmp_path: Path) -> None:
    controller = LoneController(tmp_path / "run", "reward-0")
    mount = f"mount --bind {controller.folder} {controller.folder} && mount -o remount,ro,bind {controller.folder}"
    code = "from starling.controller.shell.main import main; raise SystemExit(main())"
    words = [sys.executable, "-c", code, "--config", str(controller.config), "--dir", str(controller.folder)]
    try:
        ended = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "-", *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ended.returncode in (EXIT_RESTART, 2), ended.stderr
        assert "Traceback" not in ended.stderr
        assert str(controller.folder) in ended.stderr.splitlines()[-1]
        assert "read-only" in ended.stderr.splitlines()[-1].lower()
    finally:
        end(controller.processes)


def test_volume_that_becomes_read_only_is_named(tmp_path: Path) -> None:
    with breakable_disk(tmp_path / "volume", size_mb=24) as volume:
        controller = LoneController(volume.folder / "run", "reward-0")
        controller.log = tmp_path / "controller.log"
        try:
            controller.start()
            volume.break_down()
            controller.join("reward", "reward-0", log=tmp_path / "reward.log")
            assert controller.process is not None
            assert controller.process.wait(PATIENCE_S) == EXIT_RESTART
            assert last_line(controller.log) == (
                f"starling controller: the journal {controller.folder}/journal.sqlite cannot be written: its file "
                "system is read-only; see the kernel's log for the reason, and resume the run when it can be written"
            )
        finally:
            end(controller.processes)
