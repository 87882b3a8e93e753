"""Linux system calls that Python does not have: namespaces, mounts, capabilities, Landlock and seccomp.

It imports only the standard library, since it is also used before a process may see any installed package. Every
function raises OSError when the kernel refuses.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import struct
from collections.abc import Iterable
from functools import cache
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
_NAMESPACES: Final = (
    CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | 0x02000000
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH: Final = 2

INSIDE: Final = {"CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Capabilities of a payload at its start, in the sandbox's user namespace, with which it makes sessions."""

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 1, 8, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
"""Numbers that all architectures share."""
_CAPABILITIES_V3: Final = 0x20080522

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _check(returned: int, what: str) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


# --- processes ---------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl(PDEATHSIG)")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(CHILD_SUBREAPER)")


def forbid_new_privileges() -> None:
    """Let no program that this process or a descendant executes gain privileges."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def set_limits(limits: Iterable[tuple[int, int]]) -> None:
    """Set resource limits, pairs of kind and value, soft and hard, nowhere above the present hard limit."""
    for kind, wanted in limits:
        _, hard = resource.getrlimit(kind)
        bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (bound, bound))


# --- namespaces and mounts ---------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    """Leave the namespaces of `flags`; a new PID namespace begins with the next child."""
    _check(_libc.unshare(flags), "unshare")


def set_pid_namespace(descriptor: int) -> None:
    """Let further children begin in the PID namespace of an open ``/proc/<pid>/ns/pid``."""
    _check(_libc.setns(descriptor, CLONE_NEWPID), "setns")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """Mount a file system of `kind`, or bind `source`."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    what = f"mount {kind or source} at {target}"
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), what)


def unmount(target: str) -> None:
    """Detach the mount at `target`, with all below it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def make_read_only(target: str) -> None:
    """Make the mount at `target` and all below it read-only and without setuid (Linux 5.12)."""
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    returned = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, len(attributes))
    _check(returned, f"mount_setattr {target}")


def make_read_only_alone(target: str) -> None:
    """Make the mount at `target` read-only, and nothing below it."""
    mount("none", target, None, 32 | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)  # 32: MS_REMOUNT


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root, with the old one at `put_old`."""
    number = {"x86_64": 155, "aarch64": 41, "riscv64": 41}.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"pivot_root: its number on {os.uname().machine} is not known here")
    _check(_libc.syscall(number, os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def bring_loopback_up() -> None:
    """Bring up the loopback device of this network namespace."""
    import socket  # here, since not every start of a sandbox needs it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


# --- privileges --------------------------------------------------------------------------------------------------


def become(uid: int, gid: int) -> None:
    """Become another user for good, without supplementary groups, and keep the permitted capabilities."""
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl(KEEPCAPS)")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def keep_capabilities(*kept: int) -> None:
    """Give up all capabilities but `kept`, which programs that this process executes do not get either."""
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(CAP_AMBIENT)")
    low = sum(1 << capability for capability in kept if capability < 32)
    high = sum(1 << (capability - 32) for capability in kept if capability >= 32)
    header = struct.pack("Ii", _CAPABILITIES_V3, 0)
    _check(_libc.capset(header, struct.pack("IIIIII", low, low, 0, high, high, 0)), "capset")


def raise_ambient(*raised: int) -> None:
    """Let programs that this process executes have these of its capabilities, although it is not root."""
    data = ctypes.create_string_buffer(24)
    header = struct.pack("Ii", _CAPABILITIES_V3, 0)
    _check(_libc.capget(header, data), "capget")
    words = list(struct.unpack("IIIIII", data.raw))
    words[2] |= sum(1 << capability for capability in raised)
    _check(_libc.capset(header, struct.pack("IIIIII", *words)), "capset")
    for capability in raised:
        _check(_libc.prctl(_PR_CAP_AMBIENT, 2, capability, 0, 0), "prctl(CAP_AMBIENT_RAISE)")


def has_capability(capability: int) -> bool:
    """Return whether this process has the capability in effect, in its user namespace."""
    data = ctypes.create_string_buffer(24)
    if _libc.capget(struct.pack("Ii", _CAPABILITIES_V3, 0), data) < 0:
        return False
    words = struct.unpack("IIIIII", data.raw)
    return bool(words[3 * (capability // 32)] >> (capability % 32) & 1)


# --- Landlock ----------------------------------------------------------------------------------------------------

_READ: Final = 1 << 0 | 1 << 2 | 1 << 3
"""Execute, read a file, list a folder."""
_LIST: Final = 1 << 3
_FILE_BITS: Final = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Rights that a rule for a file, not a folder, may have."""


def landlock_version() -> int:
    """Return the version of Landlock that the kernel offers; 0 for none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def landlock(
    readable: Iterable[str],
    writable: Iterable[str],
    listable: Iterable[str],
    *,
    network: bool,
    ports: Iterable[int] = (),
) -> None:
    """Restrict this process and its descendants to these files and folders, for ever.

    They can then neither trace, nor read in ``/proc``, nor (Linux 6.12) signal processes outside; without `network`
    they can neither bind nor connect TCP (Linux 6.7), but connect to `ports`. Paths that do not exist are skipped.
    """
    version = landlock_version()
    if version < 1:
        raise OSError(38, "Landlock is not there")
    files = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    connections = 3 if version >= 4 and not network else 0
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", files, connections, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        for paths, rights in ((readable, _READ), (writable, files), (listable, _LIST)):
            for path in paths:
                _allow(rules, path, rights & files)
        for port in ports if connections else ():
            attributes = struct.pack("QQ", 2, port)  # connect
            _check(_libc.syscall(_LANDLOCK_ADD, rules, 2, attributes, 0), f"landlock port {port}")
        forbid_new_privileges()
        _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & _FILE_BITS
        _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, descriptor), 0), f"landlock {path}")
    finally:
        os.close(descriptor)


# --- seccomp -----------------------------------------------------------------------------------------------------

_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE3: Final = 435
_FORBIDDEN: Final = {
    # mount umount2 pivot_root chroot unshare setns ptrace process_vm_readv process_vm_writev add_key request_key keyctl
    # bpf perf_event_open userfaultfd init_module finit_module delete_module kexec_load open_by_handle_at
    # name_to_handle_at swapon swapoff reboot acct settimeofday
    "x86_64": (165, 166, 155, 161, 272, 308, 101, 310, 311, 248, 249, 250, 321, 298, 323, 175, 313, 176, 246, 304, 303,
               167, 168, 169, 163, 164),
    "aarch64": (40, 39, 41, 51, 97, 268, 117, 270, 271, 217, 218, 219, 280, 241, 282, 105, 273, 106, 104, 265, 264,
                224, 225, 142, 89, 170),
}  # fmt: skip
_FORBIDDEN_EVERYWHERE: Final = (425, 426, 427, 428, 429, 430, 432, 442)
"""io_uring_setup, io_uring_enter, io_uring_register, open_tree, move_mount, fsopen, fsmount, mount_setattr."""


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid_kernel_interfaces() -> bool:
    """Forbid what no tool or scorer needs, for ever: namespaces, mounts, tracing, keys, io_uring, kernel modules.

    Returns False on an architecture for which it has no list. Needs `forbid_new_privileges` or CAP_SYS_ADMIN.
    """
    program = filter_program()
    if program is None:
        return False
    what = _FilterProgram(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(what), 0, 0), "prctl(SECCOMP)")
    return True


@cache
def filter_program() -> bytes | None:
    """Return the program of `forbid_kernel_interfaces`; None on an architecture for which there is no list.

    A process that forks many others calls it once before, so that each finds it in its memory.
    """
    machine = os.uname().machine
    if machine not in _FORBIDDEN:
        return None
    forbidden = (*_FORBIDDEN[machine], *_FORBIDDEN_EVERYWHERE)
    return b"".join(_filter(_AUDIT_ARCH[machine], _CLONE[machine], forbidden, foreign=machine == "x86_64"))


def _filter(architecture: int, clone: int, forbidden: tuple[int, ...], *, foreign: bool) -> list[bytes]:
    """Return a program for the kernel's packet filter over (number, architecture, instruction, arguments)."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    program = [step(load, 4), step(equal, architecture, 1, 0), step(give, kill), step(load, 0)]
    if foreign:  # the x32 system calls of x86-64 have numbers of their own
        program += [step(at_least, 0x40000000, 0, 1), step(give, refuse)]
    # Its arguments are in memory, which a filter cannot read: the C library then takes `clone`.
    program += [step(equal, _CLONE3, 0, 1), step(give, missing)]
    program += [step(equal, clone, 0, 3), step(load, 16), step(any_bit, _NAMESPACES, 0, 1), step(give, refuse)]
    program += [step(load, 0)]
    for number in forbidden:
        program += [step(equal, number, 0, 1), step(give, refuse)]
    return [*program, step(give, allow)]
