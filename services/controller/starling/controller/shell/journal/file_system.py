"""Check that a file system keeps the journal safe: the locks and the shared memory of SQLite's log need one host.

The kernel reports the type of a file system by a number (`statfs`). Refused are those that another host can change
behind this one's back, or whose locks or `mmap` hold on one host only. Cluster file systems whose locks and caches are
coherent over all hosts (GPFS, OCFS2, GFS2) are allowed, and 9P, by which virtual machines and sandboxes have their own
disk. Most file systems in user space (FUSE) are a network or an object store: only local ones are allowed, by name.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError

_REFUSED: Final = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x0BD00BD0: "Lustre",
    0x00C36400: "CephFS",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x564C: "NCP",
    0x786F4256: "a shared folder of VirtualBox",
    0xBACBACBC: "a shared folder of VMware",
    0x7C7C6673: "a shared folder of Parallels",
}
"""Types by `statfs`, as in the kernel's magic.h and in coreutils' list of remote file systems."""
_FUSE: Final = 0x65735546
_LOCAL_FUSE: Final = frozenset(
    {
        "bindfs",
        "cryfs",
        "encfs",
        "exfat",
        "fuse-overlayfs",
        "fuse2fs",
        "gocryptfs",
        "grpcfuse",
        "mergerfs",
        "ntfs",
        "ntfs-3g",
        "osxfs",
        "virtiofs",
    }
)


def check_file_system(folder: Path) -> None:
    """Raise ConfigError when the journal would not be safe in `folder`; other problems show when it is opened."""
    name = unsafe_file_system(file_system_type(folder), folder)
    if name:
        raise ConfigError(
            f"the journal would be in {folder}, which is on {name}, where neither its lock nor its log is safe; set "
            "run.folder to a local disk, or controller.network_disk = true if no other host can start this run"
        )


def unsafe_file_system(type_: int | None, folder: Path) -> str:
    """Return the name of the file system of this type, on which `folder` is, if it is refused; else nothing."""
    if type_ != _FUSE:
        return _REFUSED.get(type_ or 0, "")
    kind = _mounted_type(folder)
    name = kind.removeprefix("fuse.").removeprefix("fuse:")
    return "" if kind == "fuseblk" or name in _LOCAL_FUSE else f"FUSE ({name or 'unknown'})"


def file_system_type(folder: Path) -> int | None:
    """Return the type of the file system of `folder`, as `statfs` reports it; None where that is not known."""
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.create_string_buffer(512)  # struct statfs has 120 bytes and begins with the type
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), found) != 0:
        return None
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF


def _mounted_type(folder: Path) -> str:
    """Return the type of the mount that holds `folder`, such as ``fuse.sshfs``; nothing where it is not known."""
    device = folder.stat().st_dev
    number, found = f"{os.major(device)}:{os.minor(device)}", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == number:
            found = file_system.split()[0]
    return found
