"""Disks of a policy that are full or read-only: at its start, and during a run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import DEADLINE_S, FakeHub
from lone_controller import PATIENCE_S, LoneController, lone_controller
from replica_processes import Replica, exit_code, replica
from small_disk import Disk, disk
from test_installation_faults import last_line
from test_policy_process import FLAGS, failure_reason, save, train

from starling.common.observe.process import EXIT_RESTART
from starling.common.wire import messages as wire
from starling.policy.train.checkpoint.header import find_state

pytestmark = pytest.mark.system

FULL, READ_ONLY = "No space left on device", "Read-only file system"
REMEDIES = {FULL: "free some space", READ_ONLY: "make its volume writable"}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "small", size_mb=16) as mounted:
        yield mounted


def spoil(small: Disk, reason: str) -> None:
    """Make a disk such that nothing can be written, for this reason."""
    if reason == FULL:
        small.fill()
    else:
        small.allow_writes(allowed=False)


def mend(small: Disk) -> None:
    """Make a disk writable again, with space on it."""
    small.allow_writes(allowed=True)
    small.free()


def sentence(folder: Path, reason: str) -> str:
    """Return the error sentence of a policy whose folder of states cannot be written."""
    return (
        f"the folder of states and checkpoints {folder} cannot be written ({reason}); {REMEDIES[reason]}, or set "
        "policy.saving.folder to another one, and start it again"
    )


def output(policy: Replica) -> str:
    """Wait for the end of a policy that its disk ends, and return what it has printed."""
    _, errors = policy.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors, errors
    assert policy.returncode == EXIT_RESTART, errors
    return errors


def notices(controller: LoneController) -> list[str]:
    """Return the faults among the events of the run, as soon as there are some."""
    path, end = controller.folder / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while True:  # a status has them before they are written
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = [line["text"] for line in lines if line["kind"] == "notice"]
        if found or time.monotonic() > end:
            return found
        time.sleep(0.05)


@pytest.mark.parametrize("reason", [FULL, READ_ONLY])
def test_policy_whose_states_cannot_be_written_says_so_at_its_start(
    reason: str, small: Disk, model: Path, tmp_path: Path
) -> None:
    with lone_controller(tmp_path / "run", "policy-0") as controller:
        spoil(small, reason)
        flags = (f"--model.path={model}", "--policy.init=random", f"--policy.saving.folder={small.folder}")
        policy, log = controller.join("policy", "policy-0", *flags)
        assert policy.wait(PATIENCE_S) == EXIT_RESTART
        text = sentence(small.folder / "run-1", reason)
        assert last_line(log) == f"starling policy-0: {text}"
        snapshot = controller.wait_for_snapshot(lambda one: one.notices)
        assert snapshot.notices == (f"policy-0: {text}",)
        assert snapshot.replicas == ()
        assert notices(controller) == [f"policy-0: {text}"]
        assert sum("replica_fault" in line for line in controller.log.read_text().splitlines()) == 1
        mend(small)
        controller.join("policy", "policy-0", *flags)
        controller.wait_for_snapshot(lambda one: len(one.replicas) == 1)


def test_each_volume_of_a_policy_is_checked(hub: FakeHub, small: Disk, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "states").mkdir(parents=True)
    (folder / "checkpoints").symlink_to(small.folder)
    small.allow_writes(allowed=False)
    with replica(hub, "policy-0", folder, "--model.path", str(model), *FLAGS) as policy:
        assert sentence(folder / "checkpoints", READ_ONLY) in output(policy)
    assert list((folder / "states").iterdir()) == []


@pytest.mark.parametrize("reason", [FULL, READ_ONLY])
def test_policy_whose_disk_fails_during_a_run_trains_on_and_loses_nothing(
    reason: str, hub: FakeHub, small: Disk, model: Path
) -> None:
    flags = ("--model.path", str(model), *FLAGS)
    with replica(hub, "policy-0", small.folder, *flags) as policy:
        hub.hello("policy-0")
        train(hub, 1)
        save(hub, 1)
        spoil(small, reason)
        train(hub, 2)
        refused = wire.SaveCheckpoint(lease=hub.lease("save"), step=2, state=True)
        assert f"version-2 cannot be written ({reason}): free space or choose another folder" in failure_reason(
            hub, refused
        )
        assert find_state(str(small.folder)).state.version == 1, "the previous state is unchanged"
        third = train(hub, 3)
        mend(small)
        save(hub, 3)
        spoil(small, reason)
        fourth = train(hub, 4)
        policy.kill()
    with replica(hub, "policy-0", small.folder, *flags) as policy:
        assert sentence(small.folder / "states", reason) in output(policy)
    mend(small)
    with replica(hub, "policy-0", small.folder, *flags) as policy:
        assert hub.hello("policy-0")[0].version == 3
        assert train(hub, 4, replayed=True) == fourth
        assert third != fourth
        policy.terminate()
        assert exit_code(policy) == 0
    assert find_state(str(small.folder)).state.version == 4


def test_policy_that_leaves_while_its_disk_is_full_keeps_its_states(hub: FakeHub, small: Disk, model: Path) -> None:
    with replica(hub, "policy-0", small.folder, "--model.path", str(model), *FLAGS) as policy:
        hub.hello("policy-0")
        train(hub, 1)
        save(hub, 1)
        train(hub, 2)
        small.fill()
        policy.send_signal(signal.SIGTERM)
        assert exit_code(policy) == 0, "what it could not save is in the journal"
    small.free()
    assert find_state(str(small.folder)).state.version == 1
    assert [path.name for path in (small.folder / "states").iterdir()] == ["version-1"], "no half of a state is left"
