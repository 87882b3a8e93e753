"""Faults around a run in the dashboard: each is one clear line among its events, and in metrics.jsonl where that can be
written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lone_controller import PATIENCE_S, LoneController, end, lone_controller

from starling.cli.dashboard import answers
from starling.cli.dashboard.watch import RunWatch
from starling.common.net.keyring import make_keys

pytestmark = pytest.mark.system

OTHER_VERSION = "import starling.common.wire.structs as structs\nstructs.PROTOCOL_VERSION = 7"
CLOCK = "import time\nnow = time.time\ntime.time = lambda: now() - 3600"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def shown_faults(folder: Path, num: int) -> list[str]:
    """Return the faults among the events of a dashboard on this run, once there are `num`."""
    watch, found = RunWatch(0, folder, "lone"), list[str]()
    watch.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < num:
            assert time.monotonic() < deadline, watch.view()
            time.sleep(0.1)
            if watch.attempt is not None:
                events = answers.events(watch, answers.Query({}))["events"]
                found = [one["text"]["text"] for one in events if one["kind"] in ("notice", "problem")]
    finally:
        watch.stop()
    return sorted(found)


def with_key_of_another_run(key: Path, folder: Path) -> Path:
    """Return a key file of another run, with the controller's public key of this one."""
    make_keys(folder, [key.stem])
    own, theirs = key.read_text(), (folder / key.name).read_text()
    at = "controller_public"
    (folder / key.name).write_text(theirs[: theirs.index(at)] + own[own.index(at) :])
    return folder / key.name


def test_wrong_key_version_and_clock_are_events(tmp_path: Path) -> None:
    with lone_controller(tmp_path / "run", "reward-0", "reward-1", "reward-2") as controller:
        key = with_key_of_another_run(controller.folder / "keys/reward-2.json", tmp_path / "others")
        controller.reward("reward-2", "--key", str(key))
        controller.reward("reward-1", before=OTHER_VERSION)
        controller.reward("reward-0", before=CLOCK)
        snapshot = controller.wait_for_snapshot(lambda one: len(one.notices) == 3)
        assert shown_faults(controller.folder, 3) == sorted(snapshot.notices)
        for words in ("unknown key", "version 7 of the protocol", "s behind the controller's"):
            assert sum(words in text for text in snapshot.notices) == 1
        lines = [json.loads(line) for line in (controller.folder / "metrics.jsonl").read_text().splitlines()]
        assert sorted(line["text"] for line in lines if line["kind"] == "notice") == sorted(snapshot.notices)
        # Who looks later finds them in the file; the dashboard shows each once all the same.
        controller.kill()
        assert shown_faults(controller.folder, 3) == sorted(snapshot.notices)


def test_full_disk_is_one_event(disk: Path, tmp_path: Path) -> None:
    controller = LoneController(disk / "run", "reward-0")
    patient = controller.config.read_text().replace("start_s = 3000.0", "start_s = 3000.0\njournal_s = 3000.0")
    controller.config.write_text(patient)
    controller.log.symlink_to(tmp_path / "controller.log")  # elsewhere: it is the run that shall find the disk full
    try:
        controller.start()
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass
        code = "from starling.reward.shell.main import main; raise SystemExit(main())"
        arguments = ("--controller", controller.address(), "--name", "reward-0", "--config", str(controller.config))
        words = [sys.executable, "-c", code, *arguments, "--key", str(controller.folder / "keys/reward-0.json")]
        with (tmp_path / "reward.log").open("wb") as log:
            reward = subprocess.Popen([*words, "--dir", str(tmp_path)], stdout=log, stderr=log)
        controller.processes.append(reward)  # the journal is to hold that it has joined
        snapshot = controller.wait_for_snapshot(lambda one: bool(one.notices))
        sentence = f"the disk of {controller.folder} is full, and what cannot be written waits; free some space"
        assert snapshot.notices == (sentence,)
        assert shown_faults(controller.folder, 1) == [sentence]
        (disk / "ballast").unlink()
        controller.wait_for_snapshot(lambda one: [replica.name for replica in one.replicas] == ["reward-0"])
    finally:
        end(controller.processes)


def test_read_only_volume_is_one_event(disk: Path) -> None:
    with lone_controller(disk / "run") as controller:
        controller.kill()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        sentence = f"the volume of {controller.folder} is read-only, so the run cannot go on; make it writable"
        assert shown_faults(controller.folder, 1) == [sentence]
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def test_dashboard_with_the_key_of_another_run_says_so(tmp_path: Path) -> None:
    with lone_controller(tmp_path / "run") as controller:
        key = controller.folder / "keys/observer-0.json"
        key.write_text(with_key_of_another_run(key, tmp_path / "others").read_text())
        own, told = sorted(shown_faults(controller.folder, 2), key=lambda text: "public key" in text)
        assert own == "the controller refuses this key; use that of an observer of this run, keys/observer-0.json"
        assert told.startswith("a service with an unknown key is refused (public key "), "in its metrics.jsonl"
