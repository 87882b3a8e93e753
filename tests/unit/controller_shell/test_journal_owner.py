"""One controller writes a journal: network file systems are refused, and each transaction checks who owns the file."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from user_file_system import mounted

from starling.common.errors import ConfigError
from starling.controller.core.records import ControllerStarted
from starling.controller.shell.journal.file_system import check_file_system, file_system_type, unsafe_file_system
from starling.controller.shell.journal.journal import Journal, JournalTakenError

UNSAFE = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x0BD00BD0: "Lustre",
    0x00C36400: "CephFS",
    0x19830326: "BeeGFS",
    0x786F4256: "a shared folder of VirtualBox",
}
SAFE = {
    0xEF53: "ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
    0x2FC12FC1: "ZFS",
    0x47504653: "GPFS",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x01021997: "9P",
}


def record(journal: Journal, incarnation: int) -> None:
    """Write a record of this number."""
    journal.append(ControllerStarted(incarnation=incarnation))
    journal.commit()


def incarnations(journal: Journal) -> list[int]:
    return [entry.record.incarnation for entry in journal.read() if isinstance(entry.record, ControllerStarted)]


@pytest.mark.parametrize(("type_", "name"), UNSAFE.items())
def test_network_file_systems_are_unsafe(type_: int, name: str, tmp_path: Path) -> None:
    assert unsafe_file_system(type_, tmp_path) == name


@pytest.mark.parametrize("type_", SAFE)
def test_local_and_cluster_file_systems_are_safe(type_: int, tmp_path: Path) -> None:
    assert unsafe_file_system(type_, tmp_path) == ""


def test_file_system_type_is_what_the_kernel_reports(tmp_path: Path) -> None:
    assert file_system_type(Path("/proc")) == 0x9FA0
    assert file_system_type(tmp_path / "missing") is None
    found = subprocess.run(["stat", "-f", "-c", "%t", str(tmp_path)], capture_output=True, text=True, check=True)
    assert file_system_type(tmp_path) == int(found.stdout, 16)


def test_journal_refuses_a_mounted_network_file_system(tmp_path: Path) -> None:
    with mounted(tmp_path, "fuse.sshfs") as is_mounted:
        if not is_mounted:
            pytest.skip("no file system in user space can be mounted here")
        with pytest.raises(ConfigError) as refused:
            Journal(tmp_path / "journal.db")
        assert str(refused.value) == (
            f"the journal would be in {tmp_path}, which is on FUSE (sshfs), where neither its lock nor its log is "
            "safe; set run.folder to a local disk, or controller.network_disk = true if no other host can start this "
            "run"
        )
        with pytest.raises(ConfigError, match="needs a writable folder"):  # it is asked for, and this one is empty
            Journal(tmp_path / "journal.db", network_disk=True)


def test_journal_allows_a_local_file_system_in_user_space(tmp_path: Path) -> None:
    with mounted(tmp_path, "fuse.virtiofs") as is_mounted:
        if not is_mounted:
            pytest.skip("no file system in user space can be mounted here")
        check_file_system(tmp_path)


def test_journal_ends_its_older_writer(tmp_path: Path) -> None:
    """A lock that does not exclude: the second controller takes over, and the first one stops at its next record."""
    program, path = str(Path(__file__).with_name("journal_writer.py")), tmp_path / "journal.db"
    command = [sys.executable, program, str(path), "0"]
    # It waits once its pipe is full: a small one, so that the second controller need not meet the gap of two commits.
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096)
    assert writer.stdout is not None
    writer.stdout.readline()
    (tmp_path / "journal.db.lock").unlink()
    taken = False
    while not taken:  # it writes all the time: a second controller that read the journal too early ends itself
        with contextlib.closing(Journal(path)) as journal, contextlib.suppress(JournalTakenError):
            record(journal, 7)
            taken = True
            _, errors = writer.communicate(timeout=60)
            record(journal, 8)
            assert incarnations(journal) == [7, 8], "the first one has written nothing since"
    assert writer.returncode == 1
    assert f"JournalTakenError: another controller writes the journal {path}; this one ends" in errors


def test_journal_notices_a_writer_since_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with contextlib.closing(Journal(path)) as first, contextlib.closing(Journal(path)) as second:
        record(first, 1)  # one process holds both locks
        with pytest.raises(JournalTakenError, match="another controller writes the journal"):
            record(second, 2)
        record(first, 3)
        assert incarnations(first) == [1, 3]


def test_journal_passes_from_owner_to_owner(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for incarnation in (1, 2, 3):
        with contextlib.closing(Journal(path)) as journal:
            record(journal, incarnation)
            record(journal, incarnation + 10)
    with contextlib.closing(Journal(path)) as journal:
        assert incarnations(journal) == [1, 11, 2, 12, 3, 13]


@pytest.mark.parametrize("moved_to", ["elsewhere.db", ""])
def test_journal_notices_that_its_file_is_gone(tmp_path: Path, moved_to: str) -> None:
    path = tmp_path / "journal.db"
    with contextlib.closing(Journal(path)) as journal:
        record(journal, 1)
        path.rename(tmp_path / moved_to) if moved_to else path.unlink()
        with pytest.raises(JournalTakenError, match=r"journal\.db was moved or deleted; this controller ends"):
            record(journal, 2)
