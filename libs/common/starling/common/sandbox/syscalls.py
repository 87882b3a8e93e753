"""Linux system calls that Python does not have: namespaces, mounts, capabilities, Landlock and seccomp.

It imports only the standard library, since it is also used before a process may see any installed package. Every
function raises OSError when the kernel refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import struct
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Final, Literal

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

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 1, 3, 4, 8, 22
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


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0), "prctl(PDEATHSIG)")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(CHILD_SUBREAPER)")


def forbid_new_privileges() -> None:
    """Let no program that this process or a descendant executes gain privileges."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def be_killed_first() -> None:
    """Let the kernel choose this process and its descendants before others when memory is short."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # there may be no /proc
        file.write("1000")


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


def unshare_user(proc: int) -> None:
    """Enter a user namespace below the present one, with the same user and group there, and no other.

    The process keeps no capability over the namespaces that it is in. Since Linux 5.14 the limits on tasks, pending
    signals and locked memory are counted for each user namespace by itself, and in those above it.

    Args:
        proc: descriptor of a mount of `/proc` that can be written.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    was_dumpable = _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(DUMPABLE)")  # else these files are root's
    for name, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(was_dumpable), 0, 0, 0), "prctl(DUMPABLE)")


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


def make_read_only_alone(target: str, flags: int = 0) -> None:
    """Make the mount at `target` read-only, and nothing below it; `flags` are those that it has and must keep."""
    mount("none", target, None, 32 | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | flags)  # 32: MS_REMOUNT


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


# --- Landlock ----------------------------------------------------------------------------------------------------

_LANDLOCK_SCOPES: Final = 6
"""First version of Landlock that limits signals."""
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
    files = _file_rights(version)
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


def landlock_apart(writable: Iterable[str]) -> None:
    """Separate this process and its descendants from the others of its Landlock domain, as one below it.

    They can then neither trace these, nor read their memory, nor (Linux 6.12) signal them; of the files that they could
    write before, they can write those in `writable`, and read the others. Needs `forbid_new_privileges` or root.
    """
    version = landlock_version()
    attributes = struct.pack("QQQ", _file_rights(version), 0, 3)[: 24 if version >= _LANDLOCK_SCOPES else 8]
    rules = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        _allow(rules, "/", _READ)
        for path in writable:
            if path:
                _allow(rules, path, _file_rights(version))
        _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def kill_domain() -> None:
    """Kill all other processes of this process's Landlock domain, and of those below it, before they can fork again.

    Does nothing where Landlock does not limit signals: they would reach all processes of the user.
    """
    if landlock_version() < _LANDLOCK_SCOPES:
        return
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(os.getppid(), 0)  # the parent is outside
        except PermissionError:
            os.kill(-1, signal.SIGKILL)


def _file_rights(version: int) -> int:
    """Return all rights to files that a version of Landlock knows."""
    return (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1


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

Surroundings = Literal["own", "landlocked", "shared"]
"""What a process has around it: namespaces of its own; the machine's, behind Landlock; the machine's."""

_ARCHITECTURES: Final = ("x86_64", "aarch64")
_AUDIT_ARCH: Final = (0xC000003E, 0xC00000B7)
_FORBIDDEN: Final = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "acct": (163, 89), "settimeofday": (164, 170), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    # The kernel counts their objects for the user outside, who has 128 of them on the whole machine.
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
}  # fmt: skip
"""Numbers of system calls on each of the architectures, here and below; None where one has no such call."""
_FORBIDDEN_OUTSIDE: Final = {
    # Their objects outlive each process that made them, in memory that nothing limits.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
"""Without namespaces: what reaches other processes, and files that are not declared."""
_OF_ITSELF: Final = {
    "prlimit64": (302, 261), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
}  # fmt: skip
"""Without namespaces allowed only for process 0, which is the caller: the others of its user include the service."""
_SETPRIORITY: Final = (141, 140)
_WITHOUT_EFFECT: Final = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
"""Landlock lets them change every file of the user. They do nothing and succeed: much code makes them in passing."""
_FALLOCATE: Final = (285, 47)
_FCNTL: Final = (72, 25)
_FORBIDDEN_COMMANDS: Final = (1024, 1031)
"""Of fcntl: F_SETLEASE, which keeps others from opening a file for up to 45 s; F_SETPIPE_SZ, since a user may have
16,384 pages for all its pipes on the machine."""
_Numbers = tuple[int | None, int | None]
_TRUNCATE, _OPENAT2 = (76, 45), (437, 437)
_OPENS: Final[tuple[tuple[_Numbers, int], ...]] = (((2, None), 1), ((257, 56), 2))
"""`open` and `openat`, and which argument their flags are."""
_LANDLOCK_TRUNCATES: Final = 3
"""First version of Landlock that limits truncation."""
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_SENDTO, _SENDMSG, _SENDMMSG = (44, 206), (46, 211), (307, 269)
_FAMILIES: Final = (1, 2, 10, 16)
"""Unix, IPv4, IPv6 and netlink. Others, as that to a virtual machine's host, are not divided by network namespaces."""
_FAST_OPEN: Final = 0x20000000
_ACCESS_MODE: Final = 3
_ALLOW, _KILL, _NOTHING, _REFUSE, _DENY, _MISSING, _UNSUPPORTED, _NO_FAMILY = (
    0x7FFF0000, 0x80000000, 0x00050000, 0x00050001, 0x0005000D, 0x00050026, 0x0005005F, 0x00050061,
)  # fmt: skip
"""Answers to a system call; `_NOTHING` is a success, and those after it EPERM, EACCES, ENOSYS, EOPNOTSUPP and
EAFNOSUPPORT."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid_kernel_interfaces(surroundings: Surroundings = "own", *, network: bool = True) -> bool:
    """Forbid what no tool or scorer needs, for ever: namespaces, mounts, tracing, keys, io_uring, modules, inotify.

    With the machine's processes around it, also what changes these and what outlives it; behind Landlock, what that
    does not limit: changes of a file's owner, permissions and times, which do nothing then, and without `network` each
    socket but those of TCP and netlink's for routes. Returns False on an architecture for which it has no list. Needs
    `forbid_new_privileges` or CAP_SYS_ADMIN.
    """
    version = landlock_version() if surroundings == "landlocked" else 0
    program = filter_program(surroundings, version, network=network)
    if program is None:
        return False
    what = _FilterProgram(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(what), 0, 0), "prctl(SECCOMP)")
    return True


@cache
def filter_program(surroundings: Surroundings, version: int, *, network: bool) -> bytes | None:
    """Return the program of `forbid_kernel_interfaces`, behind a version of Landlock; None without a list.

    A process that forks many others calls it once before, so that each finds it in its memory.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return None
    return b"".join(_Filter(_ARCHITECTURES.index(machine)).steps(surroundings, version, network=network))


class _Filter:
    """Program for the kernel's packet filter over (number, architecture, instruction, arguments) of a system call."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture
        self._steps = list[bytes]()

    def steps(self, surroundings: Surroundings, version: int, *, network: bool) -> list[bytes]:
        """Return its steps."""
        architecture = _AUDIT_ARCH[self._architecture]
        self._steps = [_step(_LOAD, 4), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
        if self._architecture == 0:  # the x32 system calls of x86-64 have numbers of their own
            self._steps += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _REFUSE)]
        # Its arguments are in memory, which a filter cannot read: the C library then takes `clone`.
        self._answer(_CLONE3, _MISSING)
        self._check(_CLONE, _argument(0), _step(_ANY_BIT, _NAMESPACES, 0, 1), _step(_RETURN, _REFUSE))
        for forbidden in _FORBIDDEN.values():
            self._answer(forbidden, _REFUSE)
        commands = [(_step(_EQUAL, command, 0, 1), _step(_RETURN, _DENY)) for command in _FORBIDDEN_COMMANDS]
        self._check(_FCNTL, _argument(1), *chain.from_iterable(commands))
        self._limit_sockets(only_tcp=surroundings == "landlocked" and not network)
        if surroundings != "own":
            self._limit_to_itself()
        if surroundings == "landlocked":
            for numbers in _WITHOUT_EFFECT.values():
                self._answer(numbers, _NOTHING)
            if version < _LANDLOCK_TRUNCATES:
                self._limit_truncation()
        return [*self._steps, _step(_RETURN, _ALLOW)]

    def _limit_to_itself(self) -> None:
        for numbers in _FORBIDDEN_OUTSIDE.values():
            self._answer(numbers, _REFUSE)
        for numbers in _OF_ITSELF.values():
            self._check(numbers, _argument(0), _step(_EQUAL, 0, 1, 0), _step(_RETURN, _REFUSE))
        self._answer(_FALLOCATE, _UNSUPPORTED)  # it takes a whole disk at once; the C library writes zeros then
        itself = [_step(_EQUAL, 0, 1, 0), _step(_RETURN, _REFUSE)]
        self._check(_SETPRIORITY, _argument(0), *itself, _argument(1), *itself)

    def _limit_sockets(self, *, only_tcp: bool) -> None:
        num = len(_FAMILIES)
        families = [_step(_EQUAL, family, num - index) for index, family in enumerate(_FAMILIES)]
        steps = [_argument(0), *families, _step(_RETURN, _NO_FAMILY)]
        # Landlock limits neither datagrams nor other protocols of streams, nor data that opens one, nor who connects to
        # a socket in the file system, as that of D-Bus, by which a user has programs started.
        if only_tcp:
            stream = [_argument(1), _step(_AND, 15), _step(_EQUAL, 1, 1, 0), _step(_RETURN, _DENY)]
            tcp = [_argument(2), _step(_EQUAL, 0, 2, 0), _step(_EQUAL, 6, 1, 0), _step(_RETURN, _DENY)]
            after = len(stream) + len(tcp)
            # Of netlink the routes only: other protocols carry datagrams between processes, and list connections.
            netlink = [_argument(2), _step(_EQUAL, 0, after + 1, 0), _step(_RETURN, _DENY)]
            unix = [_step(_EQUAL, 1, 0, 1), _step(_RETURN, _DENY)]
            steps += [*unix, _step(_EQUAL, 16, 0, len(netlink)), *netlink, *stream, *tcp]
            for sending, flags in ((_SENDTO, 3), (_SENDMSG, 2), (_SENDMMSG, 3)):
                self._check(sending, _argument(flags), _step(_ANY_BIT, _FAST_OPEN, 0, 1), _step(_RETURN, _DENY))
        self._check(_SOCKET, *steps)

    def _limit_truncation(self) -> None:
        """Forbid to truncate by name, and to truncate what is opened for reading, as old versions of Landlock allow."""
        self._answer(_TRUNCATE, _REFUSE)
        self._answer(_OPENAT2, _MISSING)  # its flags are in memory
        for numbers, flags in _OPENS:
            reading = [_step(_AND, _ACCESS_MODE | os.O_TRUNC), _step(_EQUAL, os.O_RDONLY | os.O_TRUNC, 0, 1)]
            self._check(numbers, _argument(flags), *reading, _step(_RETURN, _REFUSE))

    def _answer(self, numbers: _Numbers, answer: int) -> None:
        """Give an answer to a system call."""
        self._check(numbers, _step(_RETURN, answer))

    def _check(self, numbers: _Numbers, *steps: bytes) -> None:
        """Take steps for a system call, after which the next check follows."""
        number = numbers[self._architecture]
        if number is not None:
            self._steps += [_step(_EQUAL, number, 0, len(steps)), *steps, _step(_LOAD, 0)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    """Load the lower half of an argument."""
    return _step(_LOAD, 16 + 8 * index)
